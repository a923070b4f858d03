"""Entry points of installed packages, and of this package's own extras."""

import functools
import importlib.metadata
import os
import sys
from typing import Any

from jax_transformer.errors import ConfigError


def of(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of a group by name, of the packages that are installed now."""
    folders = [path or "." for path in sys.path if os.path.isdir(path or ".")]
    return _of(group, tuple((path, os.stat(path).st_mtime_ns) for path in folders))


@functools.lru_cache(maxsize=8)
def _of(
    group: str, folders: tuple[tuple[str, int], ...]
) -> dict[str, importlib.metadata.EntryPoint]:
    """Reading the metadata of every installed package takes 6 ms; it is read again if one of the
    folders has changed.
    """
    return {point.name: point for point in sorted(importlib.metadata.entry_points(group=group))}


def load(entry_point: importlib.metadata.EntryPoint, kind: type = object) -> Any:
    """Return the value of an entry point. Raises ConfigError unless it is there and a ``kind``."""
    where = f"entry point {entry_point.name} = {entry_point.value}"
    try:
        value = entry_point.load()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{where}: {text}") from error
    if not isinstance(value, kind):
        raise ConfigError(f"{where}: is a {type(value).__name__}, not a {kind.__name__}")
    return value
