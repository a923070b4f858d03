"""The campaign ``resumes``: a run is resumed at every step and must equal one that never stopped.

A tiny model makes :data:`STEPS` steps, and the digest of its state after each is recorded. The same
run again saves after every step, as after a request to stop. A case resumes it at one of these
checkpoints by ``recipe.train``, in a process that keeps its compiled programs, and stops it some
steps later. In some cases the resume is wrong on purpose, which the comparison must notice.
"""

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from campaigns.case import Campaign, Case
from campaigns.interruptions import child, comparison, kept_programs, tiny_run, wrong_resumes

STEPS = 1000
MORE = 3
"""Steps that a resumed run makes before it is stopped again. One more if it would validate then,
as a request to stop puts that off."""
EVAL_EVERY, AVERAGE = 100, 3
TO_THE_END = 50
"""Each so many-th case resumes and is never stopped again."""
CONTROL = 10
"""Each so many-th case has a second resume, a wrong one."""
FLAGS = (
    "--model.preset t5 --model.d-model 8 --model.num-heads 2 --model.d-ff 16 "
    "--model.encoder-layers 1 --model.decoder-layers 1 --model.max-length 16 --data.vocab-size 300 "
    "--data.tokens-per-batch 64 --data.buckets 2 --optimizer.ema 0.9 --optimizer.warmup-steps 100 "
    f"--steps {STEPS} --eval-every {EVAL_EVERY} --log-every 7 --eval-pairs 2 --samples 0 "
    f"--average {AVERAGE}"
)
RUN, CHECKPOINTS = tiny_run.RUN, "checkpoints"
UNINTERRUPTED = "digests.json"
COPIED = "config.json train_config.json data.json tokenizer.json metrics.jsonl SHA256SUMS".split()


def options_of_run() -> Any:
    """The options of the run in the current folder, which has the text too."""
    from jax_transformer.cli.arguments import parse
    from jax_transformer.cli.train import TrainCommand

    flags = ["--run", RUN, *tiny_run.text_flags(Path()), *FLAGS.split()]
    return parse("train", TrainCommand, flags).options


def train(folder: Path, last: int | None = None) -> dict[int, str]:
    """Train in ``folder`` from the newest checkpoint to the end, or to the step ``last``, where a
    request to stop comes. Returns the digest of the state after every step that was made.
    """
    from jax_transformer.errors import Preempted
    from jax_transformer.runtime.process import Stop
    from jax_transformer.training import curves, recipe, run

    stop, digests = Stop(), {}

    def make_step(*arguments: Any) -> Callable[..., Any]:
        train_step = kept_step(*arguments)

        def recorded(*inputs: Any) -> Any:
            state, metrics = train_step(*inputs)
            digests[int(state.step)] = comparison.state_digest(state)
            stop.asked = int(state.step) == last
            return state, metrics

        return recorded

    tiny_run.write_text(folder)
    with contextlib.chdir(folder), kept_programs.shared_programs():
        kept_step = run.make_step
        with (
            mock.patch.object(run, "make_step", make_step),
            mock.patch.object(curves, "figure", child.no_figure),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(Preempted),
        ):
            recipe.train(options_of_run(), stop)
    return digests


def prepare(folder: Path) -> None:
    """Train without a stop, and once more with a checkpoint after every step."""
    from jax_transformer.training import run

    started = run.Run.__init__

    def with_votes(new: run.Run, *arguments: Any) -> None:
        started(new, *arguments)
        new.votes = mock.MagicMock(return_value=True)  # after each step: save
        new.votes.now.return_value = False  # and go on

    for name in ("whole", "saved"):
        (folder / name).mkdir()
    (folder / UNINTERRUPTED).write_text(json.dumps(train(folder / "whole")))
    with (
        mock.patch.object(run.Run, "__init__", with_votes),
        mock.patch.object(run.Run, "_prune", lambda _: None),
    ):
        train(folder / "saved")


