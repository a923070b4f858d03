"""Two campaigns on recorded commands: SIGKILL at every moment, and a loss of power at every moment.

See docs/reliability.md. A numbered case looks at up to 25 moments of one recording, spread over
all of it.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from campaigns.case import Campaign, Case
from campaigns.crashes import recordings, states
from campaigns.crashes.judges import ConversionJudge, Judge, Promise, TrainingJudge, promises
from campaigns.crashes.recordings import Recording
from campaigns.crashes.states import Disk, Operation, State, Tree, Write

MOMENTS = 25
RESTARTED = 1
"""States of each case with which the real command is started, whatever is known of them."""
CUTS = 8
"""Kills in the middle of each write."""
DRAWN = 2
"""States that are drawn at each moment of a loss of power."""
SHOWN = 5
"""Findings of a case that are told one by one."""

Moment = tuple[str, Tree, Promise]
"""The last call before the crash, what the crash left, and what is promised."""


@dataclass(frozen=True)
class Part:
    """The moments of one case: every ``distance``-th of a recording."""

    name: str
    first: int
    distance: int
    rounds: int
    """The number of times that earlier cases have been through all recordings."""

    def has(self, moment: int) -> bool:
        return moment % self.distance == self.first


def part(shared: Path, number: int) -> Part:
    """The part of a numbered case; the recordings take turns."""
    distances = {name: 1 + length // MOMENTS for name, length in recordings.lengths(shared).items()}
    parts = [
        (first, name)
        for first in range(max(distances.values()))
        for name in distances
        if first < distances[name]
    ]
    rounds, turn = divmod(number, len(parts))
    first, name = parts[turn]
    return Part(name, first, distances[name], rounds)


def killed(recording: Recording, part: Part, draw: random.Random) -> Iterator[Moment]:
    """Yield what SIGKILLs leave: after a call, and in the middle of a write."""
    state, promised = recording.start.copy(), promises(recording)
    for i, operation in enumerate([None, *recording.operations]):
        if part.has(i) and isinstance(operation, Write):
            promise = Promise(promised[i].newest, promised[i].newest)
            for torn in cut(state, operation, draw):
                yield f"in {i}: {operation.text}", torn.tree(), promise
        if operation is not None:
            state.apply(operation)
        if part.has(i) and not part.rounds:
            promise = Promise(promised[i].newest, promised[i].newest)
            yield f"after {i}: {text(operation)}", state.tree(), promise


def cut(state: State, operation: Write, draw: random.Random) -> Iterator[State]:
    """Yield states in the middle of a write."""
    if len(operation.data) > 1:
        for _ in range(CUTS):
            data = operation.data[: draw.randrange(1, len(operation.data))]
            torn = state.copy()
            torn.apply(dataclasses.replace(operation, data=data))
            yield torn


def lost(recording: Recording, part: Part, draw: random.Random) -> Iterator[Moment]:
    """Yield what a loss of power may leave: the extremes, and some that are drawn."""
    disk, promised = Disk(recording.start), promises(recording)
    for i, operation in enumerate([None, *recording.operations]):
        if operation is not None:
            disk.apply(operation)
        if part.has(i):
            trees = [] if part.rounds else list(disk.extremes())
            trees += [disk.drawn(draw) for _ in range(DRAWN)]
            for tree in {states.digest(tree): tree for tree in trees}.values():
                yield f"after {i}: {text(operation)}", tree, promised[i]


def text(operation: Operation | None) -> str:
    return "the start" if operation is None else operation.text


@cache
def judge_of(shared: Path, name: str) -> Judge:
    """The judge of a recording, which a worker keeps from case to case."""
    recording = recordings.load(shared, name)
    return (TrainingJudge if recording.trains else ConversionJudge)(recording, shared)


def cases(
    crash: Callable[[Recording, Part, random.Random], Iterable[Moment]],
    shared: Path,
    scratch: Path,
    seed: int,
    number: int,
) -> Iterator[Case]:
    """Yield the outcomes of a numbered case, as of a campaign; the recordings take turns."""
    here = part(shared, number)
    judge, draw = judge_of(shared, here.name), random.Random(f"{seed} {number}")
    moments = list(crash(judge.recording, here, draw))
    restarted = {draw.randrange(len(moments)) for _ in range(RESTARTED)} if moments else set()
    outcomes: Counter[str] = Counter()
    findings: list[Case] = []
    for i, (what, tree, promise) in enumerate(moments):
        outcome, wrong = judge(tree, promise, restart=i in restarted)
        if not wrong:
            outcomes[outcome] += 1
            continue
        findings.append(Case(here.name, outcome, what, tuple(wrong)))
        if len(findings) <= SHOWN:
            states.write(tree, scratch / str(i))
    distinct = len({states.digest(tree) for _, tree, _ in moments})
    facts = {"distinct": distinct, "restarted": len(restarted)}
    for outcome, count in outcomes.items():
        yield Case(here.name, outcome, f"{len(moments)} moments", count=count, facts=facts)
        facts = {}
    yield from findings


CRASHES = Campaign(
    "SIGKILL after every call of recorded runs, resumes and conversions, and inside writes",
    recordings.make,
    partial(cases, killed),
    small=6,
    nightly=1000,
)
POWER_LOSS = Campaign(
    "loss of power at every moment of recorded runs, resumes and conversions",
    recordings.make,
    partial(cases, lost),
    small=6,
    nightly=1000,
)
