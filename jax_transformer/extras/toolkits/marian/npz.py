"""NumPy's ``.npz``: a zip file with an array in each member, ``name.npy``.

Arrays are mapped into memory from the file itself. Members that are compressed and arrays of
Python objects are refused, so nothing is unpickled and no small file becomes a large array.
"""

import math
import re
from functools import partial
from pathlib import Path

import numpy as np

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.storage import tensors
from jax_transformer.storage.pt import zip_archive
from jax_transformer.storage.tensors import LazyTensor, TensorInfo
from jax_transformer.storage.untrusted import shown

_SUFFIX = ".npy"
_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 4096
_MOST_AXES = 32
# numpy.lib.format evaluates a header as a literal: it takes the last of two equal keys, lengths
# that are truth values or below zero, and fails in many ways. This is the form that is written.
# No part can match in two ways, so that a long header does not take long
_HEADER = (
    r"\{'descr': '([^']{1,80})', 'fortran_order': (True|False), "
    r"'shape': \(((?:[0-9]{1,15}, )*(?:[0-9]{1,15},?)?)\),? ?\} *\n?"
)
_DTYPE = r"[<|=](f[248]|[iu][1248])"


def is_npz(path: Path) -> bool:
    """Return True if the first member of a zip file is an array."""
    with open(path, "rb") as file:
        start = file.read(30 + 512)
    length = int.from_bytes(start[26:28], "little")
    return start[:4] == b"PK\x03\x04" and start[30 : 30 + length].endswith(_SUFFIX.encode())


def scan(path: Path) -> dict[str, LazyTensor]:
    """Return the arrays by name, none of them read; the checksum of each is verified when it is
    read.

    Raises:
        InputError: the file is damaged, or an array has a form that is not known.
        UnsafeFileError: an array holds Python objects, is compressed, or declares another number of
            bytes than it has.
    """
    with zip_archive.Archive(path, not_for_disk=True) as archive:
        others = [name for name in archive.members if not name.endswith(_SUFFIX)]
        if others:
            raise InputError(f"{path}: {shown(others[0])} is not an array (.npy)")
        return {
            name.removesuffix(_SUFFIX): _array(path, name, member)
            for name, member in archive.members.items()
        }


def verify(path: Path) -> str:
    """Read every byte and return the file's SHA-256. Raises InputError if a checksum in the file
    does not hold.
    """
    with zip_archive.Archive(path, not_for_disk=True) as archive:
        return archive.verify()


def _array(path: Path, name: str, member: zip_archive.Member) -> LazyTensor:
    header, start = _header(path, name, member)
    match = re.fullmatch(_HEADER, header)
    if match is None:
        raise InputError(f"{path}: {shown(name)} has the header {shown(header)}")
    dtype, order, sizes = match.groups()
    if not re.fullmatch(_DTYPE, dtype):
        if "O" in dtype:
            raise UnsafeFileError(
                f"{path}: refused: {shown(name)} holds Python objects, which only pickle reads"
            )
        raise InputError(f"{path}: {shown(name)} is of dtype {shown(dtype)}")
    shape = tuple(int(size) for size in sizes.replace(" ", "").split(",") if size)
    if order == "True" and len(shape) > 1:
        raise InputError(f"{path}: {shown(name)} is stored column by column, as no toolkit does")
    if len(shape) > _MOST_AXES:
        raise InputError(f"{path}: {shown(name)} has {len(shape)} axes")
    kind = np.dtype(dtype.replace("=", "<"))
    declared, size = math.prod(shape) * kind.itemsize, member.start + member.size - start
    if declared != size:
        raise UnsafeFileError(
            f"{path}: refused: {shown(name)} declares {declared:,} bytes, and has {size:,}"
        )
    return LazyTensor(
        TensorInfo(shape, kind.name), partial(_read, path, name, member, start, kind, shape)
    )


def _header(path: Path, name: str, member: zip_archive.Member) -> tuple[str, int]:
    """Return the header's text, and the first byte of the numbers."""
    with open(path, "rb") as file:
        file.seek(member.start)
        begin = file.read(min(member.size, 12))
        width = {1: 2, 2: 4, 3: 4}.get(begin[6] if len(begin) == 12 else 0, 0)
        if begin[:6] != _MAGIC or not width:
            raise InputError(f"{path}: {shown(name)} does not begin as an array of NumPy")
        length, before = int.from_bytes(begin[8 : 8 + width], "little"), 8 + width
        if length > min(_LONGEST_HEADER, member.size - before):
            raise InputError(f"{path}: {shown(name)} has a header of {length:,} bytes")
        file.seek(member.start + before)
        return file.read(length).decode("latin-1"), member.start + before + length


def _read(
    path: Path,
    name: str,
    member: zip_archive.Member,
    start: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
) -> np.ndarray:
    zip_archive.verify_member(path, name, member)
    return tensors.map_file(path, start, dtype=dtype, shape=shape)
