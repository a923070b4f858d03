"""The options of ``train``: these dataclasses are its command line, and the text under a field is
that flag's help."""

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from jax_transformer.architectures import registry
from jax_transformer.config import TransformerConfig, codec
from jax_transformer.data.options import DataOptions
from jax_transformer.errors import ConfigError
from jax_transformer.storage.run_folder import RunFolder, parsed


class Precision(enum.StrEnum):
    """The dtype of the computation. Parameters, loss and optimizer are float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Criterion(enum.StrEnum):
    """The validation figure that decides which checkpoint is best."""

    BLEU = "bleu"
    CHRF = "chrf"
    EXACT_MATCH = "exact_match"
    LOSS = "valid_loss"


class Resume(enum.StrEnum):
    """Continuing a run that exists."""

    AUTO = "auto"  # if there is one
    NEVER = "never"  # always a new run; refused if --run names one that exists
    MUST = "must"  # refused unless there is one with a checkpoint


class AverageOf(enum.StrEnum):
    """The checkpoints that are averaged."""

    LAST = "last"
    BEST = "best"


RATES = ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout")
"""The options that a pretrained model can be trained with, next to its precision: they act in
training only."""


@dataclass(frozen=True)
class ModelOptions:
    """The architecture. A size that is not given keeps the preset's."""

    preset: str = "small"
    """Architecture and its sizes, as lesson10."""
    d_model: int | None = None
    """Width of the model."""
    num_heads: int | None = None
    """Attention heads."""
    d_ff: int | None = None
    """Width of the feed-forward layers."""
    encoder_layers: int | None = None
    """Layers of the encoder."""
    decoder_layers: int | None = None
    """Layers of the decoder."""
    max_length: int | None = None
    """Longest source and target, in tokens."""
    dropout: float | None = None
    """Dropout on the output of every sublayer."""
    attention_dropout: float | None = None
    """Dropout on attention weights."""
    activation_dropout: float | None = None
    """Dropout inside the feed-forward layers."""
    embedding_dropout: float | None = None
    """Dropout on embeddings plus positions."""
    norm_placement: str | None = None
    """Norm before (pre) or after (post) each sublayer."""
    tying: str | None = None
    """Embeddings and output that share a matrix: none, output, all."""
    precision: Precision = Precision.FLOAT32
    """Dtype of computation; parameters are float32."""

    def config(
        self, source_vocab_size: int, target_vocab_size: int, **ids: int
    ) -> TransformerConfig:
        """The preset with these sizes; ``ids`` replace its special ids, as ``source_pad_id``."""
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


class OptimizerName(enum.StrEnum):
    """The optimizer, with the paper that describes it."""

    ADAMW = "adamw"  # Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101
    ADAM = "adam"  # Kingma and Ba 2015, https://arxiv.org/abs/1412.6980
    SGD = (
        "sgd"  # momentum: Sutskever et al. 2013, https://proceedings.mlr.press/v28/sutskever13.html
    )
    ADAFACTOR = "adafactor"  # Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235
    LION = "lion"  # Chen et al. 2023, https://arxiv.org/abs/2302.06675


class Schedule(enum.StrEnum):
    """The learning rate after its linear warm-up."""

    COSINE = "cosine"  # to zero at the last step: Loshchilov and Hutter 2017, without restarts
    INVERSE_SQRT = "inverse_sqrt"  # with the root of the step: Vaswani et al. 2017, section 5.3
    LINEAR = "linear"  # to zero at the last step: Devlin et al. 2019
    CONSTANT = "constant"


_ADAMS = (OptimizerName.ADAMW, OptimizerName.ADAM)
USED_BY: dict[str, tuple[OptimizerName, ...]] = {
    "beta1": (*_ADAMS, OptimizerName.LION),
    "beta2": (*_ADAMS, OptimizerName.LION),
    "epsilon": _ADAMS,
    "momentum": (OptimizerName.SGD,),
    "nesterov": (OptimizerName.SGD,),
}
"""The options that only some optimizers have. Every other option is for all of them."""


class LearningRate(NamedTuple):
    """A learning rate that rises linearly to its peak, then follows a schedule."""

    learning_rate: float
    schedule: Schedule
    warmup_steps: int


