"""A command: its options dataclass from its command line, a field for a flag, and its report.

:class:`~jax_transformer.config.option.Option` says what a field's type cannot.
"""

import ast
import contextlib
import dataclasses
import enum
import inspect
import json
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from functools import cache, reduce
from itertools import chain, pairwise
from types import NoneType
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

from jax_transformer.config.option import Option
from jax_transformer.errors import ConfigError, nearest

T = TypeVar("T")
_PLAIN = Option()
_VALUE = re.compile(r"(?!-)|-$|-[\d.]|-[^-].* ")
"""A word that is not a flag: a text, standard input, or a negative number."""


@dataclass(frozen=True)
class Command:
    """A command: its options, its function, and examples."""

    kind: type
    """The dataclass of its options."""
    run: Callable[[Any], int]
    examples: tuple[str, ...]
    """Arguments of example calls."""
    synonyms: str = ""
    """Names in other projects, for which this command is suggested."""
    calls_started: bool = False
    """``run`` calls :func:`.process.started`; otherwise the start ends before ``run``."""


@runtime_checkable
class Printable(Protocol):
    """A result that prints itself as lines, or as one JSON value."""

    def lines(self) -> Iterable[str]: ...

    def to_data(self) -> Any: ...


def show(report: Printable, *, as_json: bool) -> None:
    for line in [json.dumps(report.to_data())] if as_json else report.lines():
        print(line)


@dataclass(frozen=True)
class Argument:
    """One option of a command, or an argument without a flag."""

    name: str
    """Field name, with the names of the nested dataclasses in front, for example data.train."""
    path: tuple[str, ...]
    """Names of the fields that lead to it."""
    owner: type
    """The dataclass of its field."""
    type: Any
    """Type of the value, or of each value of several."""
    default: Any
    """MISSING if the option is required."""
    option: Option
    group: str
    optional: bool
    """None is a value."""
    several: bool
    """The option takes several values."""
    flags: tuple[str, ...]
    """Its flag, and for a boolean the one that switches it off, for example ``--model.no-bias``."""
    synonyms: tuple[str, ...]
    """Another flag that works."""
    former: tuple[str, ...]
    """Flags of earlier versions."""

    @property
    def text(self) -> str:
        """Docstring of the field, which is the help."""
        return docstrings(self.owner).get(self.path[-1], "")

    def expanded(self, value: Any) -> Any:
        """Return the value of a path with the home folder for ``~``, any other as it is."""
        if isinstance(value, tuple):
            return tuple(self.expanded(each) for each in value)
        is_path = self.option.metavar == "PATH" or self.option.positional
        return os.path.expanduser(value) if is_path and isinstance(value, str) else value


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def flags(kind: type) -> list[str]:
    """Return the flags of an options dataclass, for example ``--data.train-source``."""
    return [flag for argument in listed(kind) for flag in argument.flags]


