"""Files and folders that appear under their name complete or not at all.

Both are written to a temporary sibling, synced, given the mode of a new file, and renamed. The
parent folder is synced last, so that the new name survives a power cut. All files of this package
are written with these functions.
"""

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from jax_transformer.errors import ConfigError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


@contextlib.contextmanager
def file(path: Path) -> Iterator[Path]:
    """A temporary file next to ``path`` to write to. It becomes ``path`` at the end, and is removed
    after an error.

    Its mode is the one that the umask gives a new file: the safetensors library would create
    files that only their owner can read.
    """
    temporary = _temporary(path)
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode & 0o777
        yield temporary
        os.chmod(temporary, mode)
        sync(temporary)
        os.replace(temporary, path)
        sync(temporary.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def folder(
    path: Path, *, temporary: Path | None = None, aside: Path | None = None
) -> Iterator[Path]:
    """The name of a new folder next to ``path``, which the caller creates and fills. It becomes
    ``path`` at the end, and is removed after an error. The parent folder is created if it does
    not exist.

    An existing folder is exchanged for the new one in one system call, and removed.

    Args:
        path: the final name of the folder.
        temporary: the name to write under; by default one with the process's id.
        aside: a temporary name for the old folder, for systems without that call. If it is None,
            ConfigError is raised on such systems, and ``path`` is unchanged.
    """
    path = path.absolute()
    temporary = temporary or _temporary(path)
    parent_is_new = not path.parent.exists()
    remove(temporary)
    path.parent.mkdir(exist_ok=True)
    try:
        yield temporary
        for written in [*temporary.rglob("*"), temporary]:
            sync(written)
        if path.is_dir():
            _replace_folder(temporary, path, aside)
        else:
            os.rename(temporary, path)
        sync(path.parent)
        if parent_is_new:
            sync(path.parent.parent)
    finally:
        remove(temporary)
        if parent_is_new and not os.listdir(path.parent):
            path.parent.rmdir()


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` in UTF-8 with its line ends unchanged."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write ``content`` to the file ``path``."""
    with file(Path(path)) as temporary:
        temporary.write_bytes(content)


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that a killed process left in ``folder``. No other process may be
    writing there.
    """
    for path in folder.glob(".*"):
        if path.suffix[1:].isdecimal() and not path.is_dir():
            path.unlink()


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.absolute().with_name(f".{path.name}.{os.getpid()}")


def _replace_folder(new: Path, old: Path, aside: Path | None) -> None:
    if _exchange(new, old):
        return
    if aside is None:
        raise ConfigError(f"{old}: this system cannot replace a folder at once: remove it first")
    os.rename(old, aside)
    os.rename(new, old)
    remove(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at once, if the system has such a call."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    return rename is not None and rename(*paths, _RENAME_EXCHANGE) == 0
