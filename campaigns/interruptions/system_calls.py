"""The system calls of a process that change its folder: counted, and one of them made to fail."""

import errno
import functools
import os
import re
import resource
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from campaigns.interruptions.reports import FULL, KILL, Pipe

CALLS = {
    "open": "open",
    "os.rename": "rename",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.remove": "unlink",
    "fsync": "fsync",
}
"""The watched calls, by their audit events.

Python reports replace as a rename; of open only calls for writing are watched.
"""
EXCHANGE = "exchange"
"""The watched call that no event reports."""
DIR_FD = {"os.mkdir": 2, "os.rmdir": 1, "os.remove": 1}
"""The argument of an event that is the folder which its path is relative to."""
FULL_AT = 200
"""Bytes that no file may exceed from a call on whose fault is ``full``, also if C++ writes it."""


class Watch:
    """Counts the calls that change the run folder, and makes the chosen one fail or kills the
    process."""

    def __init__(self, pipe: Pipe):
        self.pipe = pipe
        self.aim()

    def aim(self) -> None:
        """Count from 0 again, in the current folder."""
        self.folder, self.seen = os.getcwd(), 0

    def install(self) -> None:
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            self("fsync", (os.readlink(f"/proc/self/fd/{descriptor}"),))
            sync(descriptor)

        os.fsync = fsync  # type: ignore[assignment]
        sys.addaudithook(self)

    def wrap_exchange(self, atomic: Any) -> None:
        """Watch the exchange of two names, which no audit event reports."""
        exchange = atomic._exchange

        @functools.wraps(exchange)
        def watched(one: Path, other: Path) -> bool:
            if str(other).startswith(self.folder):
                self._count(EXCHANGE, str(other), os.path.relpath(other, self.folder))
            return exchange(one, other)

        atomic._exchange = watched

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CALLS or (
            event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            return
        path = arguments[0]
        if isinstance(path, (str, os.PathLike)):
            absolute = self._absolute(event, path, arguments)
            if absolute.startswith(self.folder):
                self._count(CALLS[event], os.fspath(path), os.path.relpath(absolute, self.folder))

    def _absolute(self, event: str, path: str | os.PathLike, arguments: tuple[Any, ...]) -> str:
        folder = arguments[DIR_FD[event]] if event in DIR_FD else -1
        where = os.getcwd() if folder < 0 else os.readlink(f"/proc/self/fd/{folder}")
        return os.path.normpath(os.path.join(where, path))

    def _count(self, call: str, path: str, relative: str) -> None:
        task, site = self.pipe.task, site_of(sys._getframe(1), relative)
        if task is None:
            return
        self.pipe.report(f"call {call} {site}")
        if call != task.call or task.site not in (None, site):
            return
        self.seen += 1
        if self.seen == task.number or (task.lasting and self.seen > task.number):
            self.pipe.report(f"fault {call}")
            _fail(task.does, path)


def _fail(does: str, path: str) -> None:
    if does == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif does == FULL:
        limit_files(FULL_AT)
    else:
        number = getattr(errno, does)
        raise OSError(number, os.strerror(number), path)


def limit_files(size: int | None) -> None:
    """Let no file of this process grow above so many bytes; None: as before."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))


def site_of(frame: FrameType | None, path: str) -> str:
    """The place of a call: our innermost function, or Orbax's, and the kind of file."""
    kind = re.sub("[0-9a-f]{16,}", "HEX", Path(path).name)
    kind = re.sub("[0-9]+", "N", kind)
    functions = {}
    while frame is not None:
        file = frame.f_code.co_filename
        for package in ("/jax_transformer/", "/orbax/"):
            if package in file:
                functions.setdefault(package, f"{Path(file).stem}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    function = next((functions[p] for p in ("/jax_transformer/", "/orbax/") if p in functions), "")
    return f"{function}:{kind}".replace(" ", "_")
