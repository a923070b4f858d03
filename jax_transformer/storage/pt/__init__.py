"""Read PyTorch's ``.pt`` files (also ``.pth`` and ``.bin``; the zip format since PyTorch 1.6)
without PyTorch, and find the state_dict in them. What is neither array nor plain container is
refused.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import InputError, UnsafeFileError, nearest
from jax_transformer.storage import atomic, tensors
from jax_transformer.storage.pt import zip_archive
from jax_transformer.storage.pt.unpickler import Unpickler
from jax_transformer.storage.tensors import LazyTensor, Note, TensorInfo, TensorView
from jax_transformer.storage.untrusted import shown

_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # files from before PyTorch 1.6 begin with this number
_NEWEST_VERSION = 10
_USUAL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net", "weights")


def is_legacy(path: str | Path) -> bool:
    """Return True for a file in the format from before PyTorch 1.6: a sequence of pickles."""
    path = Path(path)
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        begin = file.read(64)
    return begin[:1] == b"\x80" and _MAGIC in begin


def read(path: str | Path) -> Any:
    """Read the saved value: dicts, lists, tuples and plain values, with an array for every tensor.

    The arrays are contiguous copies; tensors with the same elements of one storage are one array,
    so ties are preserved. An OrderedDict, Counter or argparse.Namespace is a dict, a set a list, a
    torch.Size a tuple, a bytearray bytes, a dtype or device its name, and a storage a flat array.

    Raises:
        InputError: the file is missing, damaged, or not of this format.
        UnsafeFileError: it has other objects, or needs more memory than it has bytes.
    """
    return _read(path, _Storages.copied)


def scan(path: str | Path) -> Any:
    """Read as :func:`read`, with a ``LazyTensor`` for every tensor, verified when read first."""
    return _read(path, _Storages.lazily)


def describe(path: str | Path) -> Any:
    """Read as :func:`read`, but with a ``TensorView`` for every tensor. No storage is read."""
    return _read(path)


def verify(path: str | Path) -> str:
    """Read the file and return its SHA-256. Raises InputError if a checksum does not hold."""
    with _open(path) as archive:
        return archive.verify()


def ties(path: str | Path) -> list[tuple[str, ...]]:
    """Return groups of dotted names of tensors with the same elements, also transposed."""
    return tied(describe(path))


def tied(described: Any) -> list[tuple[str, ...]]:
    """Return what :func:`ties` does, from the result of :func:`describe`."""
    groups: dict[Any, list[str]] = {}
    for name, leaf in leaves(described):
        if isinstance(leaf, TensorView) and leaf.nbytes:
            groups.setdefault(leaf.region(), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a container, with its dotted name."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _open(path: str | Path) -> zip_archive.Archive:
    path = Path(path)
    atomic.check_readable(path)
    if is_legacy(path):
        raise InputError(
            f"{path}: is in the format from before PyTorch 1.6: load it there, if you trust it, "
            "and torch.save it again"
        )
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise InputError(f"{path}: not a PyTorch file: it is not a zip file")
    return zip_archive.Archive(path)


def _read(path: str | Path, leaf: Callable[["_Storages", TensorView], Any] | None = None) -> Any:
    """Read the value of a file, with ``leaf`` of every tensor; by default its description."""
    with _open(path) as archive:
        path = archive.path
        pickles = [name for name in archive.members if name.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            raise InputError(f"{path}: not a PyTorch file: it has {len(pickles) or 'no'} data.pkl")
        folder = pickles[0].removesuffix("data.pkl")
        if outside := [name for name in archive.members if not name.startswith(folder)]:
            place = f"{shown(outside[0])} is not within {shown(folder)}"
            raise UnsafeFileError(f"{path}: refused: {place}")
        members = {name.removeprefix(folder): member for name, member in archive.members.items()}
        if "constants.pkl" in members:
            raise InputError(
                f"{path}: is a TorchScript program: save the state_dict() of the module instead"
            )
        if "version" not in members and ".data/version" not in members:
            raise InputError(f"{path}: not a PyTorch file: it has no version")
        version = _word(archive, folder + ("version" if "version" in members else ".data/version"))
        known = version.isascii() and version.isdecimal()
        if not known or not 1 <= int(version) <= _NEWEST_VERSION:
            raise InputError(
                f"{path}: is of version {shown(version)} of the format; known are 1 to "
                f"{_NEWEST_VERSION}"
            )
        order = _word(archive, f"{folder}byteorder") if "byteorder" in members else "little"
        if order != "little":
            raise InputError(
                f"{path}: its numbers are in the byte order {shown(order)}; only little is read"
            )
        data = {name: member for name, member in members.items() if name.startswith("data/")}
        sizes = {name.removeprefix("data/"): member.size for name, member in data.items()}
        storages = _Storages(path, f"{folder}data/", archive.members)
        of_tensor = None if leaf is None else partial(leaf, storages)
        unpickler = Unpickler(str(path), sizes, archive.size, of_tensor)
        return unpickler.value(archive.read(pickles[0]))


def _word(archive: zip_archive.Archive, name: str) -> str:
    """Return the text of a member that is a word."""
    if archive.members[name].size > 16:
        raise InputError(f"{archive.path}: {shown(name)} is too long")
    return archive.read(name).decode("latin-1").strip()


@dataclass(eq=False)
class _Storages:
    """The storages of one file, which is opened for each array that is read."""

    path: Path
    folder: str
    """The beginning of their members' names."""
    members: Mapping[str, zip_archive.Member]
    verified: set[str] = field(default_factory=set)
    known: dict[TensorView, Any] = field(default_factory=dict)
    """The array or LazyTensor of each tensor, the same for equal ones."""

    def copied(self, tensor: TensorView) -> np.ndarray:
        """Return a copy of the array of a tensor, the same for equal ones."""
        if tensor not in self.known:
            self.known[tensor] = np.array(self.array(tensor))
        return self.known[tensor]

    def lazily(self, tensor: TensorView) -> LazyTensor:
        """Return the tensor without reading it, the same for equal ones."""
        info = TensorInfo(tensor.shape, tensor.dtype.name)
        return self.known.setdefault(tensor, LazyTensor(info, partial(self.array, tensor)))

    def array(self, tensor: TensorView) -> np.ndarray:
        """Return the tensor in C order, mapped if stored so. Raises InputError if it is damaged."""
        if not all(tensor.shape):
            return np.empty(tensor.shape, tensor.dtype)
        name = f"{self.folder}{tensor.storage}"
        if name not in self.verified:
            zip_archive.verify_member(self.path, name, self.members[name])
            self.verified.add(name)
        width = tensor.dtype.itemsize
        start = self.members[name].start + tensor.offset * width
        length = (tensor.end - tensor.offset) * width
        raw = tensors.map_file(self.path, start, dtype=np.dtype(np.uint8), shape=(length,))
        strides = (np.array(tensor.stride, np.int64) * width).tolist()
        array = tensors.contiguous(np.ndarray(tensor.shape, tensor.dtype, raw.data, 0, strides))
        if tensor.dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise InputError(
                f"{self.path}: storage {shown(tensor.storage)} has truth values other than 0 and 1"
            )
        return array