def resumed(shared: Path, folder: Path, step: int, last: int | None) -> dict[int, str]:
    """The digests of the run that was saved at ``step``, resumed in the new folder ``folder``, with
    the checkpoints before it that the averages need.
    """
    saved, run = shared / "saved" / RUN, folder / RUN
    for each in (*[*range(EVAL_EVERY, step, EVAL_EVERY)][-AVERAGE:], step):
        shutil.copytree(saved / CHECKPOINTS / str(each), run / CHECKPOINTS / str(each))
    for name in COPIED:
        shutil.copyfile(saved / name, run / name)
    return train(folder, last)


def compared(
    shared: Path, folder: Path, step: int, digests: dict[int, str], last: int
) -> list[str]:
    """The differences between a resumed run and the uninterrupted one, at its end or after the step
    ``last``."""
    expected, reference, run = digests_of(shared), shared / "whole" / RUN, folder / RUN
    wrong = [
        f"the state after step {number} differs"
        for number in range(step + 1, last + 1)
        if digests.get(number) != expected[number]
    ]
    wrong += [f"step {n} was made" for n in digests if not step < n <= last]
    if last == STEPS:
        return wrong + comparison.differences(run, comparison.run_contents(reference))
    if metrics(run, last) != metrics(reference, last):
        wrong.append("metrics.jsonl differs")
    return wrong + [
        f"the checkpoint of step {last}: {name} differs"
        for name in different_arrays(run, shared / "saved" / RUN, last)
    ]


def digests_of(shared: Path) -> dict[int, str]:
    """The digest of the uninterrupted run after each step."""
    digests = json.loads((shared / UNINTERRUPTED).read_text())
    return {int(step): digest for step, digest in digests.items()}


def different_arrays(run: Path, other: Path, step: int) -> list[str]:
    """The arrays that differ between two runs' checkpoints of a step."""
    from jax_transformer.storage import checkpoint

    ours, theirs = (checkpoint.open(each / CHECKPOINTS, step).arrays() for each in (run, other))
    names = ours.keys() | theirs.keys()
    return sorted(n for n in names if not np.array_equal(ours.get(n, ()), theirs.get(n, ())))


def metrics(run: Path, last: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl up to a step, without speed."""
    return [line for line in comparison.metrics(run) if line["step"] <= last]


def cases(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """Resume at one step; every :data:`CONTROL`-th number once more, wrongly."""
    step = (number + seed) % STEPS + 1
    last = STEPS if number % TO_THE_END == 0 else stop_after(step)
    digests = resumed(shared, scratch / "resumed", step, last if last < STEPS else None)
    wrong = compared(shared, scratch / "resumed", step, digests, last)
    group = f"resumed for {MORE} steps" if last < STEPS else "resumed to the end"
    yield Case(group, "different" if wrong else "equal", f"step {step}", tuple(wrong))
    if number % CONTROL == 0 and stop_after(step) < STEPS:
        controls = list(wrong_resumes.CONTROLS)
        yield control(shared, scratch, step, controls[number // CONTROL % len(controls)])


def stop_after(step: int) -> int:
    """The step at which a run that is resumed at ``step`` is stopped."""
    last = step + MORE
    return min(last + (last % EVAL_EVERY == 0), STEPS)


def control(shared: Path, scratch: Path, step: int, name: str) -> Case:
    """A wrong resume, which must end differently."""
    last = stop_after(step)
    with wrong_resumes.wrong_resume(name):
        digests = resumed(shared, scratch / "control", step, last)
    noticed = digests[last] != digests_of(shared)[last]
    missed = () if noticed else ("the comparison did not notice it",)
    return Case(f"control: {name}", "noticed" if noticed else "missed", f"step {step}", missed)


RESUMES = Campaign(
    "a run is resumed at each of its steps and equals the uninterrupted one, bit for bit",
    prepare,
    cases,
    small=20,
    nightly=STEPS,
)
