"""Checkpoints: ``checkpoints/STEP`` holds a tree of arrays, written by Orbax, and a manifest: the
SHA-256 of every file in it and of itself, its step, and the facts that were recorded about it.

A checkpoint appears under its name complete or not at all. The groups of a training state are
``step``, ``params``, ``frozen``, ``opt_state`` and ``ema``. Orbax is used here and in
:mod:`.checkpoint_stream` only.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jax_transformer.errors import CheckpointError, Refusal
from jax_transformer.runtime import distributed
from jax_transformer.storage import atomic, checksums, orbax_arrays, run_files
from jax_transformer.storage.checksums import sha256
from jax_transformer.storage.tensors import TensorInfo

Tree = TypeVar("Tree")
Identity = dict[str, tuple[int, int, int, int]]
"""Device, inode, size and time of change of every file: equal if no file was written in between.
"""
MANIFEST = "manifest.json"
_OWN_HASH = "manifest_sha256"
_WRITING = ".writing-"
_FORMER_GROUPS = {"carried": "frozen", "moments": "opt_state"}
"""Groups' names in checkpoints of version 0.1, and their present names."""
_FORMER_MODULE = (".idle.", ".unused.")
"""A part of arrays' names in checkpoints of version 0.1, and its present name."""


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint: when it was opened, its files had the hashes of its manifest. Arrays
    are read on demand.
    """

    path: Path
    step: int
    about: Mapping[str, Any]
    """The manifest: the recorded facts, the step, and ``sha256`` of every file."""
    tensors: Mapping[str, TensorInfo]
    """Shape and dtype of every array by its path in the tree (``params/encoder.norm.scale``)."""
    _identity: Identity
    _stored: Mapping[str, Any]
    """The arrays by their path in the tree, see :mod:`.orbax_arrays`."""

    def load(self, like: Tree, *, partial: bool = False) -> Tree:
        """Read the saved tree, with the structure of ``like``; its shapes and dtypes must be the
        checkpoint's.

        An array is loaded with the sharding that it has in ``like``, each device its own part; to
        the first device if it has none.
        ``like`` may name a part of the tree if ``partial``. Raises CheckpointError if arrays are
        missing, unexpected or of another shape or dtype, or if a file changed after it was
        verified.
        """
        import jax

        expected = {
            name: TensorInfo(tuple(leaf.shape), str(leaf.dtype)) for name, leaf in _leaves(like)
        }
        names = expected.keys() if partial else self.tensors.keys() | expected.keys()
        odd = sorted(name for name in names if self.tensors.get(name) != expected.get(name))
        if odd:
            name = odd[0]
            theirs, ours = (
                f"{infos[name].dtype} {infos[name].shape}" if name in infos else "nothing"
                for infos in (self.tensors, expected)
            )
            raise CheckpointError(
                f"{self.path}: {len(odd)} arrays do not fit the model, "
                f"first {name}: the checkpoint has {theirs}, the model {ours}"
            )
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=getattr(x, "sharding", None) or device
            ),
            like,
        )
        return self._restore(abstract, partial=partial)

    def arrays(self, groups: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Read NumPy arrays by their path in the tree, bit for bit (also float64 in JAX's 32-bit
        mode): all of them, or those of some groups.
        """
        return self.selected(
            {name for name in self.tensors if groups is None or name.partition("/")[0] in groups}
        )

    def selected(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Read the arrays of these paths, as :meth:`arrays`."""
        loaded = orbax_arrays.read_arrays(
            {name: array for name, array in self._stored.items() if name in names}
        )
        self._check_unchanged()
        return loaded

    def _restore(self, like: Any, *, partial: bool) -> Any:
        """Read the stored tree, and make sure that no file was written to since it was verified."""
        from orbax.checkpoint import v1 as ocp

        on_disk = orbax_arrays.groups(self.path)
        former = {new: old for old, new in _FORMER_GROUPS.items() if old in on_disk}
        stored_like = like
        if former:
            groups = like._asdict() if hasattr(like, "_asdict") else like
            stored_like = {
                former.get(group, group): _renamed(tree, *_FORMER_MODULE[::-1])
                for group, tree in groups.items()
            }
        context = ocp.Context()
        context.pytree.loading.partial_load = partial
        with context:
            loaded = ocp.load(self.path, stored_like)
        self._check_unchanged()
        if not former:
            return loaded
        restored = {
            _FORMER_GROUPS.get(group, group): _renamed(tree, *_FORMER_MODULE)
            for group, tree in loaded.items()
        }
        return type(like)(**restored) if hasattr(like, "_asdict") else restored

    def _check_unchanged(self) -> None:
        if _identity_of(self.path) != self._identity:
            raise CheckpointError(f"{self.path}: was changed by another process; try again")


def open(folder: Path, step: int, *, verified: bool = False) -> Checkpoint:
    """Open the checkpoint of ``step``, verified against its manifest unless another process has
    ``verified`` it. Raises CheckpointError naming the file that is damaged, or InputError if it is
    SHA256SUMS of the run.
    """
    path = folder.resolve() / str(step)  # TensorStore takes neither a relative path nor `..`
    if verified:
        about, identity = read_manifest(folder, step), _identity_of(path)
    else:
        about, identity = verify(folder, step)
    stored, tensors = {}, {}
    for name, array in orbax_arrays.open_arrays(path).items():
        group, slash, rest = name.partition("/")
        name = _FORMER_GROUPS.get(group, group) + slash + rest.replace(*_FORMER_MODULE)
        stored[name], tensors[name] = array, TensorInfo(tuple(array.shape), array.dtype.name)
    return Checkpoint(path, step, about, tensors, identity, stored)


def load(folder: Path, step: int, like: Tree, *, partial: bool = False) -> Tree:
    """Return ``open(folder, step).load(like, partial=partial)``."""
    return open(folder, step).load(like, partial=partial)


def steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, ascending."""
    return sorted(
        int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()
    )


def save(folder: Path, step: int, tree: Any, *, about: dict[str, Any]) -> Path:
    """Write ``folder/step``: arrays from ``tree``, ``about`` into its manifest. Raises
    CheckpointError if the disk is full.

    An earlier checkpoint is not touched until the new one is complete and on the disk.
    """
    from orbax.checkpoint import v1 as ocp

    with new(folder, step, about=about) as temporary:
        ocp.save(temporary, tree)
    return folder.resolve() / str(step)


def begin(folder: Path, step: int, tree: Any, *, about: dict[str, Any]) -> Callable[[], Path]:
    """Copy ``tree`` to the host and begin to :func:`save` it.

    The returned function, which may be called in another thread, completes the checkpoint. The
    memory of ``tree`` can be reused before: a step that takes it over changes nothing in the copy.
    """
    from orbax.checkpoint import v1 as ocp

    with contextlib.ExitStack() as entered:
        temporary = entered.enter_context(new(folder, step, about=about))
        # In the caller's thread: with several processes Orbax begins with a collective operation,
        # and all processes have to start those in one order
        response = ocp.save_async(temporary, _host_copy(tree))
        writing = entered.pop_all()

    def complete() -> Path:
        with writing:
            response.result()
        return folder.resolve() / str(step)

    return complete


def _host_copy(tree: Any) -> Any:
    """Return a copy of every array in the memory of the host, divided as it is on the devices."""
    import jax

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return np.array(leaf)
        return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))

    return jax.block_until_ready(jax.tree.map(copy, tree))


