"""Weights between PyTorch and Flax, as functions over ``{name: array}``."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer import architectures, transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.transformer import Encoder, Transformer
from jax_transformer.weights import rules

_PARTS: dict[str, Callable[..., Transformer | Encoder]] = {"model": Transformer, "encoder": Encoder}


def weight_table(config: TransformerConfig, part: str = "model") -> rules.Table:
    """The checked table of rules for a model of ``config``, or for its encoder alone (``part="encoder"``), under names without ``encoder.``.

    Raises ConfigError for another part, and for a layout whose encoder does not stand by itself.
    """
    if part not in _PARTS:
        raise ConfigError(
            f"unknown part {part!r}{nearest(part, list(_PARTS))}; known: {', '.join(_PARTS)}"
        )
    table = architectures.table(config)
    try:
        rules.check_complete(table, transformer.shapes(config))
    except (
        ValueError
    ) as error:  # a configuration that the layout's own module cannot be set to, such as a tied one
        raise ConfigError(
            f"layout {config.layout.value!r} has no names for this configuration: {error}"
        ) from None
    if part == "encoder":
        table = rules.within(table, "encoder.")
        rules.check_complete(table, transformer.shapes(config, _PARTS[part]))
    return table


def _as_numpy(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.split(".")[0] == "torch":
        from jax_transformer import torch_bridge

        return torch_bridge.to_numpy(value)
    if isinstance(value, jax.Array):
        return np.asarray(value)
    raise InputError(f"{name} is a {type(value).__name__}, not an array")


def as_jax(name: str, array: np.ndarray, dtype: Any) -> jax.Array:
    """A copy that shares no memory with ``array`` (JAX may alias NumPy's on CPU), in its own dtype or the one asked for."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(f"{name} is {array.dtype}, and weights are floating-point numbers")
    dtype = np.dtype(array.dtype if dtype is None else dtype).newbyteorder("=")
    if dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        raise InputError(
            f"{name} is float64 and JAX is in 32-bit mode: give dtype='float32', or set jax_enable_x64"
        )
    return jnp.array(array.astype(dtype), copy=True)


@overload
def from_torch(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    *,
    dtype: Any = None,
    part: Literal["model"] = "model",
) -> Transformer: ...


@overload
def from_torch(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    *,
    dtype: Any = None,
    part: Literal["encoder"],
) -> Encoder: ...


def from_torch(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    *,
    dtype: Any = None,
    part: str = "model",
) -> Transformer | Encoder:
    """The Flax model with a PyTorch state_dict's weights.

    Args:
        state_dict: name -> array (np.ndarray, or torch tensors where torch is installed), with exactly the names and shapes of the layout.
        config: the architecture and its sizes.
        dtype: cast every array to this; the arrays keep their own dtypes where None.
        part: "encoder" for the state_dict of an encoder that the document prints alone; the result is then an ``Encoder``.

    Raises:
        InputError: one message with everything missing, unexpected and mis-shaped (both shapes), tied copies that differ, or float64 arrays
            while JAX is in 32-bit mode and no dtype is given.
    """
    state = {name: _as_numpy(name, value) for name, value in state_dict.items()}
    arrays = rules.to_flax(
        weight_table(config, part), state, transformer.shapes(config, _PARTS[part])
    )
    return transformer.unflatten_part(
        config, {name: as_jax(name, array, dtype) for name, array in arrays.items()}, _PARTS[part]
    )


def to_torch(model: Transformer | Encoder) -> dict[str, np.ndarray]:
    """The weights of a model, or of an encoder alone, under PyTorch's names, each array contiguous and its own: the inverse of
    :func:`from_torch`, bit for bit."""
    arrays = {name: np.asarray(leaf) for name, leaf in transformer.flatten(model).items()}
    return rules.to_torch(
        weight_table(model.config, "encoder" if isinstance(model, Encoder) else "model"), arrays
    )


def into_torch(model: Transformer, module: Any) -> Any:
    """Fill a torch module with the model's weights (dtypes as the model's), strictly, and return it. Needs torch."""
    from jax_transformer import torch_bridge

    return torch_bridge.fill(module, to_torch(model))
