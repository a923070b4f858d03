"""A new file whose bytes are hashed, read back and compared as they are written."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.storage import tensors
from jax_transformer.storage.lazy import LazyTensor

_CHUNK = 1 << 20


class CheckedFile:
    """A file that is being written, from its beginning to its end.

    Args:
        path: the new file.
        target: the name that the file will get, for errors.
        hashed: compute the SHA-256 of the whole file.
    """

    def __init__(self, path: Path, target: str | Path, *, hashed: bool = True):
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 (close() is __exit__'s)
        self._target = target
        self._digest = hashlib.sha256() if hashed else None
        self._buffer = np.empty(_CHUNK, np.uint8)
        self._background = ThreadPoolExecutor(1)  # hashlib releases the interpreter's lock

    def __enter__(self) -> "CheckedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._background.shutdown()
        self._file.close()

    @property
    def size(self) -> int:
        """Number of bytes that have been written."""
        return self._file.tell()

    def write(self, content: Any, name: str = "the header") -> None:
        """Append bytes. Raises InputError naming ``name`` if they read back different."""
        raw = np.frombuffer(content, np.uint8)
        hashing = self._background.submit(self._digest.update, raw.data) if self._digest else None
        start = self.size
        view = raw.data
        while view:
            view = view[self._file.write(view) :]
        self._compare(raw, start, name)
        if hashing is not None:
            hashing.result()

    def write_array(self, array: np.ndarray, name: str) -> None:
        """Append the bytes of an array in C order. Raises as :meth:`write`."""
        self.write(tensors.contiguous(array).reshape(-1).view(np.uint8), name)

    def sha256(self) -> str:
        """The SHA-256 of everything that was written."""
        assert self._digest is not None
        return self._digest.hexdigest()

    def _compare(self, written: np.ndarray, start: int, name: str) -> None:
        self._file.seek(start)
        for at in range(0, written.size, _CHUNK):
            piece = written[at : at + _CHUNK]
            again = self._buffer[: piece.size]
            read = self._file.readinto(again.data)
            if read != piece.size or not tensors.same(again, piece):
                raise InputError(
                    f"{self._target}: {name} reads back different; nothing was changed"
                )
        self._file.seek(0, os.SEEK_END)


class Digests:
    """SHA-256 of tensors, computed in the background as each is read."""

    def __init__(self, background: ThreadPoolExecutor) -> None:
        self._background = background
        self._by_name: dict[str, Future[str]] = {}
        self._last: Future[str] | None = None

    def watched(self, name: str, tensor: LazyTensor) -> LazyTensor:
        """The tensor, which is hashed when it is read."""
        return LazyTensor(tensor.info, partial(self._read, name, tensor))

    def result(self) -> dict[str, str]:
        """The hash of every tensor that was read, by name."""
        return {name: pending.result() for name, pending in self._by_name.items()}

    def _read(self, name: str, tensor: LazyTensor) -> np.ndarray:
        if self._last is not None:
            self._last.result()  # so that no more than one tensor is kept
        array = tensor.read()
        self._by_name[name] = self._last = self._background.submit(sha256, array)
        return array


@contextmanager
def digests() -> Iterator[Digests]:
    """Digests, and the thread that computes them."""
    with ThreadPoolExecutor(1) as background:
        yield Digests(background)


def sha256(array: np.ndarray) -> str:
    """The SHA-256 of an array's bytes in C order."""
    return hashlib.sha256(tensors.contiguous(array).reshape(-1).view(np.uint8).data).hexdigest()
