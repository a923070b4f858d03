"""The training loop with stand-ins for the step, the batches and the validation."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.data.batches import Batch
from jax_transformer.errors import NonFiniteLossError, Preempted
from jax_transformer.runtime.process import Stop
from jax_transformer.storage import checkpoint, saving
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import run as training_run
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.devices import Devices
from jax_transformer.training.evaluation import ValidationReport
from jax_transformer.training.optimizer import OptimizerOptions
from jax_transformer.training.options import AverageOf, Criterion, TrainOptions
from jax_transformer.training.step import TrainState
from parity_tests.unit import helpers, runs

SCORES = dict.fromkeys(("bleu", "chrf", "exact_match"), 1.0) | {"signatures": {}}


def numbered_batches(encoded, plan, start: int, stop: int, *, drawn, local_rows) -> Iterator[Batch]:
    for number in range(start, stop):
        yield Batch(*[np.full((1, 1), number, np.int32)] * 3)


class Loop:
    """A run whose weight is the number of its steps, and whose losses are numbers of batches."""

    def __init__(self, folder: RunFolder, patch: pytest.MonkeyPatch):
        nothing = dict.fromkeys(("config", "train", "plan", "drawn"))
        self.folder, self.corpus = folder, helpers.stand_in(Corpus, **nothing)
        self.stop_at: int | None = None
        self.spoiled: int | None = None
        self.while_validating: Callable[[], None] = lambda: None
        self.valid_loss = lambda weight: weight
        patch.setattr(training_run, "make_step", lambda *_: self.step)
        patch.setattr(training_run, "Validation", lambda *_: self.validate)
        patch.setattr(training_run.batches, "train_stream", numbered_batches)
        patch.setattr(training_run.curves, "draw", lambda *_, **__: None)

    def train(self, stop: Stop | None = None, **options) -> None:
        """Train from the newest checkpoint on."""
        self.stop = stop or Stop()
        began = self.folder.last_step() or 0
        state = TrainState(jnp.int32(0), {"weight": jnp.zeros(1, jnp.float32)}, {}, (), {})
        if began:
            state = checkpoint.open(self.folder.checkpoints, began).load(state)
        run = training_run.Run(
            TrainOptions(**options), self.corpus, self.folder, Devices.take(1), self.stop, began
        )
        run.train(state)

    def step(self, state: TrainState, group: Sequence[Batch], key: jax.Array):
        self.key = jax.random.key_data(key).tolist()
        numbers = [float(batch.source[0, 0]) for batch in group]
        self.steps = step = int(state.step) + 1
        if step == self.stop_at:
            self.stop.request()
        weight = state.params["weight"]
        loss = sum(numbers) / len(numbers) + 0 * float(weight[0])
        weight = weight + jnp.float32("nan" if step == self.spoiled else 1)
        state = state._replace(step=jnp.int32(step), params={"weight": weight})
        measured = {"loss": loss, "nll_loss": 0.0, "gradient_norm": step}
        measured = {name: jnp.float32(value) for name, value in measured.items()}
        return state, measured | {"tokens": jnp.int32(1)}

    def validate(self, weights) -> ValidationReport:
        self.while_validating()
        loss = self.valid_loss(float(weights["weight"][0]))
        return ValidationReport({"valid_loss": loss, **SCORES}, [])

    def losses(self) -> dict[int, float]:
        """The training loss of each line of metrics by its step."""
        lines = [line for line in runs.metrics(self.folder.path) if "loss" in line]
        losses = {line["step"]: line["loss"] for line in lines}
        assert len(losses) == len(lines)
        return losses

    def validations(self) -> list[tuple[int, float, bool]]:
        """Step, loss, and True for averaged weights, of each validation in metrics."""
        lines = [line for line in runs.metrics(self.folder.path) if "valid_loss" in line]
        return [(line["step"], line["valid_loss"], "weights" in line) for line in lines]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Loop:
    return loop(tmp_path / "run", monkeypatch)


def loop(path: Path, patch: pytest.MonkeyPatch) -> Loop:
    path.mkdir()
    return Loop(RunFolder(path), patch)


def test_the_last_step_has_a_line_a_validation_and_a_checkpoint(run):
    run.train(steps=5, log_every=2, eval_every=3)
    assert run.losses() == {2: 0.5, 4: 2.5, 5: 4.0}
    assert run.validations() == [(3, 3.0, False), (5, 5.0, False)]
    assert checkpoint.steps(run.folder.checkpoints) == [3, 5]


def test_samples_and_dropout_follow_the_number_and_the_seed(run, monkeypatch):
    """Every validation shows the next pairs, also the last one, which comes early."""
    numbers: list[tuple] = []
    monkeypatch.setattr(
        ValidationReport, "describe", lambda _, *arguments: numbers.append(arguments) or []
    )
    run.train(steps=5, eval_every=3, samples=2, seed=7)
    assert numbers == [("step 3", 1, 2), ("step 5", 2, 2)]
    assert run.key == jax.random.key_data(jax.random.key(7)).tolist()


@pytest.mark.parametrize(("when", "ends"), [(2, False), (4, True)])
def test_a_request_after_the_last_validation_is_no_stop(run, monkeypatch, when, ends):
    about = training_run.run_files.about

    def requested(path):
        if path.name == str(when):
            run.stop.request()
        return about(path)

    monkeypatch.setattr(training_run.run_files, "about", requested)
    with contextlib.nullcontext() if ends else pytest.raises(Preempted, match="at step 2,"):
        run.train(steps=4, eval_every=2)
    assert checkpoint.steps(run.folder.checkpoints)[-1] == when


def test_a_stop_that_another_process_asked_for_is_one(run, monkeypatch):
    class Votes(StopVotesOf):
        def __call__(self, stop: bool) -> bool:
            return not stop and run.steps == 3

    monkeypatch.setattr(training_run, "StopVotes", lambda *_: Votes(True))
    several = dict(count=lambda: 2, first=lambda: True, from_first=lambda _, value: value)
    monkeypatch.setattr(training_run, "distributed", SimpleNamespace(**several))
    with pytest.raises(Preempted, match=r"^stopped at step 3, saved in "):
        run.train(steps=9, eval_every=9)
    assert checkpoint.steps(run.folder.checkpoints) == [3]


@pytest.mark.parametrize("each", [1, 3])
def test_a_stopped_run_goes_on_with_the_next_batches(run, each):
    """Its lines are those of a run that was not stopped."""
    options = dict(steps=6, log_every=4, eval_every=6, optimizer=OptimizerOptions(accumulate=each))
    run.stop_at = 3
    with pytest.raises(Preempted, match=r"^stopped at step 3, saved in "):
        run.train(**options)
    run.stop_at = None
    run.train(**options)
    batches = np.arange(6 * each).reshape(6, each).mean(axis=1)
    assert run.losses() == {4: batches[:4].mean(), 6: batches[4:].mean()}
    assert run.validations() == [(6, 6.0, False)]
    assert checkpoint.steps(run.folder.checkpoints) == [6]


def test_batches_are_on_the_device_before_the_loop_waits_for_earlier_steps(run, monkeypatch):
    placed, placed_by_step = [], {}
    divide, wait = Devices.divide, jax.block_until_ready

    def recorded_divide(devices, batch):
        placed.append(float(batch.source[0, 0]))
        return divide(devices, batch)

    def recorded_wait(value):
        if isinstance(value, list):  # metrics of steps
            placed_by_step.update({int(one["gradient_norm"]): len(placed) for one in value})
        return wait(value)

    monkeypatch.setattr(Devices, "divide", recorded_divide)
    monkeypatch.setattr(jax, "block_until_ready", recorded_wait)
    run.train(steps=6, eval_every=6, log_every=6)
    assert placed == [0, 1, 2, 3, 4, 5]
    assert placed_by_step == {1: 3, 2: 4, 3: 5, 4: 6}


def test_a_validation_that_a_stop_cuts_short_is_made_by_the_next_process(run):
    run.while_validating = lambda: run.stop.request()
    with pytest.raises(Preempted):
        run.train(steps=4, eval_every=2)
    assert run.validations() == [] and checkpoint.steps(run.folder.checkpoints) == [2]
    run.while_validating = lambda: None
    run.train(steps=4, eval_every=2)
    assert run.validations() == [(2, 2.0, False), (4, 4.0, False)]


def test_the_last_checkpoints_are_averaged_once(run):
    options = dict(steps=6, eval_every=2, keep=1, keep_best=0, average=2)
    run.train(**options)
    assert checkpoint.steps(run.folder.checkpoints) == [4, 6]
    assert run.validations()[-1] == (6, 5.0, True)
    assert checkpoint.read_manifest(run.folder.averaged, 6)["of"] == [4, 6]
    before = run.folder.metrics.read_bytes()
    run.train(**options)
    assert run.folder.metrics.read_bytes() == before, "finished is finished"


def test_a_checkpoint_that_was_not_removed_any_more_is_removed_by_the_next_process(run):
    options = dict(steps=4, eval_every=2, keep=1, keep_best=0)
    run.train(**options)
    assert checkpoint.steps(run.folder.checkpoints) == [4]
    shutil.copytree(run.folder.checkpoints / "4", run.folder.checkpoints / "2")
    run.train(**options)
    assert checkpoint.steps(run.folder.checkpoints) == [4]


def test_the_average_of_steps_that_are_made_again_is_made_again(run):
    run.train(steps=4, eval_every=2, average=2)
    saving.prune(run.folder.checkpoints, [2])
    run.stop_at = 3
    with pytest.raises(Preempted):
        run.train(steps=4, eval_every=2, average=2)
    assert checkpoint.steps(run.folder.averaged) == []
    assert run.validations() == [(2, 2.0, False)]


def test_only_averages_up_to_the_step_of_a_resume_stay(run):
    """That of the step stays, the next one goes."""
    run.train(steps=2, eval_every=1, average=2)
    shutil.copytree(run.folder.averaged / "2", run.folder.averaged / "3")
    run.stop_at = 3
    with pytest.raises(Preempted):
        run.train(steps=4, eval_every=4, average=2)
    assert checkpoint.steps(run.folder.averaged) == [2]


def test_patience_averaging_and_the_best_checkpoint_work_together(run, monkeypatch):
    """Two without a new best end it, however often it is continued; the best two are averaged."""
    options = dict(steps=9, eval_every=1, keep=1, patience=2, best_by=Criterion.LOSS)
    options |= dict(average=2, average_of=AverageOf.BEST)
    run.valid_loss = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 2.5: 1.5}.get
    run.train(**options)
    assert run.validations() == [
        *((1, 3.0, False), (2, 1.0, False), (3, 2.0, False), (4, 2.5, False)),
        (4, 1.5, True),
    ]
    assert checkpoint.steps(run.folder.checkpoints) == [2, 3, 4]
    assert checkpoint.read_manifest(run.folder.averaged, 4)["of"] == [2, 3]
    before, drawn = run.folder.metrics.read_bytes(), []
    monkeypatch.setattr(training_run.curves, "draw", drawn.append)  # as if no write had succeeded
    for left in (".writing-3", "3"):  # by a process that ended before it removed them
        shutil.copytree(run.folder.averaged / "4", run.folder.averaged / left)
    run.train(**options)
    assert run.folder.metrics.read_bytes() == before and drawn == [run.folder]
    assert [path.name for path in run.folder.averaged.iterdir()] == ["4"]


@pytest.mark.parametrize(
    ("log_every", "spoiled", "message", "saved"),
    [
        (3, 9, "loss of step 10", []),
        (1, 19, "loss of step 20", [10]),
        (1, 10, "validation loss of step 10", []),
    ],
)
def test_a_state_that_is_not_finite_is_never_saved(run, log_every, spoiled, message, saved):
    """A step spoils the weights, which the next loss or a validation shows."""
    run.spoiled = spoiled
    with pytest.raises(NonFiniteLossError, match=rf"^the {message} is nan; "):
        run.train(steps=20, eval_every=10, log_every=log_every, keep=1, keep_best=0)
    assert checkpoint.steps(run.folder.checkpoints) == saved
    assert b"NaN" not in run.folder.metrics.read_bytes()


def test_a_stop_at_any_question_changes_nothing_of_the_end(run, tmp_path, monkeypatch):
    """Within steps, validations and saves: metrics, checkpoints and weights are those of one go."""
    options = dict(steps=4, log_every=3, eval_every=2, keep=1)
    uninterrupted, stops = loop(tmp_path / "uninterrupted", monkeypatch), set()
    uninterrupted.train(**options)
    for when in itertools.count(1):
        folder = tmp_path / f"stopped {when}"
        stopped = loop(folder, monkeypatch)
        try:
            stopped.train(Scripted(when), **options)
            break
        except Preempted as preempted:
            (step,) = checkpoint.steps(stopped.folder.checkpoints)[-1:]
            assert str(preempted).startswith(f"stopped at step {step}, saved in ")
            manifest = checkpoint.read_manifest(stopped.folder.checkpoints, step)
            stops.add((step, "figures" in manifest))
        stopped.train(**options)
        assert runs.metrics(folder) == runs.metrics(uninterrupted.folder.path)
        assert checkpoint.steps(stopped.folder.checkpoints) == [2, 4]
        assert not runs.differing(runs.arrays(folder, 4), runs.arrays(uninterrupted.folder.path, 4))
    assert stops == {(1, False), (2, False), (2, True), (3, False), (4, False)}


def test_patience_ends_where_the_first_process_sees_it(run, monkeypatch):
    """The others may read its metrics before or after it has written them."""
    asked = []

    def of_first(name: str, value):
        asked.append(name)
        return asked.count(name) > 2 if name == "patience" else value

    monkeypatch.setattr(training_run.distributed, "from_first", of_first)
    run.train(steps=9, eval_every=1)
    assert run.validations() == [(1, 1.0, False)]


def test_no_process_validates_after_another_one_was_asked_to_stop(monkeypatch):
    """Several validate together; a request that came during the last validation ends the run before
    its average is validated."""
    monkeypatch.setattr(training_run.distributed, "count", lambda: 2)
    asked = dict(stop=Stop(), votes=StopVotesOf(True), validation=None)
    training = helpers.stand_in(training_run.Run, **asked)
    with pytest.raises(Preempted, match=r"^stopped after step 3; the same command continues"):
        training._validate({}, "step 3", {"step": 3})


class Scripted(Stop):
    """Request a stop at the ``when``-th check for one."""

    def __init__(self, when: int):
        self.left = when
        super().__init__()

    @property
    def asked(self) -> bool:
        self.left -= 1
        return self.left <= 0

    @asked.setter
    def asked(self, value: bool) -> None:
        pass


class StopVotesOf:
    def __init__(self, result: bool):
        self.result = result

    def now(self, stop: bool) -> bool:
        return self.result
