"""A command line to an options dataclass, by argparse: flags, help, and refusals in one line.

argparse rather than a library for dataclasses: the placeholders, groups and examples of help and
the words of errors are then ours, and there is one dependency less.
"""

import argparse
import enum
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeVar

from jax_transformer.cli import options
from jax_transformer.cli.options import Command, Option
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
    values = vars(build_parser(command, known, {}, ()).parse_intermixed_args(dashed))
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
    return build_parser(name, known, command.groups, command.examples, description).format_help()


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


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError in words of ours instead of printing usage and exiting."""

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


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """One line for an option if its text is short: ``--flag METAVAR   text (default: value)``."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 100)
        super().__init__(prog, max_help_position=37, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        option = getattr(action, "option", None)
        if option is None:
            return super()._format_action_invocation(action)
        if option.positional:
            return option.metavar
        if option.type is bool:
            return option.flag.replace("--", "--[no-]") if option.default is True else option.flag
        return f"{option.flag} {option.metavar}{' ...' if option.several else ''}"


def build_parser(
    command: str,
    known: Sequence[Option],
    groups: Mapping[str, str],
    examples: Sequence[str],
    description: str | None = None,
) -> _Parser:
    """Return a parser that stores only the options that are given."""
    built = _Parser(
        prog=f"jax-transformer {command}",
        usage=" ".join(["%(prog)s", *_usage(known), "[options]"]),
        description=description,
        epilog="\n".join(["examples:", *(f"  jax-transformer {each}" for each in examples)]),
        formatter_class=_Formatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    rest = {option.name: option for option in known}
    for title, names in {**groups, "other options" if groups else "options": "*"}.items():
        members = [
            rest.pop(name)
            for pattern in names.split()
            for name in list(rest)
            if fnmatchcase(name, pattern)
        ]
        if members:
            section = built.add_argument_group(title)
            for option in members:
                _add(section, option)
    return built


def _usage(known: Sequence[Option]) -> Iterator[str]:
    """Yield the arguments without a flag, and the options that are required."""
    for option in known:
        if option.positional:
            yield option.metavar if option.default is MISSING else f"[{option.metavar}]"
        elif option.default is MISSING:
            yield f"{option.flag} {option.metavar}"


def _add(section: "argparse._ArgumentGroup", option: Option) -> None:
    default = _shown(option.default)
    text = option.text.removesuffix(".")
    if default is not None and "default: " not in text:
        note = f"default: {default})"
        text = f"{text[:-1]}; {note}" if text.endswith(")") else f"{text} ({note}"
    settings: dict[str, Any] = {"help": text.replace("%", "%%")}
    if option.type is bool:
        settings |= {"action": _Switch, "nargs": 0}
    else:
        settings |= {"type": _converter(option), "metavar": option.metavar}
    if option.several:
        settings["nargs"] = "*"
    if option.positional:
        settings |= {} if option.default is MISSING else {"nargs": "?"}
        action = section.add_argument(option.name, **settings)
    else:
        settings |= {"dest": option.name, "required": option.default is MISSING}
        action = section.add_argument(*option.flags, **settings)
    action.option = option  # type: ignore[attr-defined]


def _shown(default: Any) -> str | None:
    """Return a default as it would be typed, or None for one that says nothing."""
    if default is MISSING or default is None or default is False or default is True:
        return None
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or None
    return str(default.value if isinstance(default, enum.Enum) else default) or None


def _converter(option: Option) -> Callable[[str], Any]:
    """Return the function from the text of a value to the value."""

    def convert(text: str) -> Any:
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

    return convert
