"""The names of "Transformer from scratch": a decoder's layer is a masked attention and, within it, a whole transformer block.

The positions of the linked commit are learned and belong to the checkpoint. A later version of the same code computes sinusoids instead and
keeps no table: with ``positions`` set so, the same page reads and writes its checkpoints.
"""

from jax_transformer.config import Part, Positions, StackConfig, TransformerConfig, Tying
from jax_transformer.weights.rules import (
    Alias,
    Rule,
    Table,
    attention,
    embedding,
    layer_norm,
    linear,
    repeat,
)

_LINEARS = {
    "query": "queries_transform",
    "key": "keys_transform",
    "value": "values_transform",
    "out": "linear_out",
}


def _attention(torch: str, flax: str, config: TransformerConfig) -> Table:
    return attention(
        torch,
        flax,
        _LINEARS,
        bias=config.bias if config.attention_bias is None else config.attention_bias,
    )


def _transformer_block(
    torch: str, flax: str, part: Part, first: int, config: TransformerConfig
) -> Table:
    """An attention and the feed-forward; ``first`` is the number of the attention's branch."""
    bias = config.bias
    return [
        *_attention(f"{torch}.self_attention", f"{flax}.{part.value}", config),
        *layer_norm(f"{torch}.norm1", f"{flax}.residuals.{first}.norm", bias=bias),
        *linear(f"{torch}.feed_forward.0", f"{flax}.feed_forward.up", bias=bias),
        *linear(f"{torch}.feed_forward.2", f"{flax}.feed_forward.down", bias=bias),
        *layer_norm(f"{torch}.norm2", f"{flax}.residuals.{first + 1}.norm", bias=bias),
    ]


def _decoder_block(torch: str, flax: str, config: TransformerConfig) -> Table:
    return [
        *_attention(f"{torch}.self_attention", f"{flax}.{Part.SELF.value}", config),
        *layer_norm(f"{torch}.norm", f"{flax}.residuals.0.norm", bias=config.bias),
        *_transformer_block(f"{torch}.transformer_block", flax, Part.CROSS, 1, config),
    ]


def _positions(name: str, stack: StackConfig) -> Table:
    return (
        [Rule(f"{name}.position_embedding.weight", (f"{name}.positions.table",))]
        if stack.positions is Positions.LEARNED
        else []
    )


def _output(config: TransformerConfig) -> Table:
    if config.tying is Tying.NONE:
        return linear("decoder.fc_out", "output", bias=config.output_bias)
    bias: Table = [Rule("decoder.fc_out.bias", ("output_bias",))] if config.output_bias else []
    return [Alias("decoder.fc_out.weight", "decoder.word_embedding.weight"), *bias]


def table(config: TransformerConfig) -> Table:
    """The rules for a model of ``config``."""
    tied: Table = [Alias("encoder.word_embedding.weight", "decoder.word_embedding.weight")]
    source = (
        tied
        if config.tying is Tying.ALL
        else embedding("encoder.word_embedding", "source_embedding")
    )
    return [
        *embedding("decoder.word_embedding", "target_embedding"),
        *source,
        *_positions("encoder", config.encoder),
        *_positions("decoder", config.decoder),
        *repeat(
            config.encoder.layers,
            _transformer_block("encoder.layers.{i}", "encoder.blocks.{i}", Part.SELF, 0, config),
        ),
        *repeat(
            config.decoder.layers,
            _decoder_block("decoder.layers.{i}", "decoder.blocks.{i}", config),
        ),
        *_output(config),
    ]
