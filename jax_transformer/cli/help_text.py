"""The help of a command: options in groups, each with placeholder, meaning and default."""

import argparse
import enum
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from fnmatch import fnmatchcase
from typing import Any

from jax_transformer.cli import arguments
from jax_transformer.cli.arguments import Command, Option, Parser

METAVARS = {
    "N": "top_k",
    "NAME": "preset model.preset model.tying model.norm_placement data.dataset_config wandb",
    "PATH": """run ensemble config init input output attention html source target hypotheses
        pairs comet reference batch python compilation_cache data.train data.valid data.tokenizer
        data.target_tokenizer data.train_source data.train_target data.valid_source
        data.valid_target data.dataset""",
    "TAG": "source_lang target_lang data.source_lang data.target_lang",
    "SPLIT": "data.train_split data.valid_split",
    "FIELD": "source_field target_field data.source_field data.target_field",
    "WHICH": "weights",
    "KIND": "to",
    "DTYPE": "dtype quantization",
    "NAME=VALUE": "set",
    "KEY": "key",
    "PATTERN": "freeze lora.targets ignore",
    "PREFIX": "strip_prefix",
    "OLD=NEW": "rename",
    "SIZE": "shard_size",
    "FILE.py:NAME": "architecture",
    "HOST": "host allowed_hosts",
    "HOST:PORT": "distributed.coordinator_address",
    "N,N,...": "lengths",
    "KIND:SIZE": "topology",
}
"""The placeholders of text values in help, each with the dotted names of its options."""
_METAVAR = {name: metavar for metavar, names in METAVARS.items() for name in names.split()}


def help_text(name: str, command: Command, words: Sequence[str]) -> str:
    """Return the help of a command, with the defaults of ``--config FILE`` if it is given.

    ``words`` are those after the command; rare options are explained with ``--help-all``.
    """
    default, _ = arguments.from_file(command.kind, words)
    known = list(arguments.listed(command.kind, default))
    patterns = [] if "--help-all" in words else command.rare.split()
    rare = [x for x in known if any(fnmatchcase(x.name, pattern) for pattern in patterns)]
    parser = Parser(
        name,
        usage=" ".join(["%(prog)s", *_usage(known), "[options]"]),
        description=(command.kind.__doc__ or "").partition("\n")[0],
        epilog="\n".join(
            ["examples:", *(f"  jax-transformer {each}" for each in command.examples)]
        ),
        formatter_class=_Formatter,
    )
    for title, options in _grouped([x for x in known if x not in rare], command.groups):
        group = parser.add_argument_group(title)
        for option in options:
            added = arguments.add(group, option, help=_text(option).replace("%", "%%"))
            added.option = option  # type: ignore[attr-defined]
    if rare:
        names = " ".join(arguments.flag(option.name) for option in rare)
        more = textwrap.fill(names, _width() - 2, break_on_hyphens=False)
        parser.add_argument_group("more options (--help-all explains them)", more)
    return parser.format_help()


def metavar(option: Option) -> str:
    """Return the placeholder of an option's value, or its choices; empty for a boolean."""
    if option.positional:
        return option.name.upper()
    if option.type is bool:
        return ""
    if issubclass(option.type, enum.Enum):
        return "{" + ",".join(str(member.value) for member in option.type) + "}"
    return {int: "N", float: "FLOAT"}.get(option.type) or _METAVAR.get(option.name, "TEXT")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """One line for an option if its text is short: ``--flag METAVAR   text (default: value)``."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=37, width=_width())

    def _format_action_invocation(self, action: argparse.Action) -> str:
        option = getattr(action, "option", None)
        if option is None:
            return super()._format_action_invocation(action)
        if option.positional:
            return metavar(option)
        flag = arguments.flag(option.name)
        if option.type is bool:
            return flag.replace("--", "--[no-]") if option.default is True else flag
        return f"{flag} {metavar(option)}{' ...' if option.several else ''}"


def _width() -> int:
    """Return the number of columns of help."""
    return min(shutil.get_terminal_size().columns, 100)


def _grouped(
    known: Sequence[Option], groups: Mapping[str, str]
) -> Iterator[tuple[str, list[Option]]]:
    """Yield the title and options of each group that has any; an option is in one group only."""
    rest = {option.name: option for option in known}
    for title, names in {**groups, "other options" if groups else "options": "*"}.items():
        members = [
            rest.pop(name)
            for pattern in names.split()
            for name in list(rest)
            if fnmatchcase(name, pattern)
        ]
        if members:
            yield title, members


def _usage(known: Sequence[Option]) -> Iterator[str]:
    """Yield the arguments without a flag, and the options that are required."""
    for option in known:
        if option.positional:
            yield metavar(option) if option.default is MISSING else f"[{metavar(option)}]"
        elif option.default is MISSING:
            yield f"{arguments.flag(option.name)} {metavar(option)}"


def _text(option: Option) -> str:
    """Return the meaning of an option with its default."""
    text, default = option.text.removesuffix("."), _shown(option.default)
    if default is None or "default: " in text:
        return text
    note = f"default: {default})"
    return f"{text[:-1]}; {note}" if text.endswith(")") else f"{text} ({note}"


def _shown(default: Any) -> str | None:
    """Return a default as it would be typed, or None for one that says nothing."""
    if default is MISSING or default is None or default is False or default is True:
        return None
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or None
    return str(default.value if isinstance(default, enum.Enum) else default) or None
