"""A training run: its files and output, refusals to continue, and arrays that are never saved."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest

from jax_transformer.config import RATES
from jax_transformer.storage import checkpoint
from parity_tests.unit import runs

pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.fixture
def own(trained, tmp_path) -> runs.Trained:
    """A copy of the uninterrupted run and its text: one process at a time may continue it."""
    folder = shutil.copytree(trained.path.parent, tmp_path / "own")
    shared = str(trained.path.parent)
    arguments = [argument.replace(shared, str(folder)) for argument in trained.arguments]
    return dataclasses.replace(trained, path=folder / "run", arguments=arguments)


def test_a_run_prints_only_its_path_on_stdout(trained):
    run, result = trained.path, trained.result
    assert result.code == 0
    assert result.out == f"{run}\n"
    files = {"config.json", "train_config.json", "tokenizer.json", "data.json", "metrics.jsonl"}
    files |= {"curves.png", "checkpoints", ".lock", "SHA256SUMS"}
    assert {path.name for path in run.iterdir()} == files
    assert checkpoint.steps(run / "checkpoints") == list(runs.CHECKPOINTS)


def test_metrics_have_the_documented_keys(trained):
    lines = [json.loads(line) for line in (trained.path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    validations = [line for line in lines if "valid_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, runs.STEPS + 1))
    assert [line["step"] for line in validations] == list(runs.CHECKPOINTS)
    assert len(lines) == len(steps) + len(validations)
    keys = set("step loss nll_loss gradient_norm learning_rate tokens_per_second".split())
    assert all(line.keys() == keys for line in steps)
    keys = set("step valid_loss bleu chrf exact_match signatures".split())
    assert all(line.keys() == keys for line in validations)
    rates = [line["learning_rate"] for line in steps]
    assert rates[19] == pytest.approx(0.01 * 20 / 21)
    assert max(rates) == rates[20] == pytest.approx(0.01)
    assert all(line["tokens_per_second"] > 0 and line["gradient_norm"] > 0 for line in steps)


def test_progress_and_translated_samples_are_on_stderr(trained):
    result = trained.result
    assert f"step {runs.STEPS}/{runs.STEPS}  loss " in result.err
    assert result.err.count("validation loss") == len(runs.CHECKPOINTS)
    assert result.err.count("      -> ") == 3 * len(runs.CHECKPOINTS)
    assert "60 pairs in batches of" in result.err
    assert " without label smoothing)  " in result.err
    assert "learning_rate 0.01, schedule cosine, warmup_steps 20 (" in result.err


def test_one_program_is_compiled_for_each_bucket(trained):
    widths = json.loads((trained.path / "data.json").read_text())["widths"]
    assert len(widths) == 2
    assert trained.result.programs == [len(widths)]


def test_the_manifest_records_the_inputs_of_a_run(trained):
    manifest = checkpoint.read_manifest(trained.path / "checkpoints", runs.STEPS)
    assert manifest["step"] == runs.STEPS
    assert {"python", "jax", "jaxlib", "flax", "optax", "numpy"} <= manifest["versions"].keys()
    assert manifest["machine"]["device"] == jax.devices()[0].device_kind
    assert manifest["machine"]["cores"] >= 1
    last = [line for line in runs.metrics(trained.path) if "valid_loss" in line][-1]
    assert manifest["figures"] | {"step": runs.STEPS} == last


def snapshot(run: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in (run / "checkpoints").rglob("*")
        if path.is_file()
    }


def test_a_finished_run_is_not_changed(own):
    run = own.path
    before, metrics = snapshot(run), (run / "metrics.jsonl").read_bytes()
    result = runs.train("--run", run, *own.arguments)
    assert (result.code, result.out) == (0, f"{run}\n")
    assert "nothing is left to do" in result.err and "continuing" not in result.err
    assert (snapshot(run), (run / "metrics.jsonl").read_bytes()) == (before, metrics)
    assert result.programs in ([], [0])
    result = runs.train("--run", run, *own.arguments, "--model.attention-backend", "auto")
    assert result.code == 0 and "model.attention_backend=auto is xla: attention_back" in result.err


def test_other_options_are_refused_with_both_values(own):
    before, arguments = snapshot(own.path), own.arguments
    for flag, value in (
        ("--data.tokens-per-batch", 256),
        ("--optimizer.learning-rate", 0.5),
        ("--data.vocab-size", 310),
        ("--model.d-ff", 64),
    ):
        arguments = runs.with_option(arguments, flag, value)
    result = runs.train("--run", own.path, *arguments)
    assert (result.code, result.out) == (2, "")
    message = (
        "model.d_ff (32 -> 64), data.vocab_size (300 -> 310), data.tokens_per_batch (128 -> 256), "
        "optimizer.learning_rate (0.01 -> 0.5)"
    )
    expected = f"{own.path} is a run of other options: {message}; give another --run\n"
    assert result.err == f"jax-transformer: {expected}"
    assert snapshot(own.path) == before


@pytest.mark.parametrize(
    ("flag", "named"),
    [("--data.train-target", "train_sha256"), ("--data.valid-source", "valid_sha256")],
)
def test_changed_text_is_refused(own, flag, named):
    path = Path(own.arguments[own.arguments.index(flag) + 1])
    changed = ("cat", "dog") if "source" in flag else ("Katze", "Hund")
    path.write_text(path.read_text().replace(*changed, 1))
    result = runs.train("--run", own.path, *own.arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"jax-transformer: {own.path}: the data changed")
    assert named in result.err


def test_a_huge_learning_rate_ends_the_run(trained, tmp_path):
    options = runs.with_option(trained.arguments, "--optimizer.learning-rate", 1e30)
    quick = [word for name in RATES for word in (f"--model.{name}", "0")]  # to compile
    options += ["--data.buckets", "1", *quick]
    result = runs.train("--run", tmp_path / "run", *options)
    assert (result.code, result.out) == (6, "")
    assert "the loss of step 2 is" in result.err.splitlines()[-1]
    assert "Traceback" not in result.err
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []
