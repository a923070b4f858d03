"""The configuration of one encoder-decoder: its fields, their checks, and their JSON.

Every message of a check has the numbers.
"""

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from jax_transformer.config import codec, enums
from jax_transformer.config.fields import StackConfig, TransformerFields
from jax_transformer.errors import ConfigError, check_numbers, nearest

EXECUTION = ("matmul_precision", "attention_backend", "remat", "scan_layers")
"""The fields of TransformerConfig that say how the same numbers are computed.

No weight depends on them, and a run may be resumed with others."""

CUDNN_WIDTH = 256
"""The widest head of cuDNN's attention; before Hopper it is 128."""
MOST_LAYERS = 1000
"""Layers of a stack: a configuration of unknown origin is described layer by layer."""
_LEAST_FILL = -3e38
"""Numbers of float32 end there."""
_COMPUTE_DTYPES = ("bfloat16", "float16", "float32", "float64")
_SIZES = """source_vocab_size target_vocab_size d_model num_heads d_ff max_length head_dim
    embedding_dropouts mel_bins"""
RATES = ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout")
"""The fields that act in training only: a pretrained model may be trained with others."""
_SHORTHANDS = {
    "encoder_layers": ("encoder.layers",),
    "decoder_layers": ("decoder.layers",),
    "num_layers": ("encoder.layers", "decoder.layers"),
    "vocab_size": ("source_vocab_size", "target_vocab_size"),
    "pad_id": ("source_pad_id", "target_pad_id"),
}


@dataclass(frozen=True)
class TransformerConfig(TransformerFields):
    """A whole encoder-decoder.

    ``dataclasses.replace`` or :meth:`with_sizes` make variants; both check the result.
    """

    def __post_init__(self) -> None:
        check_numbers(self, "", _SIZES, "be at least 1", _is_positive)
        stacks = {"encoder": self.encoder, "decoder": self.decoder}
        for name, stack in stacks.items():
            _check_stack(self, name, stack)
        _check_shared(self)
        for name, stack in stacks.items():
            _check_branches(self, name, stack)
        if {self.encoder.attention_span, self.decoder.attention_span} != {enums.AttentionSpan.FULL}:
            _check_spans(self)
        if self.attention_backend is not enums.AttentionBackend.XLA:
            _check_backend(self)

    @property
    def portable(self) -> "TransformerConfig":
        """The configuration without :data:`EXECUTION`: what a run and an export record."""
        return dataclasses.replace(self, **{name: getattr(type(self), name) for name in EXECUTION})

    def to_json(self) -> str:
        """Return JSON text; :meth:`from_json` gives an equal config back."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "TransformerConfig":
        """Return the configuration of a JSON text, the inverse of :meth:`to_json`.

        Raises ConfigError that names an unknown, missing or mistyped key.
        """
        return codec.from_json(cls, text)

    def with_sizes(self, **changes: Any) -> "TransformerConfig":
        """Return a copy with fields changed by name.

        Names are fields, a stack's as ``**{"encoder.positions": "learned"}``,
        ``num_layers`` (both stacks), ``encoder_layers``, ``decoder_layers``, ``vocab_size`` and
        ``pad_id`` (both sides). Enums may be given by value. Raises ConfigError for an unknown
        name.
        """
        known: dict[str, tuple[str, ...]] = dict(_SHORTHANDS)
        former: dict[str, str] = {}
        for prefix in ("", "encoder.", "decoder."):
            owner = StackConfig if prefix else TransformerFields
            names = [prefix + field.name for field in dataclasses.fields(owner)]
            known |= {name: (name,) for name in names}
            former |= {prefix + old: prefix + new for old, new in owner.RENAMED.items()}
        data = dataclasses.asdict(self)
        for name, value in changes.items():
            if name in former:
                print(f"{name} is now called {former[name]}", file=sys.stderr)
                name = former[name]
            if name not in known:
                near = nearest(name, sorted(known))
                raise ConfigError(f"unknown configuration field {name!r}{near}")
            for full in known[name]:
                stack, _, leaf = full.rpartition(".")
                value = _plain(value) if dataclasses.is_dataclass(value) else value
                (data[stack] if stack else data)[leaf] = value
        return codec.from_json(type(self), json.dumps(data, default=_plain))


def _is_positive(value: int) -> bool:
    return value >= 1


def _is_rate(value: float) -> bool:
    return 0 <= value < 1


def _plain(value: Any) -> Any:
    """Return a plain value for a branch, or for a NumPy number given as a size."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.item()


