"""``.safetensors`` files, and the index of several (``*.safetensors.index.json``).

The safetensors library checks the shapes and offsets of a header. It takes the last of two tensors
of one name, and accepts unknown keys and any name: those are checked here.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from jax_transformer.errors import InputError, UnsafeFileError, nearest
from jax_transformer.storage import atomic, tensors, untrusted
from jax_transformer.storage.read_back import CheckedFile
from jax_transformer.storage.tensors import LazyState, LazyTensor, TensorInfo
from jax_transformer.storage.untrusted import is_index, shown

# Errors of the library about files that could be read in two ways, or would need more memory than
# they have
_UNSAFE = ("invalid shape", "overflow", "invalid offset", "recursion limit", "expected usize")
_NAMES = (
    "F64:float64 F32:float32 F16:float16 BF16:bfloat16 I64:int64 I32:int32 I16:int16 I8:int8 "
    "U64:uint64 U32:uint32 U16:uint16 U8:uint8"
)
_MORE = "BOOL:bool C64:complex64 F8_E4M3:float8_e4m3fn F8_E5M2:float8_e5m2 F8_E8M0:float8_e8m0fnu"
DTYPES: dict[str, np.dtype] = {
    pair.split(":")[0]: tensors.DTYPES[pair.split(":")[1]] for pair in f"{_NAMES} {_MORE}".split()
}

Tensor = TypeVar("Tensor", LazyTensor, TensorInfo)
_CODES = {dtype.name: code for code, dtype in DTYPES.items()}
# The order of safetensors 0.8's enum Dtype, from its last to its first
_ORDER = (
    "uint64 int64 float64 complex64 float32 uint32 int32 bfloat16 float16 uint16 int16 "
    "float8_e8m0fnu float8_e4m3fn float8_e5m2 int8 uint8 bool"
).split()


@dataclass(frozen=True)
class TensorExtent:
    """The position of a tensor: ``start`` and ``end`` count bytes of the file."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    end: int


def is_safetensors(path: str | Path) -> bool:
    """Return True if the file begins with the length of a JSON header that fits the file."""
    path = Path(path)
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        begin = file.read(9)
    length = int.from_bytes(begin[:8], "little")
    return begin[8:] == b"{" and length <= path.stat().st_size - 8


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Return every tensor by name, of a file or of all files that an index names. Raises InputError
    if one is missing, damaged, no safetensors file, or has other tensors than the index names;
    UnsafeFileError if a header or index declares more than the file has.
    """
    return tensors.arrays(scan(path))


def scan(path: str | Path) -> dict[str, LazyTensor]:
    """Return every tensor by name, without reading one. Raises as :func:`read`."""
    headers = {file: header(file) for file in untrusted.files(path)}
    if is_index(path):
        untrusted.check_shards(Path(path), headers)
    state = {}
    for extents in headers.values():
        for name, tensor in extents.items():
            info = TensorInfo(tensor.shape, DTYPES[tensor.dtype].name)
            state[name] = LazyTensor(info, partial(_array, name, tensor))
    return state


def _array(name: str, tensor: TensorExtent) -> np.ndarray:
    dtype = DTYPES[tensor.dtype]
    array = tensors.map_file(tensor.file, tensor.start, dtype=dtype, shape=tensor.shape)
    if tensor.dtype == "BOOL" and array.view(np.uint8).max(initial=0) > 1:
        raise InputError(f"{tensor.file}: {shown(name)} has truth values other than 0 and 1")
    return array


def check_dtypes(target: Path, infos: Mapping[str, TensorInfo]) -> None:
    """Raise InputError naming every tensor whose dtype a .safetensors file cannot hold."""
    if unsupported := [
        f"{name} is {info.dtype}" for name, info in infos.items() if info.dtype not in _CODES
    ]:
        raise InputError(f"{target}: a .safetensors file cannot hold {', '.join(unsupported)}")


def describe(path: str | Path) -> dict[str, TensorInfo]:
    """Shape and dtype of every tensor, from the headers only. Raises as ``read``."""
    return {name: tensor.info for name, tensor in scan(path).items()}


def write(
    path: str | Path, state: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file whole or not at all, verify, then name it; ``metadata`` goes into the header."""
    with atomic.file(Path(path)) as temporary:
        save(temporary, tensors.in_memory(state), metadata, target=path)


def save(
    path: Path,
    state: LazyState,
    metadata: Mapping[str, str] | None = None,
    *,
    target: str | Path,
    hashed: bool = True,
    begin: str | None = None,
) -> str:
    """Write the new file ``path``, one tensor at a time, each read back and compared, and return
    its SHA-256 (if ``hashed``). The bytes are the library's, unless the header ``begin`` is given,
    of the same tensors in the order of ``state``. Tied ones are read once. Raises InputError naming
    ``target``, its later name.
    """
    ordered = state if begin is not None else in_order(state)
    if begin is None:
        begin = header_text(ordered, metadata)
    first: dict[LazyTensor, str] = {}  # of tied names
    for name, tensor in ordered.items():
        first.setdefault(tensor, name)
    with (
        CheckedFile(path, target, hashed=hashed) as file,
        contextlib.closing(tensors.read_ahead(first)) as arrays,
    ):
        file.write(len(begin.encode()).to_bytes(8, "little") + begin.encode())
        starts: dict[str, int] = {}
        for name, tensor in ordered.items():
            starts[name] = file.size
            if first[tensor] == name:
                array = next(arrays)
            else:
                same, dtype = starts[first[tensor]], tensor.info.numpy_dtype()
                array = tensors.map_file(path, same, dtype=dtype, shape=tensor.shape)
            file.write(array, name)
            del array
    if {name: extent.start for name, extent in header(path).items()} != starts:
        raise InputError(f"{target}: its header reads back different; nothing was changed")
    return file.sha256() if hashed else ""


