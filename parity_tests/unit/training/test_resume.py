"""A stopped run resumes where it stopped and ends, bit for bit, like an uninterrupted one."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer.config import codec
from jax_transformer.errors import CheckpointError, ConfigError, LockedError
from jax_transformer.runtime import process
from jax_transformer.storage import checkpoint, run_folder, saving
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import optimizer, resume, step
from jax_transformer.training.devices import Devices
from jax_transformer.training.optimizer import OptimizerName, OptimizerOptions
from jax_transformer.training.options import DataOptions, Resume, TrainOptions
from parity_tests.unit import helpers, runs
from parity_tests.unit.runs import train
from parity_tests.unit.training.test_loop import Scripted

pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    """Text and options of every run here: a metrics line every 30 steps, one batch shape."""
    options = runs.with_option(runs.OPTIONS, "--log-every", 30)
    options = runs.with_option(options, "--data.buckets", 1)
    return [*runs.write_text(tmp_path_factory.mktemp("text")), *options]


@pytest.fixture(scope="module")
def finished(text, as_a_user, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    assert train("--run", run, *text).code == 0
    return run


def assert_same_end(run: Path, other: Path) -> None:
    assert runs.differing(runs.arrays(run), runs.arrays(other)) == []
    assert checkpoint.steps(run / "checkpoints") == checkpoint.steps(other / "checkpoints")
    assert runs.metrics(run) == runs.metrics(other)


def test_sigterm_saves_and_the_same_command_resumes(finished, text, tmp_path, monkeypatch):
    """The next metrics line averages steps before and after the stop."""
    run, add_metrics = tmp_path / "run", RunFolder.add_metrics

    def then_stop(*arguments):
        add_metrics(*arguments)
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "add_metrics", then_stop)
        result = train("--run", run, *text)
    stopped = checkpoint.steps(run / "checkpoints")[-1]
    assert (result.code, result.out) == (75, "")
    assert (
        result.err.splitlines()[-1]
        == f"jax-transformer: stopped at step {stopped}, saved in {run}; "
        "the same command continues from there"
    )
    assert 30 <= stopped < runs.STEPS
    result = train("--run", run, *text)
    assert (result.code, result.out) == (0, f"{run}\n")
    assert f"continuing at step {stopped}" in result.err
    assert result.programs == [1]
    assert_same_end(run, finished)


def test_a_killed_run_resumes_from_its_last_checkpoint(finished, text, tmp_path):
    run = tmp_path / "run"
    process, deadline = runs.start("train", "--run", run, *text), time.monotonic() + 120
    while not (run / "checkpoints" / "100").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=60)
    (run / "checkpoints" / ".writing-150.orbax-checkpoint-tmp").mkdir(exist_ok=True)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 120, "lo')  # the machine failed while writing
    result = train("--run", run, *text)
    assert result.code == 0, result.err
    assert "continuing at step 100" in result.err
    assert_same_end(run, finished)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["100", "200"]


def stopped_at_question(when: int, run: Path | None, text: list[str]) -> runs.CommandResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "stop_requests", lambda: contextlib.nullcontext(Scripted(when)))
        return train(*(["--run", run] if run else []), *text)


@pytest.mark.parametrize(
    ("when", "message"),
    [(1, "before anything was begun"), (3, "before the first step; the same command begins again")],
)
def test_a_stop_request_before_the_first_step_leaves_no_files(text, tmp_path, when, message):
    result = stopped_at_question(when, tmp_path / "run", text)
    assert (result.code, result.out) == (75, "")
    assert result.err == f"jax-transformer: stopped {message}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", list(OptimizerName))
def test_every_optimizer_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, name):
    """Also with moments that Adafactor factors."""
    tx, random = optimizer.make(OptimizerOptions(name), 10), np.random.default_rng(0)
    shapes = {"kernel": (130, 129), "bias": (129,)}

    def drawn() -> dict[str, jax.Array]:
        return {n: jnp.asarray(random.normal(size=s), jnp.float32) for n, s in shapes.items()}

    def update(state: step.TrainState, gradients: dict[str, jax.Array]) -> step.TrainState:
        updates, moments = tx.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=moments, step=state.step + 1)

    state = update(update(step.state_of(drawn(), {}, tx, ema=True), drawn()), drawn())
    saving.save(tmp_path, 2, state, about={})
    loaded = checkpoint.open(tmp_path, 2).load(Devices.take(1).abstract(state))
    gradients = drawn()
    after = jax.tree.leaves_with_path(update(state, gradients))
    again = jax.tree.leaves_with_path(update(loaded, gradients))
    assert len(after) >= 2 * len(shapes) + 3
    for (path, x), (same, y) in zip(after, again, strict=True):
        assert path == same and runs.bits(np.asarray(x)) == runs.bits(np.asarray(y)), path


def damage(path: Path) -> Path:
    """Flip one bit of a checkpoint's largest file, and return its path."""
    file = max(path.rglob("d/*"), key=lambda path: path.stat().st_size)
    helpers.flip_a_bit(file)
    return file


