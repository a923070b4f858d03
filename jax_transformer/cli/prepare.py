"""``jax-transformer prepare``: text to a corpus on disk."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from jax_transformer.cli.arguments import Command
from jax_transformer.config import option
from jax_transformer.config.option import Option
from jax_transformer.data.options import DataOptions
from jax_transformer.errors import check_numbers


@dataclass(frozen=True)
class PrepareOptions:
    """Encode text once, for training on corpora that are larger than memory."""

    folder: option.Positional[str]
    """Folder to write. The same command completes one that was begun."""
    preset: option.Name = "small"
    """Preset to train, whose special ids and maximum length a tokenizer gets."""
    init: option.PathText | None = None
    """Run or Hugging Face folder to train further, whose tokenizer is used."""
    processes: int = 0
    """Processes that encode (0: one for each core)."""
    data: Annotated[DataOptions, Option(group="data")] = field(default_factory=DataOptions)

    def __post_init__(self) -> None:
        check_numbers(self, "", "processes", "be at least 0", lambda x: x >= 0)


def run(options: PrepareOptions) -> int:
    """Make or complete the corpus, print what it holds, and return the exit code."""
    from jax_transformer.training import preparation
    from jax_transformer.training.options import ModelOptions, TrainOptions

    train = TrainOptions(
        init=options.init, model=ModelOptions(preset=options.preset), data=options.data
    )
    manifest = preparation.prepare(train, Path(options.folder), options.processes)
    print(f"{options.folder}: {'; '.join(preparation.summary(manifest))}")
    return 0


COMMAND = Command(
    PrepareOptions,
    run,
    examples=(
        "prepare corpora/de-en --data.train de-en.tsv.gz --data.valid valid.tsv",
        "train --data.prepared corpora/de-en",
    ),
)
