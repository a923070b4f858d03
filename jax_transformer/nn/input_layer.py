"""The layer of a model whose source is not ids of text, such as sound: found by its entry point."""

from collections.abc import Callable
from dataclasses import dataclass

from flax import nnx
from jaxtyping import Array

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.runtime import entry_points
from jax_transformer.shapes import Source

ENTRY_POINTS = "jax_transformer.input_layers"


@dataclass(frozen=True)
class InputLayer:
    """A layer that takes the place of the source's embedding."""

    layer: Callable[..., nnx.Module]
    """Called with the configuration and ``rngs``. The module returns the encoder's input (b, s, d)
    for a checked source, without positions, in the dtype of its weights.
    """
    check: Callable[[Source, TransformerConfig], Array]
    """Returns a source as an array, or raises InputError if the model cannot read it."""
    check_length: Callable[[int, TransformerConfig], None]
    """Raises InputError for a number of positions that the encoder does not have."""


def of(config: TransformerConfig) -> InputLayer:
    """Return the input layer of a model. Raises ConfigError if it is not installed."""
    entry_point = entry_points.of(ENTRY_POINTS).get(config.input_layer or "")
    if entry_point is None:
        raise ConfigError(f"no installed package has the input layer {config.input_layer!r}")
    value: InputLayer = entry_points.load(entry_point, InputLayer)
    return value
