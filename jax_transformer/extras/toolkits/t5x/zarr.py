"""Arrays in the format zarr 2, as TensorStore writes them for T5X: a folder with ``.zarray``, which
is JSON, and a file for each chunk.

They are read here with NumPy and zlib: every size is checked against the files before memory is
taken, and so is each checksum. (TensorStore reads a chunk whose checksum is cut off, and aborts the
process for a size that memory cannot hold.) Facts from the specification of zarr 2 and from the
driver ``zarr`` of TensorStore 0.1.
"""

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.storage import tensors, untrusted
from jax_transformer.storage.tensors import LazyTensor, Shape, TensorInfo
from jax_transformer.storage.untrusted import shown

METADATA = ".zarray"
CHUNK = 64 << 20
"""Most bytes of a chunk that is written, as T5X chooses them."""
RATIO = 1032
"""The most bytes that deflate makes of one."""
_MOST_CHUNKS = 1000
_LONGEST = 1 << 16  # bytes of a .zarray; TensorStore's have about 200
_KEYS = frozenset(
    "chunks compressor dimension_separator dtype fill_value filters order shape zarr_format".split()
)
_COMPRESSED = {"gzip": 31, "zlib": 15}  # zlib's wbits
_PIECE = 1 << 18
_CODES = {
    tensors.DTYPES[name].str: tensors.DTYPES[name]
    for name in "float64 float32 float16 int64 int32 int16 int8 uint8 uint16 uint32 uint64".split()
} | {"bfloat16": tensors.DTYPES["bfloat16"]}
_NAMES = {dtype.name: code for code, dtype in _CODES.items()}


