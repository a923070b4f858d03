"""``jax-transformer parity``: two models that should be equal, compared module by module."""

import json
import os
from dataclasses import dataclass
from typing import Annotated

from jax_transformer.cli import arguments
from jax_transformer.cli.arguments import Command
from jax_transformer.config import option
from jax_transformer.config.option import Option
from jax_transformer.errors import ConfigError, DifferentError
from jax_transformer.storage import atomic


@dataclass(frozen=True)
class ParityOptions:
    """Compare a model with PyTorch module by module, and name the first module that differs."""

    model: Annotated[option.Positional[str], Option(group="models")]
    """Weights to run in JAX: a run folder, one checkpoint, a Hugging Face folder, a .safetensors
    or PyTorch file."""
    other: option.Positional[str]
    """Weights to run in the PyTorch twin; the word `twin` for the same weights; or a file written
    by `golden make`."""
    config: option.PathText | None = None
    """The model's config.json, if neither side has one."""
    preset: option.Name | None = None
    """The model's preset, if there is no config.json; sizes are read from the shapes."""
    architecture: option.Architecture | None = None
    """Register an architecture of yours, my_file.py:NAME or package.module:NAME."""
    set: Annotated[tuple[str, ...], Option(metavar="NAME=VALUE")] = ()
    """Fields of the preset that shapes do not show, for example num_heads=4 max_length=40."""
    weights: option.Weights = "auto"
    """Weights of a run: averaged, best, last, a step, or auto (the first that exists)."""
    dtype: Annotated[option.Dtype | None, Option(group="comparison")] = None
    """Also show differences in this dtype (default: the weights'). Float64 decides."""
    gradients: bool = True
    """Compare gradients too."""
    lengths: Annotated[str | None, Option(metavar="N,N,...")] = None
    """Lengths of source and target to compare at, for example 1,7,31 (default: 7 and 5)."""
    seed: int | None = None
    """Seed of the random batch and of the gradients' weights (default: 0, or the golden's)."""
    steps: int | None = None
    """Compare so many optimizer steps of the model and its `twin` in place of their modules: AdamW,
    and the mean of squared differences from random numbers as the loss."""
    html: Annotated[option.PathText | None, Option(group="output")] = None
    """Also write the report as an HTML page."""
    junit: option.PathText | None = None
    """Also write the report as JUnit XML, with a case for each module."""
    json: bool = False
    """Print a JSON list of reports instead of a table."""


def run(options: ParityOptions) -> int:
    """Print the report and return the exit code. Raises DifferentError if the models differ."""
    lengths = _lengths(options.lengths)
    of_modules = {
        "--dtype": options.dtype,
        "--no-gradients": not options.gradients,
        "--html": options.html,
        "--junit": options.junit,
    }
    if options.steps is not None and (flags := [flag for flag, on in of_modules.items() if on]):
        raise ConfigError(f"--steps: {', '.join(flags)} can only be used without it")
    for path in filter(None, (options.html, options.junit)):
        atomic.check_output(path)
    from jax_transformer.convert.models import ModelDescription
    from jax_transformer.parity import ci, from_files

    description = ModelDescription(
        options.config, options.preset, arguments.assignments("--set", options.set)
    )
    names = ("weights", "dtype", "gradients", "seed", "steps")
    shared = {name: getattr(options, name) for name in names}
    reports = from_files.compare_files(
        options.model, options.other, description, lengths=lengths, **shared
    )
    different = (pair for pair in reports if not pair[1].agrees)
    shown, full = next(different, reports[-1])
    if options.html is not None:
        atomic.write_text(options.html, full.to_page(shown))
    if options.junit is not None:
        atomic.write_text(options.junit, ci.junit(reports))
    if options.json:
        print(json.dumps([{"title": title} | report.to_data() for title, report in reports]))
    else:
        for title, report in reports:
            for line in report.lines() if report is full else [f"{title}: {report.summary()}"]:
                print(line)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for title, report in reports:
                if not report.agrees:
                    print(ci.annotation(title, report.summary()))
    if not full.agrees:
        raise DifferentError(f"{shown}: {full.summary()}" if reports[1:] else full.summary())
    return 0


def _lengths(text: str | None) -> tuple[int, ...]:
    """Return the numbers of --lengths. Raises ConfigError if they are not numbers."""
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--lengths {text}: must be lengths with commas, for example 1,7,31")
    return tuple(map(int, parts))


COMMAND = Command(
    ParityOptions,
    run,
    examples=(
        "parity runs/phrases twin",
        "parity model.safetensors model.pt --config config.json --lengths 1,7,31",
        "parity runs/phrases twin --steps 3",
    ),
    synonyms="compare diff",
)