FROM_SCRATCH = LearningRate(3e-3, Schedule.COSINE, 200)
"""The defaults for random weights: small models, AdamW."""
FINE_TUNING = LearningRate(5e-5, Schedule.LINEAR, 100)
"""The defaults with ``init``: a higher rate would undo the training of those weights."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer, learning rate and loss."""

    name: OptimizerName = OptimizerName.ADAMW
    """Optimizer; each needs another learning rate."""
    learning_rate: float | None = None
    """Highest learning rate; 5e-5 with --init."""
    schedule: Schedule | None = None
    """Schedule after warm-up; linear with --init."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; 100 with --init."""
    beta1: float = 0.9
    """Decay of the mean gradient (adamw, adam, lion)."""
    beta2: float = 0.98
    """Decay of the mean square (adamw, adam, lion)."""
    epsilon: float = 1e-9
    """Added to the mean square's root (adamw, adam)."""
    momentum: float = 0.9
    """Decay of past gradients (sgd; 0: none)."""
    nesterov: bool = False
    """Use Nesterov momentum (sgd)."""
    weight_decay: float = 0.01
    """Weight decay; an L2 penalty for adam and sgd."""
    clip_norm: float = 1.0
    """Clip gradients to this global norm (0: off)."""
    label_smoothing: float = 0.1
    """Label smoothing of the training loss."""
    accumulate: int = 1
    """Batches per update."""
    ema: float = 0.0
    """Decay of an average of the weights (0: off)."""

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2", "momentum", "label_smoothing", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"optimizer.{name}={getattr(self, name)} must be at least 0 and below 1"
                )
        if self.accumulate < 1:
            raise ConfigError(f"optimizer.accumulate={self.accumulate} must be at least 1")
        for name in ("learning_rate", "epsilon"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)} must be above 0")
        self._check_used()

    @property
    def rate(self) -> LearningRate:
        """The learning rate; of training from scratch for what is not given."""
        return self.rate_over(FROM_SCRATCH)

    def rate_over(self, default: LearningRate) -> LearningRate:
        """The learning rate, with the defaults for what is not given."""
        values = {name: getattr(self, name) for name in LearningRate._fields}
        return default._replace(**{k: v for k, v in values.items() if v is not None})

    def _check_used(self) -> None:
        """Raise ConfigError if an option is set that the optimizer does not have."""
        unused = [
            f"optimizer.{field.name}={getattr(self, field.name)} (only for {_listed(field.name)})"
            for field in dataclasses.fields(self)
            if self.name not in USED_BY.get(field.name, (self.name,))
            and getattr(self, field.name) != field.default
        ]
        if unused:
            raise ConfigError(
                f"{', '.join(unused)}: has no meaning with optimizer.name={self.name.value}"
            )
        if self.nesterov and not self.momentum:
            raise ConfigError("optimizer.nesterov needs optimizer.momentum above 0")


def _listed(option: str) -> str:
    return ", ".join(name.value for name in USED_BY[option])


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (LoRA, Hu et al. 2021): train these instead of the model's parameters."""

    rank: int = 0
    """Rank of low-rank adapters (0: off)."""
    alpha: float = 16.0
    """Scale of the adapters, times 1 / rank."""
    targets: tuple[str, ...] = ("*_attention.query.kernel", "*_attention.value.kernel")
    """Names of the kernels to adapt."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"lora.rank={self.rank} must be at least 0")
        if self.alpha <= 0:
            raise ConfigError(f"lora.alpha={self.alpha} must be above 0")
        if self.rank and not self.targets:
            raise ConfigError("lora.targets: names no kernel to adapt")


@dataclass(frozen=True)
class TrainOptions:
    """Train an encoder-decoder on parallel text."""

    run: str | None = None
    """Run folder (default: the newest unfinished run of the same
    options under runs/, otherwise a new one)."""
    init: str | None = None
    """Start from a run, a Hugging Face folder or hf:owner/name:
    its weights, configuration and tokenizer."""
    resume: Resume = Resume.AUTO
    """Continue the run if it exists (auto), never, or fail if it does
    not (must)."""
    steps: int = 1600
    """Optimizer updates."""
    seed: int = 0
    """Seed of initial weights, data order and dropout."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    eval_every: int = 800
    """Steps between validations and checkpoints."""
    eval_pairs: int = 1000
    """Most validation pairs to translate for scores."""
    samples: int = 3
    """Translations to print at each validation."""
    keep: int = 2
    """Last checkpoints to keep."""
    keep_best: int = 1
    """Best checkpoints to keep as well."""
    best_by: Criterion = Criterion.BLEU
    """Metric that decides which checkpoint is best."""
    patience: int = 0
    """Stop after N validations without a best (0: never)."""
    average: int = 0
    """Average N checkpoints at the end (0: off)."""
    average_of: AverageOf = AverageOf.LAST
    """Checkpoints to average."""
    freeze: tuple[str, ...] = ()
    """Do not train parameters with these names, as encoder.*."""
    devices: int = 0
    """Devices to use (0: all)."""
    tensorboard: bool = False
    """Write TensorBoard events (needs the extra [tensorboard])."""
    wandb: str | None = None
    """Weights & Biases project (needs the extra [wandb])."""
    compilation_cache: str | None = None
    """Cache of compiled programs, or none (default: user's cache)."""
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)

    def __post_init__(self) -> None:
        at_least = {"steps": 1, "log_every": 1, "eval_every": 1, "eval_pairs": 1, "keep": 1}
        at_least |= dict.fromkeys(("samples", "keep_best", "patience", "average", "devices"), 0)
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.lora.rank and self.freeze:
            raise ConfigError(
                f"freeze={' '.join(self.freeze)}: not with lora.rank, which trains adapters alone"
            )
        self._check_init()
        rate = self.optimizer.rate_over(self.default_rate)._asdict()
        object.__setattr__(self, "optimizer", dataclasses.replace(self.optimizer, **rate))

    @property
    def default_rate(self) -> LearningRate:
        """The learning rate for what ``optimizer`` leaves out."""
        return FROM_SCRATCH if self.init is None else FINE_TUNING

    def _check_init(self) -> None:
        """Raise ConfigError for options that contradict ``init``, or need it."""
        if self.init is None:
            languages = [
                f"data.{name}"
                for name in ("source_lang", "target_lang")
                if getattr(self.data, name) is not None
            ]
            if languages:
                raise ConfigError(
                    f"{', '.join(languages)}: languages of a tokenizer that init brings; give init"
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
                f"{', '.join(changed)} cannot be changed: model and tokenizer are those of "
                f"init={self.init}; {can} can be"
            )


def read_options(folder: RunFolder) -> TrainOptions:
    """The options of the run in ``folder``. Raises InputError naming the file."""
    return parsed(folder.train_config, lambda text: codec.from_json(TrainOptions, text))
