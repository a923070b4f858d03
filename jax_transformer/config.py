"""The description of one encoder-decoder: enums and frozen dataclasses that check themselves. Standard library only.

A stack is ``layers`` times a block, a block is a tuple of branches, and a branch is one or more parts under one residual and one norm. A field
is here because two published architectures differ in it. Shared numbers stand in TransformerConfig, what a stack may have for itself in StackConfig.
"""

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import Any

from jax_transformer import codec
from jax_transformer.errors import ConfigError, nearest


class Part(enum.StrEnum):
    """What a branch computes."""

    SELF = "self_attention"
    CROSS = "cross_attention"
    FFN = "feed_forward"


class Residual(enum.StrEnum):
    """What a branch's output is added to."""

    INPUT = "input"
    MEMORY = "memory"  # the encoder's output, position by position, instead of the query (the 2023-06-05 post)


class Mask(enum.StrEnum):
    """A rule that says which keys a query may see; several are joined by *and*."""

    SOURCE_PADDING = "source_padding"
    TARGET_PADDING = "target_padding"
    CAUSAL = "causal"


class NormPlacement(enum.StrEnum):
    """Where the norm of a branch stands: Vaswani et al. 2017 (post), Xiong et al. 2020 (pre)."""

    POST = "post"
    PRE = "pre"


class DropoutSite(enum.StrEnum):
    """Where a branch's dropout stands: on its output before the sum (Vaswani et al. 2017), or on what leaves the block's norm."""

    BEFORE_ADD = "before_add"
    AFTER_NORM = "after_norm"


class Activation(enum.StrEnum):
    """The feed-forward's nonlinearity."""

    RELU = "relu"
    GELU = "gelu"  # exact, by erf: what torch.nn.functional.gelu computes by default
    GELU_TANH = "gelu_tanh"  # Hendrycks and Gimpel's approximation: what jax.nn.gelu computes by default


class ScoreScale(enum.StrEnum):
    """What the attention scores are divided by."""

    HEAD_DIM = "head_dim"  # sqrt(width of a head): Vaswani et al. 2017
    D_MODEL = "d_model"  # sqrt(d_model)
    NONE = "none"  # T5


class Positions(enum.StrEnum):
    """How a stack knows the order of its input."""

    SINUSOIDAL = "sinusoidal"  # sin and cos interleaved, Vaswani et al. 2017; computed in float64, then rounded
    SINUSOIDAL_STORED = (
        "sinusoidal_stored"  # the same as a table that belongs to the checkpoint: loaded, used and given back as it is, never trained
    )
    LEARNED = "learned"
    NONE = "none"


class EmbeddingScale(enum.StrEnum):
    """What token embeddings are multiplied by."""

    NONE = "none"
    SQRT_D_MODEL = "sqrt_d_model"  # Vaswani et al. 2017, section 3.4


class Tying(enum.StrEnum):
    """Which of source embedding, target embedding and output layer are one matrix (Press and Wolf 2017)."""

    NONE = "none"
    OUTPUT = "output"  # the target embedding is also the output layer
    ALL = "all"  # all three; both sides share one vocabulary


class Init(enum.StrEnum):
    """The distributions that new parameters are drawn from."""

    TORCH = "torch"  # torch.nn.Linear (uniform, 1/sqrt(fan_in), biases too) and torch.nn.Embedding (normal, 1)
    TORCH_TRANSFORMER = "torch_transformer"  # TORCH, but matrices of the stacks Xavier-uniform, query, key and value as one (3d, d) matrix
    XAVIER = "xavier"  # Xavier-uniform matrices (query, key and value as one), zero biases, embeddings normal with deviation d_model^-0.5


class Layout(enum.StrEnum):
    """The page of convert/tables that names this model's PyTorch weights."""

    TORCH_NN = "torch_nn"  # torch.nn.Transformer with embeddings around it
    LESSON10 = "lesson10"  # the same names; the twin is the document's


class DropoutMasks(enum.StrEnum):
    """The generator of dropout masks."""

    HASH = "hash"  # an integer hash of position and key: several times cheaper on CPU
    THREEFRY = "threefry"  # jax.random.bernoulli


