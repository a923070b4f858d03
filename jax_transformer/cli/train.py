"""``jax-transformer train``: train a model, and print its run folder."""

from dataclasses import dataclass, field
from typing import Annotated

from jax_transformer.cli.arguments import Command
from jax_transformer.config import option
from jax_transformer.config.option import Option
from jax_transformer.runtime import distributed, process
from jax_transformer.runtime.distributed import DistributedOptions
from jax_transformer.training.options import TrainOptions


@dataclass(frozen=True)
class TrainCommand:
    """Train an encoder-decoder on parallel text."""

    config: Annotated[option.PathText | None, Option(group="run")] = None
    """YAML file of options, or a run's train_config.json; flags win."""
    architecture: option.Rare[option.Architecture | None] = None
    """Register an architecture of yours, my_file.py:NAME or package.module:NAME."""
    options: option.Inline[TrainOptions] = field(default_factory=TrainOptions)
    distributed: Annotated[DistributedOptions, Option(group="several processes", rare=True)] = (
        field(default_factory=DistributedOptions)
    )

    @classmethod
    def from_file(cls, path: str) -> "TrainCommand":
        """Return the options of a file. Checks across several options run after the flags."""
        from jax_transformer.cli import config_file

        return cls(path, options=config_file.read(TrainOptions, path))


def run(command: TrainCommand) -> int:
    """Train, print the run folder, and return the exit code."""
    process.keep_freed_memory()
    with process.stop_requests() as stop:  # from here on: importing JAX takes a second or two
        with stop.at_once("stopped before anything was begun"):
            from jax_transformer.training import recipe
        with distributed.joined(command.distributed):
            folder = recipe.train(command.options, stop)
        if distributed.first():
            print(folder.path)
    return 0


COMMAND = Command(
    TrainCommand,
    run,
    examples=("train --steps 400", "train --config run.yaml --optimizer.learning-rate 1e-3"),
    synonyms="fit finetune run",
    calls_started=True,
)
