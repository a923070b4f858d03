"""A command line to an options class: strict about names, underscores and dashes alike, refusals in one line, a file underneath the flags."""

import dataclasses
import io
import json
import re
import typing
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Annotated, Any, TypeVar

import tyro

from jax_transformer.errors import ConfigError, nearest

Options = TypeVar("Options")
_INLINE = tyro.conf.arg(name="")
Inline = Annotated[Options, _INLINE]
"""A nested options class whose flags have no prefix."""


def flags(kind: type, prefix: str = "", several: bool = False) -> list[str]:
    """The dotted flags of an options class, as ``--data.train-source``; with ``several``, those alone that take several values."""
    found = []
    for field in dataclasses.fields(kind):
        hint = typing.get_type_hints(kind, include_extras=True)[field.name]
        marks = getattr(hint, "__metadata__", ())
        inner = hint.__origin__ if marks else hint
        if tyro.conf.Positional in marks:
            continue
        if dataclasses.is_dataclass(inner):
            found += flags(inner, prefix if _INLINE in marks else f"{prefix}{field.name}.", several)  # type: ignore[arg-type]
        elif not several or typing.get_origin(inner) is tuple:
            dashed, name = prefix.replace("_", "-"), field.name.replace("_", "-")
            found += [f"--{dashed}{name}"]
            found += [f"--{dashed}no-{name}"] if inner is bool else []
    return found


def parse(command: str, kind: type[Options], arguments: Sequence[str]) -> Options:
    """The options on a command line. Where ``kind`` has a ``from_file``, ``--config FILE`` gives what the flags do not.

    Underscores and dashes are one, and of a flag that is given again the last counts, unless it takes several values: that is refused. Raises
    ConfigError in one line; ``--help`` prints and exits.
    """
    dashed = _dashed(command, arguments, [*flags(kind), "--help"])
    given = Counter(argument.partition("=")[0] for argument in dashed)
    for flag in flags(kind, several=True):
        if given[flag] > 1:
            raise ConfigError(
                f"{flag} is given {given[flag]} times; give all of its values behind one"
            )
    read = getattr(kind, "from_file", None)
    file = _last(dashed, "--config") if read is not None else None
    underneath = {"default": read(file)} if read is not None and file is not None else {}
    said, where = io.StringIO(), f" (with {file} underneath the flags)" if underneath else ""
    try:
        with redirect_stderr(said):
            return tyro.cli(
                kind,
                args=dashed,
                prog=f"jax-transformer {command}",
                description=kind.__doc__,
                config=(tyro.conf.EnumChoicesFromValues,),
                **underneath,
            )
    except ConfigError as error:  # the class's own checks, of the values together
        raise ConfigError(f"{error}{where}") from None
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_one_line(said.getvalue()) + where) from None


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


def _dashed(command: str, arguments: Sequence[str], known: list[str]) -> list[str]:
    """The arguments with dashes in the names of flags. Raises ConfigError naming an unknown flag and the nearest known one."""
    dashed = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-")
            if name not in known:
                raise ConfigError(
                    f"unknown option {name}{nearest(name, known)}; jax-transformer {command} --help lists them"
                )
            argument = name + equals + value
        dashed.append(argument)
    return dashed


def _last(dashed: list[str], flag: str) -> str | None:
    """The value of a flag where it is given last, None where it is not given or has no value."""
    found = None
    for argument, following in zip(dashed, [*dashed, "--"][1:], strict=True):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else None if following.startswith("--") else following
    return found


def _one_line(box: str) -> str:
    """tyro's framed message as one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [re.sub(r"[╭╮╰╯│─]+|-{3,}", " ", line).strip() for line in text.splitlines()]
    words = [
        line
        for line in lines
        if line
        and not line.startswith(
            ("For full helptext", "Parsing error", "Value error", "Argument helptext")
        )
    ]
    return re.sub(r"^Error parsing [\w.]+: ", "", " ".join(" ".join(words).split()))
