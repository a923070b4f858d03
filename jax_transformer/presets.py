"""The documented architectures and the paper's, each a value with its source."""

from dataclasses import dataclass
from typing import Any

from jax_transformer.config import Branch, Init, Layout, Mask, NormPlacement, Part, Positions, StackConfig, TransformerConfig, Tying
from jax_transformer.errors import ConfigError, nearest

_ENCODER_BLOCK = (Branch((Part.SELF,)), Branch((Part.FFN,)))
_DECODER_BLOCK = (Branch((Part.SELF,)), Branch((Part.CROSS,)), Branch((Part.FFN,)))
_TARGET_MASK = (Mask.TARGET_PADDING, Mask.CAUSAL)


@dataclass(frozen=True)
class Preset:
    """A configuration and where it comes from."""

    source: str
    config: TransformerConfig


def _encoder(layers: int, **changes: Any) -> StackConfig:
    """The encoder that the paper and most of its descendants have."""
    return StackConfig(layers, _ENCODER_BLOCK, self_mask=(Mask.SOURCE_PADDING,), **changes)


def _decoder(layers: int, cross_mask: tuple[Mask, ...] = (Mask.SOURCE_PADDING,), **changes: Any) -> StackConfig:
    """The decoder that the paper and most of its descendants have."""
    return StackConfig(layers, _DECODER_BLOCK, self_mask=_TARGET_MASK, cross_mask=cross_mask, **changes)


def _lesson10(cross_mask: tuple[Mask, ...]) -> TransformerConfig:
    return TransformerConfig(
        source_vocab_size=10_000,
        target_vocab_size=10_000,
        d_model=512,
        num_heads=8,
        d_ff=2048,
        max_length=100,
        encoder=_encoder(6, final_norm=True, positions=Positions.SINUSOIDAL_STORED),
        decoder=_decoder(6, cross_mask, final_norm=True, positions=Positions.SINUSOIDAL_STORED),
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        embedding_dropout=0.1,
        init=Init.TORCH_TRANSFORMER,
        layout=Layout.LESSON10,
        source_pad_id=1,
        target_pad_id=1,
        bos_id=2,
        eos_id=3,
    )


PRESETS = {
    "lesson10": Preset(
        '"Lesson 10: Transformers II": torch.nn.Transformer for translation. Faithful: the decoder attends to source padding.',
        _lesson10(cross_mask=()),
    ),
    "lesson10_repaired": Preset(
        '"Lesson 10: Transformers II" with source padding masked in cross-attention.',
        _lesson10(cross_mask=(Mask.SOURCE_PADDING,)),
    ),
    "vaswani2017_base": Preset(
        "Vaswani et al. 2017, Attention Is All You Need, table 3, base: post-norm, three tied matrices, 63 M parameters.",
        TransformerConfig(
            source_vocab_size=37_000,
            target_vocab_size=37_000,
            d_model=512,
            num_heads=8,
            d_ff=2048,
            max_length=512,
            encoder=_encoder(6),
            decoder=_decoder(6),
            tying=Tying.ALL,
            output_bias=False,
        ),
    ),
    "small": Preset(
        "This project's own, for the built-in task: pre-norm (Xiong et al. 2020), three tied matrices, about a million parameters.",
        TransformerConfig(
            source_vocab_size=2_000,
            target_vocab_size=2_000,
            d_model=128,
            num_heads=4,
            d_ff=512,
            max_length=128,
            encoder=_encoder(2, final_norm=True),
            decoder=_decoder(2, final_norm=True),
            norm_placement=NormPlacement.PRE,
            tying=Tying.ALL,
            output_bias=False,
        ),
    ),
}


def preset_names() -> list[str]:
    """The names that :func:`preset` knows."""
    return list(PRESETS)


def preset(name: str, **sizes: Any) -> TransformerConfig:
    """The named configuration with ``sizes`` changed as by TransformerConfig.with_sizes; a size not given keeps the document's number."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}{nearest(name, preset_names())}; known: {', '.join(preset_names())}")
    return PRESETS[name].config.with_sizes(**sizes)
