"""The commands by name, in the order of the help. Each is imported when it is looked up, so that a
command starts without what the others need.
"""

import importlib
from collections.abc import Iterator, Mapping

from jax_transformer.cli.arguments import Command

_NAMES = (
    "train",
    "estimate",
    "translate",
    "transcribe",
    "serve",
    "evaluate",
    "convert",
    "inspect",
    "parity",
    "golden",
    "completion",
)


class _Commands(Mapping[str, Command]):
    """The ``COMMAND`` of each module of that name."""

    def __getitem__(self, name: str) -> Command:
        if name not in _NAMES:
            raise KeyError(name)
        command: Command = importlib.import_module(f"jax_transformer.cli.{name}").COMMAND
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


COMMANDS = _Commands()