# The state_dict in a file


@dataclass(frozen=True)
class StateFile:
    """A state_dict none of whose arrays is read."""

    keys: tuple[str, ...]
    """The keys that lead to it."""
    state: dict[str, LazyTensor]
    """The tensors; names that are tied have one LazyTensor."""
    ties: tuple[tuple[str, ...], ...]
    others: tuple[Note, ...]
    """The other content of the file, which is not converted."""


def open_state(path: Path, key: str | None = None, content: Any = None) -> StateFile:
    """Open the state_dict at ``key``, or the only one. Raises InputError for none or several."""
    content = scan(path) if content is None else content
    keys = _keys(path, content, key)
    notes = []
    for depth, key in enumerate(keys):
        for name in content:
            if name != key:
                place = ".".join([*keys[:depth], str(name)])
                notes.append(Note(place, "not part of the weights"))
        content = content[key]
    state, names = {}, dict[LazyTensor, tuple[str, ...]]()
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, LazyTensor):
            state[name] = value
            if value.nbytes:
                names[value] = (*names.get(value, ()), name)
        else:
            notes.append(Note(".".join([*keys, str(name)]), "not a tensor"))
    ties = tuple(group for group in names.values() if len(group) > 1)
    return StateFile(keys, state, ties, tuple(notes))


def states(path: Path, keys: Mapping[str, tuple[str, ...]]) -> dict[str, LazyTensor]:
    """Return several state_dicts' tensors, unread; ``keys`` lead to each, by its names' prefix."""
    content = scan(path)
    return {
        f"{prefix}{name}": tensor
        for prefix, where in keys.items()
        for name, tensor in _at(content, where, path).items()
        if isinstance(name, str) and isinstance(tensor, LazyTensor)
    }


def _is_state(value: Any) -> bool:
    kinds = set(map(type, value.values())) if isinstance(value, dict) else set()
    return LazyTensor in kinds and dict not in kinds


def _keys(path: Path, content: Any, key: str | None) -> tuple[str, ...]:
    if key is not None:
        keys = tuple(key.split("."))
        if not _is_state(_at(content, keys, path)):
            raise InputError(f"{path}: {key} is not a state_dict, from names to tensors")
        return keys
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}, not a state_dict")
    states = [name for name, value in content.items() if _is_state(value)]
    usual = [name for name in states if name in _USUAL_KEYS]
    if len(usual) == 1 or (len(states) == 1 and not usual):
        return ((usual or states)[0],)
    if states:
        raise InputError(
            f"{path}: holds several state_dicts: give --key with one of "
            f"{', '.join(map(str, states))}"
        )
    if _is_state(content):
        return ()
    raise InputError(
        f"{path}: holds no state_dict among {', '.join(map(str, content)) or 'nothing'}"
    )


def _at(content: Any, keys: tuple[str, ...], path: Path) -> Any:
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            known = [str(name) for name in content] if isinstance(content, dict) else []
            raise InputError(
                f"{path}: has no {key!r}{nearest(key, known)}; "
                f"there are: {', '.join(known) or 'no keys'}"
            )
        content = content[key]
    return content
