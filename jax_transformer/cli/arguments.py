"""A command line to an options dataclass: strict names, refusals in one line, a file underneath."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from jax_transformer.cli import options, parser
from jax_transformer.cli.options import Command
from jax_transformer.errors import ConfigError, nearest

Options = TypeVar("Options")


def flags(kind: type) -> list[str]:
    """Return the flags of an options dataclass, as ``--data.train-source``."""
    return [flag for option in options.listed(kind) for flag in option.flags]


def parse(command: str, kind: type[Options], arguments: Sequence[str]) -> Options:
    """Return the options on a command line.

    Underscores in flags are dashes. The last of repeated flags counts, but a flag of several values
    must not be repeated. If ``kind`` has a ``from_file``, ``--config FILE`` gives what flags leave
    out. Raises ConfigError.
    """
    known = list(options.listed(kind))
    dashed = _dashed(command, kind, arguments)
    counts = Counter(argument.partition("=")[0] for argument in dashed)
    for option in known:
        if option.several and counts[option.flag] > 1:
            raise ConfigError(
                f"{option.flag} is given {counts[option.flag]} times: give all values after one"
            )
    default, where = _underneath(kind, dashed)
    values = vars(parser.build(command, known, {}, ()).parse_intermixed_args(dashed))
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    try:
        return options.build(kind, values, default)
    except ConfigError as error:  # the class's own checks
        raise ConfigError(f"{error}{where}") from None


def help_text(name: str, command: Command, arguments: Sequence[str]) -> str:
    """Return the help of a command, with the defaults of ``--config FILE`` if it is given."""
    default, _ = _underneath(command.kind, list(arguments))
    known = list(options.listed(command.kind, default))
    description = (command.kind.__doc__ or "").partition("\n")[0]
    return parser.build(name, known, command.groups, command.examples, description).format_help()


def assignments(flag: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``name=value`` pairs by name, each JSON if it parses, otherwise text."""
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"{flag} {pair}: must be name=value")
    return {name: _value(text) for name, _, text in (pair.partition("=") for pair in pairs)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _dashed(command: str, kind: type, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with today's flags, in dashes. Raises ConfigError if one is unknown."""
    known = [*flags(kind), "--help"]
    renamed = {options.flag(a): options.flag(b) for a, b in options.renamed(kind).items()}
    dashed = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-")
            if name in renamed:
                print(f"{name} is now called {renamed[name]}", file=sys.stderr)
                name = renamed[name]
            if name not in known:
                raise ConfigError(
                    f"unknown option {name}{nearest(name, known)}; "
                    f"jax-transformer {command} --help lists them"
                )
            argument = name + equals + value
        dashed.append(argument)
    return dashed


def _underneath(kind: type, dashed: list[str]) -> tuple[Any, str]:
    """Return the options of the last ``--config FILE`` or None, and a note for error messages."""
    read = getattr(kind, "from_file", None)
    path = None
    for argument, following in zip(dashed, [*dashed, "--"][1:], strict=True):
        name, equals, value = argument.partition("=")
        if name == "--config":
            path = value if equals else None if following.startswith("--") else following
    if read is None or path is None:
        return None, ""
    return read(path), f" (with {path} underneath the flags)"
