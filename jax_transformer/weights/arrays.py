"""Arrays of weights: from PyTorch, NumPy and JAX to one another without shared memory, and with
low-rank adapters (LoRA, Hu et al. 2021) added to their kernels.

The adapters of ``x.kernel`` (shape (in, out)) are the arrays ``x.kernel.lora_a`` (in, rank),
``x.kernel.lora_b`` (rank, out) and ``x.kernel.lora_scale`` (). The model computes with
``kernel + scale * (a @ b)``, so merging them changes no result. Importing this file loads no jax.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_transformer.errors import InputError

if TYPE_CHECKING:
    import jax

ADAPTER = LORA_A, LORA_B, LORA_SCALE = ".lora_a", ".lora_b", ".lora_scale"


def of(name: str, value: Any) -> np.ndarray:
    """Return an array of NumPy, JAX or PyTorch as NumPy's. Raises InputError for anything else."""
    import jax

    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.split(".")[0] == "torch":
        from jax_transformer.weights import torch_bridge

        return torch_bridge.to_numpy(value)
    if isinstance(value, jax.Array):
        return np.asarray(value)
    raise InputError(f"{name} is a {type(value).__name__}, not an array")


def as_jax(name: str, array: np.ndarray, dtype: Any) -> "jax.Array":
    """Return a copy in its own dtype, or in ``dtype``: JAX may alias NumPy's memory on CPU."""
    import jax.numpy as jnp

    return jnp.array(as_numpy(name, array, dtype), copy=True)


def as_numpy(name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a copy in its own dtype, or in ``dtype``, that JAX has. Raises InputError if JAX has
    not, or if the array holds no floating-point numbers.
    """
    import jax
    import jax.numpy as jnp

    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(f"{name} is {array.dtype}, and weights are floating-point numbers")
    dtype = np.dtype(array.dtype if dtype is None else dtype).newbyteorder("=")
    if dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        raise InputError(
            f"{name} is float64 and JAX is in 32-bit mode: give dtype='float32', or set"
            " jax_enable_x64"
        )
    return array.astype(dtype)


def is_parameter(name: str) -> bool:
    """Return True for the name of an array of the model, false for one of an adapter."""
    return not name.endswith(ADAPTER)


def adapted_kernels(arrays: Mapping[str, Any]) -> list[str]:
    """Return the names of the kernels that have adapters among ``arrays``."""
    return [name.removesuffix(LORA_A) for name in arrays if name.endswith(LORA_A)]


def merge_adapters(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's arrays, NumPy's or JAX's, with each adapter added to its kernel."""
    merged = dict(arrays)
    for name in adapted_kernels(arrays):
        a, b, scale = (merged.pop(name + part) for part in ADAPTER)
        merged[name] = (merged[name] + scale * (a @ b)).astype(merged[name].dtype)
    return merged
