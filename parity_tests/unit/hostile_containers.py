"""Hostile zip files, safetensors files and their indexes; their contents would be harmless."""

import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from parity_tests.unit import hostile

GOOD = hostile.members(hostile.pickle(hostile.tensor()))


def _local(method: int, crc: int, packed: int, size: int, name: bytes) -> bytes:
    fields = (20, 0, method, 0, 33, crc, packed, size, len(name), 0)
    return struct.pack("<4s5H3L2H", b"PK\x03\x04", *fields) + name


def _directory(method: int, crc: int, packed: int, size: int, name: bytes, at: int) -> bytes:
    fields = (20, 20, 0, method, 0, 33, crc, packed, size, len(name), 0, 0, 0, 0, 0, at)
    return struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *fields) + name


def _end(number: int, length: int, start: int) -> bytes:
    return struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, number, number, length, start, 0)


def patched(content: bytes, at: int, raw: bytes) -> bytes:
    at %= len(content) + 1
    return content[:at] + raw + content[at + len(raw) :]


def archives() -> Iterator[tuple[str, bytes]]:
    for method in ("deflated", "bzip2", "lzma"):
        yield method, hostile.zipped(GOOD, getattr(zipfile, f"ZIP_{method.upper()}"))
    yield "a deflated gigabyte", _deflated_storage()
    data = GOOD[2]
    names = ["../evil", "a/../../evil", "/etc/passwd", "a//evil", "a/./evil", "a/dir/", "C:/evil"]
    names += ["a\\..\\evil", "..", "a/\x1b[2Jevil"]
    for what, members in {
        "the pickle twice": [GOOD[0], *GOOD],
        "a storage twice": [*GOOD, data],
        "a storage twice with other content": [*GOOD, ("a/data/0", b"\1" * 16)],
        "no pickle": GOOD[1:],
        "two pickles": [*GOOD, ("b/data.pkl", b"\x80\x02}.")],
        "two folders": [*GOOD, ("b/data/1", b"")],
        "no folder": [(name.removeprefix("a/"), content) for name, content in GOOD],
        "a folder too many": [(f"b/{name}", content) for name, content in GOOD],
        "no version": GOOD[:-1],
        "version 0": [*GOOD[:-1], ("a/version", b"0\n")],
        "version 11": [*GOOD[:-1], ("a/version", b"11\n")],
        "a version of text": [*GOOD[:-1], ("a/version", b"\xb2\n")],
        "a version of a megabyte": [*GOOD[:-1], ("a/version", b"1" * 2**20)],
        "big-endian": [GOOD[0], ("a/byteorder", b"big"), *GOOD[2:]],
        "no byte order that there is": [GOOD[0], ("a/byteorder", b"\x1b[2J"), *GOOD[2:]],
        "TorchScript": [*GOOD, ("a/constants.pkl", b"\x80\x02)."), ("a/code/__torch__.py", b"1")],
        "no storage": [GOOD[0], GOOD[1], GOOD[3]],
        "a storage that is too long": [GOOD[0], GOOD[1], ("a/data/0", b"\0" * 17), GOOD[3]],
        **{f"named {name!r}": [*GOOD, (name, b"x")] for name in names},
    }.items():
        yield what, hostile.zipped(members)
    good = hostile.zipped(GOOD)
    end, first = len(good) - 22, good.index(b"PK\x01\x02")
    start = struct.unpack_from("<L", good, end + 16)[0]
    number = struct.unpack_from("<H", good, end + 8)[0]
    second = good.index(b"PK\x01\x02", first + 4)
    less, nowhere = struct.pack("<L", len(GOOD[0][1]) - 1), (b"PK\x06\x07", 0, 2**62, 1)

    long = hostile.zipped([*GOOD, ("a/" + "x" * 46, b"x")])

    def with_end64(record: bytes) -> bytes:
        return good[:end] + record + good[end:]

    for what, content in {
        "something before it": b"#!/bin/sh\n" + good,
        "something behind it": good + b"x",
        "a comment": good[:-2] + b"\x05\x00hello",
        "a comment that is not there": good[:-2] + b"\x05\x00",
        "an empty zip": good[end:],
        **{
            f"an end with one more at {at}": patched(good, end + at, bytes([good[end + at] + 1]))
            for at in range(4, 20, 2)
        },
        "fewer members than there are": patched(good, end + 8, struct.pack("<H", number - 1) * 2),
        "more members than there are": patched(good, end + 8, struct.pack("<H", number + 1) * 2),
        "an entry more than fits": patched(long, -15, struct.pack("<H", number + 2) * 2),
        "65535 members": patched(good, end + 8, b"\xff\xff\xff\xff"),
        "a directory elsewhere": patched(good, end + 16, struct.pack("<L", start - 1)),
        "a directory far away": patched(good, end + 16, b"\xfe\xff\xff\xff"),
        "a directory of 4 GB": patched(good, end + 12, b"\xff\xff\xff\xff"),
        "encrypted": patched(patched(good, 6, b"\x01\x00"), first + 8, b"\x01\x00"),
        "patched data": patched(patched(good, 6, b"\x20\x00"), first + 8, b"\x20\x00"),
        "stored, but the header says deflated": patched(good, 8, b"\x08\x00"),
        "deflated, but the header says stored": patched(good, first + 10, b"\x08\x00"),
        "larger than the file": patched(good, first + 20, struct.pack("<LL", 2**30, 2**30)),
        "as large as there can be": patched(good, first + 20, b"\xff\xff\xff\xff\xff\xff\xff\xff"),
        "unpacked larger than packed": patched(good, first + 24, struct.pack("<L", 2**30)),
        "fewer bytes packed than unpacked": patched(patched(good, 18, less), first + 20, less),
        "another size in the header": patched(good, 18, struct.pack("<LL", 1, 1)),
        "another checksum in the header": patched(good, 14, b"\0\0\0\0"),
        "another checksum in both": patched(patched(good, 14, b"abcd"), first + 16, b"abcd"),
        "another name in the header": patched(good, 30, b"b"),
        "another flag in the header": patched(good, 6, b"\x00\x08"),
        "no signature of a header": patched(good, second and good.index(b"PK\x03\x04", 4), b"XXXX"),
        "no signature in the directory": patched(good, second, b"XXXX"),
        "two members of the same bytes": patched(good, second + 42, struct.pack("<L", 0)),
        "a header behind the end": patched(good, second + 42, b"\xf0\xff\xff\xff"),
        "a name that is no UTF-8": patched(patched(good, 30, b"\xff"), first + 46, b"\xff"),
        "a name longer than the file": patched(good, first + 28, b"\xff\xff"),
        "an extra field longer than the file": patched(good, first + 30, b"\xff\xff"),
        "a damaged storage": good.replace(b"\0" * 16, b"\0" * 15 + b"\1", 1),
        "a damaged pickle": good.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3", 1),
        "a 64-bit end that is not there": with_end64(struct.pack("<4sLQL", *nowhere)),
        "a 64-bit end of another directory": with_end64(_end64(number + 1, end - start, start)),
        "a 64-bit end of 2**60 members": patched(
            with_end64(_end64(2**60, end - start, start)), -15, b"\xff\xff\xff\xff"
        ),
        "only the beginning": b"PK\x03\x04",
    }.items():
        yield what, content
    for at in range(5, len(good), 37):
        yield f"cut at {at}", good[:at]
    yield "overlapping members", _overlapping()