@contextmanager
def new(folder: Path, step: int, *, about: dict[str, Any]) -> Iterator[Path]:
    """Yield the name of a folder that Orbax creates and fills. At the end it gets its manifest and
    becomes ``folder/step``, as for :func:`save`; after an error it is removed.

    All processes of a distributed run call this and then Orbax, which writes their shards; the
    first one does the rest, and the others wait for it.
    """
    folder = folder.resolve()
    path, temporary = folder / str(step), folder / f"{_WRITING}{step}"
    aside = temporary.with_name(f"{temporary.name}.replaced")
    if not distributed.first():
        distributed.barrier("save begins")
        with orbax_arrays.failures_reported_once():
            yield temporary
        distributed.barrier("save ends")
        return
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    try:
        with atomic.folder(path, temporary=temporary, aside=aside):
            distributed.barrier("save begins")
            with orbax_arrays.failures_reported_once():
                yield temporary
            _write_manifest(temporary, step, about)
        for parent in (folder.parent, folder.parent.parent):
            atomic.sync(parent)
        distributed.barrier("save ends")
    except Refusal:  # of what is being written
        remove_unfinished(folder)
        raise
    except Exception as error:  # a full disk reaches us from Orbax in many forms
        remove_unfinished(folder)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = (lines or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path}: could not be written ({reason[:300]}); earlier checkpoints are untouched"
        ) from error


