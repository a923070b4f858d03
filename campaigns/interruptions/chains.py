"""Chains of interruptions: one command, interrupted and restarted until it ends, then compared."""

import random
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from campaigns.interruptions import comparison, system_calls, verdicts
from campaigns.interruptions.fork_server import ForkServer
from campaigns.interruptions.processes import (
    BEFORE_OPTIONS,
    PHASES,
    ProcessResult,
    Sandbox,
    SignalTime,
)
from campaigns.interruptions.tiny_run import EVAL_EVERY, STEPS
from campaigns.interruptions.verdicts import Outcome
from jax_transformer.storage import checkpoint

# The phases of every validation; only averaging comes after the last of them
REPEATED = ("steps", "validation", "save", "prune")
LONGEST = 7  # interruptions of one chain
ATTEMPTS = 4  # starts per requested interruption: some runs end before it comes


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run of one setting."""

    name: str
    arguments: Sequence[str]
    contents: dict[str, Any]
    """The expected result of :func:`.comparison.run_contents`."""
    durations: dict[str, list[float]]
    """Seconds of each phase, for each time that it began."""
    calls: dict[str, int]
    """Number of times that each watched system call was made."""

    @classmethod
    def from_run(cls, name: str, sandbox: Sandbox, result: ProcessResult) -> "Reference":
        """The reference of a run that nothing interrupted."""
        phases = [(at, word) for at, word in result.words if word in PHASES]
        spans: dict[str, list[float]] = {PHASES[0]: [phases[0][0] - result.started]}
        for (began, phase), (over, _) in zip(
            phases, [*phases[1:], (result.ended, "")], strict=True
        ):
            spans.setdefault(phase, []).append(over - began)
        words = [word.split()[1] for _, word in result.words if word.startswith("call ")]
        watched = (*system_calls.CALLS.values(), system_calls.EXCHANGE)
        calls = {call: words.count(call) for call in watched}
        return cls(
            name,
            sandbox.arguments,
            comparison.run_contents(sandbox.run),
            spans,
            {call: n for call, n in calls.items() if n},
        )


class Chain:
    """Interrupt runs of one setting until the drawn number of interruptions has happened.

    Seed, kind and number decide everything. Each run has a folder in the sandbox's.
    """

    def __init__(self, kind: str, number: int, seed: int, reference: Reference, sandbox: Sandbox):
        self.kind, self.reference, self.sandbox = kind, reference, sandbox
        self.random = random.Random(f"{seed} {kind} {number}")
        self.count = self.random.randint(1, LONGEST)
        self.starts = ATTEMPTS * self.count

    def outcomes(self) -> list[Outcome]:
        """All interruptions, in order. If something is wrong, the folder is kept for inspection."""
        outcomes: list[Outcome] = []
        run = 0
        while len(outcomes) < self.count and self.starts > 0:
            sandbox = replace(self.sandbox, folder=self.sandbox.folder / str(run))
            sandbox.create()
            run += 1
            outcomes += self._run(sandbox, self.count - len(outcomes))
            if any(outcome.wrong for outcome in outcomes):
                return outcomes
            shutil.rmtree(sandbox.folder)
        return outcomes

    def _run(self, sandbox: Sandbox, count: int) -> list[Outcome]:
        """Interrupt one run up to ``count`` times, let it finish, and compare."""
        outcomes: list[Outcome] = []
        result = self._interrupted(sandbox, count, outcomes)
        if any(outcome.wrong for outcome in outcomes):
            return outcomes
        wrong = verdicts.clean_end(result) or comparison.differences(
            sandbox.run, self.reference.contents
        )
        if wrong and not outcomes:
            outcomes.append(Outcome("none came", PHASES[-1]))
        for outcome in outcomes:
            outcome.wrong = wrong
        return outcomes

    def _interrupted(self, sandbox: Sandbox, count: int, outcomes: list[Outcome]) -> ProcessResult:
        """The last process of the run, after interruptions that are appended to ``outcomes``."""
        while len(outcomes) < count and self.starts > 0:
            signal_time, task = self._draw(sandbox)
            self.starts -= 1
            several = sandbox.processes > 1
            target = self.random.randrange(sandbox.processes) if several else 0
            result = sandbox.start(signal_time, target, **task)
            outcome = verdicts.judge(self.kind, sandbox, result, task)
            if outcome:
                outcomes.append(outcome)
            if not outcome or outcome.wrong:
                return result
            # Finished: another start must change nothing
            if result.code == 0:
                break
        return sandbox.start()

    # The next fault

    def _draw(self, sandbox: Sandbox) -> tuple[SignalTime | None, dict[str, Any]]:
        """The time of the next signal, or the system call that fails next."""
        ahead = 1 - max(checkpoint.steps(sandbox.run / "checkpoints"), default=0) / STEPS
        if self.kind == "kills" and self.random.random() < 0.5:
            return None, self._call(ahead)
        return self._moment(ahead), {}

    def _call(self, ahead: float) -> dict[str, Any]:
        call = self.random.choice(sorted(self.reference.calls))
        return {
            "call": call,
            "number": self.random.randint(1, max(1, round(self.reference.calls[call] * ahead))),
        }

    def _moment(self, ahead: float) -> SignalTime:
        phase = self.random.choice(
            [
                phase
                for phase in PHASES
                if (ahead or phase not in (*REPEATED, "compile"))
                # several processes wait minutes for one that is late, and one that stays has begun
                and (phase not in BEFORE_OPTIONS or self._begins_alone())
            ]
        )
        times = max(1, round(ahead * STEPS / EVAL_EVERY)) if phase in REPEATED else 1
        occurrence = self.random.randint(1, times)
        delay = self.random.uniform(0, self.random.choice(self.reference.durations[phase]))
        if self.kind == "kills":
            return SignalTime(phase, occurrence, delay, (signal.SIGKILL,))
        first = signal.SIGINT if self.random.random() < 0.5 else signal.SIGTERM
        signals = (first, first) if self.random.random() < 0.2 else (first,)
        return SignalTime(phase, occurrence, delay, signals, self.random.uniform(0, 0.3))

    def _begins_alone(self) -> bool:
        return self.sandbox.processes == 1 and isinstance(self.sandbox.server, ForkServer)