@dataclass(frozen=True)
class Branch:
    """Parts composed in order, ``parts[-1](...(parts[0](x)))``, under one residual connection and one norm."""

    parts: tuple[Part, ...]
    residual: Residual = Residual.INPUT
    dropout: float | None = None
    """Rate of this branch's dropout; the model's ``dropout`` where None."""


@dataclass(frozen=True)
class StackConfig:
    """An encoder or a decoder."""

    layers: int
    branches: tuple[Branch, ...]
    positions: Positions = Positions.SINUSOIDAL
    activation: Activation = Activation.RELU
    final_norm: bool = False
    self_mask: tuple[Mask, ...] = ()
    cross_mask: tuple[Mask, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The distinct parts of a block, in order of first use: a part named in two branches is one module."""
        return tuple(dict.fromkeys(part for branch in self.branches for part in branch.parts))


@dataclass(frozen=True)
class TransformerConfig:
    """A whole encoder-decoder. ``dataclasses.replace`` or :meth:`with_sizes` make variants; both check the result."""

    source_vocab_size: int
    target_vocab_size: int
    d_model: int
    num_heads: int
    d_ff: int
    max_length: int
    """The longest source and target, in tokens."""
    encoder: StackConfig
    decoder: StackConfig
    head_dim: int | None = None
    """Width of one head; ``d_model / num_heads`` where None."""
    norm_placement: NormPlacement = NormPlacement.POST
    norm_epsilon: float = 1e-5
    bias: bool = True
    """Whether the linear layers and norms of the stacks have biases."""
    output_bias: bool = True
    score_scale: ScoreScale = ScoreScale.HEAD_DIM
    embedding_scale: EmbeddingScale = EmbeddingScale.SQRT_D_MODEL
    tying: Tying = Tying.NONE
    dropout: float = 0.1
    """On the output of every branch."""
    attention_dropout: float = 0.0
    """On the attention weights."""
    activation_dropout: float = 0.0
    """Inside the feed-forward, after its activation."""
    embedding_dropout: float = 0.1
    """On the sum of token embeddings and positions."""
    dropout_site: DropoutSite = DropoutSite.BEFORE_ADD
    dropout_masks: DropoutMasks = DropoutMasks.HASH
    init: Init = Init.XAVIER
    layout: Layout = Layout.TORCH_NN
    compute_dtype: str | None = None
    """"bfloat16", "float16", "float32" or "float64" for the arithmetic; the parameters' own dtype where None."""
    source_pad_id: int = 0
    target_pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        for check in (_check_sizes, _check_rates, _check_ids, _check_stacks):
            check(self)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.d_model // self.num_heads

    def to_json(self) -> str:
        """JSON text; :meth:`from_json` gives an equal config back."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "TransformerConfig":
        """Inverse of :meth:`to_json`. Raises ConfigError that names an unknown, missing or mistyped key."""
        return codec.from_json(cls, text)

    def with_sizes(self, **changes: Any) -> "TransformerConfig":
        """A copy with fields changed by name. Beside the fields themselves: a stack's own as ``**{"encoder.positions": "learned"}``,
        ``num_layers`` (both stacks), ``encoder_layers``, ``decoder_layers``, ``vocab_size`` and ``pad_id`` (both sides). Enums may be given by
        value. Raises ConfigError for an unknown name."""
        fields = {field.name for field in dataclasses.fields(self)}
        nested = {f"{stack}.{field.name}" for stack in ("encoder", "decoder") for field in dataclasses.fields(StackConfig)}
        known = sorted(fields | nested | set(_SHORTHANDS))
        expanded: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in known:
                raise ConfigError(f"unknown configuration field {name!r}{nearest(name, known)}")
            expanded |= dict.fromkeys(_SHORTHANDS.get(name, (name,)), value)
        data = dataclasses.asdict(self)
        for name, value in expanded.items():
            owner, _, leaf = name.rpartition(".")
            (data[owner] if owner else data)[leaf] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
        return codec.from_json(type(self), json.dumps(data, default=_plain))


def _plain(value: Any) -> Any:
    """What JSON has no form of: a branch, or a NumPy number given as a size."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value.item()


_SHORTHANDS = {
    "encoder_layers": ("encoder.layers",),
    "decoder_layers": ("decoder.layers",),
    "num_layers": ("encoder.layers", "decoder.layers"),
    "vocab_size": ("source_vocab_size", "target_vocab_size"),
    "pad_id": ("source_pad_id", "target_pad_id"),
}
_COMPUTE_DTYPES = ("bfloat16", "float16", "float32", "float64")


def _check_sizes(config: TransformerConfig) -> None:
    for name in ("source_vocab_size", "target_vocab_size", "d_model", "num_heads", "d_ff", "max_length", "head_dim"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    for name in ("encoder", "decoder"):
        if getattr(config, name).layers < 1:
            raise ConfigError(f"{name}.layers={getattr(config, name).layers} must be at least 1")
    if config.head_dim is None and config.d_model % config.num_heads:
        raise ConfigError(f"d_model={config.d_model} is not divisible by num_heads={config.num_heads}")
    sinusoidal = (Positions.SINUSOIDAL, Positions.SINUSOIDAL_STORED)
    if config.d_model % 2 and (config.encoder.positions in sinusoidal or config.decoder.positions in sinusoidal):
        raise ConfigError(f"d_model={config.d_model} is odd; sinusoidal positions come in pairs")
    if config.tying is Tying.ALL and config.source_vocab_size != config.target_vocab_size:
        sizes = f"source_vocab_size={config.source_vocab_size}, target_vocab_size={config.target_vocab_size}"
        raise ConfigError(f"tying='all' needs one vocabulary: {sizes}")
    if config.compute_dtype is not None and config.compute_dtype not in _COMPUTE_DTYPES:
        raise ConfigError(f"compute_dtype={config.compute_dtype!r} is not one of {', '.join(_COMPUTE_DTYPES)}")


def _check_rates(config: TransformerConfig) -> None:
    rates = {name: getattr(config, name) for name in ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout")}
    for stack in ("encoder", "decoder"):
        rates |= {f"{stack}.branches[{i}].dropout": b.dropout or 0.0 for i, b in enumerate(getattr(config, stack).branches)}
    for name, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise ConfigError(f"{name}={rate} must be at least 0 and below 1")
    if not config.norm_epsilon > 0:
        raise ConfigError(f"norm_epsilon={config.norm_epsilon} must be above 0")


def _check_ids(config: TransformerConfig) -> None:
    sizes = {"source_pad_id": config.source_vocab_size} | dict.fromkeys(("target_pad_id", "bos_id", "eos_id"), config.target_vocab_size)
    for name, size in sizes.items():
        if not 0 <= getattr(config, name) < size:
            raise ConfigError(f"{name}={getattr(config, name)} is outside the vocabulary of {size}")
    if config.target_pad_id == config.eos_id:
        raise ConfigError(f"target_pad_id and eos_id are both {config.eos_id}")


def _check_stacks(config: TransformerConfig) -> None:
    for name in ("encoder", "decoder"):
        stack: StackConfig = getattr(config, name)
        if not stack.branches or not all(branch.parts for branch in stack.branches):
            raise ConfigError(f"{name}.branches: every block needs a branch, and every branch a part")
        if (Part.CROSS in stack.parts) != (name == "decoder"):
            raise ConfigError(f"{name}.branches: cross_attention belongs in every decoder block and in no encoder block")
    for branch in config.encoder.branches:
        if branch.residual is Residual.MEMORY:
            raise ConfigError("encoder.branches: the residual 'memory' is the encoder's output and belongs in the decoder")
    wrong = {
        "encoder.self_mask": (config.encoder.self_mask, {Mask.SOURCE_PADDING}),
        "encoder.cross_mask": (config.encoder.cross_mask, set()),
    }
    wrong["decoder.self_mask"] = (config.decoder.self_mask, {Mask.TARGET_PADDING, Mask.CAUSAL})
    wrong["decoder.cross_mask"] = (config.decoder.cross_mask, {Mask.SOURCE_PADDING})
    for name, (masks, allowed) in wrong.items():
        for mask in masks:
            if mask not in allowed:
                raise ConfigError(f"{name}: {mask.value!r} has no meaning there (it knows {', '.join(sorted(allowed)) or 'none'})")
