"""The post "Transformer" of 2023-06-05: bias-free attention, one block that both stacks share.

The second half of a decoder block is a whole encoder block, which attends to the memory. Either stack stores a table of positions of its own.
"""

from jax_transformer.config import TransformerConfig
from jax_transformer.weights.rules import (
    Rule,
    Table,
    attention,
    embedding,
    layer_norm,
    linear,
    repeat,
)

_NAMES = {"query": "queries", "key": "keys", "value": "values", "out": "fc"}


def _shared_block(torch: str, flax: str, part: str, first: int, *, bias: bool) -> Table:
    """An encoder block; its norms are those of branches ``first`` and the next of the Flax block."""
    return [
        *attention(f"{torch}.attention", f"{flax}.{part}", _NAMES, bias=bias),
        *layer_norm(f"{torch}.layer_norm1", f"{flax}.residuals.{first}.norm"),
        *linear(f"{torch}.feed_forward.0", f"{flax}.feed_forward.up"),
        *linear(f"{torch}.feed_forward.2", f"{flax}.feed_forward.down"),
        *layer_norm(f"{torch}.layer_norm2", f"{flax}.residuals.{first + 1}.norm"),
    ]


def table(config: TransformerConfig) -> Table:
    """The rules for a model of ``config``."""
    bias = config.bias if config.attention_bias is None else config.attention_bias
    layer, block = "decoder.decoder_layer.{i}", "decoder.blocks.{i}"
    decoder = [
        *attention(f"{layer}.attention", f"{block}.self_attention", _NAMES, bias=bias),
        *layer_norm(f"{layer}.layer_norm", f"{block}.residuals.0.norm"),
        *_shared_block(f"{layer}.encoder_block", block, "cross_attention", 1, bias=bias),
    ]
    encoder = _shared_block(
        "encoder.encoder_layers.{i}", "encoder.blocks.{i}", "self_attention", 0, bias=bias
    )
    return [
        *embedding("encoder.embed", "source_embedding"),
        *embedding("decoder.embed", "target_embedding"),
        *(
            Rule(f"{stack}.position_embed.pe", (f"{stack}.positions.table",))
            for stack in ("encoder", "decoder")
        ),
        *repeat(config.encoder.layers, encoder),
        *repeat(config.decoder.layers, decoder),
        *linear("decoder.fc", "output"),
    ]
