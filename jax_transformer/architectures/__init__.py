"""One file per architecture, and the registry that knows them all."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_transformer.config import TransformerConfig
    from jax_transformer.weights.rules import Table


def table(config: "TransformerConfig") -> "Table":
    """Return the weight table of the configuration's architecture."""
    from jax_transformer.architectures import bart_table, registry, t5_table
    from jax_transformer.architectures.attributes import BART_LIKE, LAYOUTS

    if config.architecture in LAYOUTS and config.architecture not in registry.built_in():
        family = bart_table if config.architecture in BART_LIKE else t5_table
        return family.table(config)
    return registry.get(config.architecture).weight_table(config)
