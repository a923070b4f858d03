"""Changes of inputs whose form would stop a blind change at once: checksums, lengths, brackets."""

import copy
import gzip
import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from campaigns.fuzzing.harness import Flat, Mutate

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
LARGE_NUMBERS = (2**62, 2**63 - 1, 2**63, 2**64 - 1)
_TEXTS = ("", ".", "..", "../up", "/etc/passwd", "\x1b[2J", "a\nb", "\ud800", "é", "a" * 2000, "0")
_VALUES: tuple[Any, ...] = (
    *NUMBERS, *LARGE_NUMBERS, -1, -(2**63), 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf"),
    None, True, False, [], {}, [[]], [1], [1, 2], ["a"], {"a": 1}, [None], *_TEXTS,
)  # fmt: skip


def blind(draw: Random, content: bytes, others: tuple[bytes, ...] = ()) -> bytes:
    """Return bytes with a few random changes."""
    result = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at, length = draw.randrange(len(result) + 1), draw.choice((1, 1, 2, 4, 8, 16, 64))
        match draw.randrange(7):
            case 0 if at < len(result):
                result[at] ^= 1 << draw.randrange(8)
            case 1:
                result[at : at + length] = draw.randbytes(length)
            case 2:
                del result[at : at + length]
            case 3:
                result[at:at] = draw.randbytes(length)
            case 4:
                result[at:at] = result[at : at + length] * draw.choice((1, 2, 100))
            case 5:
                width = draw.choice((1, 2, 4, 8))
                number = draw.choice((*NUMBERS, *LARGE_NUMBERS))
                result[at : at + width] = struct.pack("<Q", number)[:width]
            case 6 if others:
                other = draw.choice(others)
                begin = draw.randrange(len(other) + 1)
                result[at : at + length] = other[begin : begin + draw.choice((length, 200))]
    return bytes(result[: draw.randrange(len(result) + 1)] if draw.random() < 0.03 else result)


def sometimes(chance: float, mutate: Mutate) -> Mutate:
    """Return a change that is ``mutate`` with this probability, and otherwise a blind one."""

    def either(draw: Random, content: bytes, flat: Flat) -> bytes:
        return mutate(draw, content, flat) if draw.random() < chance else flat(content)

    return either


# Zip files


def zip_members(
    inner: Mutate, pack: Callable[[list[tuple[str, bytes]]], bytes], favourite: str
) -> Mutate:
    """Return a change of one member, packed again with valid checksums. The member whose name ends
    with ``favourite`` is changed more often.
    """

    def mutate(draw: Random, content: bytes, flat: Flat) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                members = [(name, archive.read(name)) for name in archive.namelist()]
        except Exception:  # it is damaged, and zipfile raises many errors
            return flat(content)
        if not members:
            return flat(content)
        positions = [at for at, (name, _) in enumerate(members) if name.endswith(favourite)]
        at = draw.choice([*positions * len(members), *range(len(members))])
        name, member = members[at]
        members[at] = (name, inner(draw, member, flat))
        if draw.random() < 0.05:
            members.append(draw.choice(members))
        return pack(members)

    return mutate


# Lengths before content


def after_length(draw: Random, content: bytes, flat: Flat, inner: Mutate | None = None) -> bytes:
    """Change the JSON header of a safetensors file, and keep the length before it right."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        return flat(content)
    header, rest = content[8 : 8 + length], content[8 + length :]
    header = (inner or json_values)(draw, header, flat)
    return len(header).to_bytes(8, "little") + header + rest


def gzipped(draw: Random, content: bytes, flat: Flat) -> bytes:
    """Change what is compressed, or compress what is changed."""
    try:
        return gzip.compress(flat(gzip.decompress(content)), 1, mtime=0)
    except Exception:
        changed = flat(content)
        return gzip.compress(changed, 1, mtime=0) if draw.random() < 0.05 else changed


def protobuf(draw: Random, content: bytes, flat: Flat) -> bytes:
    """Change one field of a message of protocol buffers, and keep its length right."""
    try:
        fields = list(_fields(content))
    except IndexError:
        return flat(content)
    if not fields:
        return flat(content)
    at = draw.randrange(len(fields))
    key, value = fields[at]
    match draw.randrange(6):
        case 0:
            del fields[at]
        case 1:
            fields.insert(draw.randrange(len(fields)), fields[at])
        case 2 if isinstance(value, bytes):
            fields[at] = (key, protobuf(draw, value, flat))
        case _:
            fields[at] = (key, flat(value) if isinstance(value, bytes) else _number(draw))
    return b"".join(_field(key, value) for key, value in fields)


def _number(draw: Random) -> int:
    return draw.choice((*NUMBERS, *LARGE_NUMBERS))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
            yield key, value
            continue
        size, at = _varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}.get(key & 7, 1), at)
        if at + size > len(message):
            raise IndexError("the message ends too early")
        yield key, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _field(key: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _as_varint(key) + _as_varint(value)
    return _as_varint(key) + (_as_varint(len(value)) if key & 7 == 2 else b"") + value


def _as_varint(number: int) -> bytes:
    result = bytearray()
    while number > 127:
        result.append(number & 127 | 128)
        number >>= 7
    return bytes([*result, number])


# Trees


def other_value(draw: Random, tree: Any) -> Any:
    """Return the tree with one value, anywhere in it, that is another one, or left out."""
    if isinstance(tree, dict | list) and tree and draw.random() < 0.85:
        key = draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        match draw.randrange(12):
            case 0:
                del tree[key]
            case 1 if isinstance(tree, dict):
                tree[draw.choice((*_TEXTS, "model_type", "a"))] = tree[key]
            case 1:
                tree.insert(key, tree[key])
            case _:
                tree[key] = other_value(draw, tree[key])
        return tree
    return copy.deepcopy(draw.choice(_VALUES))  # its lists will be changed


def json_values(draw: Random, content: bytes, flat: Flat) -> bytes:
    """Change a value of JSON, or its bytes."""
    if draw.random() < 0.5:
        return flat(content)
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return flat(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        tree = other_value(draw, tree)
    try:
        return json.dumps(tree).encode()
    except (ValueError, RecursionError):
        return flat(content)


def json_lines(draw: Random, content: bytes, flat: Flat) -> bytes:
    """Change a value of a line of JSON, or the bytes of all."""
    lines = content.split(b"\n")
    at = draw.randrange(len(lines))
    lines[at] = json_values(draw, lines[at], flat)
    return b"\n".join(lines)


def lines(draw: Random, content: bytes, flat: Flat) -> bytes:
    """Change, repeat, move or remove a line."""
    parts = content.split(b"\n")
    at, other = draw.randrange(len(parts)), draw.randrange(len(parts))
    match draw.randrange(8):
        case 0:
            del parts[at]
        case 1:
            parts.insert(other, parts[at])
        case 2:
            parts[at], parts[other] = parts[other], parts[at]
        case 3 | 4:
            key, sign, _ = parts[at].partition(b": ")
            text = str(draw.choice(_VALUES)).encode("utf-8", "surrogatepass")
            parts[at] = key + (sign or b" ") + text
        case 5:
            parts[at] = flat(parts[at])
        case _:
            return flat(content)
    return b"\n".join(parts)
