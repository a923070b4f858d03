"""A model of a file system: what a log of operations leaves after a SIGKILL or a loss of power.

After a SIGKILL everything that was done is there: the page cache survives. After a loss of power
this much is sure, and no more:

- the data of a file as they were at its last ``fsync``,
- the entries of a folder as they were at the folder's last ``fsync``; a rename is there whole or
  not at all, and is sure when the folder with the new name was synced.

Of the rest any part may be there. Later changes of names are kept or lost independently of one
another, also in one folder and in any order. Later data of a file are there up to any of its
writes, and of those each block of 512 bytes is new, or as it was before (zeros, if the file was
shorter): also a file that has its size and no data. Names do not wait for data, nor data for names.
File modes and times are not modelled.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

ROOT = 0
"""The number of the root folder. Files and folders have numbers, which no rename changes."""
BLOCK = 512
Tree = Mapping[str, bytes | None]
"""Contents by relative path; None for a folder."""
Entry = tuple[int, str]
"""A name in a folder."""


@dataclass(frozen=True)
class Names:
    """Entries of folders that change together: a new file or folder, a rename, a removal."""

    text: str
    """The call, to read."""
    changes: tuple[tuple[Entry, int | None], ...]
    """The number that each entry names afterwards; None if it is gone."""
    new_folder: bool = False
    """True if the number is that of a folder that is created."""


@dataclass(frozen=True)
class Write:
    """Bytes written into a file."""

    text: str
    number: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Resize:
    """A file cut off, or lengthened with zeros."""

    text: str
    number: int
    size: int


@dataclass(frozen=True)
class Sync:
    """The return of an fsync or fdatasync of a file or folder."""

    text: str
    number: int


Data: TypeAlias = Write | Resize
Operation: TypeAlias = Names | Data | Sync


@dataclass
class State:
    """Files and folders, by number."""

    names: dict[Entry, int] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    folders: set[int] = field(default_factory=lambda: {ROOT})

    @classmethod
    def read(cls, folder: Path) -> "State":
        """The files and folders in a folder on disk."""
        state, numbers = cls(), {folder: ROOT}
        for number, path in enumerate(sorted(folder.rglob("*")), 1):
            numbers[path] = number
            state.names[numbers[path.parent], path.name] = number
            if path.is_dir():
                state.folders.add(number)
            else:
                state.contents[number] = path.read_bytes()
        return state

    def copy(self) -> "State":
        return State(dict(self.names), dict(self.contents), set(self.folders))

    def after(self, operations: Iterable[Operation]) -> "State":
        """A copy after these operations."""
        state = self.copy()
        for operation in operations:
            state.apply(operation)
        return state

    def apply(self, operation: Operation) -> None:
        """Do what an operation does."""
        match operation:
            case Names():
                apply_names(self.names, operation)
                if operation.new_folder:
                    self.folders.update(number for _, number in operation.changes if number)
            case Write() | Resize():
                before = self.contents.get(operation.number, b"")
                self.contents[operation.number] = changed(before, operation)

    def tree(self) -> dict[str, bytes | None]:
        """Everything that a path leads to."""
        below: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), number in self.names.items():
            below.setdefault(folder, []).append((name, number))
        tree: dict[str, bytes | None] = {}
        pending = [("", ROOT)]
        while pending:
            prefix, folder = pending.pop()
            for name, number in below.get(folder, ()):
                path = f"{prefix}{name}"
                if number in self.folders:
                    tree[path] = None
                    pending.append((f"{path}/", number))
                else:
                    tree[path] = self.contents.get(number, b"")
        return tree


def apply_names(names: dict[Entry, int], operation: Names) -> None:
    """Change entries as an operation does."""
    for entry, number in operation.changes:
        if number is None:
            names.pop(entry, None)
        else:
            names[entry] = number


def changed(content: bytes, operation: Data) -> bytes:
    """A file's content after a write or a change of its size."""
    if isinstance(operation, Resize):
        return content[: operation.size].ljust(operation.size, b"\0")
    end = operation.offset + len(operation.data)
    return (
        content[: operation.offset].ljust(operation.offset, b"\0") + operation.data + content[end:]
    )


