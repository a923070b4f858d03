"""Everything that the package refuses, each with the exit code that the command line gives it.

A message is one line that names the file and line, or the key, and says what to do. The classes also derive from the built-in error that a
library user would expect to catch.
"""


class Refusal(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the command line exits with."""

    exit_code = 1


class ConfigError(Refusal, ValueError):
    """A configuration, option or call that cannot be right (exit code 2)."""

    exit_code = 2


class InputError(Refusal, ValueError):
    """A file whose content cannot be used, or ids and weights that do not fit the model (exit code 3)."""

    exit_code = 3


class UnsafeFileError(Refusal, ValueError):
    """A file that asks for more than weights: code to run, or more memory than it holds (exit code 4)."""

    exit_code = 4


class CheckpointError(Refusal, RuntimeError):
    """A checkpoint that is missing, damaged or of another model (exit code 5)."""

    exit_code = 5


class NonFiniteLossError(Refusal, ArithmeticError):
    """The training loss became NaN or infinite (exit code 6)."""

    exit_code = 6


class LockedError(Refusal):
    """A run folder that another process is training in (exit code 7)."""

    exit_code = 7


class Preempted(Refusal):
    """Training was asked to stop and has saved its state; the same command continues it (exit code 75)."""

    exit_code = 75


def nearest(name: str, known: "list[str]") -> str:
    """`` (did you mean 'd_model'?)``, or nothing where no known name is near."""
    import difflib

    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""