def _check_shared(config: TransformerConfig) -> None:
    """Check the vocabularies, rates and ids, which are not of one stack."""
    source, target = config.source_vocab_size, config.target_vocab_size
    if config.tying.one_embedding and source != target:
        both = f"source_vocab_size={source}, target_vocab_size={target}"
        raise ConfigError(f"tying='{config.tying}' needs one vocabulary: {both}")
    if (dtype := config.compute_dtype) not in (None, *_COMPUTE_DTYPES):
        raise ConfigError(f"compute_dtype={dtype!r} is not one of {', '.join(_COMPUTE_DTYPES)}")
    _check_spectrogram(config)
    check_numbers(config, "", " ".join(RATES), "be at least 0 and below 1", _is_rate)
    if isinstance(config.mask_fill, float) and not _LEAST_FILL < config.mask_fill < 0:
        raise ConfigError(f"mask_fill={config.mask_fill} must be below 0, above {_LEAST_FILL}")
    check_numbers(config, "", "norm_epsilon", "be above 0", lambda x: x > 0)
    for name in ("source_pad_id", "target_pad_id", "bos_id", "eos_id"):
        value, size = getattr(config, name), source if name == "source_pad_id" else target
        if not 0 <= value < size:
            raise ConfigError(f"{name}={value} is outside the vocabulary of {size}")
    # A window of sound has no padding, and that of its texts may be their end token (Whisper)
    masks_end = config.input_layer is None or enums.Mask.TARGET_PADDING in config.decoder.self_mask
    if config.target_pad_id == config.eos_id and masks_end:
        raise ConfigError(f"target_pad_id and eos_id are both {config.eos_id}")
    if config.padding_frozen and config.padding_trained:
        raise ConfigError("padding_frozen=True needs padding_trained=False")


def _check_stack(config: TransformerConfig, name: str, stack: StackConfig) -> None:
    """Check the sizes and positions of a stack."""
    check = partial(check_numbers, stack, f"{name}.")
    sizes = "layers num_heads d_ff local_radius global_block_size"
    check(sizes, "be at least 1", _is_positive)
    check("position_offset", "be at least 0", lambda x: x >= 0)
    check("layers", f"be at most {MOST_LAYERS:,}", lambda x: x <= MOST_LAYERS)
    if config.head_dim is None and config.d_model % (heads := config.heads(stack)):
        which = "num_heads" if stack.num_heads is None else f"{name}.num_heads"
        raise ConfigError(f"d_model={config.d_model} is not divisible by {which}={heads}")
    check("attention_dropout", "be at least 0 and below 1", _is_rate)
    if stack.positions in (enums.Positions.RELATIVE, enums.Positions.RELATIVE_PER_BLOCK):
        _check_relative(name, stack)
    check("position_exponent", "be above 0 and finite", lambda x: 0 < x < math.inf)
    if stack.position_index is enums.PositionIndex.TRUNCATED_COSINE:
        reads = f"be at least 2: {name}.position_index='truncated_cosine' reads row 1"
        check_numbers(config, "", "max_length", reads, lambda n: n >= 2)
    sinusoidal = stack.positions in (enums.Positions.SINUSOIDAL, enums.Positions.SINUSOIDAL_STORED)
    if config.d_model % 2 and sinusoidal:
        raise ConfigError(f"d_model={config.d_model} is odd; sinusoidal positions come in pairs")
    if stack.sinusoids is enums.Sinusoids.TENSOR2TENSOR:
        differ = "be at least 4: the first and the last of tensor2tensor's wavelengths differ"
        check_numbers(config, "", "d_model", differ, lambda n: n >= 4)


def _check_relative(name: str, stack: StackConfig) -> None:
    """Check a stack's relative positions.

    Half of a direction's buckets are for single distances, the others for longer and longer ranges
    up to the largest distance.
    """
    directions = 1 if enums.Mask.CAUSAL in stack.self_mask else 2
    least, single = 2 * directions, stack.relative_buckets // directions // 2
    multiple = f"be a multiple of {directions}, at least {least}"
    over = f"be over the {single} distances that have a bucket of their own"
    check = partial(check_numbers, stack, f"{name}.")
    check("relative_buckets", multiple, lambda n: n >= least and n % directions == 0)
    check("relative_max_distance", over, lambda n: n > single)
    if enums.Part.SELF not in stack.parts:
        raise ConfigError(
            f"{name}.positions='{stack.positions}': its blocks have no self-attention"
        )


def _check_branches(config: TransformerConfig, name: str, stack: StackConfig) -> None:
    """Check what the blocks of a stack compute, and which keys they see."""
    decoder, parts = name == "decoder", stack.parts
    if not stack.branches or not all(map(attrgetter("parts"), stack.branches)):
        raise ConfigError(f"{name}.branches: every block needs a branch, and every branch a part")
    for i, branch in enumerate(stack.branches):
        section = f"{name}.branches[{i}]."
        check_numbers(branch, section, "dropout", "be at least 0 and below 1", _is_rate)
        if branch.residual is enums.Residual.MEMORY and not decoder:
            belongs = "is the encoder's output and belongs in the decoder"
            raise ConfigError(f"{name}.branches: the residual 'memory' {belongs}")
    if (enums.Part.CROSS in parts) != decoder:
        belongs = "belongs in every decoder block and in no encoder block"
        raise ConfigError(f"{name}.branches: cross_attention {belongs}")
    for branch in stack.unused:
        if len(branch.parts) != 1:
            raise ConfigError(f"{name}.unused: an unused branch has one part")
    if stack.positions_at is enums.PositionsAt.FEED_FORWARD and enums.Part.FFN not in parts:
        raise ConfigError(f"{name}.positions_at='feed_forward': its blocks have no feed-forward")
    query, text = enums.Mask.QUERY_PADDING, config.input_layer is None
    of_source = {enums.Mask.SOURCE_PADDING, query} if text else {query} if decoder else set()
    of_self = {enums.Mask.TARGET_PADDING, enums.Mask.CAUSAL, query} if decoder else of_source
    for field, allowed in (("self_mask", of_self), ("cross_mask", of_source if decoder else set())):
        if query in getattr(stack, field) and config.mask_fill is enums.MaskFill.MINUS_INFINITY:
            raise ConfigError(f"{name}.{field}: padding is NaN by mask_fill='{config.mask_fill}'")
        if query in getattr(stack, field) and decoder and config.bos_id == config.target_pad_id:
            raise ConfigError(
                f"{name}.{field}: 'query_padding' hides all from the start, which is padding:"
                f" bos_id=target_pad_id={config.bos_id}"
            )
        for mask in getattr(stack, field):
            if mask not in allowed:
                known = f"(it knows {', '.join(sorted(allowed)) or 'none'})"
                raise ConfigError(f"{name}.{field}: '{mask}' has no meaning there {known}")


