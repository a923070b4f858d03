"""Write PyTorch's ``.pt`` files without PyTorch: a zip file of a pickle (protocol 2, PyTorch's own)
and of the storages, so that the same state is always the same bytes.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.storage import (
    atomic,
    lazy,
    prefetch,
    pt,
    tensors,
)
from jax_transformer.storage.lazy import LazyState, LazyTensor
from jax_transformer.storage.pt import zip_archive
from jax_transformer.storage.read_back import CheckedFile
from jax_transformer.storage.tensors import TensorView
from jax_transformer.storage.untrusted import shown

_STORAGE_OF = {tensors.DTYPES[dtype]: storage for storage, dtype in tensors.STORAGES.items()}
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
    """Write the new file ``path``, one tensor at a time, and return its SHA-256. Tensors are arrays
    or ``LazyTensor``.

    Each tensor is read back and compared as soon as it is written. Raises as :func:`write`, naming
    ``target``, which the file will become.
    """
    pickler = _Pickler(str(target))
    records = {"data.pkl": pickler.dump(value), "byteorder": b"little"}
    storages = {f"archive/data/{number}": each for number, each in enumerate(pickler.storages)}
    with CheckedFile(path, target) as file, prefetch.reading(storages) as reading:
        starts = zip_archive.write(file, _members(records, reading))
    if not _described(value, pt.describe(path), pickler) or starts != zip_archive.starts(path):
        raise InputError(f"{target}: reads back different from what was written")
    return file.sha256()


def _members(
    records: Mapping[str, bytes], storages: LazyState
) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    for name, content in records.items():
        yield f"archive/{name}", partial(np.frombuffer, content, np.uint8)
    for name, tensor in storages.items():
        yield name, partial(_bytes, tensor)
    yield "archive/version", partial(np.frombuffer, b"3\n", np.uint8)


def _bytes(tensor: LazyTensor) -> np.ndarray:
    array = tensor.read()
    native = tensors.contiguous(array.astype(array.dtype.newbyteorder("="), copy=False))
    return native.reshape(-1).view(np.uint8)


def _described(value: Any, again: Any, pickler: "_Pickler") -> bool:
    """True if two values are equal, in equal containers, and tensors have their own storages."""
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
    if isinstance(value, float):
        return isinstance(again, float) and struct.pack("d", value) == struct.pack("d", again)
    return type(again) is type(value) and again == value


class _Pickler:
    """Collects a state's pickle in ``content`` and its storages, in the order of their numbers.

    An array that is in the state twice (the same memory, shape and dtype) becomes one storage, so
    it is tied in PyTorch, too.
    """

    def __init__(self, where: str):
        self.where = where
        self.content = bytearray(b"\x80\x02")
        self.storages: list[LazyTensor] = []
        self._numbers: dict[Any, int] = {}

    def dump(self, value: Any) -> bytes:
        """The complete pickle. Raises InputError for values that are neither arrays nor plain."""
        self._value(value, "")
        return bytes(self.content + b".")

    def _value(self, value: Any, name: str) -> None:
        match value:
            case None | True | False:
                self.content += {None: b"N", True: b"\x88", False: b"\x89"}[value]
            case np.ndarray() | LazyTensor():
                self._tensor(value, name)
            case str():
                raw = value.encode("utf-8")
                self.content += b"X" + len(raw).to_bytes(4, "little") + raw
            case bytes():
                self.content += b"c_codecs\nencode\n"
                self._call(value.decode("latin-1"), "latin1")
            case np.generic():
                raise self._refused(value, name)
            case int():
                self._integer(value, name)
            case float():
                self.content += b"G" + struct.pack(">d", value)
            case complex():
                self.content += b"c__builtin__\ncomplex\n"
                self._call(value.real, value.imag)
            case Mapping():
                self.content += b"}("
                for key, item in value.items():
                    if type(key) not in (str, int, bool, float, bytes, type(None)):
                        raise self._refused(key, f"a key of {name}")
                    self._value(key, f"{name}.{key}" if name else str(key))
                    self._value(item, f"{name}.{key}" if name else str(key))
                self.content += b"u"
            case list() | tuple():
                self.content += b"](" if isinstance(value, list) else b"("
                for number, item in enumerate(value):
                    self._value(item, f"{name}.{number}" if name else str(number))
                self.content += b"e" if isinstance(value, list) else b"t"
            case _:
                raise self._refused(value, name)

    def _refused(self, value: Any, name: str) -> InputError:
        return InputError(
            f"{self.where}: {shown(name)} is a {type(value).__name__}, which is neither an array "
            "nor a plain container or value"
        )

    def _call(self, *arguments: Any) -> None:
        self._value(arguments, "")
        self.content += b"R"

    def _integer(self, value: int, name: str) -> None:
        if -(2**31) <= value < 2**31:
            self.content += b"J" + value.to_bytes(4, "little", signed=True)
            return
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(raw) > 255:
            raise InputError(f"{self.where}: {shown(name)} is an integer of {len(raw):,} bytes")
        self.content += b"\x8a" + bytes([len(raw)]) + raw

    def _tensor(self, tensor: np.ndarray | LazyTensor, name: str) -> None:
        dtype = _dtype(tensor)
        if dtype not in _NAME_OF:
            raise InputError(
                f"{self.where}: {shown(name)} is {tensor.dtype}, which PyTorch does not have"
            )
        storage = _STORAGE_OF.get(dtype)
        number = self.number(tensor)
        size = math.prod(tensor.shape)
        self.content += (
            b"ctorch._utils\n_rebuild_tensor_v2\n("
            if storage
            else b"ctorch._utils\n_rebuild_tensor_v3\n("
        )
        self.content += b"("
        self._value("storage", name)
        self.content += (
            f"ctorch\n{storage}\n".encode() if storage else b"ctorch.storage\nUntypedStorage\n"
        )
        item: Any
        for item in (str(number), "cpu", size if storage else size * dtype.itemsize):
            self._value(item, name)
        self.content += b"tQ"
        steps = [1]
        for length in tensor.shape[:0:-1]:
            steps.append(steps[-1] * max(1, length))
        for item in (0, tuple(tensor.shape), tuple(steps[: len(tensor.shape)][::-1]), False):
            self._value(item, name)
        self.content += b"ccollections\nOrderedDict\n)R"
        self.content += b"tR" if storage else f"ctorch\n{_NAME_OF[dtype]}\ntR".encode()

    def number(self, tensor: np.ndarray | LazyTensor) -> int:
        """The number of the tensor's storage."""
        memory: Any = id(tensor)
        if isinstance(tensor, np.ndarray) and tensor.size:
            memory = (
                tensor.__array_interface__["data"][0],
                tensor.shape,
                tensor.strides,
                tensor.dtype,
            )
        if memory not in self._numbers:
            self._numbers[memory] = len(self.storages)
            self.storages.append(tensor if isinstance(tensor, LazyTensor) else lazy.of(tensor))
        return self._numbers[memory]


def _dtype(tensor: np.ndarray | LazyTensor) -> np.dtype:
    if isinstance(tensor, LazyTensor):
        return tensor.numpy_dtype()
    return tensor.dtype.newbyteorder("=")