def _end64(number: int, length: int, start: int) -> bytes:
    fields = (44, 45, 45, 0, 0, number, number, length, start)
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", *fields)
    return record + struct.pack("<4sLQL", b"PK\x06\x07", 0, start + length, 1)


def _deflated_storage() -> bytes:
    """A storage of 1 GiB in 1 MB; it is written without 1 GiB of memory."""
    packer, zeros, packed, crc = zlib.compressobj(9, zlib.DEFLATED, -15), b"\0" * 2**20, [], 0
    for _ in range(64):
        packed.append(packer.compress(zeros))
        crc = zlib.crc32(zeros, crc)
    packed.append(packer.flush())
    body, name = b"".join(packed), b"a/data/0"
    good = hostile.zipped([GOOD[0], GOOD[1], GOOD[3]])
    start, end = good.index(b"PK\x01\x02"), len(good) - 22
    sizes = (crc, len(body), 64 * 2**20)
    members = good[:start] + _local(8, *sizes, name) + body
    directory = good[start:end] + _directory(8, *sizes, name, start)
    return members + directory + _end(4, len(directory), len(members))


def _overlapping() -> bytes:
    """Return a good file whose further members each lie inside the previous one's data."""
    good, body, entries = hostile.zipped(GOOD), b"", b""
    start, end = good.index(b"PK\x01\x02"), len(good) - 22
    names = [f"a/data/{number}".encode() for number in range(1, 200)]
    for name in reversed(names):
        body = _local(0, zlib.crc32(body), len(body), len(body), name) + body
    at = 0
    for name in names:
        content = body[at + 30 + len(name) :]
        sizes = (zlib.crc32(content), len(content), len(content))
        entries += _directory(0, *sizes, name, start + at)
        at += 30 + len(name)
    number, directory = len(names) + len(GOOD), good[start:end] + entries
    return good[:start] + body + directory + _end(number, len(directory), start + len(body))


def no_archives() -> Iterator[tuple[str, bytes]]:
    yield "an empty file", b""
    yield "text", b"hello\n"
    harmful = hostile.call(hostile.name("os", "system"), hostile.text("true"))
    yield "a bare pickle", hostile.pickle(harmful)
    magic = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    yield "the format before 1.6", b"\x80\x02" + magic + b"\x80\x02M\xe9\x03."
    framed = b"\x80\x04\x95" + struct.pack("<Q", len(magic)) + magic
    yield "the format before 1.6, protocol 4", framed
    yield "an archive of another kind", b"\x1f\x8b\x08" + b"\0" * 100
    yield "a tar file", b"pickle".ljust(257, b"\0") + b"ustar\0" + b"\0" * 249


