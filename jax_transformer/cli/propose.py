"""``jax-transformer propose``: a weight table between two models, with its proof."""

import json
import sys
from dataclasses import dataclass
from typing import Annotated

from jax_transformer.cli.arguments import Command
from jax_transformer.config import option
from jax_transformer.config.option import Option
from jax_transformer.errors import DifferentError


@dataclass(frozen=True)
class ProposeOptions:
    """Propose a weight table between a PyTorch model and a JAX model, and prove it."""

    theirs: Annotated[option.Positional[str], Option(group="models")]
    """A function that returns the PyTorch module, my_file.py:NAME or package.module:NAME. A
    function `batch` beside it returns the arguments of a call, as a list of NumPy arrays; one
    called `call_torch` is used as call_torch(module, *batch)."""
    ours: option.Positional[str]
    """The same for the JAX model: an NNX module, (linen.Module, variables), or (function,
    parameters). `call_flax` beside it is used as call_flax(model, *batch)."""
    batch: option.PathText | None = None
    """A .safetensors file of the call's arguments, named 0, 1, ..., in place of a function."""
    json: bool = False
    """Print one JSON object in place of Python code."""


def run(options: ProposeOptions) -> int:
    """Print the table as Python code, and the reason for each rule to standard error.

    Raises DifferentError if the table does not make the models equal.
    """
    from jax_transformer.parity import from_files

    proposal = from_files.propose_table(options.theirs, options.ours, options.batch)
    if options.json:
        print(json.dumps(proposal.to_data()))
    else:
        print(proposal.code(), end="")
        for line in proposal.lines():
            print(line, file=sys.stderr)
    if not proposal.converts:
        raise DifferentError(proposal.summary())
    return 0


COMMAND = Command(
    ProposeOptions,
    run,
    examples=("propose their_module.py:make our_module.py:make",),
    synonyms="match port",
)
