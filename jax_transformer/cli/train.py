"""``jax-transformer train``: train a model, and print its run folder."""

from dataclasses import dataclass, field

from jax_transformer.cli import config_file
from jax_transformer.cli.arguments import Command, Inline
from jax_transformer.runtime import allocator, distributed
from jax_transformer.runtime.distributed import DistributedOptions
from jax_transformer.training.options import TrainOptions


@dataclass(frozen=True)
class TrainCommand:
    """Train an encoder-decoder on parallel text."""

    config: str | None = None
    """YAML file of options, or a run's train_config.json; flags win."""
    architecture: str | None = None
    """Register an architecture of yours, my_file.py:NAME or package.module:NAME."""
    options: Inline[TrainOptions] = field(default_factory=TrainOptions)
    distributed: DistributedOptions = field(default_factory=DistributedOptions)

    @classmethod
    def from_file(cls, path: str) -> "TrainCommand":
        """Return the options of a file. Checks across several options run after the flags."""
        return cls(path, options=config_file.read(TrainOptions, path))


def run(command: TrainCommand) -> int:
    """Train, print the run folder, and return the exit code."""
    from jax_transformer.training.stop import stop_requests

    allocator.keep_freed_memory()
    with stop_requests() as stop:  # from here on: importing JAX takes a second or two
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
    groups={
        "run": "config architecture run init resume steps seed devices compilation_cache",
        "validation and checkpoints": "eval_* samples best_by patience keep keep_* average*",
        "several processes": "distributed.*",
        "logging": "log_every tensorboard wandb",
        "memory and compile time": "mesh.* loss_chunks model.attention_backend model.remat "
        "model.scan_layers",
        "model": "model.*",
        "data (default: the built-in task)": "data.*",
        "optimizer": "optimizer.*",
        "parameters to train (default: all)": "freeze lora.*",
    },
    examples=(
        "train --steps 400",
        "train --config run.yaml --optimizer.learning-rate 1e-3",
    ),
    rare="architecture compilation_cache loss_chunks model.attention_backend model.remat "
    "model.scan_layers average average_of samples model.*_dropout model.norm_placement "
    "model.tying data.dataset* data.*_split data.*_field data.*_lang data.buckets "
    "data.bpe_dropout data.target_tokenizer optimizer.beta? optimizer.epsilon "
    "optimizer.momentum optimizer.nesterov lora.alpha lora.targets mesh.* keep_best "
    "distributed.*",
)
