"""Write PyTorch's ``.pt`` files without PyTorch: a zip file of a pickle (protocol 2, PyTorch's own)
and of the storages, so that the same state is always the same bytes.
"""

import contextlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.storage import atomic, pt, tensors
from jax_transformer.storage.pt import unpickler, zip_archive
from jax_transformer.storage.read_back import CheckedFile
from jax_transformer.storage.tensors import LazyTensor, TensorView
from jax_transformer.storage.untrusted import shown

_STORAGE_OF = {dtype: storage for storage, dtype in unpickler.STORAGES.items()}
_NAME_OF = {dtype: name for name, dtype in tensors.DTYPES.items()}


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
    with atomic.file(Path(path)) as temporary:
        save(temporary, value, target=path)


def save(path: Path, value: Any, *, target: str | Path) -> str:
    """Write the new file ``path`` from arrays or ``LazyTensor``, one at a time, each read back and
    compared, and return its SHA-256. Raises as :func:`write`, naming ``target``, its later name.
    """
    pickler = _Pickler(str(target))
    pickler.add(value, "")
    pickle = bytes(pickler.content + b".")
    with (
        CheckedFile(path, target) as file,
        contextlib.closing(tensors.read_ahead(pickler.storages)) as arrays,
    ):
        members: dict[str, Callable[[], np.ndarray]] = {
            "archive/data.pkl": partial(np.frombuffer, pickle, np.uint8),
            "archive/byteorder": partial(np.frombuffer, b"little", np.uint8),
        }
        for number in range(len(pickler.storages)):
            members[f"archive/data/{number}"] = partial(_next_bytes, arrays)
        members["archive/version"] = partial(np.frombuffer, b"3\n", np.uint8)
        starts = zip_archive.write(file, members)
    with zip_archive.Archive(path) as archive:
        again = {name: member.start for name, member in archive.members.items()}
    if not _described(value, pt.describe(path), pickler) or starts != again:
        raise InputError(f"{target}: reads back different from what was written")
    return file.sha256()


def _next_bytes(arrays: Iterator[np.ndarray]) -> np.ndarray:
    array = next(arrays)
    native = tensors.contiguous(array.astype(array.dtype.newbyteorder("="), copy=False))
    return native.reshape(-1).view(np.uint8)


def _described(value: Any, again: Any, pickler: "_Pickler") -> bool:
    """Return True if two values are equal, in equal containers, tensors in their own storages."""
    if isinstance(value, np.ndarray | LazyTensor):
        expected = (0, tuple(value.shape), str(pickler.number(value)))
        return isinstance(again, TensorView) and expected == (
            again.offset,
            again.shape,
            again.storage,
        )
    if isinstance(value, Mapping):
        return (
            type(again) is dict
            and list(value) == list(again)
            and all(_described(value[key], again[key], pickler) for key in again)
        )
    if isinstance(value, list | tuple):
        return (
            isinstance(again, type(value))
            and len(value) == len(again)
            and all(_described(*pair, pickler) for pair in zip(value, again, strict=True))
        )
    return type(again) is type(value) and repr(again) == repr(value)  # also NaN and -0.0


@dataclass(eq=False)
class _Pickler:
    """Collects a state's pickle in ``content`` and its storages, in the order of their numbers. The
    same memory, shape and dtype twice is one storage, so it is tied in PyTorch as well.
    """

    where: str
    content: bytearray = field(default_factory=lambda: bytearray(b"\x80\x02"))
    storages: list[LazyTensor] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)

    def add(self, value: Any, name: str = "") -> None:
        """Add a value. Raises InputError for one that is neither an array nor plain."""
        match value:
            case None | True | False:
                self.content += {None: b"N", True: b"\x88", False: b"\x89"}[value]
            case np.ndarray() | LazyTensor():
                self._tensor(value, name)
            case str():
                raw = value.encode("utf-8")
                self.content += b"X" + len(raw).to_bytes(4, "little") + raw
            case bytes():
                self._call(b"c_codecs\nencode\n", value.decode("latin-1"), "latin1")
            case np.generic():
                raise self._refused(value, name)
            case int() if -(2**31) <= value < 2**31:
                self.content += b"J" + value.to_bytes(4, "little", signed=True)
            case int():
                raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
                if len(raw) > 255:
                    size = f"an integer of {len(raw):,} bytes"
                    raise InputError(f"{self.where}: {shown(name)} is {size}")
                self.content += b"\x8a" + bytes([len(raw)]) + raw
            case float():
                self.content += b"G" + struct.pack(">d", value)
            case complex():
                self._call(b"c__builtin__\ncomplex\n", value.real, value.imag)
            case Mapping():
                self.content += b"}("
                for key, item in value.items():
                    if type(key) not in (str, int, bool, float, bytes, type(None)):
                        raise self._refused(key, f"a key of {name}")
                    self.add(key, f"{name}.{key}" if name else str(key))
                    self.add(item, f"{name}.{key}" if name else str(key))
                self.content += b"u"
            case list() | tuple():
                self.content += b"](" if isinstance(value, list) else b"("
                for number, item in enumerate(value):
                    self.add(item, f"{name}.{number}" if name else str(number))
                self.content += b"e" if isinstance(value, list) else b"t"
            case _:
                raise self._refused(value, name)

    def _refused(self, value: Any, name: str) -> InputError:
        return InputError(
            f"{self.where}: {shown(name)} is a {type(value).__name__}, which is neither an array "
            "nor a plain container or value"
        )

    def _call(self, function: bytes, *arguments: Any) -> None:
        self.content += function
        self.add(arguments)
        self.content += b"R"

    def _tensor(self, tensor: np.ndarray | LazyTensor, name: str) -> None:
        if isinstance(tensor, LazyTensor):
            dtype = tensor.info.numpy_dtype()
        else:
            dtype = tensor.dtype.newbyteorder("=")
        if dtype not in _NAME_OF:
            raise InputError(
                f"{self.where}: {shown(name)} is {tensor.dtype}, which PyTorch does not have"
            )
        typed = dtype in _STORAGE_OF
        kind = f"torch\n{_STORAGE_OF[dtype]}" if typed else "torch.storage\nUntypedStorage"
        size = math.prod(tensor.shape) * (1 if typed else dtype.itemsize)
        self.content += f"ctorch._utils\n_rebuild_tensor_v{2 if typed else 3}\n((".encode()
        self.add("storage")
        self.content += f"c{kind}\n".encode()
        for item in (str(self.number(tensor)), "cpu", size):
            self.add(item)
        self.content += b"tQ"
        steps = [1]
        for length in tensor.shape[:0:-1]:
            steps.append(steps[-1] * max(1, length))
        for place in (0, tuple(tensor.shape), tuple(steps[: len(tensor.shape)][::-1]), False):
            self.add(place)
        self.content += b"ccollections\nOrderedDict\n)R"
        self.content += b"tR" if typed else f"ctorch\n{_NAME_OF[dtype]}\ntR".encode()

    def number(self, tensor: np.ndarray | LazyTensor) -> int:
        """Return the number of the tensor's storage."""
        memory: Any = id(tensor)
        if isinstance(tensor, np.ndarray) and tensor.size:
            start = tensor.__array_interface__["data"][0]
            memory = start, tensor.shape, tensor.strides, tensor.dtype
        if memory not in self._numbers:
            self._numbers[memory] = len(self.storages)
            self.storages.append(
                tensor if isinstance(tensor, LazyTensor) else LazyTensor.of(tensor)
            )
        return self._numbers[memory]