def safetensors(header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def _entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes


def headers() -> Iterator[tuple[str, bytes]]:
    for length in (0, 1, 2**27, 2**31, 2**62, 2**63, 2**64 - 1):
        yield f"a header of {length} bytes", safetensors({"a": _entry()}, length=length)
    shapes: list[Any] = [[5], [3], [-4], [2**62], [2**40, 2**40], [2**64], ["4"], [4.0], [True] * 4]
    shapes += [[None], "4", 4, None, [[4]], [0, 2**70], [1] * 64 + [4]]
    offsets: list[Any] = [[0, 2**62], [0, 15], [16, 0], [-16, 0], [0.0, 16.0], [0], [0, 16, 32]]
    offsets += ["0", [True, 16], [8, 24], [2**63 - 16, 2**63]]
    for what, entry in {
        **{f"shape {shape}"[:40]: _entry(shape=shape) for shape in shapes},
        **{f"offsets {at}"[:60]: _entry(data_offsets=at) for at in offsets},
        **{
            f"dtype {dtype!r}"[:60]: _entry(dtype=dtype)
            for dtype in ("F33", "", None, 32, ["F32"], "O", "object", "F4", "x" * 1_000_000)
        },
        "something more": _entry(code="import os"),
        "no dtype": {"shape": [4], "data_offsets": [0, 16]},
        "no entry": None,
        "a list": [],
    }.items():
        yield what, safetensors({"a": entry}, b"\xff" * 16)
    entry = json.dumps(_entry())
    empty = _entry(shape=[0, 2**40, 2**40], data_offsets=[16, 16])
    half, one = (_entry(shape=[n], data_offsets=[0, 4 * n]) for n in (2, 1))
    for what, header in {
        "a name twice": f'{{"a": {entry}, "a": {entry}}}',
        "a key twice": f'{{"a": {entry[:-1]}, "shape": [4]}}}}',
        "one tensor over another": json.dumps({"a": _entry(), "b": _entry()}),
        "no elements of a shape that is too large": json.dumps({"a": _entry(), "b": empty}),
        "half over another": json.dumps({"a": _entry(), "b": half}),
        "a hole": json.dumps({"a": one, "b": one | {"data_offsets": [12, 16]}}),
        "bytes that nobody owns": json.dumps({"a": half}),
        "nothing": "{}",
        "a name of escape codes": json.dumps({"\x1b[2J": _entry()}),
        "half a character as a name": f'{{"\\ud800": {entry}}}',
        "metadata of numbers": json.dumps({"__metadata__": {"a": 1}, "a": _entry()}),
        "metadata that is text": json.dumps({"__metadata__": "a", "a": _entry()}),
        "a list": "[]",
        "a number": "1",
        "no JSON": "{'a': 1}",
        "not a number": '{"a": NaN}',
        "an integer of 100 000 digits": f'{{"a": {"9" * 100_000}}}',
        "lists within lists": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "objects within objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
        "a million lists": "[" + "[]," * 1_000_000 + "1]",
        "100 000 names twice": "{" + ",".join(f'"{n}":1' for n in range(100_000)) + ',"0":1}',
        "text without an end": '{"a',
    }.items():
        yield what, safetensors(header.encode())
    yield "a header that is no UTF-8", safetensors(b'{"\xff": 1}')
    yield "a cut file", safetensors({"a": _entry()}, b"\0" * 15)
    yield "a longer file", safetensors({"a": _entry()}, b"\0" * 17)
    yield "seven bytes", b"\0" * 7
    yield "no bytes", b""


def contents() -> Iterator[tuple[str, bytes]]:
    """Yield files whose fault shows only in their numbers."""
    yield "truth that is 255", safetensors({"a": _entry(dtype="BOOL", shape=[16])}, b"\xff" * 16)


def indexes() -> Iterator[tuple[str, bytes]]:
    """Yield indexes next to good.safetensors, which has one tensor, ``a``."""
    files = ["../good.safetensors", "/etc/passwd", "..", ".", "", "a/b", "C:evil", "a\\b", "\0"]
    for file in (*files, "missing.safetensors", "x" * 5000, "\ud800", "\x1b[2J"):
        yield f"a file {file[:20]!r}", json.dumps({"weight_map": {"a": file}}).encode()
    for what, index in {
        "a tensor too many": {"weight_map": {"a": "good.safetensors", "b": "good.safetensors"}},
        "a tensor too few": {"weight_map": {"b": "good.safetensors"}},
        "itself": {"weight_map": {"a": "index.json"}},
        "a number as a file": {"weight_map": {"a": 1}},
        "a list": {"weight_map": ["good.safetensors"]},
        "no map": {"weight_map": None},
    }.items():
        yield what, json.dumps(index).encode()
    yield "a tensor twice", b'{"weight_map": {"a": "good.safetensors", "a": "good.safetensors"}}'
    yield "deep", b'{"weight_map": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    yield "cut", b'{"weight_map": {"a": "good.safe'
    yield "many brackets", b'{"weight_map": [' + b"[]," * 1_000_000 + b"1]}"


def good_safetensors() -> bytes:
    return safetensors({"a": _entry()})