def remove_unfinished(folder: Path) -> None:
    """Remove the files of an interrupted or failed save. A checkpoint that was being replaced gets
    its name back.
    """
    for stale in sorted(folder.glob(f"{_WRITING}*"), reverse=True):
        name = stale.name.removeprefix(_WRITING).removesuffix(".replaced")
        if stale.suffix == ".replaced" and not (folder / name).exists():
            os.rename(stale, folder / name)
        else:
            shutil.rmtree(stale)


def prune(folder: Path, keep: Iterable[int]) -> None:
    """Remove the checkpoints of all steps that are not in ``keep``. Each is renamed first, so
    that no incomplete one keeps its name.
    """
    for step in set(steps(folder)) - set(keep):
        nameless = folder / f"{_WRITING}{step}"
        os.rename(folder / str(step), nameless)
        shutil.rmtree(nameless)


def _renamed(tree: Any, old: str, new: str) -> Any:
    """Return a group's arrays with ``new`` for ``old`` in their names."""
    if not isinstance(tree, dict):
        return tree
    return {name.replace(old, new): leaf for name, leaf in tree.items()}


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    import jax

    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


# The manifest


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """Return the facts that :func:`save` recorded ``about`` a checkpoint, with its step and hashes.
    Only the manifest is read.

    Raises CheckpointError if a byte of the manifest changed, or it is of another step or run, and
    InputError if SHA256SUMS of the run, which tells this, is damaged.
    """
    path = folder / str(step) / MANIFEST
    try:
        text = path.read_text()
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("sha256"), dict):
        raise CheckpointError(f"{path}: not a manifest: it names no hashes")
    content.pop(_OWN_HASH, None)
    if text != _manifest_text(content):
        raise CheckpointError(f"{path}: damaged (its SHA-256 is not the one that it ends with)")
    if content.get("step") != step:
        raise CheckpointError(f"{path}: is of step {content.get('step')}, not {step}")
    if run_files.is_foreign(folder / str(step), content):
        raise CheckpointError(
            f"{path}: is of another run (its {run_files.DATA} is not the one in "
            f"{checksums.NAME}) or of another folder"
        )
    return content


def verify(folder: Path, step: int) -> tuple[dict[str, Any], Identity]:
    """Verify every file of a checkpoint against its manifest. Return the manifest and the files'
    identity.

    Raises CheckpointError naming the first file that is missing, changed or not in the manifest,
    and what :func:`read_manifest` raises.
    """
    content, path = read_manifest(folder, step), folder / str(step)
    before = _identity_of(path)
    for problem in _damage(path, content["sha256"]):
        raise CheckpointError(problem)
    return content, before


def problems(folder: Path, step: int) -> list[str]:
    """Name every file of a checkpoint that is missing, changed or not in the manifest; empty if it
    was removed meanwhile. Raises InputError as :func:`read_manifest`.
    """
    try:
        named = [*_damage(folder / str(step), read_manifest(folder, step)["sha256"])]
    except CheckpointError as error:
        named = [str(error)]
    return named if step in steps(folder) else []


def _damage(path: Path, expected: Mapping[str, str]) -> Iterator[str]:
    existing = _files(path)
    hashes = _hashes({name: existing[name] for name in existing.keys() & expected.keys()})
    for name in sorted(expected.keys() | existing.keys()):
        file = path / name
        if name not in existing:
            yield f"{file}: missing, and {MANIFEST} lists it"
        elif name not in expected:
            yield f"{file}: not in {MANIFEST}, so it was added"
        elif hashes[name] != expected[name]:
            yield f"{file}: damaged (its SHA-256 is not the one in {MANIFEST})"


def _hashes(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of each file, with all cores: hashlib releases the interpreter's lock."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(files, threads.map(sha256, files.values()), strict=True))


def _write_manifest(path: Path, step: int, about: dict[str, Any]) -> None:
    """Write the manifest of all files in the folder ``path``, with ``about`` in it."""
    hashes = _hashes(_files(path))
    (path / MANIFEST).write_text(_manifest_text({"step": step, **about, "sha256": hashes}))


def _manifest_text(content: dict[str, Any]) -> str:
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, _OWN_HASH: own}, indent=2) + "\n"


def _identity_of(path: Path) -> Identity:
    identity = {}
    for name, file in _files(path).items():
        stat = os.stat(file)
        identity[name] = stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime_ns
    return identity


def _files(path: Path) -> dict[str, Path]:
    """Return the files of a checkpoint except its manifest, by their names in it, in order."""
    files = {}
    for file in path.rglob("*"):
        if file.is_file() and file.name != MANIFEST:
            files[str(file.relative_to(path))] = file
    return dict(sorted(files.items()))
