"""Untrusted files: names that are safe to print, JSON within limits and with no key twice, and the
index of several files of weights (``*.index.json``), which names the file of each tensor.
"""

import collections
import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError, UnsafeFileError, nearest
from jax_transformer.storage import atomic

MOST_BRACKETS = 600_000  # three a tensor
LONGEST_JSON = 100_000_000  # as the header of a .safetensors file
_LONGEST_VOCABULARY = 64_000_000


def read_bytes(path: Path, longest: int) -> bytes:
    """Read a file. Raises UnsafeFileError if it has more than ``longest`` bytes."""
    atomic.check_readable(path)
    size = path.stat().st_size
    if size > longest:
        raise UnsafeFileError(f"{path}: refused: {size:,} bytes, more than {longest:,}")
    with open(path, "rb") as file:
        return file.read(size)


def read_lines(path: Path, *, longest: int = _LONGEST_VOCABULARY) -> list[str]:
    """Read the lines of a file. Raises InputError unless it is text in UTF-8."""
    content = read_bytes(path, longest)
    try:
        return content.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not text in UTF-8") from None


def shown(value: Any, longest: int = 80) -> str:
    """Return a value from a file as printable ASCII, cut after ``longest`` characters."""
    text = ascii(value[: longest + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= longest else f"{text[:longest]}..."


def plain(name: str) -> str:
    """Return a name from a file, unchanged if it can be printed on one line, otherwise escaped."""
    return name if name.isprintable() else ascii(name)


# JSON


def read_json(path: Path, *, longest: int = LONGEST_JSON) -> Any:
    """Read a JSON file. Raises as :func:`parse_json`; UnsafeFileError above ``longest`` bytes."""
    return parse_json(path, read_bytes(path, longest))


def parse_json(path: Path, content: bytes) -> Any:
    """Parse ``content`` of the file ``path``. Raises InputError if it is not JSON, UnsafeFileError
    if it has too many brackets, too deep nesting or a key twice.
    """
    if content.count(b"{") + content.count(b"[") > MOST_BRACKETS:
        raise UnsafeFileError(f"{path}: refused: JSON of more than {MOST_BRACKETS:,} brackets")

    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=functools.partial(_once, path))
    except RecursionError:
        raise UnsafeFileError(f"{path}: refused: JSON within JSON, too deep") from None
    except (ValueError, OverflowError) as error:
        if isinstance(error, UnsafeFileError):
            raise
        raise InputError(
            f"{path}: not readable JSON: {shown(str(error).splitlines()[0], 120)}"
        ) from None


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise UnsafeFileError(f"{path}: refused: the key {shown(twice)} appears twice")
    return result


# The index of several files


def is_index(path: str | Path) -> bool:
    """Return True for JSON with a weight_map. A .safetensors file begins with eight bytes of
    length, one of them NUL; JSON has no NUL.
    """
    path = Path(path)
    if not path.is_file() or path.stat().st_size > LONGEST_JSON:
        return False
    with open(path, "rb") as file:
        begin = file.read(8)
        if b"\0" in begin:
            return False
        content = begin + file.read()
    return content.lstrip()[:1] == b"{" and b'"weight_map"' in content


def is_file_name(name: str) -> bool:
    """Return True for the plain name of a file in the same folder, on every system."""
    plain = name.isprintable() and name not in ("", ".", "..") and not set(name) & set("/\\:")
    return plain and len(name.encode("utf-8")) <= 255


def weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor. Raises UnsafeFileError if one is no plain name there."""
    if path.stat().st_size > LONGEST_JSON:
        raise UnsafeFileError(f"{path}: refused: an index of {path.stat().st_size:,} bytes")
    index = parse_json(path, path.read_bytes())
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"{path}: its weight_map is not an object of names")
    for file in set(names.values()):
        if not is_file_name(file):
            raise UnsafeFileError(
                f"{path}: refused: {shown(file)} is not a plain file name in the same folder"
            )
    return names


def shards(path: Path) -> list[Path]:
    """Return the files that the index names, each once. Raises InputError if one is missing."""
    paths = [path.parent / file for file in sorted(set(weight_map(path).values()))]
    for shard in paths:
        if not shard.is_file():
            names = sorted(other.name for other in path.parent.iterdir() if other.is_file())
            raise InputError(
                f"{path}: names {shown(shard.name)}, which is missing{nearest(shard.name, names)}"
            )
    return paths


def files(path: str | Path) -> list[Path]:
    """Return the files of arrays: all that an index names, in order, or the file itself."""
    return shards(Path(path)) if is_index(path) else [Path(path)]


def check_shards(path: Path, stored: Mapping[Path, Collection[str]]) -> None:
    """Raise InputError unless each file has the tensors that the index names, and no others."""
    expected = weight_map(path)
    pairs = {(name, path.parent / file) for name, file in expected.items()}
    existing = {(name, file) for file, names in stored.items() for name in names}
    problems = []
    for word, odd in (("without", pairs - existing), ("with unexpected", existing - pairs)):
        names = sorted(name for name, _ in odd)
        more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
        if names:
            problems.append(f"{word} {', '.join(shown(name) for name in names[:5])}{more}")
    if problems:
        raise InputError(f"{path}: its files are {', '.join(problems)}")
