"""The zip files that PyTorch writes, and no others: stored members under one folder, each once,
with nothing between them. ``zipfile`` also reads ambiguous files; these mean the same to every
program.
"""

import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.storage import atomic
from jax_transformer.storage.read_back import CheckedFile
from jax_transformer.storage.untrusted import shown

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
# Sizes and checksum follow the data (PyTorch's way); the name is UTF-8
_STREAMED, _UTF8 = 0x8, 0x800
_ZIP64 = 1
MOST_MEMBERS = 500_000
ALIGNMENT = 64
_CHUNK = 1 << 20
_MIDNIGHT = 33  # of the first of January 1980, the earliest date of the format
LARGE = 0xFFFFFFFF  # numbers from here on need a zip64 field
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF  # "see the zip64 field"


class Member(NamedTuple):
    """The position of a member's bytes in the file."""

    header: int
    start: int
    size: int
    crc: int


def first_member(path: Path) -> bytes | None:
    """Return the name of a zip file's first member; None for another file."""
    with open(path, "rb") as file:
        start = file.read(30 + 512)
    length = int.from_bytes(start[26:28], "little")
    return start[30 : 30 + length] if start[:4] == b"PK\x03\x04" else None


def verify_member(path: Path, name: str, member: Member) -> None:
    """Raise InputError if the checksum of a member is wrong. Takes a megabyte of memory."""
    buffer, crc, left = np.empty(_CHUNK, np.uint8), 0, member.size
    with open(path, "rb", buffering=0) as file:
        file.seek(member.start)
        while left:
            read = file.readinto(buffer[: min(left, _CHUNK)].data)
            if not read:
                raise InputError(f"{path}: ends in the middle of {shown(name)}")
            crc, left = zlib.crc32(buffer[:read].data, crc), left - read
    _check_crc(path, name, member, crc)


def _check_crc(path: Path, name: str, member: Member, crc: int) -> None:
    if crc != member.crc:
        raise InputError(
            f"{path}: {shown(name)} is damaged (or was saved without "
            "checksums): its CRC-32 is not the recorded one"
        )


