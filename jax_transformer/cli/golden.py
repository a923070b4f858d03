"""``jax-transformer golden``: recorded outputs of a PyTorch model."""

import sys
from dataclasses import dataclass

from jax_transformer.cli.arguments import Command
from jax_transformer.config import option
from jax_transformer.errors import ConfigError, DifferentError, counted, nearest
from jax_transformer.storage import atomic

_ACTIONS = ["make", "check"]


@dataclass(frozen=True)
class GoldenOptions:
    """Record the outputs of a PyTorch model, to compare with where torch is not installed."""

    action: option.Positional[str]
    """make: write FILE. check: record again and compare with FILE."""
    file: option.Positional[str]
    """The golden, a .safetensors file."""
    model: option.Positional[str | None] = None
    """With make, the model to record: a folder or file of weights to run in the PyTorch twin, or
    package.module:callable, which returns a PyTorch module."""
    batch: option.PathText | None = None
    """For package.module:callable, a .safetensors file of the call's arguments, named 0, 1, ..."""
    weights: option.Weights = "auto"
    """Weights of a run: averaged, best, last, a step, or auto (the first that exists)."""
    architecture: option.Architecture | None = None
    """Register an architecture of yours, my_file.py:NAME or package.module:NAME."""
    python: option.PathText | None = None
    """Python to run package.module:callable in, if torch is installed in another environment."""
    seed: int = 0
    """Seed of the batch and of the gradients' weights."""


def run(options: GoldenOptions) -> int:
    """Write or check a golden and return the exit code. Raises DifferentError if numbers differ."""
    if options.action not in _ACTIONS:
        raise ConfigError(
            f"golden {options.action}: must be make or check{nearest(options.action, _ACTIONS)}"
        )
    if (options.model is not None) != (options.action == "make"):
        raise ConfigError(
            "usage: golden make FILE MODEL, or golden check FILE (FILE names its own model)"
        )
    from jax_transformer.parity import from_files

    if options.action == "make":
        atomic.check_output(options.file)
        rest = (options.weights, options.python, options.batch, options.seed)
        golden = from_files.create_golden(options.file, options.model or "", *rest)
        torch = golden.versions["torch"]
        print(
            f"{options.file}: {len(golden.arrays)} arrays, seed {golden.seed}, torch {torch}",
            file=sys.stderr if options.file == atomic.STDOUT else sys.stdout,
        )
        return 0
    check = from_files.check_golden(options.file, options.python)
    for line in check.lines():
        print(line)
    if check.wrong:
        number = counted(len(check.wrong), "different array")
        raise DifferentError(f"{options.file}: {number}: {check.wrong[0]}")
    return 0


COMMAND = Command(
    GoldenOptions,
    run,
    examples=("golden make outputs.safetensors model.pt", "golden check outputs.safetensors"),
)
