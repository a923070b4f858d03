"""Verdict on one interruption: exit code, the line on stderr, and what was saved."""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from campaigns.interruptions import reports
from campaigns.interruptions.processes import LONGEST, PHASES, ProcessResult, Sandbox
from jax_transformer.errors import CheckpointError, InputError, LostProcessError, Preempted
from jax_transformer.storage import checkpoint

REFUSALS = (InputError.exit_code, CheckpointError.exit_code)  # after a failed call
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the latter: of a supervised process
WITHOUT_HANDLER = (PHASES[0], "imports", "end")  # a signal may act as on any program
WORK = ("validation", "save")  # a run told to stop must not begin these and exit with 0
AT_ONCE = (
    -signal.SIGTERM,
    -signal.SIGINT,
    128 + signal.SIGTERM,
    128 + signal.SIGINT,
)  # after a second signal
TRAINED = ("steps", "validation", "save", "prune", "average")  # there is something to save


@dataclass
class Outcome:
    """One interruption, and the end of the run that it happened to."""

    what: str
    """The signals, or the call and its fault."""
    phase: str
    """The phase of the run at that time."""
    by_default: bool = False
    """True if a signal came while there was no handler, or was the second one.

    That is before the options are read, or after the end of the run.
    """
    code: int = 0
    """The exit code of the process."""
    seconds: float = 0.0
    """Time from the first signal to the end of the process."""
    wrong: list[str] = field(default_factory=list)
    """Broken promises, in this process or at the end of the run."""


def judge(
    kind: str, sandbox: Sandbox, result: ProcessResult, task: dict[str, Any]
) -> Outcome | None:
    """The outcome of a process; None if it ended before the interruption."""
    if result.fault:
        phase, call = result.fault
        outcome = Outcome(f"{task.get('does', reports.KILL)} at {call}", phase)
    elif result.sent and not (result.code == 0 and kind == "kills"):
        at, names = result.sent[0][0], [number.name for _, number in result.sent]
        outcome = Outcome(" ".join(names), result.phase(at), seconds=result.ended - at)
    else:
        return None
    outcome.code = result.code
    if result.hung:
        complaints = iter([_hung(result)])
    elif result.code in KILLED:
        complaints = _lost_complaints(result) if kind == "kills" else iter(["it was killed"])
    else:
        at, number = result.sent[-1]
        # With a handler no signal ends a process; the report of its end comes a little later
        outcome.by_default = not result.handled(at) or result.code == -number
        complaints = _signal_complaints(sandbox, result, outcome)
    outcome.wrong = [f"{complaint}\n{result.err[-2000:]}" for complaint in complaints]
    return outcome


def clean_end(result: ProcessResult) -> list[str]:
    """Problems of a start that nothing interrupted."""
    if result.hung:
        return [f"{_hung(result)}\n{result.err[-2000:]}"]
    if result.code != 0:
        return [
            f"a start that nothing interrupted ended with exit code {result.code}\n"
            f"{result.err[-2000:]}"
        ]
    return [f"a traceback on stderr\n{result.err[-2000:]}"] if _traceback(result) else []


def _lost_complaints(result: ProcessResult) -> Iterator[str]:
    """Problems of the processes that another one has left by its death."""
    for code, err in result.others:
        if code not in (0, LostProcessError.exit_code):
            yield f"another process ended with exit code {code}\n{err[-2000:]}"
        elif code and not err.splitlines()[-1].startswith("jax-transformer: another process"):
            yield f"no line with the reason for the end of another process\n{err[-2000:]}"


def _other_complaints(result: ProcessResult, *more: int) -> Iterator[str]:
    """Problems of the processes that must end as this one did, or with one of ``more`` codes."""
    for code, err in result.others:
        if code not in (result.code, *more):
            yield f"another process ended with exit code {code}, not {result.code}\n{err[-2000:]}"


def failure_complaints(result: ProcessResult) -> Iterator[str]:
    """Problems of a process in which a call has failed."""
    if result.hung:
        yield _hung(result)
    yield from _other_complaints(result, LostProcessError.exit_code)
    if result.code not in (0, *REFUSALS):
        yield f"exit code {result.code} after a call that failed"
    elif result.code and not _last(result).startswith("jax-transformer: "):
        yield "no line with the reason for its end"
    if _traceback(result):
        yield "a traceback on stderr"


def _signal_complaints(sandbox: Sandbox, result: ProcessResult, outcome: Outcome) -> Iterator[str]:
    if outcome.by_default and outcome.phase in WITHOUT_HANDLER:
        return
    if _traceback(result):
        yield "a traceback on stderr"
    if outcome.by_default and len(result.sent) > 1 and result.code in AT_ONCE:
        return
    # Whom a second signal ends at once, the others lose
    yield from _other_complaints(result, *[LostProcessError.exit_code] * outcome.by_default)
    if result.code not in (0, Preempted.exit_code):
        yield f"exit code {result.code} after {outcome.what}"
    elif result.code == 0 and any(
        began > result.sent[0][0] and word in WORK for began, word in result.words
    ):
        yield f"exit code 0 after {outcome.what} in phase {outcome.phase}: it did not stop"
    elif result.code:
        yield from _checkpoint_complaints(sandbox, result, outcome)


def _checkpoint_complaints(
    sandbox: Sandbox, result: ProcessResult, outcome: Outcome
) -> Iterator[str]:
    message = re.fullmatch(
        r"jax-transformer: stopped (?:before|(?:at|behind|after) step (\d+)).*", _last(result)
    )
    if not message:
        yield "no line with the step at which it stopped"
    elif message[1] is None and outcome.phase in TRAINED:
        yield f"nothing saved in phase {outcome.phase}"
    elif message[1] is not None:
        folder = sandbox.run / "checkpoints"
        saved = checkpoint.steps(folder)
        if not saved or max(saved) != int(message[1]):
            newest = max(saved, default=None)
            yield f"it printed step {message[1]}, but the newest checkpoint is {newest}"
        else:
            try:
                checkpoint.open(folder, max(saved))
            except CheckpointError as error:
                yield str(error)


def _hung(result: ProcessResult) -> str:
    return f"no end after {LONGEST:.0f} s, in phase {result.phase(result.ended)}"


def _traceback(result: ProcessResult) -> bool:
    return any("Traceback (most recent call last)" in err for err in _errors(result))


def _last(result: ProcessResult) -> str:
    """The last line of the process that reports its end, which any of several may be."""
    lasts = [err.splitlines()[-1] for err in _errors(result) if err]
    return next((last for last in lasts if last.startswith("jax-transformer: ")), "")


def _errors(result: ProcessResult) -> list[str]:
    return [result.err, *(err for _, err in result.others)]