def listed(
    kind: type,
    default: Any = None,
    prefix: str = "",
    path: tuple[str, ...] = (),
    outer: Option = _PLAIN,
) -> Iterator[Argument]:
    """Yield the options of a dataclass in order; ``default`` is an instance with other defaults.

    Names of earlier versions are in a class's ``RENAMED``, which the reader of JSON files honours.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    renamed = getattr(kind, "RENAMED", {})
    group = outer.group
    for field in dataclasses.fields(kind):
        hint, several, optional = hints[field.name], False, False
        marks: list[Option] = []  # the outermost first
        while parts := typing.get_args(hint):
            marks += parts[:0:-1] if typing.get_origin(hint) is Annotated else []
            several |= typing.get_origin(hint) is tuple
            optional |= NoneType in parts
            hint = parts[0]
        settings = (item for mark in reversed(marks) for item in vars(mark).items())
        option = Option(**{key: setting for key, setting in settings if setting})
        group, rare = option.group or group, option.rare or outer.rare
        value = field.default if default is None else getattr(default, field.name)
        if value is MISSING and field.default_factory is not MISSING:
            value = field.default_factory()
        if dataclasses.is_dataclass(hint):
            inner = prefix if option.inline else f"{prefix}{field.name}."
            title = option.group or (group if option.inline else field.name)
            yield from listed(
                typing.cast(type, hint),
                None if value is MISSING else value,
                inner,
                (*path, field.name),
                Option(group=title, rare=rare),
            )
            continue
        name = prefix + (option.flag or field.name)
        own = [] if option.positional else [flag(name)]
        former = [flag(prefix + old) for old, new in renamed.items() if new == field.name]
        yield Argument(
            name,
            (*path, field.name),
            kind,
            hint,
            value,
            dataclasses.replace(option, rare=rare),
            group,
            optional,
            several,
            (*own, flag(f"{prefix}no-{field.name}")) if hint is bool else (*own,),
            (flag(prefix + field.name),) if option.flag else (),
            tuple(former),
        )


def parse(command: str, kind: type[T], words: Sequence[str]) -> T:
    """Return the options on a command line.

    Underscores in flags are dashes, and ``~`` in a path is the home folder. A flag may be repeated
    with the same value, but one of several values only if it is ``Repeatable``. If ``kind`` has a
    ``from_file``, ``--config FILE`` gives what flags leave out. Raises ConfigError.
    """
    known = list(listed(kind))
    used, texts, unknown = split(known, words)
    if unknown:
        raise _unknown_options(command, unknown, known)
    values: dict[tuple[str, ...], Any] = {}
    missing: list[str] = []
    for argument in known:
        if argument.option.positional:
            uses = [(argument.name.upper(), [texts.pop(0)])] if texts else []
        else:
            uses = used.get(argument.name, [])
        if uses:
            values[argument.path] = _value(argument, uses)
        elif argument.default is MISSING:
            missing.append(*argument.flags[:1] or [argument.name.upper()])
    if missing:
        raise ConfigError(f"{command} needs {', '.join(missing)}")
    if texts:
        raise ConfigError(f"unexpected arguments: {' '.join(texts)}")
    file = values.get(("config",)) if hasattr(kind, "from_file") else None
    default = kind.from_file(file) if file else None  # type: ignore[attr-defined]
    for argument in known if file else ():
        value = argument.expanded(reduce(getattr, argument.path, default))
        values.setdefault(argument.path, value)
    try:
        return _build(kind, values, default)
    except ConfigError as error:  # the class's own checks
        raise ConfigError(
            f"{error} (with {file} underneath the flags)" if file else error
        ) from None


def split(
    known: Sequence[Argument], words: Sequence[str]
) -> tuple[dict[str, list[tuple[str, list[str]]]], list[str], list[str]]:
    """Return each flag with its texts by the option's name, words of no flag, and unknown flags."""
    by_flag: dict[str, Argument] = {}
    for each in known:
        by_flag |= dict.fromkeys((*each.flags, *each.synonyms, *each.former), each)
    used: dict[str, list[tuple[str, list[str]]]] = {}
    loose: list[str] = []
    unknown: dict[str, None] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        name = name.replace("_", "-")
        argument = by_flag.get(name)
        if not word.startswith("--"):
            loose.append(word)
        elif argument is None:
            unknown[name] = None
        else:
            if name in argument.former:
                print(f"{name} is now called {argument.flags[0]}", file=sys.stderr)
            texts = [text] if equals else []
            most = len(rest) if argument.several and not argument.option.repeatable else 1
            while len(texts) < most and rest and argument.type is not bool and not equals:
                if not _VALUE.match(rest[0]):
                    break
                texts.append(rest.pop(0))
            used.setdefault(argument.name, []).append((name, texts))
    return used, loose, list(unknown)


