"""The architecture of "Transformers from scratch part - 2": an encoder, here with the decoder of
"Lesson 10" after it.

Source: the document's classes MultiHeadAttention (``qkv`` holds head after head, each with its
query, key and value), LayerNormalization (``gamma``, ``beta``), PoisitionwiseFeedForward (``fnn``)
and EncoderLayer. Its encoding of positions is computed, so no tensor holds it. Everything outside
of ``encoder.`` has the names of "Lesson 10".
"""

from dataclasses import replace
from typing import Any

from jax_transformer.architectures import base, lesson10, torch_nn
from jax_transformer.architectures.base import Architecture, Arguments, Preset
from jax_transformer.config import Branch, StackConfig, TransformerConfig, enums
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Table


def _encoder(config: TransformerConfig) -> Table:
    torch, flax = "encoder.layers.{i}", "encoder.blocks.{i}"
    layer: Table = []
    bias, heads, names = config.bias, config.num_heads, ("gamma", "beta")
    for part in config.encoder.parts:
        own = f"{flax}.{part.value}"
        if part is enums.Part.FFN:
            layer += rules.linear(f"{torch}.fnn.linear1", f"{own}.up", bias=bias)
            layer += rules.linear(f"{torch}.fnn.linear2", f"{own}.down", bias=bias)
        else:
            layer += rules.fused_attention(f"{torch}.attention", own, heads, bias=bias)
    for k in range(len(config.encoder.branches)):
        own = f"{flax}.residuals.{k}.norm"
        layer += rules.layer_norm(f"{torch}.norm{k + 1}", own, bias=bias, names=names)
    return rules.repeat(config.encoder.layers, layer)


def weight_table(config: TransformerConfig) -> Table:
    """Return the rules for a model of ``config``: "Lesson 10"'s but for the encoder."""
    table = torch_nn.weight_table(config)
    others = [rule for rule in table if not rule.torch.startswith("encoder.layers.")]
    return [*_encoder(config), *others]


def _config(*, repaired: bool) -> TransformerConfig:
    """Return the document's encoder with the decoder of lesson10 after it."""
    own: dict[str, Any] = {"attention_dropout": 0.0, "init": enums.Init.TORCH}
    faithful = StackConfig(
        3,
        # One feed-forward, in both branches
        (Branch((enums.Part.FFN, enums.Part.SELF)), Branch((enums.Part.FFN,))),
        positions_at=enums.PositionsAt.FEED_FORWARD,
        position_exponent=2.0,
        head_merge=enums.HeadMerge.RAW,
        **own,
    )
    original = lesson10.base_config(repaired=repaired)
    return replace(
        original,
        d_ff=1264,
        max_length=40,
        encoder=base.encoder(3, **own) if repaired else faithful,
        decoder=replace(original.decoder, layers=3),
        architecture="part2_encoder",
    )


_FAITHFUL = Preset(
    _config(repaired=False),
    '"Transformers from scratch part 2", an encoder, before the decoder of lesson10. Faithful:'
    " heads are merged without transposing back, the feed-forward comes first and again, adding"
    " positions each time, and source padding is seen.",
)
_REPAIRED = Preset(
    _config(repaired=True),
    '"Transformers from scratch part 2" as its text describes it, source padding masked.',
)


def _arguments(config: TransformerConfig) -> Arguments:
    rates = ("attention_dropout", "activation_dropout", "embedding_dropout")
    repaired = base.is_repaired(config, _FAITHFUL, _REPAIRED, *rates, "d_ff")
    return tuple(base.vocabularies(config)), {
        "d_model": config.d_model,
        "fnn_hidden": config.d_ff,
        "num_heads": config.num_heads,
        "drop_prob": base.one_rate(config, *rates),
        "max_sequence_length": config.max_length,
        "num_encoder_layers": config.encoder.layers,
        "num_decoder_layers": config.decoder.layers,
        "repaired": repaired,
    }


ARCHITECTURE = Architecture(
    name="part2_encoder",
    source='"Transformers from scratch part - 2", which prints an encoder and promises a decoder.',
    weight_table=weight_table,
    presets={"part2_encoder": _FAITHFUL, "part2_encoder_repaired": _REPAIRED},
    reference="torch_reference.part2_encoder:EncoderDecoder",
    reference_arguments=_arguments,
)