class Archive(contextlib.AbstractContextManager["Archive"]):
    """A zip file open for reading; ``members`` by name, with colons if ``not_for_disk``, as none
    becomes a file. Raises InputError if it is damaged, UnsafeFileError if it could be read in two
    ways.
    """

    def __init__(self, path: str | Path, *, not_for_disk: bool = False):
        self.path, self._signs = Path(path), set("\\" if not_for_disk else "\\:")
        atomic.check_readable(self.path)
        self._file = open(self.path, "rb")  # noqa: SIM115 (close() is __exit__'s)
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.members = self._directory()
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, name: str) -> bytes:
        """Return the content of a member. Raises InputError if its checksum is wrong."""
        member = self.members[name]
        content = self._at(member.start, member.size)
        _check_crc(self.path, name, member, zlib.crc32(content))
        return content

    def verify(self) -> str:
        """Return the SHA-256 in one read. Raises InputError if a member's checksum is wrong."""
        digest, at = hashlib.sha256(), 0
        for name, member in sorted(self.members.items(), key=lambda item: item[1].start):
            digest.update(self._at(at, member.start - at))
            crc, at = 0, member.start + member.size
            for start in range(member.start, at, _CHUNK):
                chunk = self._at(start, min(_CHUNK, at - start))
                digest.update(chunk)
                crc = zlib.crc32(chunk, crc)
            _check_crc(self.path, name, member, crc)
        digest.update(self._at(at, self.size - at))
        return digest.hexdigest()

    def _at(self, offset: int, length: int) -> bytes:
        if offset < 0 or offset + length > self.size:
            raise InputError(f"{self.path}: a damaged zip file: it refers to bytes after its end")
        self._file.seek(offset)
        content = self._file.read(length)
        if len(content) != length:
            raise InputError(f"{self.path}: became shorter while it was read")
        return content

    def _damaged(self, what: str) -> InputError:
        return InputError(f"{self.path}: a damaged zip file: {what}")

    def _unsafe(self, what: str) -> UnsafeFileError:
        return UnsafeFileError(f"{self.path}: refused: {what}")

    def _end(self) -> tuple[int, int, int]:
        """Return the member count and the directory's span, which must end at the end record."""
        if self.size < _END.size:
            raise self._damaged("it is too short")
        at = self.size - _END.size
        signature, disk, first, here, number, length, start, comment = _END.unpack(
            self._at(at, _END.size)
        )
        if signature != b"PK\x05\x06" or comment:
            raise self._damaged("it does not end with its directory")
        narrow = (disk, first, here, number, length, start)
        if at >= _LOCATOR.size and self._at(at - _LOCATOR.size, 4) == b"PK\x06\x07":
            _, on, at64, disks = _LOCATOR.unpack(self._at(at - _LOCATOR.size, _LOCATOR.size))
            signature, record, _, _, disk, first, here, number, length, start = _END64.unpack(
                self._at(at64, _END64.size)
            )
            if (
                signature != b"PK\x06\x06"
                or on
                or disks > 1
                or record != _END64.size - 12
                or at64 + _END64.size != at - _LOCATOR.size
            ):
                raise self._damaged("its 64-bit end record is wrong")
            limits = (FULL16, FULL16, FULL16, FULL16, FULL32, FULL32)
            wide = (disk, first, here, number, length, start)
            for old, new, full in zip(narrow, wide, limits, strict=True):
                if old not in (new, full):
                    raise self._unsafe("its two end records name two directories")
            at = at64
        if (
            disk
            or first
            or here != number
            or start + length != at
            or number * _CENTRAL.size > length
        ):
            raise self._damaged("its directory is not at its place")
        if number > MOST_MEMBERS:
            raise self._unsafe(f"{number:,} members, more than {MOST_MEMBERS:,}")
        return number, start, at

    def _directory(self) -> dict[str, Member]:
        number, start, end = self._end()
        members: dict[str, Member] = {}
        records = self._at(start, end - start)
        for name, member in self._entries(records, number):
            if name in members:
                raise self._unsafe(f"{shown(name)} appears twice")
            members[name] = member
        before = 0
        for member, name in sorted(zip(members.values(), members, strict=True)):
            if member.header < before or member.start + member.size > start:
                raise self._unsafe(f"{shown(name)} overlaps another member")
            before = member.start + member.size
        return members

    def _entries(self, records: bytes, number: int) -> Iterator[tuple[str, Member]]:
        at = 0
        for _ in range(number):
            if at + _CENTRAL.size > len(records):
                raise self._damaged("its directory ends too early")
            fields = _CENTRAL.unpack_from(records, at)
            signature, _, _, flags, method, _, _, crc, packed, size, *rest = fields
            name_length, extra_length, comment_length, disk, _, _, header = rest
            begin = at + _CENTRAL.size
            middle = begin + name_length
            at = middle + extra_length + comment_length
            if signature != b"PK\x01\x02" or at > len(records):
                raise self._damaged("its directory is wrong")
            raw = records[begin:middle]
            name = self._checked_name(raw)
            size, packed, header, disk = self._wide(
                records[middle : middle + extra_length],
                ((size, FULL32), (packed, FULL32), (header, FULL32), (disk, FULL16)),
            )
            if flags & ~(_STREAMED | _UTF8):
                raise self._unsafe(f"{shown(name)} is encrypted, patched or otherwise special")
            if method or packed != size:
                raise self._unsafe(
                    f"{shown(name)} is compressed, which neither PyTorch nor Marian does"
                )
            if disk:
                raise self._damaged("it is one of several parts")
            start = self._local(raw, name, flags, (crc, packed, size), header)
            yield name, Member(header, start, size, crc)
        if at != len(records):
            raise self._damaged("its directory goes on after its last member")

    def _checked_name(self, raw: bytes) -> str:
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged("a member's name is not UTF-8") from None
        parts = {"", ".", ".."}.intersection(name.split("/"))
        if parts or self._signs.intersection(name) or not name.isprintable():
            raise self._unsafe(f"{shown(name)} is not a plain name")
        return name

    def _wide(self, extra: bytes, fields: tuple[tuple[int, int], ...]) -> list[int]:
        """Return a directory entry's fields; full ones are in the zip64 field, in this order."""
        wide = b""
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, at)
            at += 4 + length
            if at > len(extra):
                raise self._damaged("an extra field is cut off")
            if kind == _ZIP64:
                wide = extra[at - length : at]
        read = []
        for value, full in fields:
            width = 8 if full == FULL32 else 4
            if value == full and wide:
                if len(wide) < width:
                    raise self._damaged("a 64-bit field is cut off")
                value, wide = int.from_bytes(wide[:width], "little"), wide[width:]
            read.append(value)
        return read

    def _local(
        self, raw: bytes, name: str, flags: int, sizes: tuple[int, int, int], header: int
    ) -> int:
        """Return the first byte of the data. The header before it must agree with the directory."""
        fields = _LOCAL.unpack(self._at(header, _LOCAL.size))
        signature, _, local_flags, method, _, _, crc, packed, size, name_length, extra_length = (
            fields
        )
        if signature != b"PK\x03\x04":
            raise self._damaged(f"{shown(name)} is not at its place")
        streamed = flags & _STREAMED and (crc, packed, size) == (0, 0, 0)
        listed_crc, *listed = sizes
        agrees = crc == listed_crc and packed in (listed[0], FULL32) and size in (listed[1], FULL32)
        if not agrees and not streamed:
            raise self._unsafe(f"{shown(name)} has two sizes or checksums")
        if (local_flags, method) != (flags, 0) or self._at(
            header + _LOCAL.size, name_length
        ) != raw:
            raise self._unsafe(f"{shown(name)} is described in two ways")
        return header + _LOCAL.size + name_length + extra_length


