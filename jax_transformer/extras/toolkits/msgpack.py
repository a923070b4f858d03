"""The msgpack files of ``flax.serialization``: nested maps with arrays as leaves.

They are not read with flax, which trusts every length in the file, nor with msgpack's Unpacker,
which copies an array to know where it ends: this reader accepts maps and arrays only, reads none of
the arrays' bytes and checks every length against the rest of the file. An array is
an extension of type 1 (a NumPy scalar: of type 3) with a triple of shape, dtype's name and bytes in
C order; one of more than 2^30 bytes is split into pieces in a map of its own, under
``__msgpack_chunked_array__``.
"""

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from jax_transformer.errors import InputError, UnsafeFileError, nearest
from jax_transformer.storage import atomic, tensors
from jax_transformer.storage.untrusted import shown

DEEPEST = 32
MOST_VALUES = 600_000
LONGEST_TEXT = 1024
_CHUNKED = "__msgpack_chunked_array__"
_ARRAYS = {1: "an array", 3: "a NumPy scalar"}

Keys = tuple[str, ...]


@dataclass(frozen=True)
class ArrayExtent:
    """The position of an array in a file: ``pieces`` have the first byte and the length of each."""

    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    pieces: tuple[tuple[int, int], ...]


def header(path: str | Path) -> dict[Keys, ArrayExtent]:
    """Return every array of a file by the keys that lead to it; no array's bytes are read.

    Raises InputError for damage and for values other than maps of arrays; UnsafeFileError if it
    declares more bytes than it has, or is deeper or has more entries than weights need.
    """
    extents: dict[Keys, ArrayExtent] = {}
    for keys, value in leaves(Path(path), tree(path)):
        if not isinstance(value, ArrayExtent):
            raise InputError(f"{path}: {shown('/'.join(keys))} is {shown(value)}, and not an array")
        extents[keys] = value
    return extents


def tree(path: str | Path) -> dict[str, Any]:
    """Return the map in a file, with an :class:`ArrayExtent` for each array; lists, numbers, text,
    truth values and None are themselves. An array in pieces is the map that flax writes for it.

    Raises as :func:`header`, but for leaves that are not arrays.
    """
    path = Path(path)
    atomic.check_readable(path)
    with open(path, "rb") as file:
        reader = _Reader(path, file, path.stat().st_size)
        content = reader.value(0)
        if not isinstance(content, dict):
            reader.wrong("is not a map")
        if reader.at != reader.size:
            reader.wrong(f"ends at byte {reader.at:,}, and the file has {reader.size:,}")
    return content


def read(extent: ArrayExtent) -> np.ndarray:
    """Read the array. Raises InputError if the file became shorter."""
    raw, at = np.empty(sum(length for _, length in extent.pieces), np.uint8), 0
    with open(extent.file, "rb") as file:
        for start, length in extent.pieces:
            file.seek(start)
            if file.readinto(raw[at : at + length].data) != length:
                raise InputError(f"{extent.file}: became shorter while it was read")
            at += length
    if extent.dtype == np.bool_ and raw.max(initial=0) > 1:
        raise InputError(f"{extent.file}: has truth values other than 0 and 1")
    return raw.view(extent.dtype).reshape(extent.shape)


def leaves(
    path: Path, tree: dict[str, Any], stop: str = "", above: Keys = ()
) -> Iterator[tuple[Keys, Any]]:
    """Yield the leaves of a map with the keys that lead to them. An array in pieces is joined, and
    a map with the key ``stop`` is a leaf.
    """
    for name, value in tree.items():
        keys = (*above, name)
        if isinstance(value, dict):
            value = _joined(path, value, keys)
        if isinstance(value, dict) and stop not in value:
            yield from leaves(path, value, stop, keys)
        else:
            yield keys, value


def _joined(path: Path, value: dict[str, Any], at: Keys) -> ArrayExtent | dict[str, Any]:
    """Join the numbered pieces of an array, whose lengths are numbered too; or return the map."""
    if _CHUNKED not in value:
        return value
    name = shown("/".join(at))
    shape, pieces = (_numbered(value.get(key)) for key in ("shape", "chunks"))
    if set(value) != {_CHUNKED, "shape", "chunks"} or not pieces or not shape:
        raise InputError(f"{path}: {name} is not in pieces as flax writes them")
    if not all(
        isinstance(piece, ArrayExtent) and len(piece.shape) == 1 and piece.dtype == pieces[0].dtype
        for piece in pieces
    ):
        raise InputError(f"{path}: the pieces of {name} are not flat arrays of one dtype")
    if not _is_shape(shape):
        raise UnsafeFileError(f"{path}: refused: {name} has the shape {shown(shape)}")
    if math.prod(shape) != sum(piece.shape[0] for piece in pieces):
        raise UnsafeFileError(f"{path}: refused: {name} declares another size than its pieces have")
    spans = tuple(span for piece in pieces for span in piece.pieces)
    return ArrayExtent(tuple(shape), pieces[0].dtype, path, spans)


def _numbered(values: Any) -> list[Any]:
    """Return the values of the keys "0", "1" and so on; empty if there are other keys."""
    keys = [str(i) for i in range(len(values))] if isinstance(values, dict) else []
    return [values[key] for key in keys] if all(key in values for key in keys) else []


class _Bytes(NamedTuple):
    start: int
    length: int


