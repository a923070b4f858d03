"""The documented architectures and the paper's, each a value with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from jax_transformer.config import (
    Activation,
    Branch,
    DropoutSite,
    EmbeddingScale,
    HeadMerge,
    Init,
    Mask,
    MaskFill,
    Mixing,
    NormPlacement,
    Part,
    PositionIndex,
    Positions,
    PositionsAt,
    Residual,
    ScoreScale,
    StackConfig,
    TransformerConfig,
    Tying,
)
from jax_transformer.errors import ConfigError, nearest

_ENCODER_BLOCK = (Branch((Part.SELF,)), Branch((Part.FFN,)))
_DECODER_BLOCK = (Branch((Part.SELF,)), Branch((Part.CROSS,)), Branch((Part.FFN,)))
_TARGET_MASK = (Mask.TARGET_PADDING, Mask.CAUSAL)


@dataclass(frozen=True)
class Preset:
    """A configuration and where it comes from."""

    source: str
    config: TransformerConfig
    multiples: Mapping[str, int] = field(default_factory=dict)
    """Sizes that the document gives as so many times d_model."""


def _encoder(layers: int, **changes: Any) -> StackConfig:
    """The encoder that the paper and most of its descendants have."""
    return StackConfig(layers, _ENCODER_BLOCK, self_mask=(Mask.SOURCE_PADDING,), **changes)


def _decoder(
    layers: int, cross_mask: tuple[Mask, ...] = (Mask.SOURCE_PADDING,), **changes: Any
) -> StackConfig:
    """The decoder that the paper and most of its descendants have."""
    return StackConfig(
        layers, _DECODER_BLOCK, self_mask=_TARGET_MASK, cross_mask=cross_mask, **changes
    )


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
        architecture="lesson10",
        source_pad_id=1,
        target_pad_id=1,
        bos_id=2,
        eos_id=3,
    )


def _deep_dive(*, repaired: bool) -> TransformerConfig:
    padding = (Mask.SOURCE_PADDING,) if repaired else ()
    index = PositionIndex.ORDER if repaired else PositionIndex.TRUNCATED_COSINE
    # Every decoder block owns an encoder block: idle as printed, its feed-forward put to use by the repair
    branches = _DECODER_BLOCK if repaired else _DECODER_BLOCK[:2]
    idle = (Branch((Part.SELF,)),) if repaired else (Branch((Part.SELF,)), Branch((Part.FFN,)))
    positions: dict[str, Any] = {"positions": Positions.LEARNED, "position_index": index}
    return TransformerConfig(
        source_vocab_size=10,
        target_vocab_size=10,
        d_model=512,
        num_heads=8,
        head_dim=512,
        d_ff=2048,
        max_length=100,
        encoder=StackConfig(6, _ENCODER_BLOCK, self_mask=padding, **positions),
        decoder=StackConfig(
            6, branches, idle=idle, self_mask=(Mask.CAUSAL,), cross_mask=padding, **positions
        ),
        mask_fill=MaskFill.MINUS_1E20,
        embedding_scale=EmbeddingScale.NONE,
        dropout=0.0,
        embedding_dropout=0.0,
        dropout_site=DropoutSite.AFTER_NORM,
        init=Init.TORCH,
        architecture="deep_dive",
    )


def _from_scratch(score_scale: ScoreScale) -> TransformerConfig:
    padding = (Mask.SOURCE_PADDING,)
    return TransformerConfig(
        source_vocab_size=10_000,
        target_vocab_size=10_000,
        d_model=512,
        num_heads=8,
        d_ff=2048,
        max_length=100,
        encoder=StackConfig(6, _ENCODER_BLOCK, self_mask=padding, positions=Positions.LEARNED),
        decoder=StackConfig(
            6,
            _DECODER_BLOCK,
            self_mask=(Mask.CAUSAL,),
            cross_mask=padding,
            positions=Positions.LEARNED,
        ),
        score_scale=score_scale,
        mask_fill=MaskFill.MINUS_1E20,
        embedding_scale=EmbeddingScale.NONE,
        dropout=0.0,
        embedding_dropout=0.0,
        dropout_site=DropoutSite.AFTER_NORM,
        init=Init.TORCH,
        architecture="from_scratch",
    )


def _part2_encoder(*, repaired: bool) -> TransformerConfig:
    """The document's encoder with lesson10's decoder behind it."""
    own: dict[str, Any] = {"attention_dropout": 0.0, "init": Init.TORCH}
    faithful = StackConfig(
        3,
        (Branch((Part.FFN, Part.SELF)), Branch((Part.FFN,))),  # one feed-forward, in both branches
        positions_at=PositionsAt.FEED_FORWARD,
        position_exponent=2.0,
        head_merge=HeadMerge.RAW,
        **own,
    )
    behind = _lesson10((Mask.SOURCE_PADDING,) if repaired else ())
    return replace(
        behind,
        d_ff=1264,
        max_length=40,
        encoder=_encoder(3, **own) if repaired else faithful,
        decoder=replace(behind.decoder, layers=3),
        architecture="part2_encoder",
    )


def _blog2023(*, repaired: bool) -> TransformerConfig:
    padding = (Mask.SOURCE_PADDING,) if repaired else ()
    stack: dict[str, Any] = {
        "positions": Positions.SINUSOIDAL_STORED,
        "activation": Activation.GELU,
        "mixing": Mixing.WEIGHTED if repaired else Mixing.SUMMED,
    }
    residual = Residual.INPUT if repaired else Residual.MEMORY
    decoder = (
        Branch((Part.SELF,), dropout=None if repaired else 0.5),
        Branch((Part.CROSS,), residual, 0.0),
        Branch((Part.FFN,), dropout=0.0),
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
            tuple(replace(branch, dropout=0.0) for branch in _ENCODER_BLOCK),
            self_mask=padding,
            **stack,
        ),
        decoder=StackConfig(4, decoder, self_mask=(Mask.CAUSAL,), cross_mask=padding, **stack),
        attention_bias=False,
        score_scale=ScoreScale.D_MODEL,
        mask_fill=MaskFill.EXCLUDED if repaired else MaskFill.MINUS_INFINITY,
        embedding_scale=EmbeddingScale.NONE,
        dropout=0.1,
        embedding_dropout=0.1,
        embedding_dropouts=2,
        dropout_site=DropoutSite.AFTER_NORM,
        init=Init.TORCH,
        architecture="blog2023",
    )


PRESETS = {
    "deep_dive": Preset(
        '"Transformer Deep Dive". Faithful: positions read rows 1 and 0 alone, source padding is seen, decoder blocks have no feed-forward.',
        _deep_dive(repaired=False),
        {"head_dim": 1, "d_ff": 4},
    ),
    "deep_dive_repaired": Preset(
        '"Transformer Deep Dive" with positions in order, source padding masked, and the decoder\'s own feed-forward applied.',
        _deep_dive(repaired=True),
        {"head_dim": 1, "d_ff": 4},
    ),
    "lesson10": Preset(
        '"Lesson 10: Transformers II": torch.nn.Transformer for translation. Faithful: the decoder attends to source padding.',
        _lesson10(cross_mask=()),
    ),
    "lesson10_repaired": Preset(
        '"Lesson 10: Transformers II" with source padding masked in cross-attention.',
        _lesson10(cross_mask=(Mask.SOURCE_PADDING,)),
    ),
    "from_scratch": Preset(
        '"Transformer from scratch". Faithful: scores are divided by the root of d_model.',
        _from_scratch(ScoreScale.D_MODEL),
        {"d_ff": 4},
    ),
    "from_scratch_repaired": Preset(
        '"Transformer from scratch" with scores divided by the root of the head width, as its text says.',
        _from_scratch(ScoreScale.HEAD_DIM),
        {"d_ff": 4},
    ),
    "part2_encoder": Preset(
        '"Transformers from scratch part 2", an encoder, before the decoder of lesson10. Faithful: heads are merged without transposing back, '
        "the feed-forward comes first and again, and adds positions each time.",
        _part2_encoder(repaired=False),
    ),
    "part2_encoder_repaired": Preset(
        '"Transformers from scratch part 2" as its text describes it, source padding masked.',
        _part2_encoder(repaired=True),
    ),
    "blog2023": Preset(
        '"Transformer" (2023-06-05). Faithful: attention gives every query the sum of all values, and the decoder adds the memory to itself.',
        _blog2023(repaired=False),
        {"d_ff": 4},
    ),
    "blog2023_repaired": Preset(
        '"Transformer" (2023-06-05) with values mixed by the weights, the residual from the query and the masks where they belong.',
        _blog2023(repaired=True),
        {"d_ff": 4},
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
    """The named configuration with ``sizes`` changed as by TransformerConfig.with_sizes; a size not given keeps the document's number or rule."""
    if name not in PRESETS:
        raise ConfigError(
            f"unknown preset {name!r}{nearest(name, preset_names())}; known: {', '.join(preset_names())}"
        )
    found = PRESETS[name]
    d_model = sizes.get("d_model", found.config.d_model)
    derived = (
        {size: times * d_model for size, times in found.multiples.items()}
        if isinstance(d_model, Integral)
        else {}
    )
    return found.config.with_sizes(**(derived | sizes))
