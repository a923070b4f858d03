"""Checkpoints: ``checkpoints/STEP`` holds an Orbax tree and ``manifest.json``, the SHA-256 of every file in it.

A checkpoint appears under its name by a rename, whole or not at all. This is the one file that speaks to Orbax.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jax_transformer.errors import CheckpointError

Tree = TypeVar("Tree")
_MANIFEST = "manifest.json"
_OWN_HASH = "manifest_sha256"
_WRITING = ".writing-"


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    return sorted(
        int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()
    )


def save(folder: Path, step: int, tree: Any, *, about: dict[str, Any]) -> Path:
    """Write ``folder/step``: arrays from ``tree``, ``about`` into its manifest. Raises CheckpointError where the disk does not take it.

    Nothing that was there before is touched until the new one is whole and on the disk.
    """
    from orbax.checkpoint import v1 as ocp

    folder = folder.absolute()  # Orbax takes no other
    final, temporary, replaced = (
        folder / str(step),
        folder / f"{_WRITING}{step}",
        folder / f"{_WRITING}{step}.replaced",
    )
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    try:
        with _said_once():
            ocp.save(temporary, tree)
        hashes = {name: _sha256(path) for name, path in _files(temporary)}
        (temporary / _MANIFEST).write_text(
            _manifest_text({"step": step, **about, "sha256": hashes})
        )
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
    except Exception as error:  # a full disk reaches us from Orbax in many forms
        remove_unfinished(folder)
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise CheckpointError(
            f"{final}: could not be written ({reason[:300]}); the checkpoints that were there are untouched"
        ) from error
    if final.exists():
        os.rename(final, replaced)
    os.rename(temporary, final)
    for path in (folder, folder.parent, folder.parent.parent):
        sync(path)
    remove_unfinished(folder)
    return final


@contextmanager
def _said_once() -> Iterator[None]:
    """Orbax logs a failure with its traceback and raises it as well, and its threads fail after it: it is said once, by us.

    After a failure the logs stay silent, and so do exceptions in Orbax's own threads and coroutines: these come long after that.
    """
    logs = [logging.getLogger(name) for name in ("absl", "asyncio", "concurrent.futures")]
    disabled, hooks = [log.disabled for log in logs], (threading.excepthook, sys.unraisablehook)
    for log in logs:
        log.disabled = True
    threading.excepthook, sys.unraisablehook = (_but_orbax(hook) for hook in hooks)
    yield
    for log, before in zip(logs, disabled, strict=True):
        log.disabled = before
    threading.excepthook, sys.unraisablehook = hooks


def _but_orbax(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The hook for all exceptions but those that passed through Orbax, or through the event loops that it runs."""

    def filtered(unhandled: Any) -> None:
        files = [frame.filename for frame in traceback.extract_tb(unhandled.exc_traceback)]
        if not any(
            f"{os.sep}{package}{os.sep}" in file
            for file in files
            for package in ("orbax", "asyncio")
        ):
            hook(unhandled)

    return filtered


def remove_unfinished(folder: Path) -> None:
    """Remove what an interrupted or failed save left behind; a checkpoint that was being replaced is put back."""
    for stale in sorted(folder.glob(f"{_WRITING}*"), reverse=True):
        name = stale.name.removeprefix(_WRITING).removesuffix(".replaced")
        if stale.suffix == ".replaced" and not (folder / name).exists():
            os.rename(stale, folder / name)
        else:
            shutil.rmtree(stale)


def prune(folder: Path, keep: Iterable[int]) -> None:
    """Remove the checkpoints of all other steps. One that is being removed has lost its name: what is interrupted here leaves no half of one."""
    for step in set(steps(folder)) - set(keep):
        going = folder / f"{_WRITING}{step}"
        os.rename(folder / str(step), going)
        shutil.rmtree(going)


def newest_intact(folder: Path) -> tuple[int | None, list[CheckpointError]]:
    """The newest step whose files are those of its manifest, and what is wrong with the newer ones.

    Raises CheckpointError naming the newest where there are checkpoints and none is intact.
    """
    damage: list[CheckpointError] = []
    for step in reversed(steps(folder)):
        try:
            verify(folder, step)
            return step, damage
        except CheckpointError as error:
            damage.append(error)
    if damage:
        others = (
            f"; nor is any of the {len(damage) - 1} before it intact" if len(damage) > 1 else ""
        )
        raise CheckpointError(f"{damage[0]}{others}")
    return None, []


def quarantine(folder: Path, step: int) -> Path:
    """Rename a damaged checkpoint so that it is none any more, and lose nothing."""
    aside = folder / f"damaged-{step}"
    for number in itertools.count(2):
        if not aside.exists():
            break
        aside = folder / f"damaged-{step}.{number}"
    os.rename(folder / str(step), aside)
    return aside


def load(folder: Path, step: int, like: Tree, *, partial: bool = False) -> Tree:
    """The tree saved at ``step``, with the structure, shapes and dtypes of ``like``, which may name a part of it where ``partial``.

    Raises CheckpointError where the checkpoint is damaged or of another model.
    """
    import jax
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


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by its path in the tree, as NumPy's: bit for bit, whatever JAX's mode. Raises CheckpointError."""
    import jax
    from orbax.checkpoint import v1 as ocp

    verify(folder, step)
    path = folder.absolute() / str(step)
    like = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), ocp.metadata(path).metadata)
    return {name: np.asarray(leaf) for name, leaf in _leaves(ocp.load(path, like))}


def described(folder: Path, step: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array of a checkpoint, by its path in the tree; loads none. Raises CheckpointError where it is damaged."""
    from orbax.checkpoint import v1 as ocp

    verify(folder, step)
    return _described(ocp.metadata(folder.absolute() / str(step)).metadata)


def manifest(folder: Path, step: int) -> dict[str, Any]:
    """What :func:`save` was told ``about`` the checkpoint, with its step and hashes. Raises CheckpointError where a byte of it changed."""
    path = folder / str(step) / _MANIFEST
    try:
        text = path.read_text()
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("sha256"), dict):
        raise CheckpointError(f"{path}: not a manifest: it names no hashes")
    content.pop(_OWN_HASH, None)
    if text != _manifest_text(content):
        raise CheckpointError(f"{path}: damaged (its SHA-256 is not what it says itself)")
    if content.get("step") != step:
        raise CheckpointError(f"{path}: is of step {content.get('step')}, not {step}")
    return content


def _manifest_text(content: dict[str, Any]) -> str:
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, _OWN_HASH: own}, indent=2) + "\n"


def verify(folder: Path, step: int) -> None:
    """Raises CheckpointError naming the first file that is missing, changed or too many."""
    path = folder / str(step)
    expected = manifest(folder, step)["sha256"]
    found = {name for name, _ in _files(path)}
    for name in sorted(expected.keys() | found):
        if name not in found:
            raise CheckpointError(f"{path / name}: missing, so this checkpoint is not whole")
        if name not in expected:
            raise CheckpointError(
                f"{path / name}: not in the manifest, so this checkpoint was changed"
            )
        if _sha256(path / name) != expected[name]:
            raise CheckpointError(f"{path / name}: damaged (its SHA-256 is not the manifest's)")


def _described(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in _leaves(tree)}


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    import jax

    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _files(folder: Path) -> list[tuple[str, Path]]:
    return sorted(
        (str(path.relative_to(folder)), path)
        for path in folder.rglob("*")
        if path.is_file() and path.name != _MANIFEST
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have a file or folder on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
