"""``jax-transformer completion``: the completion of commands and options in a shell."""

import argparse
import enum
from dataclasses import dataclass
from typing import Any

from jax_transformer.cli import COMMANDS, arguments, help_text
from jax_transformer.cli.arguments import Command
from jax_transformer.config.option import Positional
from jax_transformer.errors import ConfigError, nearest

_SHELLS = ["bash", "zsh", "fish"]


@dataclass(frozen=True)
class CompletionOptions:
    """Print the script that completes commands, options and paths in a shell."""

    shell: Positional[str]
    """bash, zsh or fish."""


def run(options: CompletionOptions) -> int:
    """Print the script of a shell and return the exit code."""
    if options.shell not in _SHELLS:
        raise ConfigError(
            f"completion {options.shell}: must be one of {', '.join(_SHELLS)}"
            f"{nearest(options.shell, _SHELLS)}"
        )
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError("completion needs shtab: pip install shtab") from None
    print(shtab.complete(_parser(shtab.FILE), shell=options.shell))
    return 0


def _parser(file: Any) -> argparse.ArgumentParser:
    """Return a parser of all commands; ``file`` marks options that are paths."""
    root = argparse.ArgumentParser("jax-transformer")
    root.add_argument("--version", action="store_true", help="Print the version")
    parsers = root.add_subparsers()
    for name, command in COMMANDS.loadable():
        summary = help_text.summary(command)
        parser = parsers.add_parser(name, help=summary, description=summary)
        for argument in arguments.listed(command.kind):
            settings: dict[str, Any] = {"help": argument.text.replace("%", "%%")}
            if argument.type is bool:
                settings["action"] = "store_true"
            elif issubclass(argument.type, enum.Enum):
                settings["choices"] = [str(member.value) for member in argument.type]
            if argument.option.repeatable:
                settings["action"] = "append"
            elif argument.several:
                settings["nargs"] = "*"
            action = parser.add_argument(*argument.flags or [argument.name], **settings)
            if help_text.metavar(argument) == "PATH" or argument.option.positional:
                action.complete = file  # type: ignore[attr-defined]
    text = "List the commands, or the options of one."
    parsers.add_parser("help", help=text).add_argument("command", choices=[*COMMANDS])
    return root


COMMAND = Command(
    CompletionOptions,
    run,
    examples=(
        "completion bash > ~/.local/share/bash-completion/completions/jax-transformer",
        "completion zsh > ~/.zfunc/_jax-transformer",
        "completion fish > ~/.config/fish/completions/jax-transformer.fish",
    ),
)
