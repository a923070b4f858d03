"""One file per architecture, and the registry that knows them all."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_transformer.config import TransformerConfig
    from jax_transformer.weights.rules import Table


def table(config: "TransformerConfig") -> "Table":
    """Return the weight table of the configuration's architecture."""
    from jax_transformer.architectures import registry

    return registry.get(config.architecture).weight_table(config)