@dataclass(frozen=True)
class ZarrArray:
    """An array whose chunks are all there; none of them is read yet."""

    folder: Path
    shape: Shape
    dtype: np.dtype
    chunks: Shape
    compressor: str | None
    """``gzip``, ``zlib``, or None for plain bytes."""
    separator: str

    def lazy(self) -> LazyTensor:
        return LazyTensor(TensorInfo(self.shape, self.dtype.name), self.read)

    def read(self) -> np.ndarray:
        """Read the array; a single plain chunk is mapped. Raises InputError for a damaged chunk."""
        if self.chunks == self.shape:
            return self._chunk((0,) * len(self.shape))
        result = np.empty(self.shape, self.dtype)
        for index in self.indices():
            part = result[self.place(index)]
            part[...] = self._chunk(index)[tuple(slice(0, length) for length in part.shape)]
        return result

    def place(self, index: Sequence[int]) -> tuple[slice, ...]:
        """Return the part of the array that a chunk holds."""
        pairs = zip(index, self.chunks, strict=True)
        return tuple(slice(i * size, (i + 1) * size) for i, size in pairs)

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Yield the place of each chunk in the grid, one at a time however large it is."""
        grid = [-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        for number in range(math.prod(grid)):
            index: tuple[int, ...] = ()
            for length in reversed(grid):
                number, at = divmod(number, length)
                index = (at, *index)
            yield index

    def chunk_path(self, index: Sequence[int]) -> Path:
        return self.folder / (self.separator.join(map(str, index)) or "0")

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunks) * self.dtype.itemsize

    def _chunk(self, index: tuple[int, ...]) -> np.ndarray:
        path = self.chunk_path(index)
        if self.compressor is None:
            return tensors.map_file(path, 0, dtype=self.dtype, shape=self.chunks)
        raw, at = np.empty(self.chunk_bytes, np.uint8), 0  # which it must fill exactly
        inflater = zlib.decompressobj(_COMPRESSED[self.compressor])
        try:
            with open(path, "rb") as file:
                while not inflater.eof:
                    piece = inflater.unconsumed_tail or file.read(_PIECE)
                    out = inflater.decompress(piece, min(_PIECE, raw.size - at + 1))
                    if at + len(out) > raw.size or not (piece or out):
                        break
                    raw[at : at + len(out)] = np.frombuffer(out, np.uint8)
                    at += len(out)
                more = inflater.unused_data or file.read(1)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
        except zlib.error as error:
            raise InputError(f"{path}: is damaged: {error}") from None
        if not inflater.eof or at != raw.size:
            raise InputError(f"{path}: does not hold the {raw.size:,} bytes of a chunk")
        if more:
            raise InputError(f"{path}: has bytes after its chunk")
        return raw.view(self.dtype).reshape(self.chunks)


# Opening


def open_array(folder: Path) -> ZarrArray:
    """Open the array in a folder. Its chunks are looked for, and none is read.

    Raises InputError if a file is missing or damaged, and for other compressors, filters, Fortran's
    order and other dtypes; UnsafeFileError if it declares more numbers than its files can hold.
    """
    path = folder / METADATA
    data = untrusted.read_json(path, longest=_LONGEST)
    if not isinstance(data, dict) or data.get("zarr_format") != 2:
        raise InputError(f"{path}: is not the description of an array in zarr 2")
    unknown = sorted(data.keys() - _KEYS)
    if unknown:
        raise InputError(f"{path}: has the unknown key {shown(unknown[0])}")
    shape, chunks = (_lengths(path, data, name) for name in ("shape", "chunks"))
    if 0 in shape:
        raise InputError(f"{path}: an array of the shape {shape} has no numbers")
    if len(shape) != len(chunks) or 0 in chunks:
        raise InputError(f"{path}: chunks of {chunks} do not divide the shape {shape}")
    if data.get("order", "C") != "C":
        raise InputError(f"{path}: the order {shown(data['order'])} is not supported, only C is")
    if data.get("filters"):
        raise InputError(f"{path}: filters {shown(data['filters'])} are not supported")
    code = data.get("dtype")
    if not isinstance(code, str) or code not in _CODES:
        raise InputError(
            f"{path}: the dtype {shown(code)} is not one of {', '.join(sorted(_CODES))}"
        )
    separator = data.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise InputError(f"{path}: dimension_separator {shown(separator)} is neither '.' nor '/'")
    array = ZarrArray(folder, shape, _CODES[code], chunks, _compressor(path, data), separator)
    _check_chunks(array)
    return array


def _lengths(path: Path, data: dict[str, Any], name: str) -> Shape:
    lengths = data.get(name)
    if not isinstance(lengths, list) or len(lengths) > 32:
        raise InputError(f"{path}: {name} is {shown(lengths)}, and not a list of lengths")
    if not all(type(length) is int and 0 <= length < 2**48 for length in lengths):
        raise UnsafeFileError(f"{path}: refused: {name} is {shown(lengths)}")
    return tuple(lengths)


def _compressor(path: Path, data: dict[str, Any]) -> str | None:
    compressor = data.get("compressor")
    if compressor is None:
        return None
    name = compressor.get("id") if isinstance(compressor, dict) else compressor
    if not isinstance(name, str) or name not in _COMPRESSED:
        raise InputError(
            f"{path}: the compressor {shown(name)} is not supported, only gzip, zlib and none are"
        )
    return name


def _check_chunks(array: ZarrArray) -> None:
    """Raise InputError unless every chunk has a file, UnsafeFileError if one is too small for what
    it declares. TensorStore reads zeros for a chunk without a file; T5X writes all of them.
    """
    for index in array.indices():
        chunk = array.chunk_path(index)
        if not chunk.is_file():
            raise InputError(
                f"{array.folder / METADATA}: its chunk {chunk.relative_to(array.folder)} is missing"
            )
        size = chunk.stat().st_size
        if array.compressor is None and size != array.chunk_bytes:
            raise InputError(f"{chunk}: has {size:,} bytes, and a chunk has {array.chunk_bytes:,}")
        if array.chunk_bytes > size * RATIO:
            raise UnsafeFileError(
                f"{chunk}: refused: declares {array.chunk_bytes:,} bytes, and a file of {size:,} "
                "bytes cannot hold them"
            )


# Writing


def chunk_shape(shape: Shape, itemsize: int) -> Shape:
    """Return the chunks that T5X writes: equal ones of at most 64 MiB, cut along the longest axis.

    A length with few divisors would give very many; then only the first axis is cut, the last chunk
    reaches beyond it, and TensorStore reads that as well.
    """
    divisors = [[i for i in range(1, size + 1) if size % i == 0] for size in shape]
    while math.prod(each[-1] for each in divisors) * itemsize > CHUNK:
        max(divisors, key=lambda each: each[-1]).pop()
    chunks = tuple(each[-1] for each in divisors)
    if math.prod(shape) <= _MOST_CHUNKS * math.prod(chunks):
        return chunks
    rows = CHUNK // (math.prod(shape[1:]) * itemsize)
    return (max(1, rows), *shape[1:])


def write(folder: Path, array: np.ndarray) -> None:
    """Write an array into a new folder by gzip, as T5X does; equal arrays give equal files."""
    array = np.asarray(array)
    chunks = chunk_shape(array.shape, array.itemsize)
    stored = ZarrArray(folder, array.shape, array.dtype, chunks, "gzip", ".")
    folder.mkdir()
    data = {
        "chunks": list(chunks),
        "compressor": {"id": "gzip", "level": 1},
        "dimension_separator": ".",
        "dtype": _NAMES[array.dtype.name],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(array.shape),
        "zarr_format": 2,
    }
    (folder / METADATA).write_text(json.dumps(data, separators=(",", ":")), encoding="utf-8")
    for index in stored.indices():
        raw = tensors.contiguous(array[stored.place(index)]).reshape(-1).view(np.uint8)
        # zlib's own header has no time
        stored.chunk_path(index).write_bytes(zlib.compress(raw.data, 1, _COMPRESSED["gzip"]))
