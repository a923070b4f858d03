"""The options of ``train``: these dataclasses are its command line, and the text under a field is
that flag's help."""

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Annotated, Any

from jax_transformer.architectures import registry
from jax_transformer.config import EXECUTION, RATES, TransformerConfig, codec, enums, option
from jax_transformer.config.option import Option
from jax_transformer.data.options import DataOptions, Task
from jax_transformer.errors import ConfigError, check_numbers
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.training import optimizer
from jax_transformer.training.optimizer import LearningRate, OptimizerOptions


class Precision(enum.StrEnum):
    """The dtype of the computation. Parameters, loss and optimizer are float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Attention(enum.StrEnum):
    """An attention backend, or the choice of one."""

    AUTO = "auto"  # the first of cudnn, tokamax and xla that computes this model on these devices
    XLA = "xla"
    SDPA = "sdpa"
    CUDNN = "cudnn"
    TOKAMAX = "tokamax"


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


MEMORY, TRAINABLE = "memory and compile time", "parameters to train (default: all)"
"""Titles of groups of options."""


@dataclass(frozen=True)
class ModelOptions:
    """The architecture. A size that is not given keeps the preset's."""

    preset: Annotated[option.Name, Option(synonyms="arch architecture")] = "small"
    """Architecture and its sizes, for example lesson10."""
    d_model: Annotated[int | None, Option(synonyms="hidden_size width dim")] = None
    """Width of the model."""
    num_heads: Annotated[int | None, Option(synonyms="heads nhead n_heads")] = None
    """Attention heads."""
    d_ff: Annotated[int | None, Option(synonyms="ffn dim_feedforward")] = None
    """Width of the feed-forward layers."""
    encoder_layers: Annotated[
        int | None, Option(synonyms="layers num_layers n_layers num_encoder_layers")
    ] = None
    """Layers of the encoder."""
    decoder_layers: Annotated[int | None, Option(synonyms="num_decoder_layers")] = None
    """Layers of the decoder."""
    max_length: int | None = None
    """Longest source and target, in tokens."""
    dropout: float | None = None
    """Dropout on the output of every sublayer."""
    attention_dropout: option.Rare[float | None] = None
    """Dropout on attention weights."""
    activation_dropout: option.Rare[float | None] = None
    """Dropout inside the feed-forward layers."""
    embedding_dropout: option.Rare[float | None] = None
    """Dropout on embeddings plus positions."""
    norm_placement: option.Rare[option.Name | None] = None
    """Norm before (pre) or after (post) each sublayer."""
    tying: option.Rare[option.Name | None] = None
    """Embeddings and output that share a matrix: none, output, all."""
    precision: Annotated[Precision, Option(synonyms="dtype fp16 bf16 mixed_precision")] = (
        Precision.FLOAT32
    )
    """Dtype of computation; parameters are float32."""
    matmul_precision: Annotated[
        option.Rare[enums.MatmulPrecision],
        Option(synonyms="float32_matmul_precision set_float32_matmul_precision tf32"),
    ] = enums.MatmulPrecision.HIGHEST
    """Products of float32 matrices: exact (highest), or of factors rounded to bfloat16 (medium),
    which processors with such instructions compute faster; others take longer."""
    attention_backend: Annotated[
        option.Rare[Attention],
        Option(group=MEMORY, synonyms="attn_implementation attn_backend attention flash_attention"),
    ] = Attention.XLA
    """Implementation of attention; auto is cudnn or tokamax on GPUs, where they compute
    the model."""
    remat: Annotated[
        option.Rare[enums.Remat],
        Option(
            synonyms="gradient_checkpointing activation_checkpointing checkpoint_activations "
            "remat_policy"
        ),
    ] = enums.Remat.NONE
    """Store less of a block, to save memory: its input (full), or its matrix products as well
    (minimal)."""
    scan_layers: option.Rare[bool] = False
    """Compile one block a stack: less time, the same weights."""

    @property
    def _execution(self) -> dict[str, Any]:
        """The fields that say how a model is computed; sums of bfloat16 products are float32."""
        fields = {name: getattr(self, name) for name in EXECUTION}
        automatic = self.attention_backend is Attention.AUTO  # chosen when devices are known
        name = Attention.XLA if automatic else self.attention_backend
        fields["attention_backend"] = enums.AttentionBackend(name)
        if self.precision is Precision.BFLOAT16:
            fields["compute_dtype"] = self.precision.value
            fields["matmul_precision"] = enums.MatmulPrecision.MEDIUM
        return fields

    def executed(self, config: TransformerConfig) -> TransformerConfig:
        """Return the configuration of weights that exist, computed as these options say."""
        config.check_text("training")
        return dataclasses.replace(config, **self._execution)

    def config(
        self, source_vocab_size: int, target_vocab_size: int, **ids: int
    ) -> TransformerConfig:
        """Return the preset with these sizes; ``ids`` replace special ids, as ``source_pad_id``."""
        sizes = {"source_vocab_size": source_vocab_size, "target_vocab_size": target_vocab_size}
        fields = {name: value for name, value in vars(self).items() if value is not None}
        preset, _ = fields.pop("preset"), fields.pop("precision")
        config = registry.preset(preset, **sizes, **ids, **fields | self._execution)
        config.check_text("training")
        return config


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (LoRA, Hu et al. 2021): train these instead of the model's parameters."""

    rank: int = 0
    """Rank of low-rank adapters (0: off)."""
    alpha: option.Rare[float] = 16.0
    """Scale of the adapters, times 1 / rank."""
    targets: Annotated[option.Rare[tuple[str, ...]], Option(metavar="PATTERN")] = (
        "*_attention.query.kernel",
        "*_attention.value.kernel",
    )
    """Names of the kernels to adapt."""


