"""One process at a time in a run folder."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import filelock

from jax_transformer.errors import LockedError

FILES = _LOCK, _HOLDER = ".lock", ".holder.json"


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises LockedError naming the process that has it.

    The operating system releases the lock when its process ends, even if it is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise LockedError(
            f"{folder} is in use by {_holder(folder)}; wait for it, stop it, or give another --run"
        ) from None
    try:
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": started}
        (folder / _HOLDER).write_text(json.dumps(holder) + "\n", encoding="utf-8")
        yield
    finally:
        (folder / _HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / _HOLDER).read_text(encoding="utf-8"))
        return f"process {holder['process']} on {holder['host']} since {holder['since']}"
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # the holder has not written its name yet
        return "another process"
