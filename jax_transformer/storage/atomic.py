"""Files and folders that appear under their name complete or not at all.

Both are written to a temporary sibling, synced, given the mode of a new file, and renamed. The
parent folder is synced last, so that the new name survives a power cut. All files of this package
are written with these functions.

Only regular files are replaced. A symbolic link is followed, and the file that it points to is
replaced; a device, a FIFO or an open file of this process (``/dev/stdout``) is written directly,
and ``-`` is standard output. Before hours of work, :func:`check_output` and :func:`check_readable`
refuse a path that cannot be written or read.
"""

import contextlib
import ctypes
import errno
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from jax_transformer.errors import ConfigError, InputError

STDOUT = "-"
PARTIAL = ".partial"
WINDOWS = os.name == "nt"
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""Errors of a full disk, or of a limit that stands for one."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def check_output(path: str | Path | None) -> None:
    """Raise ConfigError, before hours of work, if no file can be written to ``path``."""
    if path is None or is_stream(path):
        return
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; give the name of a file")
    if not target.parent.is_dir():
        missing = target.parent if os.path.islink(path) else Path(path).parent
        raise ConfigError(f"cannot write {path}: folder {missing} does not exist")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied in folder {target.parent}")


def check_readable(path: Path) -> None:
    """Raise InputError unless ``path`` is a file that can be read."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not path.is_file():
        raise InputError(f"{path}: not a file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: cannot be read: permission denied")


def is_stream(path: str | Path) -> bool:
    """Return True if ``path`` is written directly: ``-``, a device, a FIFO, or a file open here."""
    if str(path) == STDOUT or _descriptor(path) is not None:
        return True
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let the error of a full disk name ``path``: a write knows no name."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def file(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to ``path`` to write to. It becomes ``path`` at the end, and is
    removed after an error. If ``path`` is not a regular file, the content is written to it then.

    An existing file is exchanged for the new one in one system call, and removed when that is on
    the disk. On systems without that call it is replaced, and does not come back if the last sync
    fails.

    Its mode is the one that the umask gives a new file: the safetensors library would create
    files that only their owner can read.
    """
    if is_stream(path):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder) / "output"
            yield temporary
            with open(temporary, "rb") as content, _stream(path) as stream:
                shutil.copyfileobj(content, stream)
        return
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode & 0o777
        with naming(path):
            yield temporary
            os.chmod(temporary, mode)
            sync(temporary)
            _rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # of the old file: the new one is complete
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def growing_file(path: Path) -> Iterator[io.TextIOWrapper]:
    """Yield a text file, ``path`` with ``.partial`` appended, that becomes ``path`` at the end, and
    stays after an error unless it is empty. If it cannot be written to, it ends where the last
    flush left it. Devices and the like are written to directly.

    Raises ConfigError if the partial file exists: it may be hours of work. One that is empty, and
    that no process writes to, was left by a killed process and is used.
    """
    if is_stream(path):
        with _stream(path) as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
            yield text
            text.detach()
        return
    path = Path(os.path.realpath(path))
    partial = path.with_name(path.name + PARTIAL)
    binary = _new_or_empty(partial)
    if binary is None:
        raise ConfigError(
            f"{partial} exists, with lines of a command that was interrupted: append the others to "
            "it and rename it, or remove it"
        )
    file = _Growing(binary, encoding="utf-8", newline="\n")
    try:
        with naming(path), file:
            try:
                yield file
            finally:  # after a write that failed, closing finds a part of it on the disk
                flushed = file.flushed
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    except OSError:
        os.truncate(partial, flushed)
        raise
    finally:
        if partial.exists() and not partial.stat().st_size:
            partial.unlink()