def write(tree: Tree, folder: Path) -> None:
    """Write a tree into a folder that does not exist yet."""
    folder.mkdir()
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def digest(tree: Tree) -> str:
    """The SHA-256 of all paths and contents."""
    hashed = hashlib.sha256()
    for path in sorted(tree):
        content = tree[path]
        hashed.update(f"{path}\0{'' if content is None else _digest(content)}\0".encode())
    return hashed.hexdigest()


@lru_cache(maxsize=4096)
def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# A loss of power


class Disk:
    """The changes that are sure to survive a loss of power, and those that may."""

    def __init__(self, start: State):
        self.live, self.sure = start.copy(), start.copy()
        self.names: list[Names] = []
        """Changes of entries that are not sure yet, in their order."""
        self.data: dict[int, list[Data]] = {}
        """The same for each file's data."""

    def apply(self, operation: Operation) -> None:
        self.live.apply(operation)
        self.sure.folders = self.live.folders
        match operation:
            case Names():
                self.names.append(operation)
            case Write() | Resize():
                self.data.setdefault(operation.number, []).append(operation)
            case Sync(_, number) if number in self.live.folders:
                self._sync_folder(number)
            case Sync(_, number):
                self.data.pop(number, None)
                self.sure.contents[number] = self.live.contents.get(number, b"")

    def _sync_folder(self, number: int) -> None:
        """Make the changes of a folder's entries sure, and what they replace."""
        settled: set[Entry] = set()
        for i in reversed(range(len(self.names))):
            entries = {entry for entry, _ in self.names[i].changes}
            if settled & entries or number in _decisive(self.names[i]):
                settled |= entries
        for operation in [each for each in self.names if settled & {e for e, _ in each.changes}]:
            apply_names(self.sure.names, operation)
            self.names.remove(operation)

    def extremes(self) -> Iterator[Tree]:
        """Yield the survivors if all of one kind is lost: everything, the names, the data."""
        for names in ([], self.names):
            for data in ("lost", "zeros", "kept"):
                yield self._survivors(
                    names, {number: self._extreme(number, data) for number in self.data}
                )

    def drawn(self, draw: random.Random) -> Tree:
        """Any survivors."""
        kind = draw.randrange(3)
        some = [each for each in self.names if draw.random() < 0.5]
        names = (some, self.names[: draw.randint(0, len(self.names))], self.names)[kind]
        return self._survivors(names, {number: self._drawn(number, draw) for number in self.data})

    def _survivors(self, names: list[Names], contents: Mapping[int, bytes]) -> Tree:
        state = State(dict(self.sure.names), self.sure.contents | contents, self.live.folders)
        for operation in names:
            apply_names(state.names, operation)
        return state.tree()

    def _extreme(self, number: int, data: str) -> bytes:
        before = self.sure.contents.get(number, b"")
        after = self.live.contents.get(number, b"")
        size = len(after)
        return {"lost": before, "kept": after, "zeros": before[:size].ljust(size, b"\0")}[data]

    def _drawn(self, number: int, draw: random.Random) -> bytes:
        before = after = self.sure.contents.get(number, b"")
        for operation in self.data[number][: draw.randint(0, len(self.data[number]))]:
            after = changed(after, operation)
        share, size = draw.choice((0.0, 0.5, 1.0)), len(after)
        old = before[:size].ljust(size, b"\0")
        return b"".join(
            (after if draw.random() < share else old)[at : at + BLOCK]
            for at in range(0, size, BLOCK)
        )


def _decisive(operation: Names) -> set[int]:
    """The folders whose fsync makes a change sure: those with a new name, or of a removal."""
    named = {folder for (folder, _), number in operation.changes if number is not None}
    return named or {folder for (folder, _), _ in operation.changes}
