"""The parts of fuzzing: a target, which is a reader and what it is fed; the watcher of one input;
and the reduction of an input that is a finding.

An input ends as promised if the reader returns, or refuses it in one printable line, within its
time and memory, and does nothing but read its own files.
"""

import codecs
import difflib  # noqa: F401 (errors.nearest imports it when it is needed)
import functools
import os
import resource
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from jax_transformer.architectures import registry
from jax_transformer.errors import LONGEST_MESSAGE, InputError, Refusal, UnsafeFileError

MEMORY = 4_000_000  # bytes, in addition to a multiple of the input's
SECONDS = 5.0  # of the processor; a usual input takes less than a millisecond
TRACED = 1000  # one input of so many is read with its memory traced
_RISE = 1_000_000  # bytes of the largest resident size after which an input is read again, traced
# mmap: of a file that was opened
HARMLESS = tuple(
    "mmap.__new__ builtins.id os.scandir os.walk os.listdir pathlib.Path.glob pathlib.Path.rglob "
    "sys._getframe object.__getattr__ gc. cpython. array.".split()
)

Read = Callable[[bytes], object]
"""Gives an input to a reader."""
Flat = Callable[[bytes], bytes]
"""Changes bytes without knowing what they are: libFuzzer, or :func:`.mutators.blind`."""
Mutate = Callable[[Random, bytes, Flat], bytes]
"""Changes an input of a known form; parts of it by the given function."""


def flat(draw: Random, content: bytes, change: Flat) -> bytes:
    """Change bytes whose form is not known."""
    return change(content)


@dataclass(frozen=True)
class Target:
    """A reader of files from somebody else."""

    begin: Callable[[Path], Read]
    """Write the other files that are read into an empty folder, and return the reader."""
    seeds: Callable[[], Iterable[bytes]]
    """Inputs that are read, from which fuzzing begins."""
    inputs: int = 25_000
    """The inputs of one block: some seconds."""
    share: int = 1
    """The blocks of this target in one round of all."""
    mutate: Mutate = flat
    words: tuple[bytes, ...] = ()
    """Texts that mean something to the reader."""
    refusals: tuple[type[Exception], ...] = (InputError, UnsafeFileError)
    """The errors that the reader may raise."""
    ratio: int = 100
    """The bytes of memory that one byte of an input may take."""
    memory: int = MEMORY
    longest: int = 4096
    """The bytes of an input."""


class InputFile:
    """A file whose content is replaced without being opened again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)

    def put(self, content: bytes) -> Path:
        """Write the content, and return the file's path."""
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))
        return self.path


def file_reader(name: str, read: Callable[[Path], object]) -> Callable[[Path], Read]:
    """Return the ``begin`` of a target whose reader takes the path of a file of this name."""

    def begin(folder: Path) -> Read:
        file = InputFile(folder / name)
        return lambda content: read(file.put(content))

    return begin


# The watcher


class Verdict(NamedTuple):
    """The end of one input."""

    outcome: str
    """``read``, ``exit code 3`` or ``exit code 4``; empty if it is a finding."""
    wrong: str = ""
    """The broken promise, which names the place in the code."""


_folder = ""
_events: list[str] | None = None
"""Events while a reader is watched; None otherwise."""


@functools.cache
def _install() -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _events is None or event.startswith(HARMLESS):
            return
        if event == "open" and str(arguments[0]).startswith(_folder):
            return
        if event == "os.truncate" and isinstance(arguments[0], int):  # of InputFile
            return
        _events.append(f"{event} {arguments!r}"[:200])

    sys.addaudithook(hook)


@dataclass
class Watcher:
    """Gives inputs to the reader of a target, and judges what it does.

    Args:
        target: the reader.
        folder: an empty folder, the only one whose files may be opened.
    """

    target: Target
    folder: Path
    slowest: float = 0.0
    largest: int = 0
    """Bytes that an input took, of those whose memory was traced."""
    _count: int = 0
    _resident: int = 0
    read: Read = field(init=False)

    def __post_init__(self) -> None:
        global _folder
        _install()
        _folder = f"{self.folder}{os.sep}"
        self.read = self.target.begin(self.folder)
        for name in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-8-sig"):
            codecs.lookup(name)  # Python's json guesses among these
        registry.architectures()  # loads those of entry points
        for content in (*self.target.seeds(), b"", b"\xff", b"{}"):  # imports on first use
            self.unwatched(content)

    def unwatched(self, content: bytes) -> None:
        """Give an input to the reader and ignore what happens."""
        try:
            self.read(content)
        except Exception:
            return

    def judge(self, content: bytes) -> Verdict:
        """Read an input; one of a thousand, and one after which the process was larger than ever,
        with memory traced.
        """
        self._count += 1
        if self._count % TRACED == 0:
            return self.traced(content)
        verdict = self.untraced(content)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if resident > self._resident + _RISE:
            verdict = verdict if verdict.wrong else self.traced(content)
            self._resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return verdict

    def traced(self, content: bytes) -> Verdict:
        """Read an input with its memory traced."""
        tracemalloc.start()
        try:
            verdict = self.untraced(content)
            taken = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self.largest = max(self.largest, taken)
        most = self.target.memory + self.target.ratio * len(content)
        if taken > most and not verdict.wrong:
            return Verdict("", f"memory: {taken:,} bytes for an input of {len(content):,}")
        return verdict

    def untraced(self, content: bytes) -> Verdict:
        """Read an input, with its time and its events."""
        global _events
        wrong, outcome = "", "read"
        began = time.process_time()
        _events = seen = []
        try:
            self.read(content)
        except self.target.refusals as error:
            outcome = f"exit code {error.exit_code}" if isinstance(error, Refusal) else "refused"
            message = str(error)
            if not message.isprintable() or len(message) > LONGEST_MESSAGE:
                kind = "too long" if message.isprintable() else "not printable"
                wrong = f"message {kind}: {_place(error)}: {message[:300]!r}"
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            wrong = f"{type(error).__name__}: {_place(error)}: {str(error)[:300]!r}"
        finally:
            _events = None
        seconds = time.process_time() - began
        self.slowest = max(self.slowest, seconds)
        if seen and not wrong:
            wrong = f"event: {seen[0]}"
        if seconds > SECONDS and not wrong:
            wrong = f"time: {seconds:.0f} s"
        return Verdict("", wrong) if wrong else Verdict(outcome)


def _place(error: BaseException) -> str:
    """The last line of this project's code that an error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "jax_transformer" in frame.filename] or frames[-1:]
    frame = own[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


def kind_of(wrong: str) -> str:
    """The part of a finding that is the same for all inputs that show the same fault."""
    kind, _, rest = wrong.partition(": ")
    place = rest.partition(": ")[0] if kind not in ("memory", "time", "event") else ""
    return f"{kind}: {place}" if place else kind


def reduced(content: bytes, is_same: Callable[[bytes], bool], most: int = 3000) -> bytes:
    """Return a part of an input for which ``is_same`` still holds, after at most so many trials."""
    size = max(1, len(content) // 2)
    trials = 0
    while size:
        at = 0
        while at < len(content) and trials < most:
            trials += 1
            shorter = content[:at] + content[at + size :]
            if is_same(shorter):
                content = shorter
            else:
                at += size
        size //= 2
    return content