def write(file: CheckedFile, members: Mapping[str, Callable[[], np.ndarray]]) -> dict[str, int]:
    """Write a zip file of stored members (uint8), each at a multiple of 64 bytes as PyTorch does,
    and without times: the same members give the same bytes. A member is read when its turn comes,
    and let go before the next. Returns the first byte of each.
    """
    starts = {}
    directory = b""
    at = 0
    for name, read in members.items():
        content = read()
        raw, crc, size = name.encode("utf-8"), zlib.crc32(content.data), content.size
        small = _narrow(size)
        wide = _wide_extra(size, size)
        pad = -(at + _LOCAL.size + len(raw) + len(wide) + 4) % ALIGNMENT
        extra = wide + struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        fields = (_UTF8, 0, 0, _MIDNIGHT, crc, small, small, len(raw))
        local = _LOCAL.pack(b"PK\x03\x04", 45 if wide else 20, *fields, len(extra)) + raw + extra
        file.write(local)
        file.write(content, name)
        del content
        starts[name] = at + len(local)
        wide = _wide_extra(size, size, at)
        version = 45 if wide else 20
        directory += _CENTRAL.pack(
            b"PK\x01\x02", version, version, *fields, len(wide), 0, 0, 0, 0, _narrow(at)
        )
        directory += raw + wide
        at = starts[name] + size
    file.write(directory)
    number, length = len(members), len(directory)
    if number >= FULL16 or at >= LARGE or length >= LARGE:
        counts = (number, number, length, at)
        file.write(_END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, *counts))
        file.write(_LOCATOR.pack(b"PK\x06\x07", 0, at + length, 1))
    number = min(number, FULL16)
    file.write(_END.pack(b"PK\x05\x06", 0, 0, number, number, _narrow(length), _narrow(at), 0))
    return starts


def _narrow(number: int) -> int:
    return number if number < LARGE else FULL32


def _wide_extra(*numbers: int) -> bytes:
    """Return the zip64 field for those numbers that do not fit into 32 bits."""
    large = [number for number in numbers if number >= LARGE]
    return struct.pack(f"<HH{len(large)}Q", _ZIP64, 8 * len(large), *large) if large else b""
