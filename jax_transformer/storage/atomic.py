"""What all readers and writers of files share: a file is there and readable, is written whole or not at all, and its words are shown safely."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError


def check_readable(path: Path) -> None:
    """Raises InputError where there is no file that can be read."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not path.is_file():
        raise InputError(f"{path}: not a file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: cannot be read: permission denied")


def shown(found: Any, most: int = 80) -> str:
    """Something found in a file as one line of printable ASCII, cut where it is long."""
    text = ascii(found[: most + 1] if isinstance(found, str | bytes) else found)
    return text if len(text) <= most else f"{text[:most]}..."


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path``; what was written there is synced and gets its name at the end, or is deleted where anything failed.

    Whoever wrote it, its mode is that which the umask gives a new file: safetensors' writer leaves files that their owner alone can read.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        with open(temporary, "rb") as file:
            os.fchmod(file.fileno(), mode & 0o777)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
