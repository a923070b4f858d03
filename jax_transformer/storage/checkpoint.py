"""Checkpoints: ``checkpoints/STEP`` holds a tree of arrays, written by Orbax, and a manifest: the
SHA-256 of every file in it and of itself, its step, and the facts that were recorded about it.

The groups of a training state are ``step``, ``params``, ``frozen``, ``opt_state`` and ``ema``. A
tree is restored by Orbax. Arrays are read by TensorStore, which Orbax itself reads them with:
importing Orbax takes longer than reading a small model, and restoring a tree needs JAX. A command
that only reads weights waits for neither. :mod:`.saving` writes checkpoints.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from jax_transformer.errors import CheckpointError
from jax_transformer.storage import run_files
from jax_transformer.storage.run_files import sha256
from jax_transformer.storage.tensors import LazyTensor, TensorInfo

Tree = TypeVar("Tree")
Identity = dict[str, tuple[int, int, int, int]]
"""Device, inode, size and time of change of every file: equal if no file was written in between.
"""
MANIFEST = "manifest.json"
_OWN_HASH = "manifest_sha256"
_FORMER_GROUPS = {"carried": "frozen", "moments": "opt_state"}
"""Groups' names in checkpoints of version 0.1, and their present names."""
_FORMER_MODULE = (".idle.", ".unused.")
"""A part of arrays' names in checkpoints of version 0.1, and its present name."""
_READ = 32 << 20
"""Bytes of arrays that are read at once."""
_ALONE = 512 << 10
"""Bytes of an array that is read without others."""
_CHECKS = 16
"""Number of times that the files are looked at before the last part of the arrays is read."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files had its manifest's hashes when opened; arrays are read on demand."""

    path: Path
    step: int
    about: Mapping[str, Any]
    """The manifest: the recorded facts, the step, and ``sha256`` of every file."""
    tensors: Mapping[str, TensorInfo]
    """Shape and dtype of every array by its path in the tree (``params/encoder.norm.scale``)."""
    _identity: Identity
    _stored: Mapping[str, Any]
    """The arrays by their path in the tree, each a ``tensorstore.TensorStore``."""

    def load(self, like: Tree, *, partial: bool = False) -> Tree:
        """Read the saved tree, with the structure, shapes and dtypes of ``like``, or the part of it
        that ``like`` names if ``partial``. An array gets its sharding there, each device its own
        part; by default the first device. Raises CheckpointError if arrays are missing, unexpected
        or of another shape or dtype, or if a file changed after it was verified.
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
        """Read arrays of all or some groups, bit for bit (also float64 in JAX's 32-bit mode)."""
        return self.selected(
            {name for name in self.tensors if groups is None or name.partition("/")[0] in groups}
        )

    def selected(self, names: Collection[str], *, check: bool = True) -> dict[str, np.ndarray]:
        """Read the arrays of these paths, as :meth:`arrays`. Unless ``check``, the caller makes
        sure with other arrays that no file changed.
        """
        reading = {name: self._stored[name].read() for name in names}
        loaded = {name: np.asarray(future.result()) for name, future in reading.items()}
        if check:
            self._check_unchanged()
        return loaded

    def _restore(self, like: Any, *, partial: bool) -> Any:
        """Read the stored tree, and make sure that no file was written to since it was verified."""
        from orbax.checkpoint import v1 as ocp

        tree = _metadata(self.path)[1]["tree_metadata"]  # also of groups without arrays
        on_disk = {leaf["key_metadata"][0]["key"] for leaf in tree.values()}
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
        if _files(self.path) != self._identity:
            raise CheckpointError(f"{self.path}: was changed by another process; try again")


def open(folder: Path, step: int, *, verified: bool = False) -> Checkpoint:
    """Open the checkpoint of ``step``, verified against its manifest unless another process has
    ``verified`` it. Raises CheckpointError naming the file that is damaged, or InputError if it is
    SHA256SUMS of the run.
    """
    path = folder.resolve() / str(step)  # TensorStore takes neither a relative path nor `..`
    if verified:
        about, identity = read_manifest(folder, step), _files(path)
    else:
        about, identity = verify(folder, step)
    stored, tensors = {}, {}
    for name, array in open_arrays(path).items():
        group, slash, rest = name.partition("/")
        name = _FORMER_GROUPS.get(group, group) + slash + rest.replace(*_FORMER_MODULE)
        stored[name], tensors[name] = array, TensorInfo(tuple(array.shape), array.dtype.name)
    return Checkpoint(path, step, about, tensors, identity, stored)


def steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, ascending."""
    numbers = [path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()]
    return sorted(int(path.name) for path in numbers)


def open_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays (tensorstore.TensorStore) of a checkpoint, which are not read yet, by their
    path in the tree, for example ``params/encoder.norm.scale``. Raises as :func:`specs`.
    """
    import tensorstore

    context = tensorstore.Context()  # one for each array takes ten times as long
    opened = {
        name: tensorstore.open(spec, read=True, context=context)
        for name, spec in specs(path).items()
    }
    return {name: opened[name].result() for name in sorted(opened)}


def specs(path: Path) -> dict[str, dict[str, Any]]:
    """Return TensorStore's specification of each array by its path in the tree. Raises
    CheckpointError for a layout that Orbax 0.12 does not write.
    """
    folder, content = _metadata(path)
    driver = "zarr3" if content.get("use_zarr3") else "zarr"
    result = {}
    for leaf in content["tree_metadata"].values():
        if leaf["value_metadata"]["skip_deserialize"]:  # None, or an empty part of the tree
            continue
        keys = [str(part["key"]) for part in leaf["key_metadata"]]
        base = {"driver": "file", "path": f"{folder}/"}
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{'.'.join(keys)}/"}
        result["/".join(keys)] = {"driver": driver, "kvstore": kvstore}
    return result


def database(path: Path) -> list[Path]:
    """Return the files and folders of the database that holds a checkpoint's arrays."""
    folder, _ = _metadata(path)
    return [entry for entry in folder.iterdir() if entry.name != "_METADATA"]


def _metadata(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a checkpoint's tree, and Orbax's description of it."""
    files = list(path.glob("*/_METADATA"))
    if len(files) != 1:
        raise CheckpointError(f"{path}: holds no tree of arrays that Orbax has written")
    content = json.loads(files[0].read_bytes())
    if not content.get("use_ocdbt"):
        raise CheckpointError(f"{path}: its arrays are in a layout that is not supported")
    return files[0].parent, content


def scan(opened: Checkpoint, groups: Collection[str]) -> dict[str, LazyTensor]:
    """Return the arrays of some groups by their path in the tree, none of them read. Small ones are
    read with the next ones; what was not asked for is dropped if there is too much of it.

    That no file changed is checked each time that a 16th of the bytes was read, and for each array
    of the last 16th: with every array, the files of a large model would take most of the time.
    """
    tensors, names = opened.tensors, list(opened.tensors)
    sizes = {
        name: info.nbytes for name, info in tensors.items() if name.partition("/")[0] in groups
    }
    share = sum(sizes.values()) // _CHECKS
    unread, unchecked = dict(sizes), 0
    waiting: dict[str, np.ndarray] = {}

    def read(first: str) -> np.ndarray:
        nonlocal unchecked
        if first in waiting:
            return waiting.pop(first)
        if sum(array.nbytes for array in waiting.values()) > _READ:
            waiting.clear()
        chosen, size, group = [first], tensors[first].nbytes, first.partition("/")[0]
        following = names[names.index(first) + 1 :] if size <= _ALONE else []
        for name in following:
            if tensors[name].nbytes > _ALONE:
                continue
            size += tensors[name].nbytes
            if size > _READ or name.partition("/")[0] != group:
                break
            if name not in waiting:
                chosen.append(name)
        for name in chosen:
            unchecked += unread.pop(name, 0)
        check = unchecked >= share or sum(unread.values()) <= share
        waiting.update(opened.selected(chosen, check=check))
        unchecked = 0 if check else unchecked
        if not unread:
            unread.update(sizes)
        return waiting.pop(first)

    return {name: LazyTensor(tensors[name], partial(read, name)) for name in sizes}


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
    """Return the facts that :func:`.saving.save` recorded ``about`` a checkpoint, with its step and
    hashes. Only the manifest is read.

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
    here = run_files.about_run(path.parent) if "run" in content else {}
    recorded = {"run": content.get("run"), "folder": content.get("folder", here.get("folder"))}
    if here and recorded != here:  # also an average in the place of a checkpoint
        raise CheckpointError(
            f"{path}: is of another run (its {run_files.DATA} is not the one in "
            f"{run_files.SHA256SUMS}) or of another folder"
        )
    return content


def verify(folder: Path, step: int) -> tuple[dict[str, Any], Identity]:
    """Verify all files of a checkpoint; return its manifest, and their identity. Raises
    CheckpointError naming the first that is missing, changed or unlisted, and as
    :func:`read_manifest`.
    """
    content, path = read_manifest(folder, step), folder / str(step)
    before = _files(path)
    for problem in _damage(path, before, content["sha256"]):
        raise CheckpointError(problem)
    return content, before


def problems(folder: Path, step: int) -> list[str]:
    """Name every file of a checkpoint that is missing, changed or not in the manifest; empty if it
    was removed meanwhile. Raises InputError as :func:`read_manifest`.
    """
    path = folder / str(step)
    try:
        expected = read_manifest(folder, step)["sha256"]
        named = [*_damage(path, _files(path), expected)]
    except CheckpointError as error:
        named = [str(error)]
    return named if step in steps(folder) else []


def _damage(path: Path, existing: Identity, expected: Mapping[str, str]) -> Iterator[str]:
    hashes = _hashes(path, existing.keys() & expected.keys())
    for name in sorted(expected.keys() | existing.keys()):
        file = path / name
        if name not in existing:
            yield f"{file}: missing, and {MANIFEST} lists it"
        elif name not in expected:
            yield f"{file}: not in {MANIFEST}, so it was added"
        elif hashes[name] != expected[name]:
            yield f"{file}: damaged (its SHA-256 is not the one in {MANIFEST})"


def _hashes(path: Path, names: Collection[str]) -> dict[str, str]:
    """Return the SHA-256 of files, with all cores: hashlib releases the interpreter's lock."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(names, threads.map(sha256, map(path.joinpath, names)), strict=True))


def write_manifest(
    path: Path, step: int, about: dict[str, Any], known: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write the manifest of all files in the folder ``path``, with ``about`` in it. Those whose
    SHA-256 is ``known`` are not read.
    """
    names = _files(path).keys()
    hashes = {**_hashes(path, names - known.keys()), **known}
    hashes = {name: hashes[name] for name in names}
    (path / MANIFEST).write_text(_manifest_text({"step": step, **about, "sha256": hashes}))


def _manifest_text(content: dict[str, Any]) -> str:
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, _OWN_HASH: own}, indent=2) + "\n"


def _files(path: Path) -> Identity:
    """Return the files of a checkpoint except its manifest, by their names in it, in order."""
    files, start = {}, len(str(path)) + 1
    for folder, _, names in os.walk(path):  # in a fifth of the time of pathlib
        for name in names:
            file = f"{folder}{os.sep}{name}"
            if name != MANIFEST and os.path.isfile(file):
                stat = os.stat(file)
                files[file[start:]] = stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime_ns
    return dict(sorted(files.items()))
