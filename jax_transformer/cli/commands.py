"""The commands by name, in the order of the help. Each is imported when it is looked up, so that a
command starts without what the others need.

An installed package adds a command by an entry point of the group ``jax_transformer.commands``,
whose value is a :class:`Command`; so do this package's own extras.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping

from jax_transformer.cli.arguments import Command
from jax_transformer.errors import ConfigError
from jax_transformer.runtime import process

ENTRY_POINTS = "jax_transformer.commands"
_CORE = ("train", "translate", "evaluate", "convert", "inspect", "parity", "golden", "completion")


class _Commands(Mapping[str, Command]):
    """The ``COMMAND`` of each module of that name, and those of entry points."""

    def __getitem__(self, name: str) -> Command:
        if name in _CORE:
            command: Command = importlib.import_module(f"jax_transformer.cli.{name}").COMMAND
            return command
        added: Command = process.load_entry_point(process.entry_points(ENTRY_POINTS)[name], Command)
        return added

    def __contains__(self, name: object) -> bool:
        return name in _CORE or name in process.entry_points(ENTRY_POINTS)

    def __iter__(self) -> Iterator[str]:
        return iter((*_CORE, *process.entry_points(ENTRY_POINTS)))

    def loadable(self) -> Iterator[tuple[str, Command]]:
        """Yield every command by name; one that cannot be imported is a line on standard error."""
        for name in self:
            try:
                yield name, self[name]
            except ConfigError as error:
                print(f"skipped an installed command: {error}", file=sys.stderr)

    def __len__(self) -> int:
        return sum(1 for _ in self)


COMMANDS = _Commands()
