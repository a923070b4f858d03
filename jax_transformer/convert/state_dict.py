"""Weights between PyTorch and Flax, as functions over ``{name: array}``."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer import transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import rules, tables
from jax_transformer.errors import InputError
from jax_transformer.transformer import Transformer


@lru_cache(maxsize=32)
def _shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in transformer.flatten(transformer.abstract(config)).items()}


def weight_table(config: TransformerConfig) -> rules.Table:
    """The checked table of rules for a model of ``config``."""
    table = tables.table(config)
    rules.check_complete(table, _shapes(config))
    return table


def _as_numpy(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.split(".")[0] == "torch":
        from jax_transformer.convert import torch_bridge

        return torch_bridge.to_numpy(value)
    if isinstance(value, jax.Array):
        return np.asarray(value)
    raise InputError(f"{name} is a {type(value).__name__}, not an array")


def _as_jax(name: str, array: np.ndarray, dtype: Any) -> jax.Array:
    """A copy that shares no memory with ``array`` (JAX may alias NumPy's on CPU), in its own dtype or the one asked for."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(f"{name} is {array.dtype}, and weights are floating-point numbers")
    dtype = np.dtype(array.dtype if dtype is None else dtype).newbyteorder("=")
    if dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        raise InputError(f"{name} is float64 and JAX is in 32-bit mode: give dtype='float32', or set jax_enable_x64")
    return jnp.array(array.astype(dtype), copy=True)


def from_torch(state_dict: Mapping[str, Any], config: TransformerConfig, *, dtype: Any = None) -> Transformer:
    """The Flax model with a PyTorch state_dict's weights.

    Args:
        state_dict: name -> array (np.ndarray, or torch tensors where torch is installed), with exactly the names and shapes of the layout.
        config: the architecture and its sizes.
        dtype: cast every array to this; the arrays keep their own dtypes where None.

    Raises:
        InputError: one message with everything missing, unexpected and mis-shaped (both shapes), tied copies that differ, or float64 arrays
            while JAX is in 32-bit mode and no dtype is given.
    """
    state = {name: _as_numpy(name, value) for name, value in state_dict.items()}
    arrays = rules.to_flax(weight_table(config), state, _shapes(config))
    return transformer.unflatten(config, {name: _as_jax(name, array, dtype) for name, array in arrays.items()})


def to_torch(model: Transformer) -> dict[str, np.ndarray]:
    """The model's weights under PyTorch's names, each array contiguous and its own: the inverse of :func:`from_torch`, bit for bit."""
    arrays = {name: np.asarray(leaf) for name, leaf in transformer.flatten(model).items()}
    return rules.to_torch(weight_table(model.config), arrays)


def into_torch(model: Transformer, module: Any) -> Any:
    """Fill a torch module with the model's weights (dtypes as the model's), strictly, and return it. Needs torch."""
    from jax_transformer.convert import torch_bridge

    return torch_bridge.fill(module, to_torch(model))
