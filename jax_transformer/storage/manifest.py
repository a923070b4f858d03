"""``manifest.json`` of a checkpoint: the SHA-256 of every file in it, its step, and what was
recorded about it.

The manifest ends with a hash of itself, so that a changed byte anywhere in a checkpoint is noticed.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from jax_transformer.errors import CheckpointError

FILE = "manifest.json"
_OWN_HASH = "manifest_sha256"

Identity = dict[str, tuple[int, int, int, int]]
"""Device, inode, size and time of change of every file: equal if nobody wrote to them in between.
"""


def write(folder: Path, step: int, about: dict[str, Any]) -> None:
    """Write the manifest of all files in ``folder``, with ``about`` in it."""
    hashes = {name: sha256(path) for name, path in _files(folder)}
    (folder / FILE).write_text(_text({"step": step, **about, "sha256": hashes}))


def read(folder: Path, step: int) -> dict[str, Any]:
    """The manifest's content. Raises CheckpointError if a byte of it changed or it is of another
    step.
    """
    path = folder / FILE
    try:
        text = path.read_text()
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("sha256"), dict):
        raise CheckpointError(f"{path}: not a manifest: it names no hashes")
    content.pop(_OWN_HASH, None)
    if text != _text(content):
        raise CheckpointError(f"{path}: damaged (its SHA-256 is not the one that it ends with)")
    if content.get("step") != step:
        raise CheckpointError(f"{path}: is of step {content.get('step')}, not {step}")
    return content


def verify(folder: Path, step: int) -> tuple[dict[str, Any], Identity]:
    """The manifest's content, after every file was hashed once, and the identity of these files.

    Raises CheckpointError naming the first file that is missing, changed or not in the manifest.
    """
    content = read(folder, step)
    expected, there, before = content["sha256"], dict(_files(folder)), identity(folder)
    for name in sorted(expected.keys() | there.keys()):
        path = folder / name
        if name not in there:
            raise CheckpointError(f"{path}: missing, so this checkpoint is incomplete")
        if name not in expected:
            raise CheckpointError(f"{path}: not in the manifest, so this checkpoint was changed")
        if sha256(path) != expected[name]:
            raise CheckpointError(f"{path}: damaged (its SHA-256 is not the manifest's)")
    return content, before


def identity(folder: Path) -> Identity:
    """The identity of every file in ``folder``, by its name there."""
    return {
        name: (found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)
        for name, path in _files(folder)
        for found in (os.stat(path),)
    }


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text(content: dict[str, Any]) -> str:
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, _OWN_HASH: own}, indent=2) + "\n"


def _files(folder: Path) -> list[tuple[str, Path]]:
    return sorted(
        (str(path.relative_to(folder)), path)
        for path in folder.rglob("*")
        if path.is_file() and path.name != FILE
    )
