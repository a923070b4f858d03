"""The checkpoints of T5X: a folder with the file ``checkpoint``, a msgpack of nested maps, and a
folder in zarr for each array.

The map has ``version`` and ``optimizer``, and that ``target`` (the weights) and ``state`` (step and
optimizer). A leaf is an array in the file itself, or TensorStore's description of one: driver,
dtype, the name of its folder, shape and chunks. Facts from ``t5x/checkpoints.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.extras.toolkits import msgpack
from jax_transformer.extras.toolkits.msgpack import ArrayExtent
from jax_transformer.extras.toolkits.t5x import zarr
from jax_transformer.storage.tensors import LazyState, LazyTensor, TensorInfo
from jax_transformer.storage.untrusted import is_file_name, shown

INDEX = "checkpoint"
TARGET = "target."
"""Before the names of the weights; those of optimizer and step begin with ``state.``."""
VERSION = 3
_KVSTORES = ("file", "gfile", "gcs")


def is_checkpoint(folder: Path) -> bool:
    """Return True if a folder has T5X's index; TensorFlow's file of that name is text."""
    try:
        with open(folder / INDEX, "rb") as file:
            start = file.read(256)
    except OSError:
        return False
    return start[:1] in (b"\x82", b"\x81", b"\xde") and b"optimizer" in start


@dataclass(frozen=True)
class Checkpoint:
    """The arrays of a checkpoint by name, none of them read: ``target.encoder.layers_0...``."""

    version: int
    arrays: Mapping[str, LazyTensor]
    files: tuple[Path, ...]
    """The index and the description of each array."""

    @property
    def weights(self) -> dict[str, LazyTensor]:
        """The arrays of the model, without ``target.``."""
        return {
            name.removeprefix(TARGET): array
            for name, array in self.arrays.items()
            if name.startswith(TARGET)
        }


def find(folder: Path) -> Checkpoint:
    """Find the arrays of a checkpoint, without reading one.

    Raises InputError if a file is missing, damaged, or stored in a way that T5X since 2021 does not
    write; UnsafeFileError if it names another folder, or declares more data than it has.
    """
    index = folder / INDEX
    content = msgpack.tree(index)
    version, state = content.get("version"), content.get("optimizer")
    if version not in (2, 3) or not isinstance(state, dict):
        raise InputError(
            f"{index}: is version {shown(version)} of T5X's checkpoints, and 2 and 3 are read"
        )
    arrays: dict[str, LazyTensor] = {}
    folders: dict[str, str] = {}
    for keys, leaf in msgpack.leaves(index, state, stop="kvstore"):
        name = ".".join(keys)
        if isinstance(leaf, ArrayExtent):
            info = TensorInfo(leaf.shape, leaf.dtype.name)
            arrays[name] = LazyTensor(info, partial(msgpack.read, leaf))
        elif isinstance(leaf, int | float):
            arrays[name] = LazyTensor.of(np.asarray(leaf))
        elif isinstance(leaf, dict):
            path = _folder(index, name, leaf)
            if path in folders:
                raise UnsafeFileError(
                    f"{index}: refused: {shown(name)} and {shown(folders[path])} are one folder"
                )
            folders[path] = name
            arrays[name] = _stored(index, name, leaf, folder / path)
        elif leaf is not None:
            raise InputError(f"{index}: {shown(name)} is {shown(leaf)}, and not an array")
    if version == 2:
        arrays = {name: _as_bfloat16(array) for name, array in arrays.items()}
    descriptions = (folder / path / zarr.METADATA for path in folders)
    return Checkpoint(version, arrays, (index, *descriptions))


def _folder(index: Path, name: str, spec: Mapping[str, Any]) -> str:
    """Return the folder of an array, from TensorStore's description of it."""
    kvstore = spec["kvstore"]
    if spec.get("driver") != "zarr" or not isinstance(kvstore, dict):
        raise InputError(
            f"{index}: {shown(name)} is stored by the driver {shown(spec.get('driver'))}, and only "
            "zarr is read"
        )
    if kvstore.get("driver") not in _KVSTORES:
        raise InputError(
            f"{index}: {shown(name)} is in a store {shown(kvstore.get('driver'))}, which is none "
            f"of {', '.join(_KVSTORES)}"
        )
    path = kvstore.get("path", spec.get("path"))  # next to the store before TensorStore 0.1.14
    plain = path.removesuffix("/") if isinstance(path, str) else ""
    if plain == INDEX or not is_file_name(plain):
        raise UnsafeFileError(
            f"{index}: refused: {shown(path)} is not a plain name of a folder in the same folder"
        )
    return plain


def _stored(index: Path, name: str, spec: Mapping[str, Any], folder: Path) -> LazyTensor:
    array = zarr.open_array(folder)
    metadata = spec.get("metadata")
    if isinstance(metadata, dict) and metadata.get("shape") != list(array.shape):
        raise InputError(
            f"{index}: {shown(name)} has the shape {shown(metadata.get('shape'))}, and its folder "
            f"{list(array.shape)}"
        )
    if spec.get("dtype", array.dtype.name) != array.dtype.name:
        raise InputError(
            f"{index}: {shown(name)} is {shown(spec['dtype'])}, and in its folder {array.dtype}"
        )
    transform = spec.get("transform")  # of the whole array, as some versions say
    if transform is not None and (
        not isinstance(transform, dict)
        or transform.keys() - {"input_exclusive_max", "input_inclusive_min", "input_rank"}
        or transform.get("input_inclusive_min") not in (None, [0] * len(array.shape))
        or transform.get("input_exclusive_max")
        not in (None, list(array.shape), [[length] for length in array.shape])
    ):
        raise InputError(f"{index}: {shown(name)} is a part of its folder: {shown(transform)}")
    return array.lazy()


def _as_bfloat16(array: LazyTensor) -> LazyTensor:
    """Return an array of version 2, which keeps the bits of bfloat16 as uint16."""
    if array.dtype != "uint16":
        return array
    info = TensorInfo(array.shape, "bfloat16")
    return LazyTensor(info, lambda: array.read().view(ml_dtypes.bfloat16))


# Writing


def write(folder: Path, weights: LazyState, step: int) -> None:
    """Write a new checkpoint with weights and a step, and no state of an optimizer.

    Its index is what ``flax.serialization`` makes of T5X's, its arrays what TensorStore reads.
    Nothing is synced or renamed: see :func:`jax_transformer.storage.atomic.folder`.
    """
    from flax import serialization, traverse_util  # loads jax

    folder.mkdir()
    specs: dict[str, Any] = {}
    for name, tensor in weights.items():
        array = tensor.read()
        stored = f"{TARGET}{name}"
        zarr.write(folder / stored, array)
        specs[name] = {
            "driver": "zarr",
            "dtype": array.dtype.name,
            "kvstore": {"driver": "file", "path": f"{stored}/"},
            "metadata": {
                "chunks": list(zarr.chunk_shape(array.shape, array.itemsize)),
                "compressor": {"id": "gzip", "level": 1},
                "shape": list(array.shape),
            },
        }
    target = traverse_util.unflatten_dict(specs, sep=".")
    state = {"state": {"step": np.asarray(step, np.int32)}, "target": target}
    index = {"version": VERSION, "optimizer": state}  # flax sorts the names, as in T5X
    (folder / INDEX).write_bytes(serialization.msgpack_serialize(index))
