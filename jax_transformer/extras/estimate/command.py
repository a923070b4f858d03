"""``jax-transformer estimate``: what a training step needs, without the hardware."""

import json
import sys
from dataclasses import dataclass, field
from typing import Annotated

from jax_transformer.cli import config_file
from jax_transformer.cli.arguments import Command
from jax_transformer.config import option
from jax_transformer.config.option import Option
from jax_transformer.errors import ConfigError
from jax_transformer.extras.estimate import topologies
from jax_transformer.training.options import TrainOptions

UNCHANGING = """run resume steps seed log_every tensorboard wandb eval_* best_by patience keep*
    data.train* data.valid*"""
"""Options that change no step, and so are less often of interest."""


@dataclass(frozen=True)
class EstimateCommand:
    """Compile a training step for hardware that need not be there: memory, FLOPs, time."""

    topology: Annotated[str, Option(group="estimate", metavar="KIND:SIZE")]
    """Accelerators, for example v5e:4x4, v5p:2x2x1, v6e:2x2, h100:8, h200:1 or cpu:4."""
    length: int | None = None
    """Tokens of each source and target in a batch (default: the longest that the options allow)."""
    device_memory: float | None = None
    """GiB of each device (default: the accelerator's)."""
    json: bool = False
    """Print one JSON object instead of lines."""
    config: Annotated[option.PathText | None, Option(group="run")] = None
    """YAML file of options, or a run's train_config.json; flags win."""
    architecture: option.Rare[option.Architecture | None] = None
    """Register an architecture of yours, my_file.py:NAME or package.module:NAME."""
    options: Annotated[option.Inline[TrainOptions], Option(rare=UNCHANGING)] = field(
        default_factory=TrainOptions
    )

    def __post_init__(self) -> None:
        for name in ("length", "device_memory"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"{name}={value} must be above 0")

    @classmethod
    def from_file(cls, path: str) -> "EstimateCommand":
        """Return the options of a file. Checks across several options run after the flags."""
        return cls("", config=path, options=config_file.read(TrainOptions, path))


def run(command: EstimateCommand) -> int:
    """Print the estimate and return the exit code: 1 if the step does not fit."""
    topology = topologies.Topology.parse(command.topology)
    topologies.prepare(topology)
    from jax_transformer.extras.estimate import estimate, report

    print(f"compiling for {topology} ...", file=sys.stderr)
    result = estimate.estimate(
        command.options,
        topology,
        length=command.length or 0,
        memory=int((command.device_memory or 0) * topologies.GIB),
    )
    if command.json:
        print(json.dumps(report.as_json(result)))
    else:
        print("\n".join(report.lines(result)))
    return 0 if result.fits else 1


COMMAND = Command(
    EstimateCommand,
    run,
    examples=(
        "estimate --topology v5e:2x2 --model.preset marian --data.vocab-size 32000",
        "estimate --topology h200:1 --config run.yaml --model.precision bfloat16 --json",
    ),
)
