"""The options of ``train --data.``: the text, its tokenizer and its batches.

Standard library only.
"""

import dataclasses
import enum
import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from jax_transformer.config import option
from jax_transformer.config.option import Option
from jax_transformer.data import parallel_text
from jax_transformer.errors import ConfigError, check_numbers, counted


class Vocabularies(enum.StrEnum):
    """The vocabularies of source and target."""

    SHARED = "shared"
    SEPARATE = "separate"


class Task(enum.StrEnum):
    """The task that a model learns from the text."""

    TRANSLATION = "translation"
    # of lines without translations
    SPAN_CORRUPTION = "span-corruption"  # T5's: Raffel et al. 2020
    DENOISING = "denoising"  # BART's: Lewis et al. 2019
    PREFIX_LM = "prefix-lm"  # Raffel et al. 2020

    @property
    def noisy(self) -> bool:
        """True if spans of a text are replaced."""
        return self in (Task.SPAN_CORRUPTION, Task.DENOISING)


class TooLong(enum.StrEnum):
    """The treatment of a training pair with a side over the maximum length."""

    DROP = "drop"
    CUT = "cut"  # a side keeps its first tokens, as many as the maximum allows


class LongLine(enum.StrEnum):
    """The treatment of a line to translate that is over the model's maximum length."""

    REFUSE = "refuse"
    CUT = "cut"  # translate its first tokens, as many as the maximum allows
    SKIP = "skip"  # its translation is empty


class DataSource(enum.StrEnum):
    """The form of the text."""

    PHRASES = "phrases"  # the built-in task
    LINES = "lines"  # files of source lines and of target lines
    PAIRS = "pairs"  # .tsv, .jsonl and .parquet files
    DATASET = "dataset"  # a Hugging Face data set
    PREPARED = "prepared"  # the folder of `jax-transformer prepare`


_SOURCES = {
    **dict.fromkeys(
        "train_source train_target valid_source valid_target".split(), DataSource.LINES
    ),
    "train": DataSource.PAIRS,
    "valid": DataSource.PAIRS,
    "dataset": DataSource.DATASET,
    "prepared": DataSource.PREPARED,
}
"""The options that name text, and its form."""
_DATASET = ("dataset_config", "train_split", "valid_split")
_FIELDS = ("source_field", "target_field")
_NOISE = ("noise_density", "mean_noise_span_length")
_OF_TEXT = "vocab_size tokenizer target_tokenizer source_lang target_lang".split()
_NOT_PREPARED = (*_OF_TEXT, "bpe_dropout", "train_tasks")
OF_TRAINING = "packing train_weights train_temperature tokens_per_batch buckets".split()
"""Options of training that `prepare` does not know."""


