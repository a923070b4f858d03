"""Input and output of a command: lines of text as they come, and reports."""

import contextlib
import io
import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jax_transformer.data import parallel_text
from jax_transformer.errors import Refusal
from jax_transformer.runtime import process
from jax_transformer.storage import atomic

WAIT = 0.1
"""Seconds to wait for more lines after the first of a window."""


@runtime_checkable
class Printable(Protocol):
    """A result that prints itself as lines, or as one JSON value."""

    def lines(self) -> Iterable[str]: ...

    def to_data(self) -> Any: ...


def show(report: Printable, *, as_json: bool) -> None:
    """Print a report."""
    for line in [json.dumps(report.to_data())] if as_json else report.lines():
        print(line)


# Lines out


def check_output(path: str | None) -> None:
    """Raise ConfigError, before hours of work, if a result cannot be written to ``path``."""
    if path is not None:
        atomic.check_output(path)


@contextlib.contextmanager
def output(path: str | None) -> Iterator[io.TextIOBase]:
    """Standard output or a file for :func:`write`, in UTF-8 whatever the locale.

    Standard output is None or ``-``. Until all lines are written, those of a file are in
    FILE.partial, which stays after an error.
    """
    if path is None or path == atomic.STDOUT:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", newline="\n")
        stdout: Any = sys.stdout
        yield stdout
    else:
        with atomic.growing_file(Path(path)) as file:
            yield file


def write(file: io.TextIOBase, lines: Iterable[str]) -> None:
    """Write lines at once. A line feed within one becomes a space."""
    file.write("".join(line.replace("\n", " ") + "\n" for line in lines))
    file.flush()


# Lines in


def windows(path: str | None, size: int) -> Iterator[list[str]]:
    """Yield the lines of a file or of standard input as they come, at most ``size`` at a time.

    A window ends when it is full, or a short wait after its first line. A thread reads ahead.
    Raises InputError if a file cannot be read or is empty; standard input may be empty.
    """
    chunks: queue.Queue[list[str] | Exception | None] = queue.Queue(16)
    threading.Thread(target=_read, args=(path, chunks), daemon=True).start()
    lines: list[str] = []
    while True:
        until = None
        while len(lines) < size:
            if lines and until is None:
                until = time.monotonic() + WAIT
            try:
                chunk = chunks.get(timeout=until and max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(chunk, Exception):
                raise chunk
            if chunk is None:
                yield lines
                return
            lines += chunk
        yield lines[:size]
        lines = lines[size:]


def _read(path: str | None, chunks: "queue.Queue[list[str] | Exception | None]") -> None:
    """Put the lines of a file into a queue as they come, then None or the error that ended it."""
    try:
        for lines in _standard_input() if path is None else parallel_text.read_chunks(path):
            chunks.put(lines)
        chunks.put(None)
    except Exception as error:
        chunks.put(error)


def _standard_input() -> Iterator[list[str]]:
    """Yield the lines of standard input as they come.

    Python's own buffer is not used: at exit, Python aborts if a thread still waits in that.
    """
    buffer: Any = sys.stdin.buffer
    reader = io.BufferedReader(getattr(buffer, "raw", buffer))
    try:
        yield from parallel_text.split_chunks(reader, "standard input")
    finally:
        reader.detach()


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt, and set an event.

    The event is to be looked at now and then: Python drops an exception that a signal raises in a
    callback of the garbage collector.
    """
    asked = threading.Event()

    def interrupt() -> None:
        asked.set()
        raise KeyboardInterrupt

    # A shell starts what runs in the background with SIGINT ignored, and so it stays
    heeded = [n for n in process.STOPPING if signal.getsignal(n) is not signal.SIG_IGN]
    with process.on_signals(interrupt, raising=KeyboardInterrupt, numbers=heeded):
        try:
            yield asked
        except ValueError as error:  # jaxlib makes it of an exception while it compares arguments
            if asked.is_set() and not isinstance(error, Refusal):
                raise KeyboardInterrupt from error
            raise
