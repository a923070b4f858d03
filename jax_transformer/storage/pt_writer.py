"""Write PyTorch's ``.pt`` files without PyTorch: a zip file of a pickle (protocol 2, PyTorch's own)
and of the storages, so that the same state is always the same bytes.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.storage import atomic, pt, tensors, zipped
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


def save(path: Path, value: Any, *, target: str | Path) -> Any:
    """Write the new file ``path`` and return its content, which is read back and compared.

    Raises as :func:`write`, naming ``target``, which the file will become.
    """
    pickler = _Pickler(str(target))
    records = {"data.pkl": pickler.dump(value), "byteorder": b"little"}
    with open(path, "wb") as file:
        zipped.write(file, _members(records, pickler.storages))
    again = pt.read(path)
    if not _same(value, again):
        raise InputError(f"{target}: reads back different from what was written")
    return again


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


class _Pickler:
    """Collects a state's pickle in ``content`` and its storages, in the order of their numbers.

    An array that is in the state twice (the same memory, shape and dtype) becomes one storage, so
    it is tied in PyTorch, too.
    """

    def __init__(self, where: str):
        self.where = where
        self.content = bytearray(b"\x80\x02")
        self.storages: list[np.ndarray] = []
        self._numbers: dict[Any, int] = {}

    def dump(self, value: Any) -> bytes:
        """The complete pickle. Raises InputError for values that are neither arrays nor plain."""
        self._value(value, "")
        return bytes(self.content + b".")

    def _value(self, value: Any, name: str) -> None:
        match value:
            case None | True | False:
                self.content += {None: b"N", True: b"\x88", False: b"\x89"}[value]
            case np.ndarray():
                self._array(value, name)
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

    def _array(self, array: np.ndarray, name: str) -> None:
        dtype = array.dtype.newbyteorder("=")
        if dtype not in _NAME_OF:
            raise InputError(
                f"{self.where}: {shown(name)} is {array.dtype}, which PyTorch does not have"
            )
        storage = _STORAGE_OF.get(dtype)
        number = self._number(array)
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
        for item in (str(number), "cpu", array.size if storage else array.nbytes):
            self._value(item, name)
        self.content += b"tQ"
        steps = [1]
        for length in array.shape[:0:-1]:
            steps.append(steps[-1] * max(1, length))
        for item in (0, array.shape, tuple(steps[: array.ndim][::-1]), False):
            self._value(item, name)
        self.content += b"ccollections\nOrderedDict\n)R"
        self.content += b"tR" if storage else f"ctorch\n{_NAME_OF[dtype]}\ntR".encode()

    def _number(self, array: np.ndarray) -> int:
        memory = (
            (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype)
            if array.size
            else object()
        )
        if memory not in self._numbers:
            self._numbers[memory] = len(self.storages)
            self.storages.append(array)
        return self._numbers[memory]