def in_order(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in the library's order: wide dtypes first, then names."""
    for name, tensor in state.items():
        if tensor.dtype not in _CODES:
            raise InputError(f"{shown(name)} is {tensor.dtype}, which no .safetensors file holds")
    return dict(sorted(state.items(), key=lambda item: (_ORDER.index(item[1].dtype), item[0])))


def header_text(
    ordered: Mapping[str, LazyTensor | TensorInfo], metadata: Mapping[str, str] | None = None
) -> str:
    """Return the header that the library writes for tensors in this order."""
    about = sorted(({"format": "pt"} | dict(metadata or {})).items())
    entries: dict[str, Any] = {"__metadata__": dict(about)}
    at = 0
    for name, tensor in ordered.items():
        entries[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % 8)  # so that the tensors are aligned


def metadata(path: str | Path) -> dict[str, str]:
    """Return the text in a file's header next to the tensors. Raises as :func:`read`."""
    header(Path(path))
    return _entries(Path(path))[0].get("__metadata__") or {}


def stored_header(path: Path) -> str:
    """Return the header of a file as it is, to be written again. Raises as :func:`read`."""
    header(path)
    with open(path, "rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode("utf-8")


def extents(path: Path, text: str) -> dict[str, TensorExtent]:
    """Return a header's tensors by their bytes after it. Raises InputError naming ``path``."""
    return _extents(path, _object(path, text.encode()), 0)


def header(path: Path) -> dict[str, TensorExtent]:
    """Return one file's tensors in its order; they fill the file, and no two overlap."""
    entries, data = _entries(path)
    try:  # the library compares shapes, offsets and the file's size
        with safe_open(path, "np"):
            pass
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        if any(word in reason for word in _UNSAFE):
            raise UnsafeFileError(f"{path}: refused: {shown(reason, 120)}") from None
        raise InputError(
            f"{path}: not a readable safetensors file: {shown(reason, 120)}; the file has "
            f"{path.stat().st_size:,} bytes"
        ) from None
    return _extents(path, entries, data)


def _extents(path: Path, entries: dict[str, Any], data: int) -> dict[str, TensorExtent]:
    extents = {
        name: _extent(path, name, entry, data)
        for name, entry in entries.items()
        if name != "__metadata__"
    }
    return dict(sorted(extents.items(), key=lambda item: (item[1].start, item[1].end)))


def _entries(path: Path) -> tuple[dict[str, Any], int]:
    """Return the JSON of the header, no key of it twice, and the first byte after it."""
    atomic.check_readable(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        begin = file.read(8)
        length = int.from_bytes(begin, "little")
        if len(begin) < 8 or length > size - 8:
            raise InputError(
                f"{path}: not a readable safetensors file: its header declares {length:,} bytes, "
                f"and the file has {size:,}"
            )
        if length > untrusted.LONGEST_JSON:  # the library's own limit
            raise UnsafeFileError(f"{path}: refused: a header of {length:,} bytes")
        return _object(path, file.read(length)), 8 + length


def _object(path: Path, text: bytes) -> dict[str, Any]:
    entries = untrusted.parse_json(path, text)
    if not isinstance(entries, dict):
        raise InputError(f"{path}: not a readable safetensors file: its header is not an object")
    return entries


def _extent(path: Path, name: str, entry: Any, data: int) -> TensorExtent:
    """Return the position of a tensor, after the checks that the library leaves out."""
    if not name.isprintable():
        raise UnsafeFileError(
            f"{path}: refused: the name {shown(name)} has characters that cannot be printed"
        )
    match entry:
        case {"dtype": str() as dtype, "shape": [*shape], "data_offsets": [start, end], **more} if (
            not more
        ):
            if dtype not in DTYPES:
                raise InputError(
                    f"{path}: {shown(name)} has the unknown dtype "
                    f"{shown(dtype)}{nearest(dtype, list(DTYPES))}"
                )
            # 0 counts as 1: products of the others must fit NumPy's integers
            size = DTYPES[dtype].itemsize * math.prod(max(1, length) for length in shape)
            if len(shape) <= 64 and size < 2**63:
                return TensorExtent(tuple(shape), dtype, path, data + start, data + end)
            raise UnsafeFileError(
                f"{path}: refused: {shown(name)} declares another size than its shape has"
            )
    raise InputError(
        f"{path}: not a readable safetensors file: {shown(name)} is not described by dtype, shape "
        "and data_offsets"
    )
