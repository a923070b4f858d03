"""``jax-transformer inspect``: the content of a file or folder of weights."""

from dataclasses import dataclass

from jax_transformer.cli import arguments
from jax_transformer.cli.arguments import Command
from jax_transformer.config.option import Positional


@dataclass(frozen=True)
class InspectOptions:
    """List a file or folder of weights: names, shapes, dtypes, ties, hashes. Loads no weights."""

    path: Positional[str]
    """A .safetensors or PyTorch file, the index of a sharded one, a Hugging Face folder,
    hf:owner/name, a run folder, one checkpoint of a run or of T5X, or a model of Marian."""
    json: bool = False
    """Print one JSON object instead of lines."""


def run(options: InspectOptions) -> int:
    """Print the content and return the exit code."""
    from jax_transformer.formats import registry

    arguments.show(registry.inspect(options.path), as_json=options.json)
    return 0


COMMAND = Command(InspectOptions, run, examples=("inspect model.pt", "inspect runs/phrases --json"))
