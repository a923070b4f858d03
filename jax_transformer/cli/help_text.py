"""The help of a command: options in groups, each with placeholder, meaning and default."""

import enum
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING
from fnmatch import fnmatchcase

from jax_transformer.cli import arguments
from jax_transformer.cli.arguments import Argument, Command

_COLUMN = 37
"""Column of the texts, at most."""


def help_text(name: str, command: Command, words: Sequence[str]) -> str:
    """Return the help of a command, with the defaults of ``--config FILE`` if it is given.

    ``words`` are those after the command; rare options are explained with ``--help-all``.
    """
    default = None
    uses = arguments.split(list(arguments.listed(command.kind)), words)[0].get("config", [])
    if uses and uses[-1][1] and hasattr(command.kind, "from_file"):
        default = command.kind.from_file(uses[-1][1][0])
    known = list(arguments.listed(command.kind, default))
    rare = [] if "--help-all" in words else [each for each in known if is_rare(each)]
    groups: dict[str, list[Argument]] = {}
    for argument in known:
        if argument not in rare:
            groups.setdefault(argument.group or "options", []).append(argument)
    usage = f"usage: jax-transformer {name} {' '.join([*_required(known), '[options]'])}"
    lines = [usage, "", summary(command), ""]
    longest = max(len(_invocation(each)) for group in groups.values() for each in group)
    column, width = min(longest + 4, _COLUMN), min(shutil.get_terminal_size().columns, 100)
    for title, members in groups.items():
        lines.append(f"{title}:")
        for argument in members:
            invocation = f"  {_invocation(argument)}"
            fits = len(invocation) <= column - 2
            texts = textwrap.wrap(_text(argument), width - column)
            start = invocation.ljust(column) if fits else f"{invocation}\n{' ' * column}"
            lines.append(start + f"\n{' ' * column}".join(texts))
        lines.append("")
    if rare:
        names = " ".join(arguments.flag(argument.name) for argument in rare)
        lines.append("more options (--help-all explains them):")
        more = textwrap.wrap(names, width - 2, break_on_hyphens=False)
        lines += [*(f"  {line}" for line in more), ""]
    examples = [f"  jax-transformer {each}" for each in command.examples]
    return "\n".join([*lines, "examples:", *examples]) + "\n"


def summary(command: Command) -> str:
    return (command.kind.__doc__ or "").partition("\n")[0]


def metavar(argument: Argument) -> str:
    """Return the placeholder of an option's value, or its choices; empty for a boolean."""
    if argument.option.positional:
        return argument.name.upper()
    if argument.type is bool:
        return ""
    if issubclass(argument.type, enum.Enum):
        return "{" + ",".join(str(member.value) for member in argument.type) + "}"
    return {int: "N", float: "FLOAT"}.get(argument.type) or argument.option.metavar or "TEXT"


def is_rare(argument: Argument) -> bool:
    """Return True if only ``--help-all`` explains the option."""
    rare = argument.option.rare
    patterns = rare.split() if isinstance(rare, str) else ["*"] * rare
    return any(fnmatchcase(argument.name, pattern) for pattern in patterns)


def _required(known: Sequence[Argument]) -> list[str]:
    """Return the arguments without a flag, and the options that are required."""
    words = []
    for argument in known:
        if argument.default is MISSING:
            words.append(_invocation(argument))
        elif argument.option.positional:
            words.append(f"[{metavar(argument)}]")
    return words


def _invocation(argument: Argument) -> str:
    """Return the flag of an option as it is typed, with the placeholder of its value."""
    if argument.option.positional:
        return metavar(argument)
    flag = argument.flags[0]
    if argument.type is bool:
        return flag.replace("--", "--[no-]") if argument.default is True else flag
    return f"{flag} {metavar(argument)}{' ...' if argument.several else ''}"


def _text(argument: Argument) -> str:
    """Return the meaning of an option with its default."""
    text, default = argument.text.removesuffix("."), argument.default
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    says_nothing = default is MISSING or default is None or isinstance(default, bool)
    if says_nothing or not str(default) or "default: " in text:
        return text
    note = f"default: {default})"
    return f"{text[:-1]}; {note}" if text.endswith(")") else f"{text} ({note}"
