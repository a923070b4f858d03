"""Training runs end where they should: bit for bit the same after a stop, with nothing lost and nothing recompiled."""

import contextlib
import gzip
import io
import json
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_transformer import presets, transformer
from jax_transformer.nn.positions import Frozen
from jax_transformer.training import checkpoint, loop, step
from parity_tests.unit import runs

SOURCE, TARGET = "--data.train-source", "--data.train-target"


@pytest.fixture(scope="module", autouse=True)
def _as_a_user(tmp_path_factory):
    with runs.as_a_user(tmp_path_factory.getbasetemp()):
        yield


@dataclass
class Told:
    """A finished command: its exit code, what it said, and the jitted steps that it made."""

    code: int
    out: str
    err: str
    steps: list[Any]


def train(*arguments: str | Path) -> Told:
    made, out, err = [], io.StringIO(), io.StringIO()
    make_step = step.make_step

    def record(*arguments, **options):
        made.append(make_step(*arguments, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(step, "make_step", record)
        code = runs.main("train", *arguments)
    return Told(code, out.getvalue(), err.getvalue(), made)


def with_option(arguments: list[str], name: str, value: Any) -> list[str]:
    """The arguments with one flag's value changed."""
    where = arguments.index(name) + 1
    return [*arguments[:where], str(value), *arguments[where + 1 :]]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    """The flags that name the four files, and the options of every run here."""
    return [*runs.write_text(tmp_path_factory.mktemp("text")), *runs.OPTIONS]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> tuple[Path, Told]:
    """A run that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, train("--run", run, *text)


@pytest.fixture(scope="module")
def sparse(text, tmp_path_factory) -> Path:
    """The same with a line of metrics every 30 steps, which no checkpoint and no stop falls on."""
    run = tmp_path_factory.mktemp("sparse") / "run"
    assert train("--run", run, *with_option(text, "--log-every", 30)).code == 0
    return run


def assert_same_end(run: Path, other: Path) -> None:
    assert runs.differing(runs.arrays(run), runs.arrays(other)) == []
    assert runs.metrics(run) == runs.metrics(other)
    assert checkpoint.steps(run / "checkpoints") == checkpoint.steps(other / "checkpoints")


# What a run leaves and says


def test_a_run_ends_with_its_path_on_stdout_and_nothing_else(whole):
    run, told = whole
    assert told.code == 0
    assert told.out == f"{run}\n"
    files = {"config.json", "train_config.json", "tokenizer.json", "data.json", "metrics.jsonl", "checkpoints"}
    assert {path.name for path in run.iterdir()} == files
    assert checkpoint.steps(run / "checkpoints") == list(runs.CHECKPOINTS)


def test_metrics_have_the_documented_keys(whole):
    lines = [json.loads(line) for line in (whole[0] / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    validations = [line for line in lines if "valid_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, runs.STEPS + 1))
    assert all(line.keys() == {"step", "loss", "gradient_norm", "learning_rate", "tokens_per_second"} for line in steps)
    assert [line["step"] for line in validations] == list(runs.CHECKPOINTS)
    assert all(line.keys() == {"step", "valid_loss", "bleu", "chrf", "exact_match", "signatures"} for line in validations)
    assert len(lines) == len(steps) + len(validations)
    assert steps[19]["learning_rate"] == pytest.approx(0.01 * 20 / 21)
    assert max(line["learning_rate"] for line in steps) == steps[20]["learning_rate"] == pytest.approx(0.01)
    assert all(line["tokens_per_second"] > 0 and line["gradient_norm"] > 0 for line in steps)


def test_the_loss_falls(whole):
    losses = [line["loss"] for line in runs.metrics(whole[0]) if "loss" in line]
    assert abs(losses[0] - np.log(300)) < 1.5
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 1.5
    first, last = [line["valid_loss"] for line in runs.metrics(whole[0]) if "valid_loss" in line]
    assert last < first


def test_progress_and_translated_samples_are_on_stderr(whole):
    _, told = whole
    assert f"step {runs.STEPS}/{runs.STEPS}  loss " in told.err
    assert told.err.count("validation loss") == len(runs.CHECKPOINTS)
    assert told.err.count("      -> ") == loop.SAMPLES * len(runs.CHECKPOINTS)
    assert "60 pairs in batches of" in told.err


def test_one_program_is_compiled_for_each_bucket(whole):
    (made,) = whole[1].steps
    widths = json.loads((whole[0] / "data.json").read_text())["widths"]
    assert len(widths) == 2
    assert made._cache_size() == len(widths)


def test_the_manifest_says_what_the_result_depends_on(whole):
    manifest = checkpoint.manifest(whole[0] / "checkpoints", runs.STEPS)
    assert manifest["step"] == runs.STEPS
    assert {"python", "jax", "jaxlib", "flax", "optax", "numpy"} <= manifest["versions"].keys()
    assert manifest["device"] == {"kind": jax.devices()[0].device_kind, "count": jax.device_count()}


# Stopped and resumed


def in_the_background(run: Path, text: list[str], until: Path | int):
    """A run in another process, once the file is there or the step is in metrics.jsonl."""
    process = runs.start("train", "--run", run, *text)
    deadline = time.monotonic() + 120
    metrics = run / "metrics.jsonl"
    while not (until.exists() if isinstance(until, Path) else metrics.exists() and metrics.read_text().count("\n") >= until):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.005)
    return process


def test_sigterm_saves_and_the_same_command_goes_on(whole, text, tmp_path):
    run = tmp_path / "run"
    process = in_the_background(run, text, until=5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    (stopped,) = checkpoint.steps(run / "checkpoints")
    assert (process.returncode, out) == (75, "")
    assert err.splitlines()[-1] == f"jax-transformer: stopped at step {stopped}, saved in {run}; the same command goes on from there"
    assert 5 <= stopped < runs.STEPS
    told = train("--run", run, *text)
    assert (told.code, told.out) == (0, f"{run}\n")
    assert f"continuing at step {stopped}" in told.err
    assert told.steps[0]._cache_size() == 2
    assert_same_end(run, whole[0])


def test_a_killed_run_goes_on_from_its_last_checkpoint(whole, text, tmp_path):
    run = tmp_path / "run"
    process = in_the_background(run, text, until=run / "checkpoints" / "100")
    process.kill()
    process.communicate(timeout=60)
    (run / "checkpoints" / ".writing-150.orbax-checkpoint-tmp").mkdir(exist_ok=True)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 101, "lo')  # the machine went down while it wrote
    told = train("--run", run, *text)
    assert told.code == 0, told.err
    assert "continuing at step 100" in told.err
    assert_same_end(run, whole[0])
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["100", "200"]


class Scripted:
    """Stands for the event that a signal sets: set from the ``when``-th question on."""

    def __init__(self, when: int):
        self.left = when

    def is_set(self) -> bool:
        self.left -= 1
        return self.left <= 0


def stopped_at_question(when: int, run: Path, text: list[str]) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "stop_requests", lambda: contextlib.nullcontext(Scripted(when)))
        return train("--run", run, *text)


def test_metrics_of_a_resumed_run_are_those_of_an_uninterrupted_one(sparse, text, tmp_path):
    """Also where a line averages steps from before and after the stop, and where a checkpoint falls between two lines."""
    run, text = tmp_path / "run", with_option(text, "--log-every", 30)
    assert stopped_at_question(120, run, text).code == 75
    (stopped,) = checkpoint.steps(run / "checkpoints")
    assert stopped % 30
    assert train("--run", run, *text).code == 0
    assert_same_end(run, sparse)


def test_a_run_killed_between_two_lines_of_metrics_repeats_them(sparse, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(sparse, run)
    shutil.rmtree(run / "checkpoints" / str(runs.STEPS))
    assert train("--run", run, *with_option(text, "--log-every", 30)).code == 0
    assert_same_end(run, sparse)


@pytest.mark.parametrize("when", [40, 41, 42])
def test_whenever_the_signal_comes_what_is_said_to_be_saved_is_saved(sparse, text, tmp_path, when):
    told = stopped_at_question(when, tmp_path / "run", with_option(text, "--log-every", 30))
    assert told.code == 75
    (saved,) = checkpoint.steps(tmp_path / "run" / "checkpoints")
    assert f"stopped at step {saved}, saved in" in told.err


def test_another_seed_ends_elsewhere(whole, text, tmp_path):
    assert train("--run", tmp_path / "run", *text, "--seed", "1").code == 0
    differing = runs.differing(runs.arrays(tmp_path / "run"), runs.arrays(whole[0]))
    assert sum("params/" in name for name in differing) == sum("params/" in name for name in runs.arrays(whole[0]))
    assert runs.metrics(tmp_path / "run") != runs.metrics(whole[0])


def test_gzipped_text_trains_the_same_model(sparse, text, tmp_path):
    zipped = with_option(text, "--log-every", 30)
    for flag in (SOURCE, TARGET, "--data.valid-source"):
        path = Path(text[text.index(flag) + 1])
        (tmp_path / path.name).write_bytes(gzip.compress(path.read_bytes()))
        zipped = with_option(zipped, flag, tmp_path / path.name)
    assert train("--run", tmp_path / "run", *zipped).code == 0
    assert_same_end(tmp_path / "run", sparse)


# Continuing what is not the same


def snapshot(run: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in (run / "checkpoints").rglob("*") if path.is_file()}


def test_a_finished_run_is_left_as_it_is(whole, text):
    run, first = whole
    before, metrics = snapshot(run), (run / "metrics.jsonl").read_bytes()
    told = train("--run", run, *text)
    assert (told.code, told.out) == (0, first.out)
    assert (snapshot(run), (run / "metrics.jsonl").read_bytes()) == (before, metrics)
    assert told.steps == [] or told.steps[0]._cache_size() == 0


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--steps", 300, "steps (200 -> 300)"),
        ("--optimizer.learning-rate", 0.5, "optimizer.learning_rate (0.01 -> 0.5)"),
        ("--data.vocab-size", 310, "data.vocab_size (300 -> 310)"),
        ("--model.d-ff", 64, "model.d_ff (32 -> 64)"),
    ],
)
def test_other_options_are_refused_with_both_values(whole, text, flag, value, said):
    before = snapshot(whole[0])
    told = train("--run", whole[0], *with_option(text, flag, value))
    assert (told.code, told.out) == (2, "")
    assert told.err == f"jax-transformer: {whole[0]} is a run of other options: {said}; give another --run\n"
    assert snapshot(whole[0]) == before


@pytest.mark.parametrize(("flag", "named"), [(TARGET, "train_sha256"), ("--data.valid-source", "valid_sha256")])
def test_changed_text_is_refused(whole, text, tmp_path, flag, named):
    path = Path(text[text.index(flag) + 1])
    original = path.read_text()
    try:
        path.write_text(original.replace("cat", "dog", 1) if "source" in flag else original.replace("Katze", "Hund", 1))
        told = train("--run", whole[0], *text)
    finally:
        path.write_text(original)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(f"jax-transformer: {whole[0]}: the data changed") and named in told.err


def test_a_damaged_checkpoint_is_refused(whole, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    path = max((run / "checkpoints" / "200").rglob("d/*"), key=lambda found: found.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    told = train("--run", run, *text)
    assert (told.code, told.out) == (5, "")
    assert told.err.startswith(f"jax-transformer: {path}: damaged")


# Losses that are not finite


def test_a_learning_rate_out_of_this_world_ends_the_run(text, tmp_path):
    options = with_option(with_option(text, "--optimizer.learning-rate", 1e30), "--data.buckets", 1)
    told = train("--run", tmp_path / "run", *options)
    assert (told.code, told.out) == (6, "")
    assert "the loss of step 2 is" in told.err.splitlines()[-1]
    assert "Traceback" not in told.err
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize("log_every", [1, 30])
def test_what_is_not_finite_is_never_saved(text, tmp_path, monkeypatch, log_every):
    """The parameters go bad in step 196, so that the loss of 197 is the first to show it, and 200 would save them."""
    make_step = step.make_step

    def poisoned(*arguments, **options):
        good = make_step(*arguments, **options)

        def bad(state, batch, key):
            state, measured = good(state, batch, key)
            if int(state.step) == 196:
                state = state._replace(params={name: array * np.float32("nan") for name, array in state.params.items()})
            return state, measured

        return bad

    monkeypatch.setattr(step, "make_step", poisoned)
    options = [*with_option(text, "--log-every", log_every), "--keep", "1"]
    told = train("--run", tmp_path / "run", *options)
    assert told.code == 6
    assert "the loss of step 197 is nan" in told.err
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [100]
    assert all(np.all(np.isfinite(array)) for array in runs.arrays(tmp_path / "run", 100).values())
    assert not any("NaN" in line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())


# Arrays that are carried and never trained


def test_lesson10_trains_translates_and_keeps_its_position_table(text, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    options = [*with_option(text, "--data.buckets", 1), "--model.preset", "lesson10"]
    told = train("--run", run, *options)
    assert (told.code, told.out) == (0, f"{run}\n")
    found = runs.arrays(run)
    carried = {name: array for name, array in found.items() if name.startswith("carried/")}
    assert set(carried) == {"carried/encoder.positions.table", "carried/decoder.positions.table"}
    config = presets.preset("lesson10", d_model=16, num_heads=2, d_ff=32, num_layers=1, max_length=40, vocab_size=300)
    fresh = transformer.flatten(transformer.Transformer(config, rngs=jax_rngs()), Frozen)
    assert runs.differing({name.removeprefix("carried/"): array for name, array in carried.items()}, jax.device_get(fresh)) == []
    assert not [name for name in found if "positions.table" in name and name not in carried]
    losses = [line["loss"] for line in runs.metrics(run) if "loss" in line]
    assert np.mean(losses[-10:]) < losses[0] - 1
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the cat\na red dog\n")))
    assert runs.main("translate", "--run", run) == 0
    assert capsys.readouterr().out.count("\n") == 2


def jax_rngs():
    from flax import nnx

    return nnx.Rngs(0)