def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(finished, text, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    file = damage(run / "checkpoints" / "200")
    result = train("--run", run, *text)
    assert result.code == 0, result.err
    assert f"warning: {file}: damaged" in result.err
    assert "renamed to damaged-200; continuing from step 100" in result.err
    assert (run / "checkpoints" / "damaged-200" / "manifest.json").exists()
    shutil.rmtree(run / "checkpoints" / "damaged-200")
    assert_same_end(run, finished)


def test_without_an_intact_checkpoint_training_does_not_restart(finished, text, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    file = [damage(run / "checkpoints" / str(step)) for step in (100, 200)][1]
    result = train("--run", run, *text)
    assert (result.code, result.out) == (5, "")
    assert result.err.startswith(f"jax-transformer: {file}: damaged")
    assert "nor is any of the 1 before it intact" in result.err
    assert checkpoint.steps(run / "checkpoints") == [100, 200]


@pytest.mark.slow
def test_a_run_can_be_extended_and_reports_it(text, tmp_path):
    run, short = tmp_path / "run", runs.with_option(text, "--steps", 100)
    assert train("--run", run, *short).code == 0
    result = train("--run", run, *text)
    assert result.code == 0, result.err
    assert "warning: changed since this run was stopped: steps (100 -> 200); " in result.err
    assert "continuing at step 100" in result.err
    assert checkpoint.steps(run / "checkpoints") == [100, 200]


def test_another_version_is_named(finished, text, tmp_path, monkeypatch):
    run = shutil.copytree(finished, tmp_path / "run")
    now = resume.environment()
    monkeypatch.setattr(
        resume, "environment", lambda: {**now, "versions": {**now["versions"], "jax": "99"}}
    )
    result = train("--run", run, *text)
    assert result.code == 0 and f"jax {now['versions']['jax']} -> 99" in result.err
    assert "finished at step 200" in result.err and "continuing" not in result.err


# Choice of the folder


def pretend(folder: str, options: TrainOptions, *saved: int) -> None:
    """A run folder with empty checkpoints, each with its validation."""
    for number in saved:
        Path(folder, "checkpoints", str(number)).mkdir(parents=True)
        RunFolder(Path(folder)).add_metrics({"step": number, "valid_loss": 1.0, "bleu": 0.0})
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "train_config.json").write_text(codec.to_json(options))


PHRASES = TrainOptions(steps=30)
TEXT = TrainOptions(
    steps=30,
    data=DataOptions(
        train_source=("a",), train_target=("b",), valid_source=("c",), valid_target=("d",)
    ),
)


def chosen(options: TrainOptions = PHRASES, **changes: Any) -> str:
    with resume.open_run(dataclasses.replace(options, **changes)) as folder:
        return str(folder.path)


def test_the_first_run_has_number_one():
    assert (chosen(), chosen(TEXT)) == ("runs/phrases-001", "runs/text-001")


def test_the_newest_unfinished_run_of_the_same_options_resumes():
    pretend("runs/phrases-001", PHRASES, 10)
    pretend("runs/phrases-002", PHRASES, 10, 20)
    pretend("runs/phrases-003", dataclasses.replace(PHRASES, seed=1), 10)
    pretend("runs/phrases-004", PHRASES, 20, 30)
    assert chosen() == "runs/phrases-002"
    assert chosen(seed=1) == "runs/phrases-003"
    # it has a name and stopped before its first checkpoint
    pretend("runs/phrases-005", dataclasses.replace(PHRASES, run="runs/phrases-005"))
    assert chosen() == "runs/phrases-005"


def test_otherwise_a_run_takes_the_next_number():
    pretend("runs/phrases-001", PHRASES, 30)
    pretend("runs/phrases-007", dataclasses.replace(PHRASES, seed=1), 10)
    pretend("runs/text-009", TEXT, 30)
    assert (chosen(), chosen(steps=40)) == ("runs/phrases-008", "runs/phrases-008")
    assert chosen(TEXT) == "runs/text-010"
    Path("runs/text-009/metrics.jsonl").unlink()
    assert chosen(TEXT) == "runs/text-009", "stopped during its last validation"


def test_a_run_locked_by_another_process_is_skipped():
    pretend("runs/phrases-001", PHRASES, 10)
    pretend("runs/phrases-002", PHRASES, 10)
    with run_folder.lock(Path("runs/phrases-002")):
        assert chosen() == "runs/phrases-001"
        with run_folder.lock(Path("runs/phrases-001")):
            assert chosen() == "runs/phrases-003"
        with pytest.raises(LockedError, match="phrases-002 is in use by process"):
            chosen(run="runs/phrases-002")


def test_a_second_run_in_a_folder_exits_7_and_names_the_first(text, tmp_path):
    with run_folder.lock(tmp_path / "run"):
        result = train("--run", tmp_path / "run", *text)
    assert (result.code, result.out) == (7, "")
    assert result.err.startswith(
        f"jax-transformer: {tmp_path / 'run'} is in use by process {os.getpid()} on "
    )
    assert result.err.count("\n") == 1


def test_a_refused_second_run_leaves_the_new_folder_and_its_lock_to_the_first(
    tmp_path, monkeypatch
):
    """Both started before there was a folder, which still holds nothing but the lock."""
    run = tmp_path / "new" / "run"
    monkeypatch.setattr(resume, "_missing", lambda path: [run, run.parent])
    with run_folder.lock(run):
        for _ in range(2):
            with pytest.raises(LockedError, match=rf"run is in use by process {os.getpid()} on "):
                chosen(run=str(run))
    assert chosen(run=str(run)) and not run.parent.exists()


def test_a_run_that_patience_ended_is_finished():
    patient = dataclasses.replace(PHRASES, patience=1)
    averaging = dataclasses.replace(patient, average=1)
    lines = [{"step": 5, "valid_loss": 1.0, "bleu": 2.0}, {"step": 10, "valid_loss": 1, "bleu": 1}]
    for folder, options in (("runs/phrases-001", patient), ("runs/phrases-003", averaging)):
        pretend(folder, options, 10)
        Path(folder, "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert chosen(patient) == "runs/phrases-004"
    assert chosen(averaging) == "runs/phrases-003", "the average is not made yet"


def test_resume_can_be_forbidden_or_required():
    for options in (dict(), dict(run="runs/named")):
        with pytest.raises(CheckpointError, match="--resume must"):
            chosen(resume=Resume.MUST, **options)
    assert not Path("runs").exists()
    pretend("runs/phrases-001", PHRASES, 10)
    assert chosen(resume=Resume.MUST) == chosen(resume=Resume.AUTO) == "runs/phrases-001"
    assert chosen(resume=Resume.NEVER) == "runs/phrases-002"
    message = "runs/phrases-001 holds a run already, and --resume never"
    with pytest.raises(ConfigError, match=message):
        chosen(resume=Resume.NEVER, run="runs/phrases-001")
    pretend("runs/phrases-002", PHRASES)
    with pytest.raises(CheckpointError, match="runs/phrases-002: holds no checkpoint"):
        chosen(resume=Resume.MUST, run="runs/phrases-002")


def test_the_files_of_a_run_are_verified_before_it_is_continued(monkeypatch):
    """A named run and one that is found; its metrics against its checkpoints."""
    pretend("runs/phrases-001", PHRASES, 10)
    for name in ("verify", "verify_metrics"):
        verified: list[Path] = []
        with monkeypatch.context() as patch:
            patch.setattr(run_folder, name, verified.append)
            chosen()
            chosen(run="runs/phrases-001")
        assert verified == [Path("runs/phrases-001")] * 2, name


def test_a_partial_checkpoint_does_not_make_a_folder_foreign(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".train_config.json.123").write_text("{")
    assert chosen(run=str(run)) == str(run)
    run.mkdir(exist_ok=True)
    (run / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="is not a run folder"):
        chosen(run=str(run))


@pytest.mark.parametrize("content", ["", "{", '{"from_another_version": 1}'])
def test_a_run_with_unreadable_options_is_skipped(content):
    pretend("runs/phrases-001", PHRASES, 10)
    pretend("runs/phrases-002", PHRASES, 10)
    Path("runs/phrases-002/train_config.json").write_text(content)
    assert chosen() == "runs/phrases-001"
    assert chosen(seed=1) == "runs/phrases-003"


def test_training_without_a_run_name_resumes(text):
    first, second = (stopped_at_question(6, None, text) for _ in range(2))
    assert (first.code, second.code) == (75, 75), first.err
    assert "saved in runs/text-001;" in first.err and "continuing at step" not in first.err
    assert "saved in runs/text-001;" in second.err and "continuing at step" in second.err
