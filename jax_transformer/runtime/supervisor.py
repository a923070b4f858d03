"""A process of a distributed run is supervised by its parent.

If one process dies, JAX ends the others from a thread of its own, with SIGABRT and a stack trace.
The parent makes of it one line and an exit code. It passes signals on, and ends with its child.
"""

import ctypes
import os
import re
import signal
import sys
from types import FrameType

from jax_transformer.errors import LostProcessError
from jax_transformer.runtime import distributed, process

_END = b"jax-transformer ends with "
_FATAL = b"distributed service detected fatal"
_NOISE = (b"coordination_service", b"DistributedRuntime", b"The tasks have crashed", _FATAL)
"""Parts of the lines that JAX's coordination writes when a process dies."""
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_writer: int | None = None


def supervise() -> int | None:
    """Go on in a child process: returns None there, and its exit code in the parent.

    Raises LostProcessError in the parent if another process of the run has died. JAX must not be
    loaded yet.
    """
    global _writer
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that comes before the parent can pass it on waits
    signal.pthread_sigmask(signal.SIG_BLOCK, process.STOPPING)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, process.STOPPING)
        os.close(reader)
        _writer = writer
        _detach(writer)
        return None
    os.close(writer)

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    before = {number: signal.signal(number, forward) for number in process.STOPPING}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, process.STOPPING)
    try:
        code, fatal = _follow(reader)
        status = os.waitpid(child, 0)[1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code is not None:
        return code
    if fatal:
        raise LostProcessError(
            "another process of this run has died; started again everywhere, the same command "
            "continues from the last checkpoint"
        )
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def end(code: int) -> None:
    """In a child: tell the parent the exit code, and wait for the other processes to end."""
    if _writer is not None:
        sys.stdout.flush()
        os.write(_writer, b"%s%d\n" % (_END, code))
        distributed.leave()  # JAX may end this process meanwhile: the code is known


def _detach(writer: int) -> None:
    """Send what C++ writes on stderr to the parent; our own messages go there directly."""
    os.setpgid(0, 0)  # Ctrl-C reaches the parent, which passes it on
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    terminal = os.dup(2)
    os.dup2(writer, 2)
    sys.stderr = os.fdopen(terminal, "w", 1, encoding="utf-8", errors="backslashreplace")


def _follow(reader: int) -> tuple[int | None, bool]:
    """Pass the child's lines on. Returns its exit code, and True if JAX has ended it."""
    code, fatal, noise = None, False, False
    with open(reader, "rb") as lines:
        for line in iter(lines.readline, b""):
            fatal |= _FATAL in line
            numbers = noise and re.fullmatch(rb"[\d, ]+\n", line)  # of the processes that died
            noise = bool(numbers) or any(part in line for part in _NOISE)
            if line.startswith(_END):
                code = int(line.removeprefix(_END))
            elif code is None and not fatal and not noise:
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
    return code, fatal
