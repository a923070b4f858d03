"""Ways to damage a file or a folder of files, drawn from a source of random numbers."""

import json
import random
from pathlib import Path
from typing import Any


class Damage:
    """Each method damages what it is given and returns what it did, to read and to repeat."""

    def __init__(self, random_source: random.Random):
        self.random = random_source

    def flip(self, path: Path) -> str:
        content = bytearray(path.read_bytes())
        bit = self.random.randrange(len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        return f"bit {bit} of {path.name}"

    def truncate(self, path: Path) -> str:
        content = path.read_bytes()
        size = self.random.randrange(len(content))
        path.write_bytes(content[:size])
        return f"{path.name} cut to {size} bytes"

    def append(self, path: Path) -> str:
        more = self.random.randbytes(self.random.randint(1, 100))
        path.write_bytes(path.read_bytes() + more)
        return f"{len(more)} bytes after {path.name}"

    def zero(self, path: Path) -> str:
        content = bytearray(path.read_bytes())
        start = self.random.randrange(len(content))
        lost = bytes(len(content[start : start + 512]))
        if content[start : start + 512] == lost:
            return self.flip(path)
        content[start : start + 512] = lost
        path.write_bytes(content)
        return f"{len(lost)} zeros in {path.name}"

    def delete(self, path: Path) -> str:
        path.unlink()
        return f"{path.name} deleted"

    def add(self, path: Path) -> str:
        """Create a file that does not exist."""
        path.write_bytes(self.random.randbytes(8))
        return f"{path.name} added"

    def swap(self, one: Path, two: Path) -> str:
        """Exchange the contents of two files."""
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        return f"{one.parent.name}/{one.name} and {two.parent.name}/{two.name} swapped"

    def replace(self, path: Path, other: Path) -> str:
        """Write another file's content."""
        path.write_bytes(other.read_bytes())
        return f"{path.name} replaced by {other}"

    def edit(self, path: Path) -> str:
        """Change one value of a JSON file, or of a line of JSON: it stays valid."""
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        number = self.random.randrange(len(lines))
        content = json.loads(lines[number])
        holder, key = self.random.choice(list(_values(content)))
        before = holder[key]
        holder[key] = _other(before, self.random)
        lines[number] = json.dumps(content, indent=None if path.suffix == ".jsonl" else 2)
        path.write_text("\n".join(lines) + "\n")
        return f"{path.name}: {key} {before!r} -> {holder[key]!r}"[:200]


def _values(value: Any) -> Any:
    """Every value in JSON that is no object or array, as its holder and its key."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        if isinstance(inner, dict | list) and inner:
            yield from _values(inner)
        else:
            yield value, key


def _other(value: Any, random_source: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + random_source.choice((-1, 1))
    if isinstance(value, str):
        return value + random_source.choice("xyz")
    return random_source.choice((1, "x"))


def files(folder: Path) -> list[Path]:
    """All files of a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