class _Reader:
    """Reads the values of msgpack in order, none longer than the rest of the file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.at = self.values = 0

    def wrong(self, what: str) -> NoReturn:
        raise InputError(f"{self.path}: not a readable msgpack file: {what}")

    def refuse(self, what: str) -> NoReturn:
        raise UnsafeFileError(f"{self.path}: refused: {what}")

    def check(self, length: int) -> None:
        if length > self.size - self.at:
            self.wrong(
                f"at byte {self.at:,} {length:,} bytes are said to follow, and the file has "
                f"{self.size:,}"
            )

    def take(self, length: int) -> bytes:
        self.check(length)
        self.at += length
        taken = self.file.read(length)
        if len(taken) != length:
            raise InputError(f"{self.path}: became shorter while it was read")
        return taken

    def value(self, depth: int) -> Any:
        """Read a map, an array's description, a list, a number, text, a truth value or None."""
        self.values += 1
        if depth > DEEPEST:
            self.refuse(f"more than {DEEPEST} maps in one another")
        if self.values > MOST_VALUES:
            self.refuse(f"more than {MOST_VALUES:,} values")
        start, first = self.at, self.take(1)[0]
        if first in _NUMBERS:
            form = _NUMBERS[first]
            return struct.unpack(f">{form}", self.take(struct.calcsize(form)))[0]
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _FIXED:
            read, length = _FIXED[first]
        elif first in _COUNTED:
            read, width = _COUNTED[first]
            length = int.from_bytes(self.take(width), "big")
        else:
            self.wrong(f"byte {start:,} is {first:#04x}, which is not used for weights")
        return read(self, length, depth)

    def entries(self, count: int, depth: int) -> dict[str, Any]:
        self.check(2 * count)
        entries: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                self.wrong(f"before byte {self.at:,} stands {shown(key)} where a name should")
            if not key or not key.isprintable() or "/" in key or "." in key:
                self.refuse(f"{shown(key)} is not a plain name")
            if key in entries:
                self.refuse(f"{shown(key)} appears twice in one map")
            entries[key] = self.value(depth + 1)
        return entries

    def items(self, count: int, depth: int) -> list[Any]:
        self.check(count)
        return [self.value(depth + 1) for _ in range(count)]

    def text(self, length: int, depth: int) -> str:
        if length > LONGEST_TEXT:
            self.refuse(f"a name of {length:,} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            self.wrong(f"the text before byte {self.at:,} is not UTF-8")

    def binary(self, length: int, depth: int) -> _Bytes:
        self.check(length)
        content = _Bytes(self.at, length)
        self.at += length
        self.file.seek(self.at)
        return content

    def extension(self, length: int, depth: int) -> ArrayExtent:
        kind = _ARRAYS.get(number := self.take(1)[0])
        if kind is None:
            self.wrong(
                f"before byte {self.at:,} is an extension of type {number}, which is neither an "
                "array nor a NumPy scalar"
            )
        self.check(length)
        end, triple = self.at + length, self.value(depth + 1)
        if self.at != end:
            self.wrong(f"{kind} should end at byte {end:,} and ends at {self.at:,}")
        match triple:
            case [[*shape], str() as name, _Bytes() as content]:
                if name not in tensors.DTYPES:
                    hint = nearest(name[:80], list(tensors.DTYPES))
                    self.wrong(f"{kind} is of dtype {shown(name)}, which is not known{hint}")
                dtype = tensors.DTYPES[name]
                # Without lengths of 0: products of the others must fit NumPy's integers
                if not _is_shape(shape) or (
                    math.prod(max(1, n) for n in shape) * dtype.itemsize >= 2**63
                ):
                    self.refuse(f"an array has the shape {shown(shape)}")
                if math.prod(shape) * dtype.itemsize != content.length:
                    self.refuse(
                        f"an array of {content.length:,} bytes declares another size, "
                        f"{shown(shape)} of {name}"
                    )
                span = (content.start, content.length)
                return ArrayExtent(tuple(shape), dtype, self.path, (span,))
        self.wrong(f"{kind} before byte {end:,} is not a triple of shape, dtype and bytes")


def _is_shape(lengths: list[Any]) -> bool:
    return len(lengths) <= 64 and all(type(n) is int and 0 <= n < 2**63 for n in lengths)


# The format's first bytes: of constants, of numbers, of values whose length is in the first byte,
# and of those before which as many bytes tell it
_Read = Callable[[_Reader, int, int], Any]
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_CONSTANTS |= {
    byte: byte if byte < 0x80 else byte - 256 for byte in (*range(128), *range(224, 256))
}
_NUMBERS = dict(zip((0xCA, 0xCB, *range(0xCC, 0xD4)), "fdBHIQbhiq", strict=True))
_FIXED: dict[int, tuple[_Read, int]] = {
    **{0x80 + length: (_Reader.entries, length) for length in range(16)},
    **{0x90 + length: (_Reader.items, length) for length in range(16)},
    **{0xA0 + length: (_Reader.text, length) for length in range(32)},
    **{0xD4 + power: (_Reader.extension, 2**power) for power in range(5)},
}
_COUNTED: dict[int, tuple[_Read, int]] = {
    first + power: (read, 2**power)
    for first, read in ((0xC4, _Reader.binary), (0xC7, _Reader.extension), (0xD9, _Reader.text))
    for power in range(3)
}
_COUNTED |= {0xDC: (_Reader.items, 2), 0xDD: (_Reader.items, 4)}
_COUNTED |= {0xDE: (_Reader.entries, 2), 0xDF: (_Reader.entries, 4)}
