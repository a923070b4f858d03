"""Arrays of PyTorch, NumPy and JAX, from one to another without shared memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.errors import InputError


def of(name: str, value: Any) -> np.ndarray:
    """Return an array of NumPy or JAX, or a tensor of PyTorch, as an array of NumPy.

    Raises InputError, with the name, for anything else.
    """
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.split(".")[0] == "torch":
        from jax_transformer.weights import torch_bridge

        return torch_bridge.to_numpy(value)
    if isinstance(value, jax.Array):
        return np.asarray(value)
    raise InputError(f"{name} is a {type(value).__name__}, not an array")


def as_jax(name: str, array: np.ndarray, dtype: Any) -> jax.Array:
    """Return a copy in its own dtype, or in ``dtype``, that shares no memory with ``array``.

    JAX may otherwise alias NumPy's memory on CPU.
    """
    return jnp.array(as_numpy(name, array, dtype), copy=True)


def as_numpy(name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a copy in its own dtype, or in ``dtype``, that JAX has. Raises InputError if JAX has
    not, or if the array holds no floating-point numbers.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(f"{name} is {array.dtype}, and weights are floating-point numbers")
    dtype = np.dtype(array.dtype if dtype is None else dtype).newbyteorder("=")
    if dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        raise InputError(
            f"{name} is float64 and JAX is in 32-bit mode: give dtype='float32', or set"
            " jax_enable_x64"
        )
    return array.astype(dtype)
