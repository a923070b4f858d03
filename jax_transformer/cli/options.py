"""The options of a command, listed from its dataclass: a field is a flag, its docstring the help.

Annotations say what a type cannot: ``Positional[str]`` is an argument without a flag, and
the fields of an ``Inline`` dataclass have flags without its name in front.
"""

import ast
import dataclasses
import enum
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
Positional = Annotated[T, "positional"]
Inline = Annotated[T, "inline"]

METAVARS = {
    "N": "top_k",
    "NAME": "preset model.preset model.tying model.norm_placement data.dataset_config wandb",
    "PATH": """run config init input output attention html source target hypotheses batch python
        compilation_cache data.train data.valid data.tokenizer
        data.target_tokenizer data.train_source data.train_target data.valid_source
        data.valid_target data.dataset""",
    "TAG": "source_lang target_lang data.source_lang data.target_lang",
    "SPLIT": "data.train_split data.valid_split",
    "FIELD": "data.source_field data.target_field",
    "WHICH": "weights",
    "KIND": "to",
    "DTYPE": "dtype",
    "NAME=VALUE": "set",
    "KEY": "key",
    "PREFIX": "strip_prefix",
    "SIZE": "shard_size",
    "FILE.py:NAME": "architecture",
    "N,N,...": "lengths",
}
"""The placeholders of text values in help, each with the dotted names of its options."""
_METAVAR = {name: metavar for metavar, names in METAVARS.items() for name in names.split()}


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

    @property
    def flag(self) -> str:
        return flag(self.name)

    @property
    def off(self) -> str:
        """Flag that switches a boolean off, as ``--no-json`` and ``--optimizer.no-nesterov``."""
        section, dot, name = self.name.rpartition(".")
        return flag(f"{section}{dot}no-{name}")

    @property
    def flags(self) -> list[str]:
        if self.positional:
            return []
        return [self.flag, self.off] if self.type is bool else [self.flag]

    @property
    def metavar(self) -> str:
        """Placeholder of the value in help, or the choices; empty for a boolean."""
        if self.positional:
            return self.name.upper()
        if self.type is bool:
            return ""
        if issubclass(self.type, enum.Enum):
            return "{" + ",".join(str(member.value) for member in self.type) + "}"
        return {int: "N", float: "FLOAT"}.get(self.type) or _METAVAR.get(self.name, "TEXT")


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
        text = _docstrings(kind).get(field.name, "")
        yield Option(
            prefix + field.name, kind_of_value, value, text, mark == "positional", optional, several
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


def flag(name: str) -> str:
    """Return the flag of an option's dotted name."""
    return "--" + name.replace("_", "-")


def _unmarked(hint: Any) -> tuple[str | None, Any]:
    if typing.get_origin(hint) is Annotated:
        hint, mark = typing.get_args(hint)
        return mark, hint
    return None, hint


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def _docstrings(kind: type) -> dict[str, str]:
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
