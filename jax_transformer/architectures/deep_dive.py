"""The architecture of "Transformer Deep Dive": every head as wide as the model.

Each block is a set of named linear layers, and each decoder block owns a whole encoder block,
``transformer_block``. That inner block's feed-forward and second norm are the decoder's own if the
configuration computes a feed-forward there, and unused with the rest of it otherwise; so a
checkpoint has the same keys in both forms.
"""

from typing import Any

from jax_transformer.architectures import base
from jax_transformer.architectures.base import Architecture, Arguments, Preset
from jax_transformer.config import StackConfig, TransformerConfig, enums
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Rule, Table

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
    """Return the document's encoder block; the arguments after ``torch`` are Flax modules."""
    return [
        *rules.attention(f"{torch}.attention_mechanism", attend, _SELF),
        *rules.layer_norm(f"{torch}.normalization1", attend_norm),
        *rules.linear(f"{torch}.feed_forward_layers.0", f"{feed_forward}.up"),
        *rules.linear(f"{torch}.feed_forward_layers.2", f"{feed_forward}.down"),
        *rules.layer_norm(f"{torch}.normalization2", feed_forward_norm),
    ]


def _decoder_block(*, computes_feed_forward: bool) -> Table:
    torch, flax = "decoder.DecoderBlocklayers.{i}", "decoder.blocks.{i}"
    used = (f"{flax}.feed_forward", f"{flax}.residuals.2.norm")
    unused = (f"{flax}.unused.1.part", f"{flax}.unused.1.norm")
    return [
        *rules.attention(f"{torch}.attention_layer", f"{flax}.self_attention", _SELF),
        *rules.layer_norm(f"{torch}.normalization1", f"{flax}.residuals.0.norm"),
        *rules.attention(f"{torch}.EncoderDecoderAttention", f"{flax}.cross_attention", _CROSS),
        *rules.layer_norm(f"{torch}.normalization2", f"{flax}.residuals.1.norm"),
        *_encoder_block(
            f"{torch}.transformer_block",
            f"{flax}.unused.0.part",
            f"{flax}.unused.0.norm",
            *(used if computes_feed_forward else unused),
        ),
    ]


def weight_table(config: TransformerConfig) -> Table:
    flax = "encoder.blocks.{i}"
    encoder = _encoder_block(
        "encoder.EncoderBlocklayers.{i}",
        f"{flax}.self_attention",
        f"{flax}.residuals.0.norm",
        f"{flax}.feed_forward",
        f"{flax}.residuals.1.norm",
    )
    decoder = _decoder_block(computes_feed_forward=enums.Part.FFN in config.decoder.parts)
    return [
        *rules.embedding("encoder.words_embedding", "source_embedding"),
        Rule("encoder.positional_embedding.weight", ("encoder.positions.table",)),
        *rules.repeat(config.encoder.layers, encoder),
        *rules.embedding("decoder.words_embedding", "target_embedding"),
        Rule("decoder.positional_embedding.weight", ("decoder.positions.table",)),
        *rules.repeat(config.decoder.layers, decoder),
        *rules.linear("decoder.fc_out", "output"),
    ]


def _config(*, repaired: bool) -> TransformerConfig:
    padding = (enums.Mask.SOURCE_PADDING,) if repaired else ()
    index = enums.PositionIndex.ORDER if repaired else enums.PositionIndex.TRUNCATED_COSINE
    # Every decoder block owns an encoder block: unused as printed; the repair computes its
    # feed-forward
    branches = base.DECODER_BLOCK if repaired else base.DECODER_BLOCK[:2]
    unused = base.ENCODER_BLOCK[:1] if repaired else base.ENCODER_BLOCK
    positions: dict[str, Any] = {"positions": enums.Positions.LEARNED, "position_index": index}
    return TransformerConfig(
        source_vocab_size=10,
        target_vocab_size=10,
        d_model=512,
        num_heads=8,
        head_dim=512,
        d_ff=2048,
        max_length=100,
        encoder=StackConfig(6, base.ENCODER_BLOCK, self_mask=padding, **positions),
        decoder=StackConfig(
            6,
            branches,
            unused=unused,
            self_mask=(enums.Mask.CAUSAL,),
            cross_mask=padding,
            **positions,
        ),
        mask_fill=enums.MaskFill.MINUS_1E20,
        embedding_scale=enums.EmbeddingScale.NONE,
        dropout=0.0,
        embedding_dropout=0.0,
        dropout_site=enums.DropoutSite.AFTER_NORM,
        init=enums.Init.TORCH,
        architecture="deep_dive",
    )


_MULTIPLES = {"head_dim": 1, "d_ff": 4}
_FAITHFUL = Preset(
    _config(repaired=False),
    '"Transformer Deep Dive". Faithful: positions read only rows 1 and 0, source padding is seen,'
    " decoder blocks have no feed-forward.",
    _MULTIPLES,
)
_REPAIRED = Preset(
    _config(repaired=True),
    '"Transformer Deep Dive" with positions in order, source padding masked, and the decoder\'s'
    " own feed-forward applied.",
    _MULTIPLES,
)


def _arguments(config: TransformerConfig) -> Arguments:
    repaired = base.is_repaired(config, _FAITHFUL, _REPAIRED, "embedding_dropout")
    positional = (
        *base.vocabularies(config),
        config.d_model,
        base.one_depth(config),
        config.num_heads,
        base.one_rate(config, "embedding_dropout"),
    )
    return positional, {"max_length": config.max_length, "repaired": repaired}


ARCHITECTURE = Architecture(
    name="deep_dive",
    source='"Transformer Deep Dive", a course notebook of April 2024.',
    weight_table=weight_table,
    presets={"deep_dive": _FAITHFUL, "deep_dive_repaired": _REPAIRED},
    reference="torch_reference.deep_dive:TransformerArchitecture",
    reference_arguments=_arguments,
)