@dataclass(frozen=True)
class DataOptions:
    """The text.

    Without any, the built-in task: English to German, French and Spanish phrases from Unicode CLDR.
    """

    task: option.Rare[Task] = Task.TRANSLATION
    """Task to learn: translation, or one of plain lines, as T5 and BART are pretrained."""
    noise_density: option.Rare[float | None] = None
    """Share of the tokens to replace (default: 0.15 of span corruption, 0.3 of denoising)."""
    mean_noise_span_length: option.Rare[float] = 3.0
    """Mean number of tokens of a replaced span."""
    train_source: Annotated[
        tuple[option.PathText, ...], Option(synonyms="source src train_src")
    ] = ()
    """Training lines to translate, plain, gzip or zstd."""
    train_target: Annotated[
        tuple[option.PathText, ...], Option(synonyms="target tgt trg train_tgt")
    ] = ()
    """Translations of --data.train-source, line by line."""
    valid_source: tuple[option.PathText, ...] = ()
    """Validation lines to translate."""
    valid_target: tuple[option.PathText, ...] = ()
    """Translations of --data.valid-source, line by line."""
    train: tuple[option.PathText, ...] = ()
    """Training pairs: .tsv or .jsonl, perhaps .gz or .zst; .parquet."""
    train_weights: tuple[float, ...] = ()
    """Epochs of each training file in an epoch (default: 1)."""
    train_temperature: option.Rare[float | None] = None
    """T: draw from training files of n pairs as from n^(1/T), the largest once an epoch."""
    train_tasks: option.Rare[tuple[Task, ...]] = ()
    """Task of each training file of plain lines (default: --data.task)."""
    valid: tuple[option.PathText, ...] = ()
    """Validation pairs in such files."""
    prepared: option.Rare[option.PathText | None] = None
    """Folder of jax-transformer prepare. With text, it is prepared first."""
    dataset: option.Rare[option.PathText | None] = None
    """Hugging Face data set or its folder (needs the extra [hub])."""
    dataset_config: option.Rare[option.Name | None] = None
    """Configuration of the data set, for example de-en."""
    train_split: Annotated[option.Rare[str], Option(metavar="SPLIT")] = "train"
    """Split of the data set to train on."""
    valid_split: Annotated[option.Rare[str], Option(metavar="SPLIT")] = "validation"
    """Split of the data set to validate on."""
    source_field: option.Rare[option.FieldName] = "source"
    """Field of the source in .jsonl and .parquet, for example translation.de."""
    target_field: option.Rare[option.FieldName] = "target"
    """Field of the target in .jsonl and .parquet, for example translation.en."""
    vocabularies: Vocabularies = Vocabularies.SHARED
    """One vocabulary for both sides, or two."""
    vocab_size: int = 1000
    """Size of each BPE vocabulary trained on the text."""
    tokenizer: option.PathText | None = None
    """tokenizer.json to use instead of training one."""
    target_tokenizer: option.Rare[option.PathText | None] = None
    """tokenizer.json of the target, if there are two."""
    bpe_dropout: option.Rare[float] = 0.0
    """Probability of dropping each merge of training text (Provilkov et al. 2020)."""
    source_lang: option.Rare[option.SourceLanguage | None] = None
    """Source language of --init's tokenizer: en_XX, eng_Latn, en."""
    target_lang: option.Rare[option.TargetLanguage | None] = None
    """Target language of --init's tokenizer."""
    max_source_length: int | None = None
    """Longest source, in tokens (default: the model's, or 512)."""
    max_target_length: int | None = None
    """Longest target, in tokens (default: the model's, or 512)."""
    too_long: TooLong = TooLong.DROP
    """Drop longer training pairs, or cut them."""
    tokens_per_batch: Annotated[
        int,
        Option(
            synonyms="batch_size batch max_tokens train_batch_size tokens "
            "per_device_train_batch_size"
        ),
    ] = 1024
    """Tokens of a batch, padding included, a side."""
    packing: Annotated[option.Rare[int | None], Option(synonyms="pack packed packed_length")] = None
    """Pack several training pairs into rows of this many tokens (default: a row is one pair)."""
    buckets: option.Rare[int] = 4
    """Most batch shapes, and so compiled programs."""

    def __post_init__(self) -> None:
        for name in _SOURCES:
            if isinstance(value := getattr(self, name), tuple):
                object.__setattr__(self, name, parallel_text.matching(value))
        check = partial(check_numbers, self, "data.")
        check("vocab_size tokens_per_batch buckets", "be at least 1", lambda x: x >= 1)
        check("max_source_length max_target_length packing", "be at least 2", lambda x: x >= 2)
        check("bpe_dropout", "be at least 0 and below 1", lambda x: 0 <= x < 1)
        check("noise_density", "be above 0 and below 1", lambda x: 0 < x < 1)
        check("mean_noise_span_length train_temperature", "be at least 1", lambda x: x >= 1)
        if self.train_weights and self.train_temperature:
            raise ConfigError("data.train_weights and data.train_temperature: leave one out")
        if self.packing and self.bpe_dropout:
            raise ConfigError(
                f"data.packing={self.packing} needs pairs of the same lengths at every step, which "
                f"data.bpe_dropout={self.bpe_dropout} changes: leave one of them out"
            )
        if self.prepared and (self.train or self.train_source):
            self.parted()
            return
        self._check_tasks()
        if self.noise_density == 0.15 and Task.DENOISING not in self.tasks:
            object.__setattr__(self, "noise_density", None)  # runs recorded it, for every task
        self._check_complete()
        self._check_all_used()
        if self.vocabularies is Vocabularies.SHARED:
            if self.target_tokenizer is not None:
                raise ConfigError(
                    "data.target_tokenizer needs data.vocabularies=separate; "
                    "a shared vocabulary has one tokenizer"
                )
        elif (self.tokenizer is None) != (self.target_tokenizer is None):
            absent = "data.tokenizer" if self.tokenizer is None else "data.target_tokenizer"
            raise ConfigError(
                f"data.vocabularies=separate needs both tokenizers or neither; not given: {absent}"
            )

    @property
    def kind(self) -> DataSource:
        """The form of the text that the options name."""
        named = (kind for name, kind in _SOURCES.items() if getattr(self, name))
        return next(named, DataSource.PHRASES)

    @property
    def by_file(self) -> bool:
        """True if pairs of some training files come more often than others."""
        return bool(self.train_weights or self.train_temperature)

    def parted(self) -> "tuple[DataOptions | None, DataOptions]":
        """Return the options of the text that is to be prepared, if there is some, and those of
        training. Raises ConfigError if one of them is not complete.
        """
        if self.prepared is None or not (self.train or self.train_source):
            return None, self
        own: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(self)}
        of_text = [name for name in (*_SOURCES, *_FIELDS, *_OF_TEXT) if name != "prepared"]
        return (
            dataclasses.replace(self, prepared=None, **{name: own[name] for name in OF_TRAINING}),
            dataclasses.replace(self, **{name: own[name] for name in of_text}),
        )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the training files, each once."""
        return tuple(dict.fromkeys(self.train_tasks or (self.task,)))

    @property
    def builtin(self) -> bool:
        """True if no text is named: the built-in task."""
        return self.kind is DataSource.PHRASES

    @property
    def languages(self) -> dict[str, str]:
        """The languages that are named, by their options."""
        named = {"data.source_lang": self.source_lang, "data.target_lang": self.target_lang}
        return {name: language for name, language in named.items() if language is not None}

    @property
    def files(self) -> list[str]:
        """Every file that is named, of text and of tokenizers."""
        texts = (self.train_source, self.train_target, self.valid_source, self.valid_target)
        tokenizers = filter(None, (self.tokenizer, self.target_tokenizer))
        return [*itertools.chain(*texts, self.train, self.valid, tokenizers)]

    def _check_tasks(self) -> None:
        """Check the tasks of the files, of which the first is ``task`` if that is not given."""
        if not self.train_tasks:
            return
        if self.task is Task.TRANSLATION:
            object.__setattr__(self, "task", self.train_tasks[0])
        named = f"data.train_tasks={' '.join(self.train_tasks)}"
        if Task.TRANSLATION in self.train_tasks:
            raise ConfigError(f"{named} must be tasks of plain lines, and not translation")
        if self.task not in self.train_tasks:
            raise ConfigError(f"{named} and data.task={self.task.value}: leave one of them out")

    def _check_complete(self) -> None:
        options: dict[DataSource, str] = {}
        for name, kind in _SOURCES.items():
            if getattr(self, name):
                options.setdefault(kind, f"data.{name}")
        if len(options) > 1:
            raise ConfigError(f"text comes from one place: give {' or '.join(options.values())}")
        own = [name for name, kind in _SOURCES.items() if kind is self.kind]
        if self.task is not Task.TRANSLATION:
            self._check_plain_lines()
            own = [name for name in own if not name.endswith("_target")]
        if absent := [f"data.{name}" for name in own if not getattr(self, name)]:
            raise ConfigError(
                f"training on files needs all of them; not given: {', '.join(absent)}"
            )
        for split in ("train", "valid"):
            sources = len(getattr(self, f"{split}_source"))
            targets = len(getattr(self, f"{split}_target"))
            if sources != targets and self.task is Task.TRANSLATION:
                raise ConfigError(
                    f"data.{split}_source names {counted(sources, 'file')} and "
                    f"data.{split}_target {targets}; each source needs its target"
                )
        files = len(self.train or self.train_source)
        for name, values in (("weights", self.train_weights), ("tasks", self.train_tasks)):
            if values and len(values) != files and not self.prepared:
                raise ConfigError(
                    f"data.train_{name} has {len(values)} {name}, and there are {files} training "
                    "files; each needs one"
                )
        if self.train_temperature and files < 2 and not self.prepared:
            raise ConfigError(
                f"data.train_temperature={self.train_temperature} needs several training files"
            )
        for weight in self.train_weights:
            if not 0 < weight < math.inf:
                raise ConfigError(f"data.train_weights: {weight} must be above 0")
        for path in (*self.train, *self.valid):
            if parallel_text.suffix(path) is None:
                raise ConfigError(
                    f"{path}: a file of pairs ends in .tsv or .jsonl, perhaps with .gz or .zst "
                    "after it, or in .parquet"
                )

    def _check_plain_lines(self) -> None:
        """Check that a task of plain lines gets them, and one vocabulary."""
        task = f"data.task={self.task.value}"
        plain = ("train_source", "valid_source", "prepared")
        others = [name for name in _SOURCES if name not in plain and getattr(self, name)]
        if others:
            raise ConfigError(
                f"{task} reads plain lines from data.train_source and data.valid_source, and no "
                f"data.{others[0]}"
            )
        if self.vocabularies is not Vocabularies.SHARED or self.bpe_dropout:
            raise ConfigError(
                f"{task} needs data.vocabularies=shared and data.bpe_dropout=0, not "
                f"{self.vocabularies.value} and {self.bpe_dropout}"
            )

    def _check_all_used(self) -> None:
        suffixes = set(map(parallel_text.suffix, (*self.train, *self.valid)))
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if value == field.default or self.kind is DataSource.DATASET:
                continue
            if name in _NOISE and not any(task.noisy for task in self.tasks):
                raise ConfigError(
                    f"data.{name}={value!r} has no meaning without data.task=span-corruption or "
                    "denoising"
                )
            if name in _NOT_PREPARED and self.prepared:
                raise ConfigError(f"data.{name}={value!r} has no meaning with data.prepared")
            if name in _DATASET:
                raise ConfigError(f"data.{name}={value!r} has no meaning without data.dataset")
            if name in _FIELDS and not suffixes & {".jsonl", parallel_text.PARQUET}:
                raise ConfigError(
                    f"data.{name}={value!r} has no meaning without .jsonl or .parquet files or "
                    "data.dataset"
                )
        if self.source_field == self.target_field:
            raise ConfigError(
                f"data.source_field and data.target_field are both {self.source_field!r}"
            )
