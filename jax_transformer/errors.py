"""Errors that the package raises on purpose, each with its exit code on the command line.

A message is one line that names the file and line, or the key, and says what to do. The classes
also derive from the built-in error that a user of the library would expect to catch.
"""

import contextlib
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

LONGEST_MESSAGE = 2000


class Refusal(Exception):
    """Base of all errors raised on purpose.

    Its message may quote a file of unknown origin: as text it is printable, on one line and of at
    most 2,000 characters.
    """

    exit_code = 1
    """Exit code of the command line."""
    details: tuple[str, ...] = ()
    """Everything that is wrong, if the message has only the beginning of a long list."""

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > LONGEST_MESSAGE:
            text = f"{text[: LONGEST_MESSAGE - 3]}..."
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)[:LONGEST_MESSAGE]


class DifferentError(Refusal):
    """Two models or files that should be equal are not (exit code 1)."""


class ConfigError(Refusal, ValueError):
    """A configuration, option or call that is wrong (exit code 2)."""

    exit_code = 2


class InputError(Refusal, ValueError):
    """A file with unusable content, or ids and weights that do not fit the model (exit code 3)."""

    exit_code = 3


class UnsafeFileError(Refusal, ValueError):
    """A file that asks for code to run, or for more memory than its size allows (exit code 4)."""

    exit_code = 4


class CheckpointError(Refusal, RuntimeError):
    """A checkpoint that is missing, damaged or belongs to another model (exit code 5)."""

    exit_code = 5


class NonFiniteLossError(Refusal, ArithmeticError):
    """A training loss that became NaN or infinite (exit code 6)."""

    exit_code = 6


class LockedError(Refusal):
    """A run folder or corpus that another process writes (exit code 7)."""

    exit_code = 7


class Preempted(Refusal):
    """Training stopped on request and saved its state; run it again to continue (exit code 75)."""

    exit_code = 75


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 line``, ``2,000 lines``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class LostProcessError(Refusal):
    """Another process of a distributed run has died (exit code 8)."""

    exit_code = 8


class ReportedError(Refusal):
    """Another process of a distributed run has failed, and reports it: this one ends silently."""

    def __init__(self, exit_code: int):
        super().__init__(f"another process has failed with exit code {exit_code}")
        self.exit_code = exit_code


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True for an error of Python, NumPy or JAX that says that memory ran out."""
    of_jax = isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return of_jax or isinstance(error, MemoryError)


@contextlib.contextmanager
def about_file(path: object) -> Iterator[None]:
    """Put the file's name before a ConfigError or an InputError, which becomes an InputError."""
    try:
        yield
    except (ConfigError, InputError) as error:
        named = InputError(f"{path}: {error}")
        named.details = error.details
        raise named from None


def check_numbers(
    owner: object, section: str, names: str, must: str, holds: Callable[[Any], bool]
) -> None:
    """Raise ConfigError, ``section`` and ``must`` in its message, for the first of the attributes
    ``names`` that is neither None nor a number for which ``holds`` returns True.
    """
    for name in names.split():
        value = attrgetter(name)(owner)
        if value is not None and not holds(value):
            raise ConfigError(f"{section}{name}={value} must {must}")


def nearest(name: str, known: "list[str]") -> str:
    """Return `` (did you mean 'd_model'?)``, or nothing if no known name is similar."""
    import difflib

    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
