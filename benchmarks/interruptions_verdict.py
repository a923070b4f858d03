"""Verdict on one interruption: exit code, the line on stderr, and what was saved."""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks import interruptions_child
from benchmarks.interruptions_runs import LONGEST, PHASES, Ended, Place
from jax_transformer.errors import CheckpointError, InputError, Preempted
from jax_transformer.storage import checkpoint

REFUSALS = (InputError.exit_code, CheckpointError.exit_code)  # of a call that failed
WITHOUT_HANDLER = (PHASES[0], "imports", "end")  # where a signal may do what it does to any program
WORK = ("validation", "save")  # what no run begins and then ends with 0 that was asked to stop
AT_ONCE = (
    -signal.SIGTERM,
    -signal.SIGINT,
    128 + signal.SIGTERM,
    128 + signal.SIGINT,
)  # of a second signal
TRAINED = (
    "steps",
    "validation",
    "save",
    "prune",
    "average",
)  # where something is there to be saved


@dataclass
class Outcome:
    """One interruption, and how the run ended to which it happened."""

    kind: str
    chain: int
    what: str
    """The signals, or the call and what became of it."""
    phase: str
    """In which it fell."""
    harmless: bool = False
    """A call failed, and the run went on to its end."""
    by_default: bool = False
    """True if a signal came while there was no handler, or was the second one.

    That is before the options are read, or after the end of the run.
    """
    seconds: float = 0.0
    """From the first signal to the end of the process."""
    wrong: list[str] = field(default_factory=list)
    """What was not as promised, in this process or at the end of the run."""


def judge(
    kind: str, chain: int, place: Place, ended: Ended, task: dict[str, Any]
) -> Outcome | None:
    """What happened to a process, None where it ended before anything could."""
    if ended.fault:
        phase, call = ended.fault
        outcome = Outcome(
            kind,
            chain,
            f"{task.get('does', interruptions_child.KILL)} at {call}",
            phase,
            harmless=ended.code == 0,
        )
    elif ended.sent and not (ended.code == 0 and kind == "kills"):
        at = ended.sent[0][0]
        outcome = Outcome(
            kind,
            chain,
            " ".join(number.name for _, number in ended.sent),
            ended.phase(at),
            seconds=ended.ended - at,
        )
    else:
        return None
    if ended.hung:
        complaints = iter([_hung(ended)])
    elif ended.code == -signal.SIGKILL:
        complaints = iter(() if kind == "kills" else ["it was killed"])
    elif kind == "failures":
        complaints = _of_a_failure(ended)
    else:
        outcome.by_default = not ended.handled(ended.sent[-1][0])
        complaints = _of_a_signal(place, ended, outcome)
    outcome.wrong = [f"{complaint}\n{ended.err[-2000:]}" for complaint in complaints]
    return outcome


def clean_end(ended: Ended) -> list[str]:
    """What is wrong with a start that nothing interrupted."""
    if ended.hung:
        return [f"{_hung(ended)}\n{ended.err[-2000:]}"]
    if ended.code != 0:
        return [
            f"a start that nothing interrupted ended with exit code {ended.code}\n{ended.err[-2000:]}"
        ]
    return [f"a traceback on stderr\n{ended.err[-2000:]}"] if _traceback(ended) else []


def _of_a_failure(ended: Ended) -> Iterator[str]:
    if ended.code not in (0, *REFUSALS):
        yield f"exit code {ended.code} after a call that failed"
    elif ended.code and not _last(ended).startswith("jax-transformer: "):
        yield "no line that says why it ended"
    if _traceback(ended):
        yield "a traceback on stderr"


def _of_a_signal(place: Place, ended: Ended, outcome: Outcome) -> Iterator[str]:
    if outcome.by_default and outcome.phase in WITHOUT_HANDLER:
        return
    if _traceback(ended):
        yield "a traceback on stderr"
    if outcome.by_default and len(ended.sent) > 1 and ended.code in AT_ONCE:
        return
    if ended.code not in (0, Preempted.exit_code):
        yield f"exit code {ended.code} after {outcome.what}"
    elif ended.code == 0 and any(
        began > ended.sent[0][0] and word in WORK for began, word in ended.words
    ):
        yield f"exit code 0 after {outcome.what} in phase {outcome.phase}: it did not stop"
    elif ended.code:
        yield from _of_what_is_saved(place, ended, outcome)


def _of_what_is_saved(place: Place, ended: Ended, outcome: Outcome) -> Iterator[str]:
    said = re.fullmatch(
        r"jax-transformer: stopped (?:before|(?:at|behind) step (\d+)).*", _last(ended)
    )
    if not said:
        yield "no line that says where it stopped"
    elif said[1] is None and outcome.phase in TRAINED:
        yield f"nothing saved in phase {outcome.phase}"
    elif said[1] is not None:
        folder = place.run / "checkpoints"
        saved = checkpoint.steps(folder)
        if not saved or max(saved) != int(said[1]):
            yield f"it said step {said[1]}, and the newest checkpoint is {max(saved, default=None)}"
        else:
            try:
                checkpoint.open(folder, max(saved))
            except CheckpointError as error:
                yield str(error)


def _hung(ended: Ended) -> str:
    return f"no end after {LONGEST:.0f} s, in phase {ended.phase(ended.ended)}"


def _traceback(ended: Ended) -> bool:
    return "Traceback (most recent call last)" in ended.err


def _last(ended: Ended) -> str:
    return ended.err.splitlines()[-1] if ended.err else ""
