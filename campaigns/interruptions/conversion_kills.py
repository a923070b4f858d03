"""The campaign ``conversion-kills``: SIGKILL ends conversions, each a real process.

Half of the kills come by the clock, half in place of a system call. A case is one conversion in one
folder, killed several times: each time the destination must be as it was, or complete. What the
killed processes left stays there, and the last conversion, which nothing kills, must give what it
gives without them. See docs/reliability.md. Linux.
"""

import functools
import pickle
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.case import Campaign, Case
from campaigns.crashes import judges, recordings
from campaigns.crashes.recordings import Conversion
from campaigns.crashes.states import State
from campaigns.interruptions import reports, resident
from campaigns.interruptions.processes import ProcessResult, Sandbox, SignalTime
from campaigns.interruptions.verdicts import KILLED

KILLS = 25
"""Starts of one case, most of which are killed; the rest ends before that."""
REFERENCES = "references"
BEGINNING = "imports"
"""The phase that a forked process reports first."""


@dataclass(frozen=True)
class Reference:
    """A conversion that nothing killed."""

    conversion: Conversion
    seconds: float
    calls: Mapping[str, int]
    """The number of times that each watched system call was made."""
    weights: str
    """The SHA-256 of the result's weights."""


def prepare(shared: Path) -> None:
    """Make the folders, and convert once in a copy of each."""
    references = []
    for each in recordings.conversions(shared):
        copy = each.folder.with_name(f"{each.folder.name}-done")
        shutil.copytree(each.folder, copy)
        process = started(shared, copy, each.command)
        if process.code:
            raise SystemExit(f"{each.title}: exit code {process.code}\n{process.err[-2000:]}")
        calls = Counter(word.split()[1] for _, word in process.words if word.startswith("call "))
        seconds = process.ended - process.words[0][0]
        weights = recordings.weights_of(copy, each.target)
        references.append(Reference(each, seconds, calls, weights))
    (shared / REFERENCES).write_bytes(pickle.dumps(references))


def started(
    shared: Path,
    folder: Path,
    command: Sequence[str],
    signal_time: SignalTime | None = None,
    **task: Any,
) -> ProcessResult:
    """A conversion that has ended or was killed."""
    compiled = shared / resident.COMPILED
    sandbox = Sandbox(folder, [], compiled, 1, resident.server_of(compiled), command, False)
    return sandbox.start(signal_time, **task)


@functools.cache
def references_of(shared: Path) -> list[Reference]:
    return pickle.loads((shared / REFERENCES).read_bytes())


def cases(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """Kills of one conversion, and the conversion that nothing kills."""
    references = references_of(shared)
    reference, draw = references[number % len(references)], random.Random(f"{seed} {number}")
    title, command = reference.conversion.title, reference.conversion.command
    before = shared / recordings.RECORDED / reference.conversion.folder.name
    folder = scratch / "folder"
    shutil.copytree(before, folder)
    for _ in range(KILLS):
        signal_time, task = drawn(reference, draw)
        result = started(shared, folder, command, signal_time, **task)
        if result.code in KILLED:
            outcome, wrong = judged(reference, before, folder)
            if signal_time is None:
                moment = f"in place of {result.fault[1] if result.fault else ''} {task['number']}"
            else:
                moment = f"after {signal_time.delay:.3f} s"
            yield Case(title, outcome, moment, tuple(wrong))
            if wrong:
                return
            if outcome == "as before":
                continue
        elif result.code:
            what = f"exit code {result.code}"
            yield Case(title, what, "not killed", (f"{what}\n{result.err[-2000:]}",))
            return
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
    if wrong := ended(shared, reference, folder):
        yield Case(title, "at the end", "the last conversion", tuple(wrong))


def drawn(reference: Reference, draw: random.Random) -> tuple[SignalTime | None, dict[str, Any]]:
    """A moment by the clock, or a system call."""
    if draw.random() < 0.5:
        delay = draw.uniform(0, reference.seconds)
        return SignalTime(BEGINNING, 1, delay, (signal.SIGKILL,)), {}
    call = draw.choice(sorted(reference.calls))
    number = draw.randint(1, reference.calls[call])
    return None, {"call": call, "number": number, "does": reports.KILL}


def judged(reference: Reference, before: Path, folder: Path) -> tuple[str, list[str]]:
    """The outcome of a killed conversion by what it left, and the broken promises."""
    was, now = (State.read(each).tree() for each in (before, folder))
    target = reference.conversion.target
    names, others = ({path.partition("/")[0] for path in tree} - {target} for tree in (was, now))
    odd = {name for name in others - names if not name.startswith(".")}
    wrong = [f"left behind: {', '.join(sorted(odd))}"] if odd else []
    wrong += [
        f"{name}: changed"
        for name in sorted(names)
        if judges.part(was, name) != judges.part(now, name)
    ]
    if judges.part(now, target) == judges.part(was, target):
        return "as before", wrong
    return "complete", wrong + different(reference, folder)


def different(reference: Reference, folder: Path) -> list[str]:
    """The broken promise if the destination has not the weights that it should have."""
    target = reference.conversion.target
    try:
        weights = recordings.weights_of(folder, target)
    except ValueError as error:
        return [f"{target}: neither as before nor complete: {error}"]
    return [] if weights == reference.weights else [f"{target}: other weights"]


def ended(shared: Path, reference: Reference, folder: Path) -> list[str]:
    """The broken promises of a conversion that nothing kills, after others were killed here."""
    names = {path.name for path in folder.iterdir()}
    result = started(shared, folder, reference.conversion.command)
    if result.code:
        return [f"exit code {result.code}\n{result.err[-2000:]}"]
    odd = {path.name for path in folder.iterdir()} - names - {reference.conversion.target}
    wrong = [f"left behind: {', '.join(sorted(odd))}"] if odd else []
    return wrong + different(reference, folder)


CONVERSION_KILLS = Campaign(
    "conversions are killed, and the destination is as before or complete",
    prepare,
    cases,
    small=4,
    nightly=400,
)
