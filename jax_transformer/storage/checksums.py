"""``SHA256SUMS``: the SHA-256 of the files of a folder, as ``sha256sum`` writes it and ``sha256sum
--check`` checks it.
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from jax_transformer.errors import InputError
from jax_transformer.storage import atomic
from jax_transformer.storage.untrusted import shown

NAME = "SHA256SUMS"
_LINE = r"([0-9a-f]{64})  (\S+)"

Sums = Mapping[str, Collection[str]]
"""The SHA-256 that a file may have, by its name: two while it is replaced."""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(folder: Path) -> dict[str, list[str]]:
    """Return the sums that a folder lists; empty if it has no such file. Raises InputError naming
    a line that is damaged.
    """
    path = folder / NAME
    try:
        text = path.read_bytes().decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    sums: dict[str, list[str]] = {}
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1] if not lines[-1] else lines, 1):
        match = re.fullmatch(_LINE, line)
        outside = match and (match[2].startswith("/") or ".." in PurePosixPath(match[2]).parts)
        if not match or number == len(lines) or outside:
            raise InputError(f"{path}: line {number} is damaged: {shown(line)}")
        sums.setdefault(match[2], []).append(match[1])
    return sums


def write(folder: Path, sums: Sums) -> None:
    """Write the sums of a folder, in their order."""
    lines = [f"{each}  {name}\n" for name in sums for each in sums[name]]
    atomic.write_text(folder / NAME, "".join(lines))


def changed(folder: Path, sums: Sums) -> Iterator[str]:
    """Name every file that is missing or that has none of the SHA-256 that are listed for it."""
    for name, listed in sums.items():
        path = folder / name
        if not path.is_file():
            yield f"{path}: missing, and {NAME} lists it"
        elif sha256(path) not in listed:
            yield f"{path}: damaged or edited (its SHA-256 is not the one in {NAME})"
