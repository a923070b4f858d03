"""A process that is interrupted: ``train`` or ``convert`` with one injected fault.

``python -m campaigns.interruptions.child TASK train --run run ...``, where TASK is the JSON of
:class:`.reports.Task`. The package is not changed: functions are wrapped after their modules have
been imported, and an audit hook sees system calls inside the run folder, and may make them fail.
"""

import importlib.abc
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from campaigns.interruptions.reports import Pipe, Task
from campaigns.interruptions.system_calls import Watch


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
            from campaigns.interruptions import wrong_resumes

            run.start = wrong_resumes.resume_wrongly(run.start, pipe.task.control)
        pipe.wrap(run, "start", "state", "state")
        pipe.wrap(run.Run, "_steps", "compile", "steps")
        pipe.wrap(run.Run, "_validate", "validation")
        pipe.wrap(run.Run, "_average", "average", "end")

    def change_saving(saving: Any) -> None:
        pipe.wrap_saving(saving)
        pipe.wrap(saving, "prune", "prune")

    def change_step(step: Any) -> None:
        step.TrainStep.__call__ = counted(step.TrainStep.__call__, pipe)

    training = "jax_transformer.training"
    return {
        "jax_transformer.cli": lambda cli: pipe.wrap(cli, "main", "imports", "end"),
        f"{training}.run": change_run,
        "jax_transformer.storage.atomic": watch.wrap_exchange,
        "jax_transformer.storage.saving": change_saving,
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
