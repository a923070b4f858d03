"""Recorded commands: training runs, resumes and conversions, with all that they did to files."""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import convert_folders
from campaigns.crashes import parser, states, strace
from campaigns.crashes.states import Operation, State
from campaigns.interruptions import comparison, processes, tiny_run
from campaigns.interruptions.processes import Sandbox
from campaigns.interruptions.tiny_run import RUN, SETTINGS, SHARDED

RECORDING, LENGTHS = "recording", "lengths.json"
RECORDED = "recorded"
"""The folder in which the commands run."""
COMPILED = "compiled"
NO_CHECK = ("--no-check",)
"""Conversions are not compared with PyTorch: that writes nothing."""


@dataclass(frozen=True)
class Recording:
    """A command that ran in a folder."""

    name: str
    command: tuple[str, ...]
    """``train``'s arguments after the run's name, or all of a conversion's."""
    start: State
    operations: tuple[Operation, ...]
    contents: Mapping[str, Any]
    """The result: of an uninterrupted run :func:`sandbox.run_contents`, of a conversion
    the hash of its weights.
    """
    processes: int = 1

    @property
    def trains(self) -> bool:
        return self.command[0] != "convert"

    def save(self, shared: Path) -> None:
        (shared / f"{self.name}.{RECORDING}").write_bytes(pickle.dumps(self))


def lengths(shared: Path) -> dict[str, int]:
    """The number of operations of each recording, in their order."""
    return json.loads((shared / LENGTHS).read_text())


def load(shared: Path, name: str) -> Recording:
    return pickle.loads((shared / f"{name}.{RECORDING}").read_bytes())


def make(shared: Path) -> None:
    """Record all commands into a folder."""
    operations = {}
    for recording in itertools.chain(_training(shared), _conversions(shared)):
        recording.save(shared)
        operations[recording.name] = len(recording.operations)
    shutil.rmtree(shared / RECORDED)
    (shared / LENGTHS).write_text(json.dumps(operations))


# Training


def _training(shared: Path) -> Iterator[Recording]:
    """Record a run and a resume of each setting, and a run of two processes."""
    for name, settings in SETTINGS.items():
        begun = _trained(shared, name, settings)
        yield begun
        killed = begun.start.after(begun.operations[: len(begun.operations) // 2])
        yield _trained(shared, f"{name}, resume", settings, begun=killed)
    yield _trained(shared, "two processes", f"{SETTINGS[SHARDED]} --mesh.fsdp 2", count=2)


def _trained(
    shared: Path, name: str, settings: str, count: int = 1, begun: State | None = None
) -> Recording:
    """Record a run in a folder with its text, from its start or from a killed one."""
    folder = shared / RECORDED / name.replace(", ", "-").replace(" ", "-")
    arguments = tiny_run.train_flags(settings)
    sandbox = Sandbox(folder, arguments, shared / COMPILED, count)
    if begun is None:
        sandbox.create()
    else:
        states.write(begun.tree(), folder)
    start, operations = _recorded(shared, name, train_command(arguments, count), folder)
    contents = json.loads(json.dumps(comparison.run_contents(sandbox.run)))
    _check(dataclasses.replace(sandbox, folder=folder.with_name("unrecorded")), contents)
    return Recording(name, tuple(arguments), start, operations, contents, count)


def _recorded(
    shared: Path, title: str, command: Sequence[str], folder: Path
) -> tuple[State, tuple[Operation, ...]]:
    """Run a command in a folder; return the state before it, and all that it did."""
    start, log = State.read(folder), folder.with_suffix(".log")
    ended = strace.record(command, folder, log, processes.environment(shared / COMPILED))
    if ended.returncode:
        raise SystemExit(f"{title}: exit code {ended.returncode}\n{ended.stderr[-2000:]}")
    operations = parser.checked(folder, start, log)
    log.unlink()
    return start, tuple(operations)


def _check(unrecorded: Sandbox, contents: dict[str, Any]) -> None:
    """Exit unless a run that is neither recorded nor interrupted ends as the recorded one."""
    unrecorded.create()
    result = unrecorded.start()
    differing = comparison.differences(unrecorded.run, contents)
    if result.code or differing:
        raise SystemExit(f"the recorded run ends otherwise: {result.err[-2000:]} {differing[:5]}")
    shutil.rmtree(unrecorded.folder)


def train_command(arguments: Sequence[str], count: int) -> list[str]:
    """The command that trains in the current folder, of all processes."""
    train = [sys.executable, "-m", "jax_transformer", "train", "--run", RUN, *arguments]
    if count == 1:
        return train
    lines = [" ".join([*train, *flags]) for flags in processes.distributed(count)]
    return ["sh", "-c", f"{lines[0]} & first=$!; {lines[1]} && wait $first"]


# Conversions

SHARD = ("--shard-size", convert_folders.TINY["shard"])
CONVERSIONS: dict[str, tuple[str, ...]] = {
    "hf to run": ("source", "run"),
    "run to hf": ("weights", "hf", "--to", "hf", *SHARD),
    "run to safetensors": ("weights", "out.safetensors"),
    "run to pt": ("weights", "out.pt"),
    "run to checkpoint": ("weights", "1"),
    "run to t5x": ("weights", "t5x", "--to", "t5x"),
}
"""Source, destination and options by name."""


@dataclass(frozen=True)
class Conversion:
    """A conversion that can begin, in a folder of its own."""

    title: str
    folder: Path
    target: str
    command: tuple[str, ...]


def conversions(shared: Path) -> Iterator[Conversion]:
    """Make the folders of every conversion: to a new destination, and onto an older result."""
    sources = shared / "sources"
    sources.mkdir()
    convert_folders.make(sources / "source", 0, **convert_folders.TINY)
    _done(sources, "source", "weights")
    for name, arguments in CONVERSIONS.items():
        for forced in (False, True):
            folder = shared / RECORDED / f"{name.replace(' ', '-')}-{forced}"
            shutil.copytree(sources, folder)
            if forced:
                _done(folder, *arguments, "--dtype", "float16")
            command = ("convert", *arguments, *NO_CHECK, *(["--force"] if forced else []))
            title = f"{name}, forced" if forced else name
            yield Conversion(title, folder, arguments[1], command)


def _conversions(shared: Path) -> Iterator[Recording]:
    """Record every conversion."""
    for each in conversions(shared):
        run = [sys.executable, "-m", "jax_transformer", *each.command]
        recorded = _recorded(shared, each.title, run, each.folder)
        contents = {"weights": weights_of(each.folder, each.target)}
        yield Recording(each.title, each.command, *recorded, contents)


def _done(folder: Path, *arguments: str) -> None:
    code, errors = convert(folder, *arguments)
    if code:
        raise SystemExit(f"convert {' '.join(arguments)}: {errors}")


def convert(folder: Path, *arguments: str) -> tuple[int, str]:
    """Convert in a folder, in this process; returns the exit code and what is on stderr."""
    from jax_transformer import cli

    errors = io.StringIO()
    os.chdir(folder)
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(["convert", *arguments, *NO_CHECK])
    return code, errors.getvalue()


def weights_of(folder: Path, target: str) -> str:
    """The SHA-256 of a conversion's result, converted back to one file. Raises ValueError."""
    back = folder / "back.safetensors"
    config = ("--config", "weights/config.json") if target.isdecimal() else ()
    code, errors = convert(folder, target, back.name, *config)
    if code:
        raise ValueError(errors)
    content = back.read_bytes()
    back.unlink()
    return hashlib.sha256(content).hexdigest()
