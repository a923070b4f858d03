"""``manifest.json`` of a checkpoint: the SHA-256 of every file in it, its step, and the
facts that were recorded about it.

The manifest ends with a hash of itself, so that every changed byte of a checkpoint is detected.
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
"""Device, inode, size and time of change of every file: equal if no file was written in between.
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
    """Verify every file against the manifest. Returns its content and the files' identity.

    Raises CheckpointError naming the first file that is missing, changed or not in the manifest.
    """
    content = read(folder, step)
    expected, existing, before = content["sha256"], dict(_files(folder)), identity(folder)
    for name in sorted(expected.keys() | existing.keys()):
        path = folder / name
        if name not in existing:
            raise CheckpointError(f"{path}: missing, so this checkpoint is incomplete")
        if name not in expected:
            raise CheckpointError(f"{path}: not in the manifest, so this checkpoint was changed")
        if sha256(path) != expected[name]:
            raise CheckpointError(f"{path}: damaged (its SHA-256 is not the manifest's)")
    return content, before


def identity(folder: Path) -> Identity:
    """The identity of every file in ``folder``, by its name there."""
    return {
        name: (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
        for name, path in _files(folder)
        for status in (os.stat(path),)
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
