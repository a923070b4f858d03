"""The fault of a process that is interrupted, and the pipe on which it reports what it does."""

import functools
import os
import time
from dataclasses import dataclass
from typing import Any

ERRORS = ("ENOSPC", "EIO", "EDQUOT")
FULL, KILL = "full", "kill"


@dataclass(frozen=True)
class Task:
    """The fault of a child."""

    pipe: int
    """The descriptor that takes a line ``TIME WORD`` for each phase that begins and each call."""
    call: str | None = None
    """A system call that is replaced by a fault."""
    site: str | None = None
    """The place in the code whose calls count (:func:`.system_calls.site_of`); None for all."""
    number: int = 1
    """The number of that call, counted from 1."""
    does: str = KILL
    """The fault: ``kill``, ``full``, or an error of :data:`ERRORS`."""
    lasting: bool = False
    """True if later calls fail too."""
    updates: int = 0
    """Number of updates after which the process gets SIGTERM; 0 for none."""
    control: str | None = None
    """The wrong way to resume (:mod:`.wrong_resumes`)."""


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

    def wrap_saving(self, saving: Any) -> None:
        """Report ``save`` from the beginning of a checkpoint until its thread has completed it."""
        begin = saving.begin

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

        saving.begin = reported
