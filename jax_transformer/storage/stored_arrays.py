"""Arrays of a new checkpoint that are read back, compared and hashed while others are written."""

import hashlib
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jax_transformer.storage import atomic, checkpoint, tensors

_MOST_WAITING = 32 << 20
"""Bytes of arrays that may wait to be compared when the next array is read."""
_UNSYNCED = 64 << 20
"""Bytes that are written before the disk is asked to store them."""
_PART = 16 << 20
"""Bytes of an array that are read at once. The file is mapped: they are not read in vain."""
_SAMPLE = 4096
"""Bytes at the begin and at the end of an array by which its file is recognised."""
_CACHE = 4 << 20
"""Bytes of the database's nodes that TensorStore keeps: every array needs the upper ones."""


class StoredArrays:
    """Reads arrays of the unfinished checkpoint ``path`` back, and hashes them and their files.

    TensorStore begins a file with the first array that is written to it. The bytes of an array that
    was written alone are hashed once, for the array and for the file.
    """

    def __init__(self, path: Path) -> None:
        import tensorstore

        self.sha256: dict[str, str] = {}
        """SHA-256 of every array that was read back, by its path in the tree."""
        self.files: dict[str, str] = {}
        """SHA-256 of the files that were written meanwhile, by their names in the checkpoint."""
        self.differing: list[str] = []
        """Arrays that read back different."""
        self._path = path
        self._specs = checkpoint.specs(path)
        self._context = tensorstore.Context(
            {"cache_pool": {"total_bytes_limit": _CACHE}, "file_io_mode": {"mode": "memmap"}}
        )
        (self._data,) = path.glob("*/d")
        self._listed: set[str] = set()
        self._threads, self._disk = ThreadPoolExecutor(2), ThreadPoolExecutor(1)
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._syncs: list[Future[None]] = []
        self._unsynced: list[Path] = []
        self._bytes = 0  # of the arrays in them

    def __enter__(self) -> "StoredArrays":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._disk.shutdown(cancel_futures=True)

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Compare arrays, which have been written and do not change, with the disk. No other array
        may be being written.
        """
        names = set(os.listdir(self._data)) - self._listed
        self._listed |= names
        files = [self._data / name for name in names]
        size = sum(array.nbytes for array in arrays.values())
        self._waiting.append((self._threads.submit(self._compare, arrays, files), size))
        self._unsynced += files
        self._bytes += size
        if self._bytes >= _UNSYNCED:
            self._syncs.append(self._disk.submit(_sync, self._unsynced))
            self._unsynced, self._bytes = [], 0

    def wait(self, coming: int) -> None:
        """Wait until an array of that many bytes may be read. Raises the error of a comparison."""
        while self._waiting and coming + sum(size for _, size in self._waiting) > _MOST_WAITING:
            self._waiting.popleft()[0].result()

    def finish(self) -> None:
        """Wait for everything. Raises the error of a comparison or of the disk."""
        for future in (*(future for future, _ in self._waiting), *self._syncs):
            future.result()

    def _compare(self, arrays: Mapping[str, np.ndarray], files: list[Path]) -> None:
        import tensorstore

        for name, array in arrays.items():
            stored = tensorstore.open(self._specs[name], read=True, context=self._context).result()
            parts = _parts(array)
            if any(not tensors.same(stored[part].read().result(), array[part]) for part in parts):
                self.differing.append(name)
            raw = array.reshape(-1).view(np.uint8)
            digest = hashlib.sha256(raw.data)
            self.sha256[name] = digest.hexdigest()
        for path in files:
            with open(path, "rb") as file:
                if len(arrays) == 1 and _begins_with(file, raw):
                    of_file = digest.copy()
                    of_file.update(file.read())
                else:
                    of_file = hashlib.file_digest(file, "sha256")
            self.files[str(path.relative_to(self._path))] = of_file.hexdigest()


def _parts(array: np.ndarray) -> list[Any]:
    """Return indices that cut an array into a few rows each, which are read at once."""
    if array.nbytes <= _PART or not array.ndim:
        return [...]
    rows = max(1, _PART // array[0].nbytes)
    return [slice(i, min(i + rows, len(array))) for i in range(0, len(array), rows)]


def _begins_with(file: BinaryIO, raw: np.ndarray) -> bool:
    """Return True if a file begins with these bytes, by their first and last ones: they have been
    compared. The file is read from their end then, otherwise from its begin.
    """
    start = max(0, raw.size - _SAMPLE)
    begins = file.read(_SAMPLE)[: raw.size] == raw[:_SAMPLE].tobytes()
    file.seek(start)
    if begins and file.read(raw.size - start) == raw[start:].tobytes():
        return True
    file.seek(0)
    return False


def _sync(paths: list[Path]) -> None:
    for path in paths:
        atomic.sync(path)