@contextlib.contextmanager
def folder(
    path: Path, *, temporary: Path | None = None, aside: Path | None = None
) -> Iterator[Path]:
    """Yield the name of a new folder next to ``path``, which the caller creates and fills. It
    becomes ``path`` at the end, and is removed after an error. The parent folder is created if it
    does not exist.

    An existing folder is exchanged for the new one in one system call, and removed. If that fails,
    it keeps the hidden name of the new one.

    Args:
        path: the final name of the folder.
        temporary: the name to write under; by default one with the process's id.
        aside: a temporary name for the old folder, for systems without that call. If it is None,
            ConfigError is raised on such systems, and ``path`` is unchanged.
    """
    path = path.absolute()
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}")
    parent_is_new = not path.parent.exists()
    remove(temporary)
    path.parent.mkdir(exist_ok=True)
    try:
        with naming(path):
            yield temporary
        sync_folder(temporary)
        if parent_is_new:
            sync(path.parent.parent)
        _rename(temporary, path, aside)
    except BaseException:
        remove(temporary)
        if parent_is_new and not os.listdir(path.parent):
            path.parent.rmdir()
        raise
    with contextlib.suppress(OSError):  # of the old folder: the new one is complete
        remove(temporary)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` in UTF-8 with its line ends unchanged."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write ``content`` to the file ``path``, or to standard output if it is ``-``."""
    if is_stream(path):
        with _stream(path) as stream:
            stream.write(content)
        return
    with file(Path(path)) as temporary:
        temporary.write_bytes(content)


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of a killed process in ``folder``, where no other may write."""
    for path in folder.glob(".*"):
        if path.suffix[1:].isdecimal() and not path.is_dir():
            path.unlink()


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Wait until a folder and everything in it is on the disk."""
    for written in [*path.rglob("*"), path]:
        sync(written)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk; Windows syncs only files open for writing."""
    if WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_or_empty(path: Path) -> BinaryIO | None:
    """Open a file that is new or empty, and locked while it is open; None if it is neither."""
    is_new = not os.path.lexists(path)
    try:
        file = open(path, "xb" if is_new else "r+b")  # noqa: SIM115 (it is returned)
    except (FileExistsError, FileNotFoundError):  # it came meanwhile; or it is a broken link
        return None
    if sys.platform == "win32":
        usable = is_new
    else:
        import fcntl

        usable = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # some file systems have no locks
            usable = is_new and error.errno != errno.EWOULDBLOCK
    if usable and not os.fstat(file.fileno()).st_size:
        return file
    file.close()
    return None


class _Growing(io.TextIOWrapper):
    """A text file that knows how long it was after its last flush."""

    flushed = 0

    def flush(self) -> None:
        super().flush()
        self.flushed = os.fstat(self.fileno()).st_size


@contextlib.contextmanager
def _stream(path: str | Path) -> Iterator[BinaryIO]:
    """Open what is written directly. An open file of this process goes on at its position: to open
    /dev/stdout again would begin at the first byte of the file that it is redirected to.
    """
    sys.stdout.flush()
    number = _descriptor(path)
    try:
        if str(path) == STDOUT:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        else:  # without O_CREAT: a device that is removed meanwhile does not become a file
            opened = os.open(path, os.O_WRONLY) if number is None else os.dup(number)
            with open(opened, "wb") as stream:
                yield stream
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _descriptor(path: str | Path) -> int | None:
    """Return the number of our open file that ``path`` names (1: /dev/stdout), None for others."""
    open_files = rf"/dev/fd|/proc/{os.getpid()}/(task/\d+/)?fd"
    for _ in range(40):  # as many links as Linux follows
        folder, name = os.path.split(os.path.abspath(path))
        folder = os.path.realpath(folder)
        if re.fullmatch(open_files, folder) and name.isdecimal():
            return int(name)
        try:
            path = os.path.join(folder, os.readlink(os.path.join(folder, name)))
        except OSError:
            return None
    return None


def _rename(new: Path, path: Path, aside: Path | None = None) -> None:
    """Name a new file or folder ``path``, and sync the name. The old one, if there is one, has the
    name ``new`` then. An error of the sync takes this back.
    """
    undo: Callable[[], object] | None = None
    if not (path.is_dir() if new.is_dir() else path.exists()):
        os.rename(new, path)
        undo = partial(os.rename, path, new)
    elif _exchange(new, path):
        undo = partial(_exchange, new, path)
    elif not new.is_dir():
        os.replace(new, path)
    elif aside is None:
        raise ConfigError(f"{path}: this system cannot replace a folder at once: remove it first")
    else:
        os.rename(path, aside)
        os.rename(new, path)
        remove(aside)
    try:
        sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            if undo is not None:
                undo()
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once. False without such a call. Raises OSError if it fails."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if rename(*paths, _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(error, os.strerror(error), str(other))
