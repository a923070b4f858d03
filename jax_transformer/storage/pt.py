"""PyTorch's ``.pt`` files (also ``.pth`` and ``.bin``; the zip format of 1.6 and later), read and
written without PyTorch.

Weights and training states are arrays in plain containers. Everything else is refused with an
error that names it.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.storage import atomic, pickling, untrusted, zipped
from jax_transformer.storage.rebuilt import Rebuilder
from jax_transformer.storage.tensors import TensorView
from jax_transformer.storage.untrusted import shown

__all__ = [
    "TensorView",
    "describe",
    "is_legacy",
    "is_pt",
    "leaves",
    "read",
    "tied",
    "ties",
    "write",
]

_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # files from before PyTorch 1.6 begin with this number
_NEWEST_VERSION = 10


def is_pt(path: str | Path) -> bool:
    """True for a zip file with a data.pkl in it, or with a damaged directory, which ``read``
    refuses with a reason.
    """
    path = Path(path)
    if not path.is_file() or not zipped.starts_as_zip(path):
        return False
    try:
        with zipped.Archive(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.members)
    except (InputError, UnsafeFileError):
        return True


def is_legacy(path: str | Path) -> bool:
    """True for a file in the format from before PyTorch 1.6: a sequence of pickles."""
    path = Path(path)
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        begin = file.read(64)
    return begin[:1] == b"\x80" and _MAGIC in begin


def read(path: str | Path) -> Any:
    """Read the saved value: dicts, lists, tuples and plain values, with an array for every tensor.

    The arrays are contiguous copies; tensors with the same elements of one storage are one array,
    so ties are preserved. An OrderedDict or Counter is a dict, a torch.Size a tuple, a bytearray
    bytes, a dtype or device its name, and a storage a flat array.

    Raises:
        InputError: the file is missing, damaged, or not of this format.
        UnsafeFileError: it has other objects, or needs more memory than it has bytes.
    """
    with _open(path) as archive:
        value, folder = _parsed(archive)
        arrays = _arrays(
            archive,
            folder,
            {tensor for _, tensor in leaves(value) if isinstance(tensor, TensorView)},
        )
        return _mapped(value, lambda leaf: arrays[leaf] if isinstance(leaf, TensorView) else leaf)


def describe(path: str | Path) -> Any:
    """Read as :func:`read`, but with a ``TensorView`` for every tensor. No storage is read."""
    with _open(path) as archive:
        return _parsed(archive)[0]


def write(path: str | Path, value: Any) -> None:
    """Write a file that ``torch.load(path, weights_only=True)`` reads: dicts, lists, tuples and
    plain values unchanged, arrays as tensors.

    The same value is always the same bytes. An array that is in it twice becomes two tensors that
    share a storage. The file appears complete or not at all: it is written to a temporary name,
    read back and compared, synced and renamed.

    Raises:
        InputError: something is neither an array of a dtype that PyTorch has nor a plain container
            or value.
    """
    path = Path(path)
    pickler = pickling.Pickler(str(path))
    records = {"data.pkl": pickler.dump(value), "byteorder": b"little"}
    with atomic.file(path) as temporary:
        with open(temporary, "wb") as file:
            zipped.write(file, _members(records, pickler.storages))
        if not _same(value, read(temporary)):
            raise InputError(f"{path}: reads back different from what was written")


def _members(
    records: Mapping[str, bytes], storages: list[np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    for name, content in records.items():
        yield f"archive/{name}", np.frombuffer(content, np.uint8)
    for number, array in enumerate(storages):
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        yield f"archive/data/{number}", native.reshape(-1).view(np.uint8)
    yield "archive/version", np.frombuffer(b"3\n", np.uint8)


def _same(value: Any, again: Any) -> bool:
    """True if two values are equal bit for bit, in equal containers."""
    if isinstance(value, np.ndarray):
        same = isinstance(again, np.ndarray) and (value.shape, value.dtype.newbyteorder("=")) == (
            again.shape,
            again.dtype,
        )
        return same and np.ascontiguousarray(value, again.dtype).tobytes() == again.tobytes()
    if isinstance(value, Mapping):
        return (
            type(again) is dict
            and list(value) == list(again)
            and all(_same(value[key], again[key]) for key in again)
        )
    if isinstance(value, list | tuple):
        return (
            isinstance(again, type(value))
            and len(value) == len(again)
            and all(map(_same, value, again))
        )
    if isinstance(value, float):
        return isinstance(again, float) and struct.pack("d", value) == struct.pack("d", again)
    return type(again) is type(value) and again == value


def ties(path: str | Path) -> list[tuple[str, ...]]:
    """Groups of dotted names of tensors with the same elements of one storage, also transposed or
    flattened.
    """
    return tied(describe(path))


def tied(described: Any) -> list[tuple[str, ...]]:
    """The result of :func:`ties`, from that of :func:`describe`."""
    groups: dict[Any, list[str]] = {}
    for name, leaf in leaves(described):
        if isinstance(leaf, TensorView) and leaf.nbytes:
            groups.setdefault(leaf.region(), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not a container, with its dotted name."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)


def _open(path: str | Path) -> zipped.Archive:
    path = Path(path)
    untrusted.check_readable(path)
    if is_legacy(path):
        raise InputError(
            f"{path}: is in the format from before PyTorch 1.6: load it there, if you trust it, "
            "and torch.save it again"
        )
    if not zipped.starts_as_zip(path):
        raise InputError(f"{path}: not a PyTorch file: it is no zip file")
    return zipped.Archive(path)


def _parsed(archive: zipped.Archive) -> tuple[Any, str]:
    """The described value, and the folder that all members are in."""
    pickles = [name for name in archive.members if name.split("/")[1:] == ["data.pkl"]]
    if len(pickles) != 1:
        raise InputError(
            f"{archive.path}: not a PyTorch file: it has {len(pickles) or 'no'} data.pkl"
        )
    folder = pickles[0].removesuffix("data.pkl")
    inside = {
        name.removeprefix(folder): member
        for name, member in archive.members.items()
        if name.startswith(folder)
    }
    for name in archive.members:
        if not name.startswith(folder):
            raise UnsafeFileError(
                f"{archive.path}: refused: {shown(name)} is not within {shown(folder)}"
            )
    if "constants.pkl" in inside:
        raise InputError(
            f"{archive.path}: is a TorchScript program: save the state_dict() of the module instead"
        )
    if "version" not in inside and ".data/version" not in inside:
        raise InputError(f"{archive.path}: not a PyTorch file: it has no version")
    version = _record(archive, folder + ("version" if "version" in inside else ".data/version"))
    if not (version.isascii() and version.isdecimal()) or not 1 <= int(version) <= _NEWEST_VERSION:
        raise InputError(
            f"{archive.path}: is of version {shown(version)} of the format; known are 1 to "
            f"{_NEWEST_VERSION}"
        )
    order = _record(archive, f"{folder}byteorder") if "byteorder" in inside else "little"
    if order != "little":
        raise InputError(
            f"{archive.path}: its numbers are in the byte order {shown(order)}; only little is read"
        )
    sizes = {
        name.removeprefix("data/"): member.size
        for name, member in inside.items()
        if name.startswith("data/")
    }
    return Rebuilder(str(archive.path), sizes, archive.size).value(
        archive.read(pickles[0]).tobytes()
    ), folder


def _record(archive: zipped.Archive, name: str) -> str:
    """The text of a member that is a word."""
    if archive.members[name].size > 16:
        raise InputError(f"{archive.path}: {shown(name)} is too long")
    return archive.read(name).tobytes().decode("latin-1").strip()


def _arrays(
    archive: zipped.Archive, folder: str, views: set[TensorView]
) -> dict[TensorView, np.ndarray]:
    """Read an array for each view; every storage is read once."""
    by_storage: dict[str, list[TensorView]] = {}
    for tensor in views:
        by_storage.setdefault(tensor.storage, []).append(tensor)
    arrays: dict[TensorView, np.ndarray] = {}
    for key, tensors in by_storage.items():
        storage = archive.read(f"{folder}data/{key}")
        for tensor in tensors:
            arrays[tensor] = _array(storage, tensor)
            if tensor.dtype == np.bool_ and arrays[tensor].view(np.uint8).max(initial=0) > 1:
                raise InputError(
                    f"{archive.path}: storage {shown(key)} has truth values other than 0 and 1"
                )
    return arrays


def _array(storage: np.ndarray, tensor: TensorView) -> np.ndarray:
    """A contiguous copy. NumPy checks once more that it is within the storage."""
    if not all(tensor.shape):
        return np.empty(tensor.shape, tensor.dtype)
    width = tensor.dtype.itemsize
    strides = tuple(step * width for step in tensor.stride)
    return np.array(
        np.ndarray(tensor.shape, tensor.dtype, storage.data, tensor.offset * width, strides),
        order="C",
        copy=True,
    )
