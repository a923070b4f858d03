"""Commands in processes of their own, which report what they do and are sent signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from campaigns.interruptions import tiny_run
from campaigns.interruptions.fork_server import Command, Forked
from campaigns.interruptions.tiny_run import RUN, write_text
from parity_tests import compiling

ROOT = Path(__file__).resolve().parent.parent.parent
CHILD = "campaigns.interruptions.child"
PHASES = tuple(
    "interpreter imports data state compile steps validation save prune average end".split()
)
"""Phases in the order of a run.

``interpreter`` ends with the first line of our code, ``end`` begins after all work.
"""
BEFORE_OPTIONS = ("interpreter", "imports")
LONGEST = 900.0  # seconds after which a child counts as hung, on a busy machine too


@dataclass(frozen=True)
class SignalTime:
    """The time of a signal: seconds after the n-th start of a phase, and perhaps of a second
    signal."""

    phase: str
    occurrence: int
    delay: float
    signals: tuple[signal.Signals, ...]
    between: float = 0.0


@dataclass
class ProcessResult:
    """A process that has ended, and everything that it reported."""

    code: int
    out: str
    err: str
    words: list[tuple[float, str]]
    """Phases, calls and handlers, with the time at which each began."""
    sent: list[tuple[float, signal.Signals]] = field(default_factory=list)
    """The signals that were sent."""
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    hung: bool = False
    """True if it had not ended after :data:`LONGEST` and was killed."""
    others: list[tuple[int, str]] = field(default_factory=list)
    """Exit code and standard error of the other processes of a distributed run."""

    def phase(self, at: float) -> str:
        """The phase at a time."""
        return next(
            (word for began, word in reversed(self.words) if began <= at and word in PHASES),
            PHASES[0],
        )

    def handled(self, at: float) -> bool:
        """True if signals had a handler at a time."""
        words = [
            word for began, word in self.words if began <= at and word in ("handled", "unhandled")
        ]
        return words[-1:] == ["handled"]

    @property
    def fault(self) -> tuple[str, str] | None:
        """The phase and the name of the call that failed or killed, if that happened."""
        fault = next(((at, word) for at, word in self.words if word.startswith("fault ")), None)
        return (self.phase(fault[0]), fault[1].removeprefix("fault ")) if fault else None


class Starter(Protocol):
    """Starts commands: a server that forks a process for each, or one that stays."""

    def start(self, command: Command) -> Forked: ...


@dataclass(frozen=True)
class Sandbox:
    """A folder in which the same command is started until the run has ended.

    Its paths are relative to this folder, so that all files and messages are equal.
    """

    folder: Path
    arguments: Sequence[str]
    """Added to ``command``."""
    compiled: Path
    """The cache of compiled programs."""
    processes: int = 1
    """Processes that train together; any of them may be the one that is interrupted."""
    server: Starter | None = None
    """Forks the processes; interpreters are started if None, and to interrupt their imports."""
    command: Sequence[str] = ("train", "--run", RUN)
    interrupts_imports: bool = True
    """False if the process is always forked."""

    def create(self) -> None:
        """Create the folder, with the text that the arguments name."""
        self.folder.mkdir(parents=True)
        text = write_text(self.folder)
        if tiny_run.CORPUS in self.arguments:
            command = [sys.executable, "-m", "jax_transformer", *tiny_run.PREPARE, *text]
            subprocess.run(command, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)

    @property
    def run(self) -> Path:
        return self.folder / RUN

    def start(
        self, signal_time: SignalTime | None = None, target: int = 0, **task: Any
    ) -> ProcessResult:
        """Start the command and wait for its end; ``task`` are fields of the child's task.

        With several processes, signals and the task are for process ``target``.
        """
        reader, writer = os.pipe()
        variables = environment(self.compiled)
        command = [*self.command, *self.arguments]
        commands = [[*command, *flags] for flags in distributed(self.processes)]
        result = ProcessResult(0, "", "", [])
        early = signal_time is not None and signal_time.phase in BEFORE_OPTIONS
        server = None if early and self.interrupts_imports else self.server
        process = self._begin(server, commands.pop(target), variables, writer, task)
        os.close(writer)
        others = [self._begin(server, command, variables) for command in commands]
        sender = Sender(process, signal_time, result)
        follower = threading.Thread(target=sender.follow, args=(reader,))
        follower.start()
        try:
            result.out, result.err = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            process.kill()
            result.out, result.err = process.communicate()
            result.hung = True
        finally:
            result.ended = time.monotonic()
            for other in others:
                err, hung = _ended(other)
                result.hung |= hung
                result.others.append((other.returncode, err))
            sender.cancel()
            follower.join()
        result.code = process.returncode
        return result

    def _begin(
        self,
        server: Starter | None,
        arguments: list[str],
        variables: dict[str, str],
        writer: int | None = None,
        task: Any = None,
    ) -> subprocess.Popen | Forked:
        """Start a process, which reports to ``writer`` if there is one."""
        fields = None if writer is None else {"pipe": writer, **task}
        if server is not None:
            return server.start(Command(arguments, fields, self.folder, variables, writer))
        child = ["jax_transformer"] if fields is None else [CHILD, json.dumps(fields)]
        return subprocess.Popen(
            [sys.executable, "-m", *child, *arguments],
            cwd=self.folder,
            env=variables,
            text=True,
            pass_fds=() if writer is None else (writer,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


def environment(compiled: Path) -> dict[str, str]:
    """The environment of every process, with a cache of compiled programs."""
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "XLA_", "JAX_"))
    }
    return others | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # collectives of CPUs wait half a minute for a process that compiles
        "XLA_FLAGS": compiling.FLAGS,
    }


def distributed(count: int) -> list[list[str]]:
    """The flags of each process of a run: none for a single one."""
    if count == 1:
        return [[]]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    common = f"--distributed.coordinator-address=127.0.0.1:{port} --distributed.num-processes="
    common += f"{count} --distributed.heartbeat-timeout=10 --distributed.process-id="
    return [f"{common}{i}".split() for i in range(count)]


def _ended(process: subprocess.Popen | Forked) -> tuple[str, bool]:
    """Standard error of a process after its end, and True if it had to be killed."""
    try:
        return process.communicate(timeout=LONGEST)[1], False
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[1], True


class Sender:
    """Reads a child's reports and sends the signals at their time."""

    def __init__(
        self,
        process: subprocess.Popen | Forked,
        signal_time: SignalTime | None,
        result: ProcessResult,
    ):
        self.process, self.signal_time, self.result = process, signal_time, result
        self.timer: threading.Timer | None = None
        self.over = threading.Event()
        self.remaining = signal_time.occurrence if signal_time else 0
        self._begun(PHASES[0])

    def follow(self, reader: int) -> None:
        with open(reader) as lines:
            for line in lines:
                at, word = line.rstrip("\n").split(" ", 1)
                self.result.words.append((float(at), word))
                self._begun(word)

    def cancel(self) -> None:
        self.over.set()
        if self.timer:
            self.timer.cancel()
            if self.timer.is_alive():
                self.timer.join()

    def _begun(self, word: str) -> None:
        if self.signal_time and word == self.signal_time.phase and self.remaining:
            self.remaining -= 1
            if not self.remaining:
                self.timer = threading.Timer(self.signal_time.delay, self._send)
                self.timer.start()

    def _send(self) -> None:
        assert self.signal_time is not None
        for number in self.signal_time.signals:
            if self.process.poll() is not None:
                return
            self.result.sent.append((time.monotonic(), number))
            self.process.send_signal(number)
            if self.over.wait(self.signal_time.between):
                return
