"""The campaign ``failures``: system calls fail at every place of the code that changes files.

A run, a resume and conversions are recorded once: each place (function and kind of file) that
opens a file for writing, renames, removes, syncs or makes a folder. A case makes one of these calls
fail, once or from then on, or lets no file grow any more from there on. See docs/reliability.md.
"""

import dataclasses
import functools
import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.case import Campaign, Case
from campaigns.interruptions import comparison, reports, resident, tiny_run, verdicts
from campaigns.interruptions.processes import ProcessResult, Sandbox
from campaigns.interruptions.tiny_run import RUN, SETTINGS
from jax_transformer.storage import checkpoint, run_folder

UPDATES = 11
"""Updates before the stop of the run that is resumed."""


@dataclass(frozen=True)
class Operation:
    """A command, and what is there before it."""

    command: list[str]
    source: str | None = None
    """The operation whose result it begins with; None for the text alone."""
    trains: bool = False
    processes: int = 1


TRAIN = ["train", "--run", RUN, *tiny_run.train_flags(SETTINGS["ema"])]
OPERATIONS = {
    "train": Operation(TRAIN, trains=True),
    "resume": Operation(TRAIN, "stop", trains=True),
    "train by two": Operation(TRAIN, trains=True, processes=2),
    "run to hf": Operation(["convert", RUN, "hf", "--to", "hf", "--no-check"], "train"),
    "hf to run": Operation(["convert", "hf", "other", "--no-check"], "run to hf"),
    "run to safetensors": Operation(["convert", RUN, "a.safetensors", "--no-check"], "train"),
    "run to pt": Operation(["convert", RUN, "a.pt", "--no-check"], "train"),
    "replace safetensors": Operation(
        ["convert", RUN, "a.safetensors", "--no-check", "--force", "--dtype", "float16"],
        "run to safetensors",
    ),
}


@dataclass(frozen=True)
class Fault:
    """A call that fails."""

    operation: str
    call: str
    site: str
    number: int
    does: str
    lasting: bool

    @property
    def task(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if name != "operation"}


# Recording


def prepare(folder: Path) -> None:
    """Record every operation: its result and its calls."""
    start(folder, "stop", folder / "stop", updates=UPDATES)
    for name in OPERATIONS:
        record(folder, name)
    resident.resident_of(folder / resident.COMPILED).close()


def record(folder: Path, name: str) -> None:
    """Run an operation twice, and write down the calls of the second time."""
    for turn in ("", " again"):
        result = start(folder, name, folder / (name + turn))
        if wrong := verdicts.clean_end(result):
            raise RuntimeError(f"{name}: {wrong[0]}")
    if contents(folder / name) != contents(folder / f"{name} again"):
        raise RuntimeError(f"two results of {name} differ")
    words = [word.split()[1:] for _, word in result.words if word.startswith("call ")]
    calls = sorted((*call, count) for call, count in Counter(map(tuple, words)).items())
    (folder / f"{name}.json").write_text(json.dumps(calls))


def start(shared: Path, name: str, folder: Path, **task: Any) -> ProcessResult:
    """Run an operation in a new folder."""
    operation = OPERATIONS.get(name, OPERATIONS["train"])
    if operation.source is None:
        folder.mkdir(parents=True)
        tiny_run.write_text(folder)
    else:
        shutil.copytree(shared / operation.source, folder)
    return sandbox_of(shared, name, folder).start(**task)


def sandbox_of(shared: Path, name: str, folder: Path) -> Sandbox:
    """The operation in a process that stays, or in two of its own."""
    compiled = shared / resident.COMPILED
    operation = OPERATIONS.get(name, OPERATIONS["train"])
    several = operation.processes > 1
    starter = (resident.server_of if several else resident.resident_of)(compiled)
    return Sandbox(folder, [], compiled, operation.processes, starter, operation.command)


@functools.cache
def faults(shared: Path, seed: int) -> list[Fault]:
    """Every fault at every place, in an order drawn from the seed."""
    draw = random.Random(seed)
    kinds = [(does, lasting) for does in reports.ERRORS for lasting in (False, True)]
    entries = [
        Fault(name, call, site, draw.randint(1, count), does, lasting)
        for name in OPERATIONS
        for call, site, count in json.loads((shared / f"{name}.json").read_text())
        for does, lasting in [*kinds, (reports.FULL, True)]
    ]
    draw.shuffle(entries)
    return entries


# Cases


def cases(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """A call that fails; then the same command again, which must end as if nothing had been."""
    every = faults(shared, seed)
    fault = every[number % len(every)]
    operation, failed, again = OPERATIONS[fault.operation], scratch / "failed", scratch / "again"
    result = start(shared, fault.operation, failed, **fault.task)
    before = hashes(shared / operation.source) if operation.source else {}
    what = f"{fault.does}{' from then on' * fault.lasting} at {fault.call} of {fault.site}"
    if not result.fault:
        yield Case(fault.operation, "did not come", what)
        return
    wrong = [f"{each}\n{result.err[-2000:]}" for each in verdicts.failure_complaints(result)]
    if result.code and not operation.trains:
        wrong += changed(before, hashes(failed), cleans=fault.call in ("unlink", "rmdir"))
    if not wrong:
        # Threads of the failed save may be left, which end with the process of an ordinary command
        shutil.copytree(failed, again)
        command = sandbox_of(shared, fault.operation, again)
        if result.code or operation.trains:
            wrong += verdicts.clean_end(command.start())
        after, expected = contents(again), contents(shared / fault.operation)
        wrong += [
            f"{name}: {after.get(name)} instead of {expected.get(name)}"
            for name in sorted(after.keys() | expected.keys())
            if after.get(name) != expected.get(name)
        ]
    outcome = f"exit code {result.code}" if result.code else "harmless"
    yield Case(fault.operation, outcome, what, tuple(wrong))


def changed(before: dict[str, str], after: dict[str, str], *, cleans: bool) -> Iterator[str]:
    """Yield what a failed conversion changed. If cleaning fails, a hidden file may stay."""
    for name in sorted(before.keys() | after.keys()):
        hidden = any(part.startswith(".") for part in Path(name).parts)
        if before.get(name) != after.get(name) and not (hidden and cleans and name not in before):
            yield f"{name}: {'left behind' if name not in before else 'changed'}"


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file, without those of the lock."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in run_folder.LOCK_FILES
    }


def contents(folder: Path) -> dict[str, Any]:
    """Everything that two results of a command have in common: arrays of checkpoints, other files,
    and metrics without speed."""
    entries: dict[str, Any] = {}
    for name, digest in hashes(folder).items():
        path = folder / name
        if path.name == "metrics.jsonl":
            entries[name] = comparison.metrics(path.parent)
        elif not {"checkpoints", "averaged"} & {*Path(name).parts}:
            entries[name] = digest
    for path in [*folder.rglob("checkpoints"), *folder.rglob("averaged")]:
        name = str(path.relative_to(folder))
        entries[name] = sorted(each.name for each in path.iterdir())
        for step in checkpoint.steps(path):
            arrays = checkpoint.open(path, step).arrays()
            entries |= {
                f"{name}/{step} {array}": hashlib.sha256(values.tobytes()).hexdigest()
                for array, values in arrays.items()
            }
    return entries


FAILURES = Campaign(
    "system calls fail at every place that changes files, and the command is repeated",
    prepare,
    cases,
    small=20,
    nightly=1000,
)
