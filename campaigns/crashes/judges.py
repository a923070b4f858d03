"""Judges of what a crash left: does the same command, started again, keep all promises?"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from campaigns.crashes import recordings, states
from campaigns.crashes.begin import Beginner, Beginning
from campaigns.crashes.recordings import COMPILED, Recording
from campaigns.crashes.states import ROOT, Names, State, Tree
from campaigns.interruptions import comparison, processes, verdicts
from campaigns.interruptions.fork_server import ForkServer
from campaigns.interruptions.processes import Sandbox
from campaigns.interruptions.tiny_run import RUN
from jax_transformer.storage import atomic

MEMORY = Path("/dev/shm")
"""A file system in memory, on which nothing waits for a disk."""


@dataclass(frozen=True)
class Promise:
    """The checkpoints that a crash at some moment of a command must leave, or the result."""

    lowest: int = 0
    """The checkpoint that must be on the disk: a later one was begun, or the command had ended. Of
    a conversion 1 if the result must be there."""
    newest: int = 0
    """The newest checkpoint that was complete. Of a conversion 1 if the result was."""


def promises(recording: Recording) -> list[Promise]:
    """The promise before the first operation, and after each one."""
    follow = _checkpoints if recording.trains else _result
    *before, last = follow(recording)
    return [*before, Promise(last.newest, last.newest)]


def _checkpoints(recording: Recording) -> Iterator[Promise]:
    state = recording.start.copy()
    newest = lowest = max(_steps(state), default=0)
    yield Promise(lowest, newest)
    for operation in recording.operations:
        state.apply(operation)
        if isinstance(operation, Names):
            completed = max(_steps(state), default=0)
            if completed > newest:
                newest = completed
            elif _in_checkpoints(state, operation):  # pruning, or the next save, or the average
                lowest = newest
        yield Promise(lowest, newest)


def _result(recording: Recording) -> Iterator[Promise]:
    target = recording.command[2]
    state = recording.start.copy()
    first = state.names.get((ROOT, target))
    for operation in [None, *recording.operations]:
        if operation is not None:
            state.apply(operation)
        yield Promise(0, int(state.names.get((ROOT, target)) != first))


def _folder(state: State, *names: str) -> int | None:
    """The number of a folder."""
    number: int | None = ROOT
    for name in names:
        number = None if number is None else state.names.get((number, name))
    return number


def _steps(state: State) -> list[int]:
    """The steps of the complete checkpoints of a run."""
    checkpoints = _folder(state, RUN, "checkpoints")
    return [int(name) for folder, name in state.names if folder == checkpoints and name.isdecimal()]


def _in_checkpoints(state: State, operation: Names) -> bool:
    folders = {_folder(state, RUN, name) for name in ("checkpoints", "averaged")} - {None}
    return any(folder in folders for (folder, _), _ in operation.changes)


class Judge:
    """A folder in memory, in which states are judged."""

    def __init__(self, recording: Recording, shared: Path):
        self.recording, self.shared = recording, shared
        place = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.closing = contextlib.ExitStack()
        self.folder = Path(self.closing.enter_context(place)) / "state"

    def place(self, tree: Tree) -> Path:
        """A folder with this content."""
        shutil.rmtree(self.folder, ignore_errors=True)
        states.write(tree, self.folder)
        return self.folder


class TrainingJudge(Judge):
    """Begins the command in every state, and ends it once for each way in which it begins."""

    def __init__(self, recording: Recording, shared: Path):
        super().__init__(recording, shared)
        variables = processes.environment(shared / COMPILED)
        server = ForkServer(variables)
        self.closing.callback(server.close)
        # One process with a device for each process of the run
        flags = f"--xla_force_host_platform_device_count={recording.processes}"
        beginner = Beginner(recording.command, variables | {"XLA_FLAGS": flags})
        self.closing.callback(beginner.close)
        self.beginner, self.server = beginner, server
        self.beginnings: dict[str, Beginning] = {}

    def __call__(self, tree: Tree, promise: Promise, *, restart: bool) -> tuple[str, list[str]]:
        """The outcome for the table, and the broken promises; ``restart`` starts the real command
        in any case."""
        digest = states.digest(tree)
        if digest not in self.beginnings:
            self.beginnings[digest] = self.beginner.begin(self.place(tree))
        beginning = self.beginnings[digest]
        if beginning.code is not None:
            return "refused", [f"exit code {beginning.code}: {beginning.error}"]
        outcome = "begins again" if not beginning.step else "the newest checkpoint"
        if beginning.step < promise.newest:
            outcome = "the one before it"
        if not promise.lowest <= beginning.step <= promise.newest:
            return outcome, [
                f"continues from step {beginning.step}, and {promise.lowest} to {promise.newest} "
                "are promised"
            ]
        verdict = self.shared / f"{beginning.digest}.verdict"  # for all workers
        if restart or not verdict.exists():
            atomic.write_text(verdict, json.dumps(self.end(tree)))
        return outcome, json.loads(verdict.read_text())

    def end(self, tree: Tree) -> list[str]:
        """The broken promises after the real command was started again, to its end."""
        sandbox = Sandbox(
            self.place(tree),
            self.recording.command,
            self.shared / COMPILED,
            self.recording.processes,
            self.server,
        )
        wrong = verdicts.clean_end(sandbox.start())
        return wrong or comparison.differences(sandbox.run, dict(self.recording.contents))


class ConversionJudge(Judge):
    """Compares the destination with the one before and the one after, and converts again."""

    def __init__(self, recording: Recording, shared: Path):
        super().__init__(recording, shared)
        ends = recording.start, recording.start.after(recording.operations)
        self.target = recording.command[2]
        self.verdicts: dict[str, list[str]] = {}
        self.before, self.after = (part(state.tree(), self.target) for state in ends)

    def __call__(self, tree: Tree, promise: Promise, *, restart: bool) -> tuple[str, list[str]]:
        """The outcome for the table, and the broken promises; ``restart`` converts again in any
        case."""
        target = part(tree, self.target)
        if target == self.after:
            outcome = "complete"
        elif target == self.before:
            outcome = "as before"
        else:
            return "neither", [f"{self.target}: neither as before nor complete"]
        allowed = {("as before", "complete")[step] for step in (promise.lowest, promise.newest)}
        if outcome not in allowed:
            return outcome, [f"{self.target}: {outcome}, and {' or '.join(allowed)} is promised"]
        visible = {path.partition("/")[0] for path in tree if not path.startswith(".")}
        odd = visible - {path.partition("/")[0] for path in self.recording.start.tree()}
        if odd - {self.target}:
            return outcome, [f"left behind: {', '.join(odd)}"]
        # Once for all contents of unfinished files and folders
        names = {path.partition("/")[0] for path in tree}
        known = f"{outcome} {' '.join(sorted(names))}"
        if known not in self.verdicts or restart:
            self.verdicts[known] = self.end(tree, outcome)
        return outcome, self.verdicts[known]

    def end(self, tree: Tree, outcome: str) -> list[str]:
        """The broken promises of the same command, started again; a process of the same number left
        what is there."""
        if outcome == "complete" and "--force" not in self.recording.command:
            return []
        folder = self.place(tree)
        for path in folder.glob(f".{self.target}.*"):
            number = path.name.removeprefix(f".{self.target}.").partition(".")[0]
            path.rename(path.with_name(path.name.replace(number, str(os.getpid()))))
        code, errors = recordings.convert(folder, *self.recording.command[1:])
        if code:
            return [f"the second conversion: exit code {code}: {errors}"]
        weights = recordings.weights_of(folder, self.target)
        return [] if weights == self.recording.contents["weights"] else ["other weights"]


def part(tree: Tree, name: str) -> Tree:
    """A file or folder of a tree with its content."""
    return {
        path: content
        for path, content in tree.items()
        if path == name or path.startswith(f"{name}/")
    }
