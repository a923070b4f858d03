"""Suggestions for an unknown option: by synonyms, by the part after the dot, by spelling."""

import difflib
from collections.abc import Iterable, Sequence

from jax_transformer.cli.arguments import Argument
from jax_transformer.errors import ConfigError


def unknown_options(command: str, flags: Sequence[str], known: Sequence[Argument]) -> ConfigError:
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
    others = {synonym: each for each in reversed(known) for synonym in each.option.synonyms.split()}
    by_name = {each.name: each for each in known}
    meant = by_word.get(word) or others.get(word)
    meant = meant or by_name.get(_close(name, by_name)) or by_word.get(_close(word, by_word))
    if meant is None:
        return ""
    return f" (did you mean {meant.flags[0] if flags else meant.name!r}?)"


def _close(name: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), "")
