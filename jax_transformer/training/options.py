"""What ``train`` can be told: these dataclasses are its command line, and the text under a field is that flag's help."""

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any

from jax_transformer.architectures import registry
from jax_transformer.config import TransformerConfig, codec
from jax_transformer.data.options import DataOptions
from jax_transformer.errors import ConfigError
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.training.optimizer_options import OptimizerOptions


class Precision(enum.StrEnum):
    """What the model computes in. Parameters, loss and optimizer stay float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Criterion(enum.StrEnum):
    """The validation figure that decides which checkpoint is best."""

    BLEU = "bleu"
    CHRF = "chrf"
    EXACT_MATCH = "exact_match"
    LOSS = "valid_loss"


class Resume(enum.StrEnum):
    """Whether to go on with a run that is there."""

    AUTO = "auto"  # where there is one
    NEVER = "never"  # a new run; refused where --run names one
    MUST = "must"  # refused where there is none with a checkpoint


class AverageOf(enum.StrEnum):
    """Which checkpoints are averaged."""

    LAST = "last"
    BEST = "best"


RATES = ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout")
"""What may be changed of a model that is there already, beside its precision: what acts in training alone."""


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
    precision: Precision = Precision.FLOAT32
    """What the model computes in; its parameters are float32 either way."""

    def config(
        self, source_vocab_size: int, target_vocab_size: int, **ids: int
    ) -> TransformerConfig:
        """The preset with these sizes, and with special ids (``source_pad_id`` and so on) where they are not the preset's."""
        sizes = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in ("preset", "precision") and value is not None
        }
        if self.precision is not Precision.FLOAT32:
            sizes["compute_dtype"] = self.precision.value
        return registry.preset(
            self.preset,
            source_vocab_size=source_vocab_size,
            target_vocab_size=target_vocab_size,
            **ids,
            **sizes,
        )


@dataclass(frozen=True)
class TrainOptions:
    """Train an encoder-decoder on parallel text."""

    run: str | None = None
    """The run folder. Without one, the newest unfinished run of the same options under runs/ goes on, else a new one begins."""
    init: str | None = None
    """Begin with the weights, configuration and tokenizer of a Hugging Face folder, hf:owner/name or another run, instead of random weights."""
    resume: Resume = Resume.AUTO
    """Whether to go on with a run that is there (auto), never, or to insist on it (must)."""
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
    samples: int = 3
    """Validation examples printed at each validation, others each time."""
    keep: int = 2
    """The last checkpoints to keep."""
    keep_best: int = 1
    """The best checkpoints to keep beside them."""
    best_by: Criterion = Criterion.BLEU
    """The validation figure that decides which is best."""
    patience: int = 0
    """Stop after this many validations in a row without a new best; 0 is never."""
    average: int = 0
    """At the end, average the weights of this many checkpoints; 0 is not to. They are kept until then."""
    average_of: AverageOf = AverageOf.LAST
    """Average the last ones or the best ones."""
    devices: int = 0
    """Devices to share every batch; 0 is all there are."""
    tensorboard: bool = False
    """Write TensorBoard's event files to RUN/tensorboard (needs the extra [tensorboard])."""
    wandb: str | None = None
    """A Weights & Biases project to log to (needs the extra [wandb])."""
    compilation_cache: str | None = None
    """Where compiled programs are kept for the next start; a folder in the user's cache where not given, `none` for nowhere."""
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)

    def __post_init__(self) -> None:
        at_least = {"steps": 1, "log_every": 1, "eval_every": 1, "eval_pairs": 1, "keep": 1}
        at_least |= dict.fromkeys(("samples", "keep_best", "patience", "average", "devices"), 0)
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        self._check_init()

    def _check_init(self) -> None:
        """What a model and a tokenizer that are there already leave to be told."""
        if self.init is None:
            given = [
                f"data.{name}"
                for name in ("source_lang", "target_lang")
                if getattr(self.data, name) is not None
            ]
            if given:
                raise ConfigError(
                    f"{', '.join(given)} mean nothing without init: they are languages of its tokenizer"
                )
            return
        free = (*RATES, "precision")
        fixed = [
            (f"model.{f.name}", getattr(self.model, f.name), f.default)
            for f in dataclasses.fields(self.model)
            if f.name not in free
        ]
        fixed += [
            (f"data.{f.name}", getattr(self.data, f.name), f.default)
            for f in dataclasses.fields(self.data)
            if f.name.startswith("vocab")
        ]
        changed = [f"{name}={value}" for name, value, default in fixed if value != default]
        if changed:
            can = ", ".join(f"model.{name}" for name in free)
            raise ConfigError(
                f"{', '.join(changed)} cannot be changed: model and tokenizer are those of init={self.init}; what can be is {can}"
            )

    def names(self) -> set[str]:
        """The dotted names of all options."""
        return set(_flat(dataclasses.asdict(self)))

    def differences(self, other: "TrainOptions") -> dict[str, str]:
        """The dotted fields in which two sets of options differ, each with ``name (other's value -> own value)``."""
        mine, theirs = _flat(dataclasses.asdict(self)), _flat(dataclasses.asdict(other))
        return {
            name: f"{name} ({theirs[name]!r} -> {mine[name]!r})"
            for name in mine
            if mine[name] != theirs[name]
        }


def read_options(folder: RunFolder) -> TrainOptions:
    """The options that the run in ``folder`` was started with. Raises InputError naming the file."""
    return parsed(folder.train_config, lambda text: codec.from_json(TrainOptions, text))


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return flat
