"""What ``train --data.`` can be told: where the text is and how it becomes batches. Standard library only."""

import enum
from dataclasses import dataclass

from jax_transformer.errors import ConfigError


class Vocabularies(enum.StrEnum):
    """Whether source and target are written in the same tokens."""

    SHARED = "shared"
    SEPARATE = "separate"


class TooLong(enum.StrEnum):
    """What happens to a training pair with a side over the maximum length."""

    DROP = "drop"
    CUT = "cut"  # both sides keep their first tokens


@dataclass(frozen=True)
class DataOptions:
    """The text. Without any, the built-in task: English to German, French and Spanish phrases from Unicode CLDR."""

    train_source: tuple[str, ...] = ()
    """Training lines to translate from: one file or several, plain or gzip."""
    train_target: tuple[str, ...] = ()
    """Their translations, line by line, in as many files."""
    valid_source: tuple[str, ...] = ()
    """Validation lines to translate from."""
    valid_target: tuple[str, ...] = ()
    """Their translations."""
    train: tuple[str, ...] = ()
    """Or training pairs in files of their own: .tsv (source, tab, target) or .jsonl (an object a line), plain or gzip."""
    valid: tuple[str, ...] = ()
    """Validation pairs, likewise."""
    dataset: str | None = None
    """Or a data set of the Hugging Face hub, or a folder that its library reads (needs the extra [hub])."""
    dataset_config: str | None = None
    """The data set's configuration, as de-en."""
    train_split: str = "train"
    """The data set's split to train on."""
    valid_split: str = "validation"
    """The data set's split to validate on."""
    source_field: str = "source"
    """Where the source stands in an object of .jsonl or a data set; dots lead inside, as translation.de."""
    target_field: str = "target"
    """Where the target stands."""
    vocabularies: Vocabularies = Vocabularies.SHARED
    """One vocabulary for both sides, or one for each."""
    vocab_size: int = 1000
    """Size of each byte-level BPE vocabulary, trained on the training text."""
    tokenizer: str | None = None
    """A tokenizer.json to use instead of training one."""
    target_tokenizer: str | None = None
    """The target's tokenizer.json, where vocabularies are separate."""
    max_source_length: int | None = None
    """The longest source in tokens, its end token included; the model's max_length where not given."""
    max_target_length: int | None = None
    """The longest target."""
    too_long: TooLong = TooLong.DROP
    """What happens to longer training pairs; either way they are counted. Longer validation pairs are dropped and counted."""
    tokens_per_batch: int = 1024
    """Positions in a batch, padding included, on each side."""
    buckets: int = 4
    """The most batch shapes, and so compiled programs, of a run."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "tokens_per_batch", "buckets"):
            if getattr(self, name) < 1:
                raise ConfigError(f"data.{name}={getattr(self, name)} must be at least 1")
        given = [name for name, paths in self.files.items() if paths]
        if given and len(given) < 4:
            absent = [f"data.{name}" for name in self.files if name not in given]
            raise ConfigError(f"training on files needs all four of them; not given: {', '.join(absent)}")

    @property
    def builtin(self) -> bool:
        """Whether the built-in task is asked for."""
        return not (self.train or self.valid or self.dataset or any(self.files.values()))

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """The four options for pairs of files, by name."""
        return {name: getattr(self, name) for name in ("train_source", "train_target", "valid_source", "valid_target")}
