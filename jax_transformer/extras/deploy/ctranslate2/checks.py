"""Checks before a model is written: of CTranslate2 itself, of the quantization, and of
configurations that its specification of a Transformer cannot express.

Standard library and NumPy only. Every reason names the field and its value.
"""

import enum
import importlib.util
import math
from collections.abc import Iterator

import numpy as np

from jax_transformer.config import StackConfig, TransformerConfig, enums
from jax_transformer.errors import ConfigError

MODEL = "model.bin"
RELATIVE = (enums.Positions.RELATIVE, enums.Positions.RELATIVE_PER_BLOCK)
_BRANCHES = {
    "encoder": ((enums.Part.SELF,), (enums.Part.FFN,)),
    "decoder": ((enums.Part.SELF,), (enums.Part.CROSS,), (enums.Part.FFN,)),
}


class Quantization(enum.StrEnum):
    """The numbers that a folder stores, by CTranslate2's names."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"  # matrices, with a scale for each row; the rest stays float32


def check_installed(purpose: str) -> None:
    """Raise ConfigError unless CTranslate2 can be imported."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise ConfigError(f"{purpose} needs CTranslate2: pip install 'jax-seq2seq[ctranslate2]'")


def quantization(name: str | None) -> Quantization:
    """Return the quantization of this name, float32 if None. Raises ConfigError for another."""
    try:
        return Quantization(name or "float32")
    except ValueError:
        known = ", ".join(Quantization)
        raise ConfigError(f"--quantization {name} is not one of {known}") from None


def check(config: TransformerConfig) -> None:
    """Raise one ConfigError with everything that CTranslate2 cannot compute."""
    if reasons := list(problems(config)):
        raise ConfigError(f"CTranslate2 cannot compute this model: {'; '.join(reasons)}")


def problems(config: TransformerConfig) -> Iterator[str]:
    """Yield the fields that cannot be expressed, each with its value and the reason."""
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        yield from _structure(name, stack)
        yield from _positions(name, stack, config)
    yield from _masks(config)
    if config.norm is enums.Norm.LAYER_UNBIASED:
        yield f"norm='{config.norm}' (it adds epsilon inside the root)"
    if config.mel_bins is not None:
        yield f"mel_bins={config.mel_bins} (only models that read text are written)"
    if not config.key_bias:
        yield "key_bias=False (query, key and value have one bias)"


def _structure(name: str, stack: StackConfig) -> Iterator[str]:
    parts = tuple(branch.parts for branch in stack.branches)
    if parts != _BRANCHES[name]:
        shown = ", ".join(" of ".join(reversed(branch)) for branch in parts)
        expected = ", ".join(part for (part,) in _BRANCHES[name])
        yield f"{name}.branches is {shown} (it has {expected})"
    if any(branch.residual is not enums.Residual.INPUT for branch in stack.branches):
        yield f"{name}.branches has the residual 'memory'"
    if stack.attention_span is not enums.AttentionSpan.FULL:
        yield f"{name}.attention_span='{stack.attention_span}'"
    if stack.mixing is not enums.Mixing.WEIGHTED:
        yield f"{name}.mixing='{stack.mixing}'"
    if stack.head_merge is not enums.HeadMerge.CONCATENATED:
        yield f"{name}.head_merge='{stack.head_merge}'"
    if stack.embedding_norm and stack.embedding_norm_of is not enums.EmbeddingNormOf.SUM:
        yield (
            f"{name}.embedding_norm_of='{stack.embedding_norm_of}' (its norm comes after positions)"
        )


def _positions(name: str, stack: StackConfig, config: TransformerConfig) -> Iterator[str]:
    if stack.positions is enums.Positions.NONE:
        return
    if stack.positions_at is not enums.PositionsAt.EMBEDDING:
        yield f"{name}.positions_at='{stack.positions_at}' (it adds positions to embeddings)"
    starts_with_padding = name == "decoder" and config.bos_id == config.target_pad_id
    if stack.position_index is enums.PositionIndex.NOT_PADDING and starts_with_padding:
        yield (
            f"{name}.position_index='{stack.position_index}' with bos_id=target_pad_id="
            f"{config.bos_id} (the start gets no position)"
        )
    if stack.positions in RELATIVE:
        directions = 1 if enums.Mask.CAUSAL in stack.self_mask else 2
        count = stack.relative_buckets // directions
        if distance := _differing_bucket(config.max_length, count, stack.relative_max_distance):
            yield (
                f"{name}.relative_buckets={stack.relative_buckets} and relative_max_distance="
                f"{stack.relative_max_distance} (it rounds distance {distance} to another bucket)"
            )


def _differing_bucket(length: int, count: int, max_distance: int) -> int:
    """Return the first distance that CTranslate2 puts into another bucket; 0 if there is none.

    It adds in float32 before it truncates; transformers, and our nn/embeddings.py, afterwards.
    """
    single = count // 2
    distances = np.arange(single, min(length, max_distance + 1))
    scaled = np.log(distances.astype(np.float32) / np.float32(single)) / np.float32(
        math.log(max_distance / single)
    )
    scaled = scaled * np.float32(count - single)
    differs = (np.float32(single) + scaled).astype(np.int64) != single + scaled.astype(np.int64)
    differs &= single + scaled.astype(np.int64) < count - 1
    return int(distances[differs][0]) if differs.any() else 0


def _masks(config: TransformerConfig) -> Iterator[str]:
    encoder, decoder = config.encoder, config.decoder
    if enums.Mask.SOURCE_PADDING not in encoder.self_mask:
        yield "encoder.self_mask=() (it never attends to padding)"
    if enums.Mask.CAUSAL not in decoder.self_mask:
        shown = ", ".join(decoder.self_mask)
        yield f"decoder.self_mask=({shown}) (it never attends to later tokens)"
    if enums.Mask.SOURCE_PADDING not in decoder.cross_mask:
        yield "decoder.cross_mask=() (it never attends to padding)"
    if enums.Mask.TARGET_PADDING in decoder.self_mask and config.bos_id == config.target_pad_id:
        yield (
            "decoder.self_mask has target_padding, and bos_id=target_pad_id="
            f"{config.bos_id} (it attends to the start)"
        )
