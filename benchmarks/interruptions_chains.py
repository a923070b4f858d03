"""Chains of interruptions: one command, interrupted and restarted until it ends, then compared."""

import random
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import interruptions_child, interruptions_runs, interruptions_verdict
from benchmarks.interruptions_runs import EVAL_EVERY, PHASES, STEPS, Ended, Moment, Place
from benchmarks.interruptions_verdict import Outcome
from jax_transformer.storage import checkpoint

REPEATED = (
    "steps",
    "validation",
    "save",
    "prune",
)  # phases of every validation; after the last of them only averaging is left
LONGEST = 7  # interruptions of one chain
COLD = 10  # every so-many-th chain begins without compiled programs, and keeps its own
ATTEMPTS = 4  # starts for each interruption that is asked for: some runs end before it comes


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run of one setting."""

    name: str
    arguments: Sequence[str]
    left: dict[str, Any]
    """What has to be left (:func:`interruptions_runs.left`)."""
    durations: dict[str, list[float]]
    """Seconds of each phase, each time that it began."""
    calls: dict[str, int]
    """How often each watched system call was made."""

    @classmethod
    def of(cls, name: str, place: Place, ended: Ended) -> "Reference":
        """From a run that nothing interrupted."""
        phases = [(at, word) for at, word in ended.words if word in PHASES]
        spans: dict[str, list[float]] = {PHASES[0]: [phases[0][0] - ended.started]}
        for (began, phase), (over, _) in zip(phases, [*phases[1:], (ended.ended, "")], strict=True):
            spans.setdefault(phase, []).append(over - began)
        words = [word.removeprefix("call ") for _, word in ended.words if word.startswith("call ")]
        calls = {call: words.count(call) for call in interruptions_child.CALLS.values()}
        return cls(
            name,
            place.arguments,
            interruptions_runs.left(place.run),
            spans,
            {call: n for call, n in calls.items() if n},
        )


def lengths(count: int, seed: int, kind: str) -> list[int]:
    """How many interruptions each chain has, ``count`` in all."""
    choose, found = random.Random(f"{seed} {kind}"), []
    while count:
        found.append(min(count, choose.randint(1, LONGEST)))
        count -= found[-1]
    return found


class Chain:
    """Interrupt runs of one setting until the requested number of interruptions has happened.

    Seed, kind and number decide everything.
    """

    def __init__(
        self,
        kind: str,
        number: int,
        seed: int,
        count: int,
        to: Reference,
        work: Path,
        compiled: Path,
    ):
        self.kind, self.number, self.count, self.to = kind, number, count, to
        self.random = random.Random(f"{seed} {kind} {number}")
        self.folder = work / f"{kind}-{number}"
        self.compiled = self.folder / "compiled" if number % COLD == COLD - 1 else compiled
        self.starts = ATTEMPTS * count

    def outcomes(self) -> list[Outcome]:
        """All interruptions, in order. If something is wrong, the folder is kept for inspection."""
        found: list[Outcome] = []
        run = 0
        while len(found) < self.count and self.starts > 0:
            place = Place(self.folder / str(run), self.to.arguments, self.compiled)
            place.folder.mkdir(parents=True)
            run += 1
            found += self._run(place, self.count - len(found))
            if any(outcome.wrong for outcome in found):
                return found
            shutil.rmtree(place.folder)
        shutil.rmtree(self.folder)
        return found

    def _run(self, place: Place, count: int) -> list[Outcome]:
        """One run, interrupted up to ``count`` times, to its end and compared."""
        found: list[Outcome] = []
        ended = self._interrupted(place, count, found)
        if any(outcome.wrong for outcome in found):
            return found
        wrong = interruptions_verdict.clean_end(ended) or interruptions_runs.differences(
            place.run, self.to.left
        )
        if wrong and not found:
            found.append(Outcome(self.kind, self.number, "none came", PHASES[-1]))
        for outcome in found:
            outcome.wrong = wrong
        return found

    def _interrupted(self, place: Place, count: int, found: list[Outcome]) -> Ended:
        """The process that ended the run, after the interruptions that are put into ``found``."""
        while len(found) < count and self.starts > 0:
            moment, task = self._draw(place)
            self.starts -= 1
            ended = place.start(moment, **task)
            outcome = interruptions_verdict.judge(self.kind, self.number, place, ended, task)
            if outcome:
                found.append(outcome)
            if not outcome or outcome.wrong:
                return ended
            if (
                ended.code == 0
            ):  # it had just finished, or the call that failed was harmless: another start has to change nothing
                break
        return place.start()

    # What is to happen

    def _draw(self, place: Place) -> tuple[Moment | None, dict[str, Any]]:
        """When a signal is to be sent, or what is to become of which system call."""
        ahead = 1 - max(checkpoint.steps(place.run / "checkpoints"), default=0) / STEPS
        if self.kind == "failures":
            does = self.random.choice([*interruptions_child.ERRORS, interruptions_child.FULL])
            return None, {**self._call(ahead), "does": does, "lasting": self.random.random() < 0.5}
        if self.kind == "kills" and self.random.random() < 0.5:
            return None, self._call(ahead)
        return self._moment(ahead), {}

    def _call(self, ahead: float) -> dict[str, Any]:
        call = self.random.choice(sorted(self.to.calls))
        return {
            "call": call,
            "number": self.random.randint(1, max(1, round(self.to.calls[call] * ahead))),
        }

    def _moment(self, ahead: float) -> Moment:
        phase = self.random.choice(
            [phase for phase in PHASES if ahead or phase not in (*REPEATED, "compile")]
        )
        times = max(1, round(ahead * STEPS / EVAL_EVERY)) if phase in REPEATED else 1
        occurrence = self.random.randint(1, times)
        delay = self.random.uniform(0, self.random.choice(self.to.durations[phase]))
        if self.kind == "kills":
            return Moment(phase, occurrence, delay, (signal.SIGKILL,))
        first = signal.SIGINT if self.random.random() < 0.5 else signal.SIGTERM
        again = self.random.random() < 0.2
        return Moment(
            phase,
            occurrence,
            delay,
            (first, first) if again else (first,),
            self.random.uniform(0, 0.3),
        )
