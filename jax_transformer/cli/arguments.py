"""A command's options dataclass from its command line, by argparse: a field is a flag.

Annotations say what a type cannot: ``Positional[str]`` is an argument without a flag, each value of
a ``Repeatable`` tuple has a flag of its own, and the fields of an ``Inline`` dataclass have flags
without its name in front.

argparse rather than a library for dataclasses: the placeholders, groups and examples of help and
the words of errors are then ours, and there is one dependency less.
"""

import argparse
import ast
import dataclasses
import enum
import inspect
import json
import sys
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any, NoReturn, TypeVar

from jax_transformer.cli.suggestion import did_you_mean
from jax_transformer.errors import ConfigError, nearest

T = TypeVar("T")
Positional = Annotated[T, "positional"]
Inline = Annotated[T, "inline"]
Repeatable = Annotated[T, "repeatable"]


@dataclass(frozen=True)
class Command:
    """A command: its options, its function, and the layout of its help."""

    kind: type
    """The dataclass of its options."""
    run: Callable[[Any], int]
    groups: Mapping[str, str]
    """Titles of the groups of help, each with its dotted option names; ``model.*`` names a section.
    Options of no group come last."""
    examples: tuple[str, ...]
    """Arguments of example calls."""
    rare: str = ""
    """Dotted option names that ``--help`` lists without their meaning; ``--help-all`` has that."""


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    name: str
    """Field name, with the names of the nested dataclasses and dots in front, as data.train."""
    type: Any
    """Type of the value, or of each value of several."""
    default: Any
    """MISSING if the option is required."""
    text: str
    """Docstring of the field, which is the help."""
    positional: bool
    optional: bool
    """None is a value."""
    several: bool
    """The option takes several values."""
    repeatable: bool
    """Each of several values has a flag of its own."""

    @property
    def flags(self) -> list[str]:
        """Its flag, and for a boolean the one that switches it off, as ``--model.no-bias``."""
        if self.positional:
            return []
        section, dot, name = self.name.rpartition(".")
        off = [flag(f"{section}{dot}no-{name}")] if self.type is bool else []
        return [flag(self.name), *off]


def flag(name: str) -> str:
    """Return the flag of an option's dotted name."""
    return "--" + name.replace("_", "-")


def flags(kind: type) -> list[str]:
    """Return the flags of an options dataclass, as ``--data.train-source``."""
    return [flag for option in listed(kind) for flag in option.flags]


def parse(command: str, kind: type[T], arguments: Sequence[str]) -> T:
    """Return the options on a command line.

    Underscores in flags are dashes. The last of repeated flags counts, but a flag of several values
    must not be repeated, unless it is ``Repeatable``. If ``kind`` has a ``from_file``,
    ``--config FILE`` gives what flags leave out. Raises ConfigError.
    """
    known = list(listed(kind))
    dashed = _dashed(command, kind, arguments)
    counts = Counter(argument.partition("=")[0] for argument in dashed)
    for option in known:
        if option.several and not option.repeatable and counts[flag(option.name)] > 1:
            name = flag(option.name)
            raise ConfigError(f"{name} is given {counts[name]} times: give all values after one")
    default, where = from_file(kind, dashed)
    parser = Parser(command)
    for option in known:
        add(parser, option)
    values = vars(parser.parse_intermixed_args(dashed))
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    try:
        return build(kind, values, default)
    except ConfigError as error:  # the class's own checks
        raise ConfigError(f"{error}{where}") from None


