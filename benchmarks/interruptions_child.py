"""The child process of interruptions.py: ``train`` with one injected fault.

It reports its phases and system calls on a pipe.

``python interruptions_child.py TASK train --run run ...``, where TASK is the JSON of :class:`Task`.
The package is not changed: functions are wrapped after their modules have been imported, and an
audit hook sees system calls inside the run folder, and may make them fail.
"""

import errno
import functools
import importlib.abc
import json
import os
import re
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from benchmarks import interruptions_controls

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
ERRORS = ("ENOSPC", "EIO", "EDQUOT")
FULL = "full"  # from the call on, no file may exceed FULL_AT bytes, also those written by C++
FULL_AT = 200
KILL = "kill"


@dataclass(frozen=True)
class Task:
    """The fault of a child."""

    pipe: int
    """The descriptor that takes a line ``TIME WORD`` for each phase that begins and each call."""
    call: str | None = None
    """A system call that is replaced by a fault."""
    site: str | None = None
    """Only calls from this place in the code count, see :func:`site_of`; None for all."""
    number: int = 1
    """The number of that call, counted from 1."""
    does: str = KILL
    """The fault: ``kill``, ``full``, or an error of :data:`ERRORS`."""
    lasting: bool = False
    """True if later calls fail too."""
    updates: int = 0
    """Number of updates after which the process gets SIGTERM; 0 for none."""
    control: str | None = None
    """The wrong way to resume (:mod:`interruptions_controls`)."""


class Pipe:
    """Reports phases and calls to the parent."""

    def __init__(self, task: Task):
        self.aim(task)

    def aim(self, task: Task | None) -> None:
        """Report for this task from now on; nothing if None."""
        self.task, self.phase, self.updates = task, "", 0

    def report(self, word: str) -> None:
        if self.task is not None:
            os.write(self.task.pipe, f"{time.monotonic()} {word}\n".encode())

    def begin(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self.report(phase)

    def wrap(self, holder: Any, name: str, phase: str, then: str | None = None) -> None:
        """Report a function as a phase of its own.

        Afterwards the phase is ``then``, or the previous one if None. Averaging has no inner
        phases.
        """
        function = getattr(holder, name)

        @functools.wraps(function)
        def reported(*arguments: Any, **options: Any) -> Any:
            before = self.phase
            if before == "average":
                return function(*arguments, **options)
            self.begin(phase)
            try:
                return function(*arguments, **options)
            finally:
                if self.phase == phase:  # or another thread has begun one
                    self.begin(then or before)

        setattr(holder, name, reported)

    def wrap_saving(self, checkpoint: Any) -> None:
        """Report ``save`` from the beginning of a checkpoint until its thread has completed it."""
        begin = checkpoint.begin

        @functools.wraps(begin)
        def reported(*arguments: Any, **options: Any) -> Any:
            self.begin("save")
            complete = begin(*arguments, **options)

            def completed() -> Any:
                try:
                    return complete()
                finally:
                    if self.phase == "save":
                        self.begin("steps")

            return completed

        checkpoint.begin = reported


# System calls


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


# Phases


class AfterImport(importlib.abc.MetaPathFinder):
    """Patches modules directly after their own code has run, in the order in which they are
    imported."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]):
        self.changes = changes

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = self.changes.pop(name, None)
        spec = PathFinder.find_spec(name, path, target) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def phases(pipe: Pipe, watch: Watch) -> dict[str, Callable[[Any], None]]:
    """The changes to each module: its functions that are phases are wrapped, and one that makes a
    system call.
    """

    def change_run(run: Any) -> None:
        if pipe.task is not None and pipe.task.control:
            run.start = interruptions_controls.resume_wrongly(run.start, pipe.task.control)
        pipe.wrap(run, "start", "state", "state")
        pipe.wrap(run.Run, "_steps", "compile", "steps")
        pipe.wrap(run.Run, "_validate", "validation")
        pipe.wrap(run.Run, "_average", "average", "end")

    def change_checkpoint(checkpoint: Any) -> None:
        pipe.wrap_saving(checkpoint)
        pipe.wrap(checkpoint, "prune", "prune")

    def change_step(step: Any) -> None:
        step.TrainStep.__call__ = counted(step.TrainStep.__call__, pipe)

    training = "jax_transformer.training"
    return {
        "jax_transformer.cli": lambda cli: pipe.wrap(cli, "main", "imports", "end"),
        f"{training}.run": change_run,
        "jax_transformer.storage.atomic": watch.wrap_exchange,
        "jax_transformer.storage.checkpoint": change_checkpoint,
        f"{training}.step": change_step,
        f"{training}.curves": draw_nothing,
        f"{training}.corpus": lambda corpus: pipe.wrap(corpus, "prepare", "data", "data"),
    }


def draw_nothing(curves: Any) -> None:
    """Write a few bytes for the picture of the curves."""
    curves.figure = no_figure


def no_figure(entries: Any, title: str) -> "Picture":
    return Picture()


class Picture:
    """Stands in for a figure of the curves, which takes a third of a tiny run's time to draw."""

    def savefig(self, path: Path, **options: Any) -> None:
        Path(path).write_bytes(b"curves")


def counted(call: Callable, pipe: Pipe) -> Callable:
    """``call``, which ends the phase ``compile`` after the first update."""

    def update(*arguments: Any) -> Any:
        result = call(*arguments)
        pipe.updates += 1
        if pipe.phase != "save":  # steps go on while a checkpoint is written
            pipe.begin("steps")
        if pipe.task is not None and pipe.updates == pipe.task.updates:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    return update


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    sys.path[0] = str(root)
    task, arguments = Task(**json.loads(sys.argv[1])), sys.argv[2:]
    pipe, watch = prepare(task)
    sys.meta_path.insert(0, AfterImport(phases(pipe, watch)))
    sys.argv = ["jax_transformer", *arguments]
    runpy.run_module("jax_transformer", run_name="__main__", alter_sys=True)


def forked(arguments: list[str], fields: dict[str, Any] | None) -> None:
    """Run the command in a process that has imported everything, without a task if None."""
    from jax_transformer import cli

    if fields is not None:
        wrap(*prepare(Task(**fields)))
    draw_nothing(sys.modules["jax_transformer.training.curves"])
    write_programs()
    sys.argv = ["jax_transformer", *arguments]
    cli.process()


def wrap(pipe: Pipe, watch: Watch) -> None:
    """Report the phases of the modules, all of which are imported."""
    for name, change in phases(pipe, watch).items():
        change(sys.modules[name])


def write_programs() -> None:
    """Write every compiled program to the cache, as JAX does in the first process only.

    The programs of two processes on CPUs have different keys, so the second one would compile all
    of them at each start.
    """
    from jax._src import compiler, distributed

    class Writer:
        process_id = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(distributed.global_state, name)

    compiler.distributed = SimpleNamespace(global_state=Writer())  # type: ignore[assignment]


def prepare(task: Task) -> tuple[Pipe, Watch]:
    """Watch handlers of signals and system calls."""
    pipe = Pipe(task)
    handler = signal.signal

    def signal_handler(number: int, action: Any) -> Any:
        before = handler(number, action)
        if number == signal.SIGTERM:
            pipe.report("handled" if callable(action) else "unhandled")
        return before

    signal.signal = signal_handler  # type: ignore[assignment]
    pipe.begin("imports")
    watch = Watch(pipe)
    watch.install()
    return pipe, watch


if __name__ == "__main__":
    main()
