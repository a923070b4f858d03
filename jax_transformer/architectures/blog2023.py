"""The architecture of the post "Transformer" of 2023-06-05: attention without biases, one block
that both stacks share.

The second half of a decoder block is a whole encoder block, which attends to the memory. Each stack
stores its own table of positions.
"""

from dataclasses import replace
from typing import Any

from jax_transformer.architectures import base
from jax_transformer.architectures.base import Architecture, Arguments, Preset
from jax_transformer.config import Branch, StackConfig, TransformerConfig, enums
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Rule, Table

_NAMES = {"query": "queries", "key": "keys", "value": "values", "out": "fc"}


def _shared_block(torch: str, flax: str, part: str, first: int, *, bias: bool) -> Table:
    """Return an encoder block with the norms of the Flax branches ``first`` and ``first + 1``."""
    return [
        *rules.attention(f"{torch}.attention", f"{flax}.{part}", _NAMES, bias=bias),
        *rules.layer_norm(f"{torch}.layer_norm1", f"{flax}.residuals.{first}.norm"),
        *rules.linear(f"{torch}.feed_forward.0", f"{flax}.feed_forward.up"),
        *rules.linear(f"{torch}.feed_forward.2", f"{flax}.feed_forward.down"),
        *rules.layer_norm(f"{torch}.layer_norm2", f"{flax}.residuals.{first + 1}.norm"),
    ]


def weight_table(config: TransformerConfig) -> Table:
    bias = config.bias if config.attention_bias is None else config.attention_bias
    layer, block = "decoder.decoder_layer.{i}", "decoder.blocks.{i}"
    decoder = [
        *rules.attention(f"{layer}.attention", f"{block}.self_attention", _NAMES, bias=bias),
        *rules.layer_norm(f"{layer}.layer_norm", f"{block}.residuals.0.norm"),
        *_shared_block(f"{layer}.encoder_block", block, "cross_attention", 1, bias=bias),
    ]
    encoder = _shared_block(
        "encoder.encoder_layers.{i}", "encoder.blocks.{i}", "self_attention", 0, bias=bias
    )
    return [
        *rules.embedding("encoder.embed", "source_embedding"),
        *rules.embedding("decoder.embed", "target_embedding"),
        Rule("encoder.position_embed.pe", "encoder.positions.table"),
        Rule("decoder.position_embed.pe", "decoder.positions.table"),
        *rules.repeat(config.encoder.layers, encoder),
        *rules.repeat(config.decoder.layers, decoder),
        *rules.linear("decoder.fc", "output"),
    ]


def _config(*, repaired: bool) -> TransformerConfig:
    padding = (enums.Mask.SOURCE_PADDING,) if repaired else ()
    stack: dict[str, Any] = {
        "positions": enums.Positions.SINUSOIDAL_STORED,
        "activation": enums.Activation.GELU,
        "mixing": enums.Mixing.WEIGHTED if repaired else enums.Mixing.SUMMED,
    }
    residual = enums.Residual.INPUT if repaired else enums.Residual.MEMORY
    decoder = (
        Branch((enums.Part.SELF,), dropout=None if repaired else 0.5),
        Branch((enums.Part.CROSS,), residual, 0.0),
        Branch((enums.Part.FFN,), dropout=0.0),
    )
    return TransformerConfig(
        source_vocab_size=10_000,
        target_vocab_size=10_000,
        d_model=256,
        num_heads=8,
        d_ff=1024,
        max_length=100,
        encoder=StackConfig(
            4,
            tuple(replace(branch, dropout=0.0) for branch in base.ENCODER_BLOCK),
            self_mask=padding,
            **stack,
        ),
        decoder=StackConfig(
            4, decoder, self_mask=(enums.Mask.CAUSAL,), cross_mask=padding, **stack
        ),
        attention_bias=False,
        score_scale=enums.ScoreScale.D_MODEL,
        mask_fill=enums.MaskFill.EXCLUDED if repaired else enums.MaskFill.MINUS_INFINITY,
        embedding_scale=enums.EmbeddingScale.NONE,
        dropout=0.1,
        embedding_dropout=0.1,
        embedding_dropouts=2,
        dropout_site=enums.DropoutSite.AFTER_NORM,
        init=enums.Init.TORCH,
        architecture="blog2023",
    )


_FAITHFUL = Preset(
    _config(repaired=False),
    '"Transformer" (2023-06-05). Faithful: attention gives every query the sum of all values,'
    " the decoder adds the memory to itself, and source padding is seen.",
    {"d_ff": 4},
)
_REPAIRED = Preset(
    _config(repaired=True),
    '"Transformer" (2023-06-05) with values mixed by the weights, the residual from the query and'
    " the masks in their places.",
    {"d_ff": 4},
)


def _arguments(config: TransformerConfig) -> Arguments:
    repaired = base.is_repaired(config, _FAITHFUL, _REPAIRED, "embedding_dropout", "attention_bias")
    rate = base.one_rate(config, "embedding_dropout") if repaired else config.embedding_dropout
    return tuple(base.vocabularies(config)), {
        "embed_size": config.d_model,
        "heads": config.num_heads,
        "num_encoder_layers": config.encoder.layers,
        "num_decoder_layers": config.decoder.layers,
        "max_len": config.max_length,
        "dropout": rate,
        "bias": config.attention_bias is not False,
        "repaired": repaired,
    }


ARCHITECTURE = Architecture(
    name="blog2023",
    source='"Transformer", a post of 2023-06-05.',
    weight_table=weight_table,
    presets={"blog2023": _FAITHFUL, "blog2023_repaired": _REPAIRED},
    reference="torch_reference.blog2023:Transformer",
    reference_arguments=_arguments,
)
