"""New files and folders that are hashed as they are written, read back and compared."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.storage import atomic, tensors
from jax_transformer.storage.tensors import LazyState, LazyTensor

Result = TypeVar("Result")
_CHUNK = 1 << 20
_MOST_WAITING = 32 << 20
"""Bytes of arrays that may wait to be hashed when the next array is read."""
_UNSYNCED = 64 << 20
"""Bytes that are written before the disk is asked to store them."""


class Hashes(ThreadPoolExecutor):
    """Computes hashes in one thread, in order: hashlib releases the interpreter's lock."""

    def __init__(self) -> None:
        super().__init__(1)
        self._waiting: deque[tuple[Future[Any], int]] = deque()
        self._bytes = 0
        self._by_name: dict[str, Future[str]] = {}

    def add(self, function: Callable[[Any], Result], array: np.ndarray) -> Future[Result]:
        """Call a function with an array, which is kept until then."""
        future = self.submit(function, array)
        self._waiting.append((future, array.nbytes))
        self._bytes += array.nbytes
        return future

    def wait(self, most: int | None = None) -> None:
        """Wait until at most ``most`` bytes wait to be hashed. Raises the error of a function."""
        most = _MOST_WAITING if most is None else most
        while self._bytes > most:
            future, size = self._waiting.popleft()
            self._bytes -= size
            future.result()

    def watched(self, state: LazyState) -> dict[str, LazyTensor]:
        """Return the tensors, each of which is hashed when it is read."""
        return {
            name: LazyTensor(tensor.info, partial(self._read, name, tensor))
            for name, tensor in state.items()
        }

    def _read(self, name: str, tensor: LazyTensor) -> np.ndarray:
        self.wait()
        array = tensor.read()
        self._by_name[name] = self.add(sha256, array)
        return array

    def result(self) -> dict[str, str]:
        """Return the SHA-256 of every tensor that was read, by name."""
        return {name: pending.result() for name, pending in self._by_name.items()}


class CheckedFile:
    """A file that is written from its beginning to its end. ``target`` is the name that it will
    get, for errors; its SHA-256 is computed if ``hashed``.
    """

    def __init__(self, path: Path, target: str | Path, *, hashed: bool = True):
        self.size = 0  # bytes that have been written
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 (close() is __exit__'s)
        self._target = target
        self._digest = hashlib.sha256() if hashed else None
        self._buffer = np.empty(_CHUNK, np.uint8)
        self._hashing = Hashes()
        self._disk = ThreadPoolExecutor(1)
        self._sync: Future[None] | None = None
        self._synced = 0

    def __enter__(self) -> "CheckedFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._hashing.shutdown()
        self._disk.shutdown()
        self._file.close()
        if kind is None and self._sync is not None:
            self._sync.result()  # the system reports an error of the disk only once

    def write(self, content: Any, name: str = "the header") -> None:
        """Append bytes, or an array's in C order. Raises InputError if they read back different."""
        array = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content
        raw = tensors.contiguous(array).reshape(-1).view(np.uint8)
        if self._digest:
            self._hashing.add(self._digest.update, raw)
        view = raw.data
        while view:
            view = view[self._file.write(view) :]
        self._file.seek(self.size)
        for at in range(0, raw.size, _CHUNK):
            piece = raw[at : at + _CHUNK]
            again = self._buffer[: piece.size]
            if self._file.readinto(again.data) != piece.size or not _same(again, piece):
                raise InputError(
                    f"{self._target}: {name} reads back different; nothing was changed"
                )
        self._file.seek(0, os.SEEK_END)
        self.size += raw.size
        self._store()
        self._hashing.wait()

    def sha256(self) -> str:
        """Return the SHA-256 of everything that was written."""
        assert self._digest is not None
        self._hashing.wait(0)
        return self._digest.hexdigest()

    def _store(self) -> None:
        """Let the disk store what was written meanwhile. Raises OSError if it could not before."""
        if self.size - self._synced < _UNSYNCED or (self._sync and not self._sync.done()):
            return
        if self._sync is not None:
            self._sync.result()
        self._synced = self.size
        self._sync = self._disk.submit(os.fsync, self._file.fileno())


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return True if bytes are equal; eight at a time, which takes less than half the time."""
    even = one.size & -8
    return np.array_equal(one[:even].view(np.uint64), other[:even].view(np.uint64)) and (
        np.array_equal(one[even:], other[even:])
    )


def sha256(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's bytes in C order."""
    return hashlib.sha256(tensors.contiguous(array).reshape(-1).view(np.uint8).data).hexdigest()


@dataclass(frozen=True)
class NewFolder:
    """A folder of weights that is written under a temporary name."""

    target: Path
    """Its name when it is complete, for messages."""
    path: Path
    """Its temporary name."""
    state: LazyState
    """The tensors to write; each is hashed when it is read."""
    hashes: Hashes

    def compare(self, again: LazyState) -> None:
        """Raise InputError naming every tensor that differs between disk and memory, by SHA-256."""
        written = self.hashes.result()
        differing = sorted(written.keys() ^ again.keys())
        if not differing:
            with Hashes() as own:
                for tensor in own.watched(again).values():
                    tensor.read()
            read = own.result()
            differing = [name for name in again if read[name] != written[name]]
        self._refuse(", ".join(differing))

    def compare_files(self, files: Mapping[str, bytes], folder: str = "") -> None:
        """Raise InputError if a file differs between disk and memory."""
        for name, content in files.items():
            if (self.path / folder / name).read_bytes() != content:
                self._refuse(name)

    def _refuse(self, differing: str) -> None:
        if differing:
            raise InputError(
                f"{self.target}: {differing} reads back different; nothing was changed"
            )

    def sha256(self, hashes: Mapping[str, str] | None = None) -> str:
        """Hash every tensor's name, dtype, shape and SHA-256, in the order of names."""
        digest, hashes = hashlib.sha256(), hashes or self.hashes.result()
        for name in sorted(self.state):
            tensor = self.state[name]
            digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0{hashes[name]}\0".encode())
        return digest.hexdigest()


@contextmanager
def new_folder(target: Path, state: LazyState) -> Iterator[NewFolder]:
    """Give a folder its name when the block ends without an exception."""
    with atomic.folder(target) as temporary, Hashes() as hashes:
        yield NewFolder(target, temporary, hashes.watched(state), hashes)
