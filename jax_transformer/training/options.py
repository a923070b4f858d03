"""What ``train`` can be told: these dataclasses are its command line, and the text under a field is that flag's help. Standard library only."""

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any

from jax_transformer import presets
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError


class Schedule(enum.StrEnum):
    """How the learning rate goes on after its linear warm-up."""

    COSINE = "cosine"  # to zero at the last step
    INVERSE_SQRT = "inverse_sqrt"  # with the square root of the step: Vaswani et al. 2017, section 5.3
    CONSTANT = "constant"


@dataclass(frozen=True)
class ModelOptions:
    """The architecture. A size that is not given keeps the preset's."""

    preset: str = "small"
    """One of the documented architectures, see `jax_transformer.preset_names()`."""
    d_model: int | None = None
    """Width of the model."""
    num_heads: int | None = None
    """Attention heads."""
    d_ff: int | None = None
    """Width inside the feed-forward."""
    encoder_layers: int | None = None
    """Blocks of the encoder."""
    decoder_layers: int | None = None
    """Blocks of the decoder."""
    max_length: int | None = None
    """The longest source and target, in tokens; longer pairs are dropped and counted."""
    dropout: float | None = None
    """Dropout on the output of every branch."""
    attention_dropout: float | None = None
    """Dropout on attention weights."""
    activation_dropout: float | None = None
    """Dropout inside the feed-forward."""
    embedding_dropout: float | None = None
    """Dropout on embeddings plus positions."""
    norm_placement: str | None = None
    """Norm before (pre) or after (post) each branch."""
    tying: str | None = None
    """Which of source embedding, target embedding and output are one matrix: none, output, all."""

    def config(self, vocab_size: int) -> TransformerConfig:
        """The preset with these sizes, for one vocabulary on both sides."""
        sizes = {name: value for name, value in dataclasses.asdict(self).items() if name != "preset" and value is not None}
        return presets.preset(self.preset, vocab_size=vocab_size, **sizes)


@dataclass(frozen=True)
class DataOptions:
    """The text. Without files, the built-in task: English to German, French and Spanish phrases from Unicode CLDR."""

    train_source: str | None = None
    """Training lines to translate from; plain or gzip."""
    train_target: str | None = None
    """Their translations, line by line."""
    valid_source: str | None = None
    """Validation lines to translate from."""
    valid_target: str | None = None
    """Their translations."""
    vocab_size: int = 1000
    """Size of the byte-level BPE vocabulary, trained on both sides of the training text."""
    tokens_per_batch: int = 1024
    """Positions in a batch, padding included, on each side."""
    buckets: int = 4
    """The most batch shapes, and so compiled programs, of a run."""

    @property
    def files(self) -> dict[str, str | None]:
        """The four file options by name."""
        return {name: getattr(self, name) for name in ("train_source", "train_target", "valid_source", "valid_target")}


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW."""

    learning_rate: float = 3e-3
    """The highest learning rate, reached after warm-up."""
    schedule: Schedule = Schedule.COSINE
    """What follows warm-up."""
    warmup_steps: int = 200
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.98
    """Decay of the second moment."""
    epsilon: float = 1e-9
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on every parameter."""
    clip_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it; 0 is no clipping."""
    label_smoothing: float = 0.1
    """Probability mass spread over the whole vocabulary."""


@dataclass(frozen=True)
class TrainOptions:
    """Train an encoder-decoder on parallel text."""

    run: str | None = None
    """The run folder. It continues where it stopped. Without one, the newest unfinished run of the same options under runs/, else a new one."""
    steps: int = 1600
    """Updates."""
    seed: int = 0
    """Decides initial weights, the order of the text, and dropout."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    eval_every: int = 800
    """Steps between validations, each followed by a checkpoint."""
    eval_pairs: int = 1000
    """At most this many validation pairs are translated for BLEU, chrF and exact match; loss is over all."""
    keep: int = 2
    """Checkpoints to keep."""
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("log_every", 1), ("eval_every", 1), ("eval_pairs", 1), ("keep", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        given = [name for name, path in self.data.files.items() if path is not None]
        if given and len(given) < 4:
            absent = [f"data.{name}" for name in self.data.files if name not in given]
            raise ConfigError(f"training on files needs all four of them; not given: {', '.join(absent)}")
        for name in ("vocab_size", "tokens_per_batch", "buckets"):
            if getattr(self.data, name) < 1:
                raise ConfigError(f"data.{name}={getattr(self.data, name)} must be at least 1")
        self._check_optimizer(self.optimizer)

    @staticmethod
    def _check_optimizer(optimizer: OptimizerOptions) -> None:
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if getattr(optimizer, name) < 0:
                raise ConfigError(f"optimizer.{name}={getattr(optimizer, name)} must not be negative")
        for name in ("beta1", "beta2", "label_smoothing"):
            if not 0 <= getattr(optimizer, name) < 1:
                raise ConfigError(f"optimizer.{name}={getattr(optimizer, name)} must be at least 0 and below 1")
        for name in ("learning_rate", "epsilon"):
            if not getattr(optimizer, name) > 0:
                raise ConfigError(f"optimizer.{name}={getattr(optimizer, name)} must be above 0")

    def differences(self, other: "TrainOptions") -> list[str]:
        """The dotted fields, the run's name apart, in which two sets of options differ, with both values."""
        mine, theirs = _flat(dataclasses.asdict(self)), _flat(dataclasses.asdict(other))
        return [f"{name} ({theirs[name]!r} -> {mine[name]!r})" for name in mine if name != "run" and mine[name] != theirs[name]]


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
