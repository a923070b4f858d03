"""The campaigns ``kills``, ``signals``, ``controls`` and ``checkpoint-damages``.

Training is interrupted in every phase, and each result compared bit for bit with an uninterrupted
run. See docs/reliability.md. Linux.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from campaigns.case import Campaign, Case
from campaigns.interruptions import (
    checkpoint_damages,
    comparison,
    tiny_run,
    verdicts,
    wrong_resumes,
)
from campaigns.interruptions.chains import Chain, Reference
from campaigns.interruptions.processes import Sandbox, Starter
from campaigns.interruptions.resident import COMPILED, Resident, resident_of, server_of
from campaigns.interruptions.tiny_run import SETTINGS, SHARDED
from campaigns.interruptions.verdicts import Outcome

EVERY = 10
"""One of so many chains has two processes, and another one begins without compiled programs."""
RESIDENT = "resident"


# What all chains share


def prepare(folder: Path) -> None:
    """Record the references: of runs in a process that stays, in one of their own, and in two."""
    compiled = folder / COMPILED
    server, staying = server_of(compiled), resident_of(compiled)
    for name, starters in {
        RESIDENT: (staying, staying),  # the first compiles everything
        "1": (None,),
        "2": (server, server),
    }.items():
        references = [recorded(folder, name, setting, starters) for setting in SETTINGS]
        text = json.dumps([dataclasses.asdict(each) for each in references])
        references_path(folder, name).write_text(text)
    staying.close()


def recorded(
    folder: Path, name: str, setting: str, starters: Sequence[Starter | None]
) -> Reference:
    """A run of a setting, the last of several that must be equal."""
    processes = 1 if name == RESIDENT else int(name)
    flags = SETTINGS[setting]
    if processes > 1 and setting == SHARDED:
        flags += f" --mesh.fsdp {processes}"
    arguments = tiny_run.train_flags(flags)
    runs = []
    for turn, server in enumerate(starters):
        path = reference_folder(folder, name, setting, turn)
        sandbox = Sandbox(path, arguments, folder / COMPILED, processes, server)
        sandbox.create()
        result = sandbox.start()
        if wrong := verdicts.clean_end(result):
            raise RuntimeError(wrong[0])
        runs.append(Reference.from_run(setting, sandbox, result))
        if runs[0].contents != runs[-1].contents:
            differing = comparison.differences(sandbox.run, runs[0].contents)
            raise RuntimeError(f"two uninterrupted runs differ: {'; '.join(differing[:5])}")
    return runs[-1]


def reference_folder(folder: Path, name: str, setting: str, turn: int) -> Path:
    """The folder of an uninterrupted run."""
    return folder / f"whole-{name}-{setting}-{turn}"


def references_path(folder: Path, name: str) -> Path:
    return folder / f"references-{name}.json"


@functools.cache
def references_of(shared: Path, name: str) -> list[Reference]:
    """The references of runs of ``1`` or ``2`` processes, or of one that stays."""
    return [Reference(**each) for each in json.loads(references_path(shared, name).read_text())]


# Cases


def kills(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """SIGKILL, by the clock or in place of a system call."""
    yield from interrupted("kills", shared, scratch, seed, number, server_of(shared / COMPILED))


def signals(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """SIGTERM and Ctrl-C, one fifth of them twice, mostly in a process that stays."""
    server = resident_of(shared / COMPILED)
    yield from interrupted("terms", shared, scratch, seed, number, server)


def interrupted(
    kind: str, shared: Path, scratch: Path, seed: int, number: int, server: Starter
) -> Iterator[Case]:
    """A chain of interruptions, which begins without compiled programs or has two processes in one
    case of :data:`EVERY` each."""
    processes, compiled = 1, shared / COMPILED
    if number % EVERY == EVERY - 1:
        processes, server = 2, server_of(compiled)
    elif number % EVERY == EVERY // 2 - 1:
        server, compiled = server_of(compiled), scratch / COMPILED
    name = RESIDENT if isinstance(server, Resident) else str(processes)
    references = references_of(shared, name)
    reference = references[(number + number // EVERY) % len(references)]
    sandbox = Sandbox(scratch, reference.arguments, compiled, processes, server)
    for outcome in Chain(kind, number, seed, reference, sandbox).outcomes():
        yield case_of(outcome, processes)


def case_of(outcome: Outcome, processes: int) -> Case:
    """The line of the results for an interruption."""
    code = "killed" if outcome.code in verdicts.KILLED else f"exit code {outcome.code}"
    facts = {
        "processes": processes,
        "seconds": round(outcome.seconds, 3),
        "by default": outcome.by_default,
    }
    what = f"{outcome.what} in {outcome.phase}"
    return Case(outcome.phase, code, what, tuple(outcome.wrong), facts=facts)


def controls(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """A run that is stopped between two validations and continued: correctly it must end equal,
    wrongly in any one way it must not."""
    del seed
    names = [None, *wrong_resumes.CONTROLS]
    name, reference = names[number % len(names)], references_of(shared, "1")[0]
    compiled = shared / COMPILED
    source = checkpoint_damages.stop(reference, scratch, compiled)
    sandbox = Sandbox(source, reference.arguments, compiled, 1, server_of(compiled))
    result = sandbox.start(control=name)
    differing = comparison.differences(sandbox.run, reference.contents)
    wrong = verdicts.clean_end(result)
    if bool(differing) != bool(name):
        wrong.append("; ".join(differing[:5]) or "the comparison did not notice it")
    yield Case(name or "no fault", "different" if differing else "equal", "", tuple(wrong))


def damages(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """Damaged checkpoints, which are noticed when they are opened, or by a run that resumes."""
    reference = references_of(shared, "1")[0]
    finished = reference_folder(shared, "1", reference.name, 0)
    yield checkpoint_damages.damaged(finished, reference, scratch, shared / COMPILED, seed, number)


KILLS = Campaign("training is killed, and continued to the same end", prepare, kills, 3, 300)
SIGNALS = Campaign(
    "SIGTERM and Ctrl-C stop training, which continues to the same end", prepare, signals, 10, 300
)
CONTROLS = Campaign("a run that continues wrongly ends differently", prepare, controls, 6, 6)
DAMAGES = Campaign("no damaged checkpoint is loaded", prepare, damages, 40, 800)