def _value(argument: Argument, uses: list[tuple[str, list[str]]]) -> Any:
    """Return an option's value from the flags that name it, each with its texts."""
    (flag, texts), *others = uses
    for use in others if not argument.several else ():
        if _value(argument, [use]) != _value(argument, uses[:1]):
            first, second = (" ".join((name, *words)) for name, words in (uses[0], use))
            raise ConfigError(f"{first} and {second} contradict each other: give one of them")
    if argument.type is bool:
        if texts:
            raise ConfigError(f"{flag}: takes no value, not {texts[0]!r}")
        return flag != argument.flags[1]
    if argument.option.repeatable:
        texts = [text for _, use in uses for text in use]
    elif argument.several and len(uses) > 1:
        raise ConfigError(f"{flag} is given {len(uses)} times: give all values after one")
    values_needed = len(uses) if argument.option.repeatable else int(not argument.several)
    if len(texts) < values_needed:
        raise ConfigError(f"{flag}: needs a value")
    values: list[Any] = []
    for text in texts:
        try:
            none = argument.optional and text == "None"
            values.append(None if none else argument.expanded(argument.type(text)))
        except ValueError:
            must = f"must be {'an integer' if argument.type is int else 'a number'}"
            if issubclass(argument.type, enum.Enum):
                choices = [str(member.value) for member in argument.type]
                must = f"must be one of {', '.join(choices)}{nearest(text, choices)}"
            raise ConfigError(f"{flag}: {must}, not {text!r}") from None
    return tuple(values) if argument.several else values[0]


def _build(
    kind: type[T],
    values: dict[tuple[str, ...], Any],
    default: Any = None,
    path: tuple[str, ...] = (),
) -> T:
    """Return the dataclass at ``path`` with ``values`` by the path of their field, over ``default``
    if there is one.

    Every nested dataclass is made anew, so that its own checks run.
    """
    own: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        section, inner = field.default_factory, (*path, field.name)
        if isinstance(section, type) and dataclasses.is_dataclass(section):
            below = default and getattr(default, field.name)
            own[field.name] = _build(section, values, below, inner)
        elif inner in values:
            own[field.name] = values[inner]
    return kind(**own) if default is None else dataclasses.replace(default, **own)


def assignments(flag: str, pairs: Sequence[str], *, text: bool = False) -> dict[str, Any]:
    """Return ``name=value`` pairs by name; a value that is JSON is read so unless ``text``."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, values[name] = pair.partition("=")
        if not equals:
            raise ConfigError(f"{flag} {pair}: must be name=value")
        if not text:
            with contextlib.suppress(ValueError):
                values[name] = json.loads(values[name])
    return values


@cache
def docstrings(kind: type) -> dict[str, str]:
    """Return the text under each field of a dataclass and of its bases, on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    bases = filter(dataclasses.is_dataclass, kind.__bases__)
    texts = dict(chain.from_iterable(docstrings(base).items() for base in bases))
    for field, text in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts


# Suggestions


def _unknown_options(command: str, flags: Sequence[str], known: Sequence[Argument]) -> ConfigError:
    """Return the error that names every unknown flag, each with a suggestion."""
    typed = [argument for argument in known if argument.flags]
    names = [f"{flag}{did_you_mean(flag[2:], typed, flags=True)}" for flag in flags]
    return ConfigError(
        f"unknown option{'s' if len(names) > 1 else ''} {', '.join(names)}; "
        f"jax-transformer {command} --help lists them"
    )


def did_you_mean(name: str, known: Sequence[Argument], *, flags: bool = False) -> str:
    """Return `` (did you mean 'steps'?)`` for what ``name`` most probably means, or nothing.

    A section before the last dot of ``name`` is only looked at last.
    """
    name = name.replace("-", "_")
    word = name.rpartition(".")[2]
    by_word: dict[str, Argument] = {}
    for each in known:
        by_word.setdefault(each.name.rpartition(".")[2], each)
    others = {synonym: each for each in known for synonym in each.option.synonyms.split()}
    by_name = {each.name: each for each in known}
    meant = by_word.get(word) or others.get(word)
    meant = meant or by_name.get(_close(name, by_name)) or by_word.get(_close(word, by_word))
    if meant is None:
        return ""
    return f" (did you mean {meant.flags[0] if flags else meant.name!r}?)"


def _close(name: str, known: Iterable[str]) -> str:
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.66)), "")