@dataclass(frozen=True)
class MeshOptions:
    """Axes that divide the weights over devices; the other devices divide the batch only."""

    fsdp: int = 1
    """Devices that share a copy of the weights and divide the batch."""
    tensor: int = 1
    """Devices that divide heads, feed-forward and vocabulary."""


@dataclass(frozen=True)
class TrainOptions:
    """Train an encoder-decoder on parallel text."""

    run: Annotated[option.ModelPath | None, Option(group="run")] = None
    """Run folder (default: the newest unfinished run of the same
    options under runs/, otherwise a new one)."""
    init: Annotated[
        option.PathText | None,
        Option(synonyms="pretrained from_pretrained finetune finetune_from_model"),
    ] = None
    """Run, Hugging Face folder or hf:owner/name to start from."""
    resume: Annotated[Resume, Option(synonyms="resume_from_checkpoint restore")] = Resume.AUTO
    """Continue the run if it exists (auto), never, or fail if it does
    not (must)."""
    steps: Annotated[
        int,
        Option(
            synonyms="epochs num_epochs num_train_epochs max_epochs epoch max_steps train_steps "
            "max_update"
        ),
    ] = 1600
    """Optimizer updates."""
    seed: Annotated[int, Option(synonyms="seed_everything random_seed")] = 0
    """Seed of initial weights, data order and dropout."""
    log_every: Annotated[int, Option(group="logging", synonyms="logging_steps log_interval")] = 50
    """Steps between lines of metrics.jsonl."""
    eval_every: Annotated[
        int,
        Option(
            group="validation and checkpoints",
            synonyms="eval_steps valid_every save_steps save_interval",
        ),
    ] = 800
    """Steps between validations and checkpoints."""
    eval_pairs: int = 1000
    """Most validation pairs to translate for scores."""
    samples: option.Rare[int] = 3
    """Translations to print at each validation."""
    keep: Annotated[int, Option(synonyms="save_total_limit keep_last")] = 2
    """Last checkpoints to keep."""
    keep_best: option.Rare[int] = 1
    """Best checkpoints to keep as well."""
    best_by: Criterion = Criterion.BLEU
    """Metric that decides which checkpoint is best."""
    patience: Annotated[int, Option(synonyms="early_stopping_patience")] = 0
    """Stop after N validations without a best (0: never)."""
    average: option.Rare[int] = 0
    """Average N checkpoints at the end (0: off)."""
    average_of: option.Rare[AverageOf] = AverageOf.LAST
    """Checkpoints to average."""
    freeze: Annotated[tuple[str, ...], Option(group=TRAINABLE, metavar="PATTERN")] = ()
    """Do not train parameters with these names, for example encoder.*."""
    loss_chunks: Annotated[option.Rare[int], Option(group=MEMORY)] = 1
    """Compute the loss in N chunks of positions, to save memory."""
    devices: Annotated[int, Option(group="run")] = 0
    """Devices to use (0: all)."""
    tensorboard: Annotated[bool, Option(group="logging")] = False
    """Write TensorBoard events (needs the extra [tensorboard])."""
    wandb: option.Name | None = None
    """Weights & Biases project (needs the extra [wandb])."""
    compilation_cache: Annotated[option.Rare[option.PathText | None], Option(group="run")] = None
    """Cache of compiled programs, or none (default: user's cache)."""
    model: ModelOptions = field(default_factory=ModelOptions)
    data: Annotated[DataOptions, Option(group="data (default: the built-in task)")] = field(
        default_factory=DataOptions
    )
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lora: Annotated[LoraOptions, Option(group=TRAINABLE)] = field(default_factory=LoraOptions)
    mesh: Annotated[option.Rare[MeshOptions], Option(group=MEMORY)] = field(
        default_factory=MeshOptions
    )
    # Not an option: the options of the learning rate that took their defaults
    rate_left_out = frozenset[str]()

    def __post_init__(self) -> None:
        counts = "steps log_every eval_every eval_pairs keep loss_chunks mesh.fsdp mesh.tensor"
        check_numbers(self, "", counts, "be at least 1", lambda x: x >= 1)
        counts = "samples keep_best patience average devices lora.rank"
        check_numbers(self, "", counts, "be at least 0", lambda x: x >= 0)
        check_numbers(self, "", "lora.alpha", "be above 0", lambda x: x > 0)
        for name in ("alpha", "targets") if not self.lora.rank else ():
            value = getattr(self.lora, name)
            if value != getattr(LoraOptions, name):
                shown = " ".join(value) if isinstance(value, tuple) else value
                raise ConfigError(f"lora.{name}={shown} has no effect without lora.rank")
        if self.lora.rank and not self.lora.targets:
            raise ConfigError("lora.targets: names no kernel to adapt")
        if self.lora.rank and self.freeze:
            raise ConfigError(
                f"freeze={' '.join(self.freeze)}: not with lora.rank, which trains adapters alone"
            )
        if self.init is not None:
            self._check_init()
        elif languages := self.data.languages:
            raise ConfigError(
                f"{', '.join(languages)}: languages of a tokenizer that init brings; give init"
            )
        if self.data.task is not Task.TRANSLATION and self.best_by is not Criterion.LOSS:
            if self.best_by is not Criterion.BLEU:  # the default
                raise ConfigError(
                    f"best_by={self.best_by.value}: data.task={self.data.task.value} translates "
                    "nothing; leave it out"
                )
            object.__setattr__(self, "best_by", Criterion.LOSS)
        rate = self.optimizer.given_rate
        left_out = frozenset(LearningRate._fields) - rate.keys()
        object.__setattr__(self, "rate_left_out", left_out)
        rate = self.default_rate._replace(**rate)._asdict()
        object.__setattr__(self, "optimizer", dataclasses.replace(self.optimizer, **rate))

    @property
    def default_rate(self) -> LearningRate:
        """The learning rate for what ``optimizer`` leaves out."""
        if self.init is None:
            return optimizer.FROM_SCRATCH
        return optimizer.ADAPTERS if self.lora.rank else optimizer.FINE_TUNING

    def _check_init(self) -> None:
        """Raise ConfigError for options that contradict ``init``."""
        free = (*RATES, "precision", *EXECUTION)
        changed = []
        for section in ("model", "data"):
            options = getattr(self, section)
            for f in dataclasses.fields(options):
                value = getattr(options, f.name)
                of_text = f.name == "vocab_size" or self.data.target_tokenizer is None
                of_text &= f.name.startswith("vocab")  # two tokenizers are two vocabularies
                fixed = of_text if section == "data" else f.name not in free
                if fixed and value != f.default:
                    changed.append(f"{section}.{f.name}={value}")
        if changed:
            can = ", ".join(f"model.{name}" for name in free)
            raise ConfigError(
                f"{', '.join(changed)} cannot be changed: model and tokenizer are those of "
                f"init={self.init}; {can} can be"
            )


def read_options(folder: RunFolder) -> TrainOptions:
    """Return the options of the run in ``folder``. Raises InputError naming the file."""
    return parsed(folder.train_config, lambda text: codec.from_json(TrainOptions, text))
