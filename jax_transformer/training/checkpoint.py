"""Checkpoints: ``checkpoints/STEP`` holds an Orbax tree and ``manifest.json``, the SHA-256 of every file in it.

A checkpoint appears under its name by a rename, whole or not at all. This is the one file that speaks to Orbax.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, TypeVar

import jax

from jax_transformer.errors import CheckpointError

Tree = TypeVar("Tree")
_MANIFEST = "manifest.json"
_WRITING = ".writing-"


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir())


def save(folder: Path, step: int, tree: Any, *, keep: int, about: dict[str, Any]) -> Path:
    """Write ``folder/step`` (arrays from ``tree``, ``about`` into its manifest), then remove all but the last ``keep`` checkpoints."""
    from orbax.checkpoint import v1 as ocp

    folder = folder.absolute()  # Orbax takes no other
    final, temporary = folder / str(step), folder / f"{_WRITING}{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(stale)
    ocp.save(temporary, tree)
    manifest = {"step": step, **about, "sha256": {name: _sha256(path) for name, path in _files(temporary)}}
    (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(temporary, final)
    _sync(folder)
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / str(old))
    return final


def load(folder: Path, step: int, like: Tree, *, partial: bool = False) -> Tree:
    """The tree saved at ``step``, with the structure, shapes and dtypes of ``like``, which may name a part of it where ``partial``.

    Raises CheckpointError where the checkpoint is damaged or of another model.
    """
    from orbax.checkpoint import v1 as ocp

    path = folder.absolute() / str(step)
    saved, wanted = described(folder, step), _described(like)
    names = wanted.keys() if partial else saved.keys() | wanted.keys()
    odd = sorted(name for name in names if saved.get(name) != wanted.get(name))
    if odd:
        name = odd[0]
        raise CheckpointError(
            f"{path}: {len(odd)} arrays do not fit the model, first {name}: {saved.get(name)}, expected {wanted.get(name)}"
        )
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), like)
    context = ocp.Context()
    context.pytree.loading.partial_load = partial
    with context:
        return ocp.load(path, abstract)


def described(folder: Path, step: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array of a checkpoint, by its path in the tree; loads none. Raises CheckpointError where it is damaged."""
    from orbax.checkpoint import v1 as ocp

    path = folder.absolute() / str(step)
    _check(path)
    return _described(ocp.metadata(path).metadata)


def manifest(folder: Path, step: int) -> dict[str, Any]:
    """What :func:`save` was told ``about`` the checkpoint, with its step and hashes."""
    path = folder / str(step) / _MANIFEST
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("sha256"), dict):
        raise CheckpointError(f"{path}: not a manifest: it names no hashes")
    return content


def _check(path: Path) -> None:
    expected = manifest(path.parent, int(path.name))["sha256"]
    found = {name for name, _ in _files(path)}
    for name in sorted(expected.keys() | found):
        if name not in found:
            raise CheckpointError(f"{path / name}: missing, so this checkpoint is not whole")
        if name not in expected:
            raise CheckpointError(f"{path / name}: not in the manifest, so this checkpoint was changed")
        if _sha256(path / name) != expected[name]:
            raise CheckpointError(f"{path / name}: damaged (its SHA-256 is not the manifest's)")


def _described(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves}


def _files(folder: Path) -> list[tuple[str, Path]]:
    return sorted((str(path.relative_to(folder)), path) for path in folder.rglob("*") if path.is_file() and path.name != _MANIFEST)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