def _check_spans(config: TransformerConfig) -> None:
    """Check local attention, which an encoder has with the plain kinds of everything around it."""
    reasons = []
    for name in ("encoder", "decoder"):
        stack: StackConfig = getattr(config, name)
        if stack.attention_span is enums.AttentionSpan.FULL:
            continue
        span = f"{name}.attention_span='{stack.attention_span.value}'"
        if name == "decoder":
            reasons.append(f"{span} sees later tokens and belongs in the encoder")
        if stack.attention_span is enums.AttentionSpan.TRANSIENT_GLOBAL:
            if stack.positions is not enums.Positions.RELATIVE:
                reasons.append(f"{span} needs positions='relative'")
        elif stack.positions is enums.Positions.RELATIVE_PER_BLOCK:
            reasons.append(f"{span} has no positions='relative_per_block'")
        mixing, merge = stack.mixing, stack.head_merge
        if (mixing, merge) != (enums.Mixing.WEIGHTED, enums.HeadMerge.CONCATENATED):
            reasons.append(f"{span} has no mixing='{mixing.value}' with head_merge='{merge.value}'")
        if config.mask_fill is not enums.MaskFill.EXCLUDED:
            reasons.append(f"{span} has no mask_fill='{config.mask_fill}'")
        if enums.Mask.QUERY_PADDING in stack.self_mask:
            reasons.append(f"{span} has no mask 'query_padding'")
    if reasons:
        raise ConfigError("; ".join(reasons))


def _check_backend(config: TransformerConfig) -> None:
    """Raise ConfigError if the attention backend cannot compute this architecture."""
    reasons = []
    for name in ("encoder", "decoder"):
        stack: StackConfig = getattr(config, name)
        if stack.attention_span is not enums.AttentionSpan.FULL:
            reasons.append(f"{name}.attention_span='{stack.attention_span}' is computed in blocks")
        if stack.mixing is enums.Mixing.SUMMED:
            reasons.append(f"{name}.mixing='{stack.mixing.value}' is not a product with the values")
        relative = (enums.Positions.RELATIVE, enums.Positions.RELATIVE_PER_BLOCK)
        tokamax = config.attention_backend is enums.AttentionBackend.TOKAMAX
        if stack.positions in relative and not tokamax:
            reasons.append(f"{name}.positions='{stack.positions.value}' is a bias of the scores")
        if rate := config.attention_rate(stack):
            owner = "" if stack.attention_dropout is None else f"{name}."
            reasons.append(f"{owner}attention_dropout={rate} drops attention weights")
        if config.attention_backend is enums.AttentionBackend.CUDNN:
            width = config.head_width_of(stack)
            if width % 8 or width > CUDNN_WIDTH:
                most = f"not a multiple of 8 up to {CUDNN_WIDTH}"
                reasons.append(f"{name}: heads of width {width}, {most}")
            if enums.Mask.QUERY_PADDING in (*stack.self_mask, *stack.cross_mask):
                reasons.append(f"{name} has the mask 'query_padding'")
    if config.mask_fill is not enums.MaskFill.EXCLUDED:
        reasons.append(f"mask_fill='{config.mask_fill}' gives queries without keys a value")
    if reasons:
        backend = f"attention_backend='{config.attention_backend}'"
        raise ConfigError(
            f"{backend} cannot compute this model: {'; '.join(dict.fromkeys(reasons))}"
        )


def _check_spectrogram(config: TransformerConfig) -> None:
    """Check the sizes of a source that is sound, if there are any."""
    bins, frames = config.mel_bins, config.mel_frames
    if (bins is None) != (frames is None):
        both = f"mel_bins={bins} and mel_frames={frames}"
        raise ConfigError(f"{both} are the sizes of one spectrogram: give both or none")
    even = "be even and at least 2: two frames make one position"
    check_numbers(config, "", "mel_frames", even, lambda n: n >= 2 and n % 2 == 0)
