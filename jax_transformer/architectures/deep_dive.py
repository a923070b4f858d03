""" "Transformer Deep Dive": each block a set of named linear layers, and in each decoder block a whole encoder block, ``transformer_block``.

That inner block's feed-forward and second norm are the decoder's own where the configuration computes a feed-forward there, and idle with the
rest of it where it does not; so one checkpoint has the same keys in both forms.
"""

from jax_transformer.config import Part, TransformerConfig
from jax_transformer.weights.rules import (
    Rule,
    Table,
    attention,
    embedding,
    layer_norm,
    linear,
    repeat,
)

_SELF = {"query": "W_q", "key": "W_k", "value": "W_v", "out": "fc"}
_CROSS = {
    "query": "W_self_queries",
    "key": "W_Encoder_Decoder_keys",
    "value": "W_Encoder_Decoder_values",
    "out": "fc",
}


def _encoder_block(
    torch: str, attend: str, attend_norm: str, feed_forward: str, feed_forward_norm: str
) -> Table:
    """The document's encoder block, and where the Flax model has its four modules."""
    return [
        *attention(f"{torch}.attention_mechanism", attend, _SELF),
        *layer_norm(f"{torch}.normalization1", attend_norm),
        *linear(f"{torch}.feed_forward_layers.0", f"{feed_forward}.up"),
        *linear(f"{torch}.feed_forward_layers.2", f"{feed_forward}.down"),
        *layer_norm(f"{torch}.normalization2", feed_forward_norm),
    ]


def _decoder_block(torch: str, flax: str, *, computes_feed_forward: bool) -> Table:
    used = (f"{flax}.feed_forward", f"{flax}.residuals.2.norm")
    idle = (f"{flax}.idle.1.part", f"{flax}.idle.1.norm")
    return [
        *attention(f"{torch}.attention_layer", f"{flax}.self_attention", _SELF),
        *layer_norm(f"{torch}.normalization1", f"{flax}.residuals.0.norm"),
        *attention(f"{torch}.EncoderDecoderAttention", f"{flax}.cross_attention", _CROSS),
        *layer_norm(f"{torch}.normalization2", f"{flax}.residuals.1.norm"),
        *_encoder_block(
            f"{torch}.transformer_block",
            f"{flax}.idle.0.part",
            f"{flax}.idle.0.norm",
            *(used if computes_feed_forward else idle),
        ),
    ]


def table(config: TransformerConfig) -> Table:
    """The rules for a model of ``config``."""
    flax = "encoder.blocks.{i}"
    encoder = _encoder_block(
        "encoder.EncoderBlocklayers.{i}",
        f"{flax}.self_attention",
        f"{flax}.residuals.0.norm",
        f"{flax}.feed_forward",
        f"{flax}.residuals.1.norm",
    )
    decoder = _decoder_block(
        "decoder.DecoderBlocklayers.{i}",
        "decoder.blocks.{i}",
        computes_feed_forward=Part.FFN in config.decoder.parts,
    )
    return [
        *embedding("encoder.words_embedding", "source_embedding"),
        Rule("encoder.positional_embedding.weight", ("encoder.positions.table",)),
        *repeat(config.encoder.layers, encoder),
        *embedding("decoder.words_embedding", "target_embedding"),
        Rule("decoder.positional_embedding.weight", ("decoder.positions.table",)),
        *repeat(config.decoder.layers, decoder),
        *linear("decoder.fc_out", "output"),
    ]
