"""The commands by name, in the order of the help. Each is imported when it is looked up, so that a
command starts without what the others need.

An installed package adds a command by an entry point of the group ``jax_transformer.commands``,
whose value is a :class:`Command`; so do this package's own extras.
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping

from jax_transformer.cli.arguments import Command

ENTRY_POINTS = "jax_transformer.commands"
_CORE = ("train", "translate", "evaluate", "convert", "inspect", "parity", "golden", "completion")


class _Commands(Mapping[str, Command]):
    """The ``COMMAND`` of each module of that name, and those of entry points."""

    def __getitem__(self, name: str) -> Command:
        if name in _CORE:
            command: Command = importlib.import_module(f"jax_transformer.cli.{name}").COMMAND
            return command
        added: Command = _added()[name].load()
        return added

    def __iter__(self) -> Iterator[str]:
        return iter((*_CORE, *_added()))

    def __len__(self) -> int:
        return len(_CORE) + len(_added())


@functools.cache
def _added() -> dict[str, importlib.metadata.EntryPoint]:
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {entry_point.name: entry_point for entry_point in sorted(found)}


COMMANDS = _Commands()
