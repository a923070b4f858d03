"""Output of a command: lines on standard output or in a file."""

import io
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from jax_transformer.storage import atomic


@runtime_checkable
class Printable(Protocol):
    """A result that prints itself as lines, or as one JSON value."""

    def lines(self) -> Iterable[str]: ...

    def to_data(self) -> Any: ...


def show(report: Printable, *, as_json: bool) -> None:
    """Print a report."""
    for line in [json.dumps(report.to_data())] if as_json else report.lines():
        print(line)


def check_output(path: str | None) -> None:
    """Raise ConfigError, before hours of work, if a result cannot be written to ``path``."""
    if path is not None:
        atomic.check_output(path)


def write_lines(path: str | None, lines: Sequence[str]) -> None:
    """Write one line for each text, in UTF-8 whatever the locale, to standard output or a file.

    Standard output is None or ``-``. A file is complete or absent. A line feed within a text
    becomes a space.
    """
    text = "".join(line.replace("\n", " ") + "\n" for line in lines)
    if path in (None, atomic.STDOUT):
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", newline="\n")
        sys.stdout.write(text)
        return
    atomic.write_text(path, text)
