"""Paths and names of untrusted files: checked before they are used, and shown safely in error
messages.
"""

import os
from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError


def check_readable(path: Path) -> None:
    """Raise InputError unless ``path`` is a file that can be read."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not path.is_file():
        raise InputError(f"{path}: not a file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: cannot be read: permission denied")


def shown(value: Any, longest: int = 80) -> str:
    """A value from a file as one line of printable ASCII, cut after ``longest`` characters."""
    text = ascii(value[: longest + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= longest else f"{text[:longest]}..."


def plain(name: str) -> str:
    """A name from a file, unchanged if it can be printed on one line, otherwise escaped."""
    return name if name.isprintable() else ascii(name)