def assignments(flag: str, pairs: Sequence[str], *, text: bool = False) -> dict[str, Any]:
    """Return the values of ``name=value`` pairs by name: text, or unless ``text`` is set what a
    value is as JSON.
    """
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"{flag} {pair}: must be name=value")
    parted = (pair.partition("=") for pair in pairs)
    return {name: value if text else _value(value) for name, _, value in parted}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _dashed(command: str, kind: type, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with today's flags, in dashes. Raises ConfigError naming every unknown
    one.
    """
    names = {flag: option.name for option in listed(kind) for flag in option.flags}
    new_flags = {flag(old): flag(new) for old, new in renamed(kind).items()}
    dashed, unknown = [], []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-")
            if name in new_flags:
                print(f"{name} is now called {new_flags[name]}", file=sys.stderr)
                name = new_flags[name]
            if name not in names and name not in unknown:
                unknown.append(name)
            argument = name + equals + value
        dashed.append(argument)
    if unknown:
        shown = {name: flag for flag, name in reversed(names.items())}
        known = list(dict.fromkeys(names.values()))
        each = [f"{name}{did_you_mean(name[2:], known, shown)}" for name in unknown]
        raise ConfigError(
            f"unknown option{'s' if len(each) > 1 else ''} {', '.join(each)}; "
            f"jax-transformer {command} --help lists them"
        )
    return dashed


def from_file(kind: type, dashed: Sequence[str]) -> tuple[Any, str]:
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


# The parser


class Parser(argparse.ArgumentParser):
    """Stores only the options that are given. Raises ConfigError in words of ours."""

    def __init__(self, command: str, **settings: Any) -> None:
        super().__init__(
            prog=f"jax-transformer {command}",
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=False,
            **settings,
        )

    def error(self, message: str) -> NoReturn:
        for words, plain in (
            ("argument ", ""),
            ("the following arguments are required:", f"{self.prog.split()[-1]} needs"),
            ("expected one argument", "needs a value"),
            ("ignored explicit argument", "takes no value, not"),
            ("unrecognized arguments", "unexpected arguments"),
        ):
            message = message.replace(words, plain, 1)
        raise ConfigError(message)


class _Switch(argparse.Action):
    """A boolean option: its flag is true, the flag with ``no-`` false."""

    def __call__(self, parser: Any, namespace: Any, values: Any, flag: str | None = None) -> None:
        setattr(namespace, self.dest, flag == self.option_strings[0])


def add(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup", option: Option, **settings: Any
) -> argparse.Action:
    """Add an option to a parser or to one of its groups."""
    if option.type is bool:
        settings |= {"action": _Switch, "nargs": 0}
    else:
        settings["type"] = partial(_convert, option)
    if option.repeatable:
        settings["action"] = "append"
    elif option.several:
        settings["nargs"] = "*"
    if option.positional:
        settings |= {} if option.default is MISSING else {"nargs": "?"}
        return parser.add_argument(option.name, **{"metavar": option.name.upper()} | settings)
    settings |= {"dest": option.name, "required": option.default is MISSING}
    return parser.add_argument(*option.flags, **settings)


def _convert(option: Option, text: str) -> Any:
    """Return an option's value from its text. Raises ArgumentTypeError."""
    if option.optional and text == "None":
        return None
    try:
        return option.type(text)
    except ValueError:
        if issubclass(option.type, enum.Enum):
            choices = [str(member.value) for member in option.type]
            message = f"must be one of {', '.join(choices)}{nearest(text, choices)}"
        else:
            message = f"must be {'an integer' if option.type is int else 'a number'}"
        raise argparse.ArgumentTypeError(f"{message}, not {text!r}") from None


# The dataclass


def listed(kind: type, default: Any = None, prefix: str = "") -> Iterator[Option]:
    """Yield the options of a dataclass in order; ``default`` is an instance with other defaults."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        mark, hint = _unmarked(hints[field.name])
        value = _default(field) if default is None else getattr(default, field.name)
        if dataclasses.is_dataclass(hint):
            inner = prefix if mark == "inline" else f"{prefix}{field.name}."
            yield from listed(typing.cast(type, hint), None if value is MISSING else value, inner)
            continue
        several = typing.get_origin(hint) is tuple
        members = [member for member in typing.get_args(hint) if member is not Ellipsis]
        optional = isinstance(hint, types.UnionType) and type(None) in members
        (kind_of_value,) = {*members} - {type(None)} or {hint}
        text = docstrings(kind).get(field.name, "")
        yield Option(
            prefix + field.name,
            kind_of_value,
            value,
            text,
            mark == "positional",
            optional,
            several,
            mark == "repeatable",
        )


def build(kind: type[T], values: dict[str, Any], default: T | None = None, prefix: str = "") -> T:
    """Return the dataclass with ``values`` by dotted name, over ``default`` if there is one.

    Every nested dataclass is made anew, so that its own checks run.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    changes = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        mark, hint = _unmarked(hints[field.name])
        if dataclasses.is_dataclass(hint):
            inner = prefix if mark == "inline" else f"{prefix}{field.name}."
            section = None if default is None else getattr(default, field.name)
            changes[field.name] = build(typing.cast(type, hint), values, section, inner)
        elif prefix + field.name in values:
            changes[field.name] = values[prefix + field.name]
    if default is None:
        return kind(**changes)
    return dataclasses.replace(default, **changes)  # type: ignore[type-var]


def renamed(kind: type, prefix: str = "") -> dict[str, str]:
    """Return the dotted names of earlier versions, each with the name that replaced it.

    They are listed in a class's ``RENAMED``, which the reader of JSON files honours too.
    """
    names = {prefix + old: prefix + new for old, new in getattr(kind, "RENAMED", {}).items()}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        mark, hint = _unmarked(hints[field.name])
        if dataclasses.is_dataclass(hint):
            inner = prefix if mark == "inline" else f"{prefix}{field.name}."
            names |= renamed(typing.cast(type, hint), inner)
    return names


def _unmarked(hint: Any) -> tuple[str | None, Any]:
    if typing.get_origin(hint) is Annotated:
        hint, mark = typing.get_args(hint)
        return mark, hint
    return None, hint


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def docstrings(kind: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, on one line."""
    (body,) = [
        node.body
        for node in ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        if isinstance(node, ast.ClassDef)
    ]
    texts = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts
