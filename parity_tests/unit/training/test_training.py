"""A training run: its files and output, refusals to continue, and arrays that are never saved."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jax_transformer import transformer
from jax_transformer.architectures import registry
from jax_transformer.formats import registry as formats
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.storage import checkpoint
from jax_transformer.training import evaluation, step
from parity_tests.unit import runs

RATES = ("dropout", "attention-dropout", "activation-dropout", "embedding-dropout")
# these compile in half the time
QUICK = ["--data.buckets", "1", *(word for name in RATES for word in (f"--model.{name}", "0"))]


pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.fixture
def own(trained, tmp_path) -> runs.Trained:
    """A copy of the uninterrupted run and its text: one process at a time may continue it."""
    folder = shutil.copytree(trained.path.parent, tmp_path / "own")
    shared = str(trained.path.parent)
    arguments = [argument.replace(shared, str(folder)) for argument in trained.arguments]
    return dataclasses.replace(trained, path=folder / "run", arguments=arguments)


# Files and output of a run


def test_a_run_prints_only_its_path_on_stdout(trained):
    run, result = trained.path, trained.result
    assert result.code == 0
    assert result.out == f"{run}\n"
    files = set(
        (
            "config.json train_config.json tokenizer.json data.json metrics.jsonl "
            "curves.png checkpoints .lock SHA256SUMS"
        ).split()
    )
    assert {path.name for path in run.iterdir()} == files
    assert checkpoint.steps(run / "checkpoints") == list(runs.CHECKPOINTS)


def test_metrics_have_the_documented_keys(trained):
    lines = [json.loads(line) for line in (trained.path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    validations = [line for line in lines if "valid_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, runs.STEPS + 1))
    assert all(
        line.keys()
        == {"step", "loss", "nll_loss", "gradient_norm", "learning_rate", "tokens_per_second"}
        for line in steps
    )
    assert [line["step"] for line in validations] == list(runs.CHECKPOINTS)
    assert all(
        line.keys() == {"step", "valid_loss", "bleu", "chrf", "exact_match", "signatures"}
        for line in validations
    )
    assert len(lines) == len(steps) + len(validations)
    assert steps[19]["learning_rate"] == pytest.approx(0.01 * 20 / 21)
    assert (
        max(line["learning_rate"] for line in steps)
        == steps[20]["learning_rate"]
        == pytest.approx(0.01)
    )
    assert all(line["tokens_per_second"] > 0 and line["gradient_norm"] > 0 for line in steps)


def test_the_loss_falls(trained):
    losses = [line["loss"] for line in runs.metrics(trained.path) if "loss" in line]
    assert abs(losses[0] - np.log(300)) < 1.5
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 1.5
    first, last = [
        line["valid_loss"] for line in runs.metrics(trained.path) if "valid_loss" in line
    ]
    assert last < first


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
    (line,) = [
        line
        for line in runs.metrics(trained.path)
        if line["step"] == runs.STEPS and "valid_loss" in line
    ]
    assert manifest["figures"] == {name: value for name, value in line.items() if name != "step"}


# Continuing with changes


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


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--data.tokens-per-batch", 256, "data.tokens_per_batch (128 -> 256)"),
        ("--optimizer.learning-rate", 0.5, "optimizer.learning_rate (0.01 -> 0.5)"),
        ("--data.vocab-size", 310, "data.vocab_size (300 -> 310)"),
        ("--model.d-ff", 64, "model.d_ff (32 -> 64)"),
    ],
)
def test_other_options_are_refused_with_both_values(own, flag, value, message):
    before = snapshot(own.path)
    result = runs.train("--run", own.path, *runs.with_option(own.arguments, flag, value))
    assert (result.code, result.out) == (2, "")
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


# Best, averaged, early


def test_patience_averaging_and_the_best_checkpoint_work_together(trained, tmp_path, monkeypatch):
    """Losses are set here: it stops after two without a new best, and averages two."""
    run, losses = tmp_path / "run", iter([3.0, 1.0, 2.0, 2.5, 1.5])
    validate = evaluation.Validation.__call__

    def told_loss(self, weights):
        report = validate(self, weights)
        return dataclasses.replace(report, figures=report.figures | {"valid_loss": next(losses)})

    monkeypatch.setattr(evaluation.Validation, "__call__", told_loss)
    options = [*runs.with_option(trained.arguments, "--eval-every", 20), *QUICK]
    options += "--patience 2 --best-by valid_loss --keep 1 --average 2 --average-of best".split()
    result = runs.train("--run", run, *options)
    assert result.code == 0, result.err
    assert [line["step"] for line in runs.metrics(run) if "valid_loss" in line] == [
        20,
        40,
        60,
        80,
        80,
    ]
    assert runs.metrics(run)[-1]["weights"] == "averaged"
    assert checkpoint.steps(run / "checkpoints") == [40, 60, 80]
    assert checkpoint.read_manifest(run / "averaged", 80)["of"] == [40, 60]
    of = {step: runs.arrays(run, step) for step in (40, 60, 80)}
    mean = {
        name: (array.astype(np.float64) + of[60][name]) / 2
        for name, array in of[40].items()
        if name.startswith("params/")
    }
    for name, expected in (
        ("auto", mean),
        ("averaged", mean),
        ("best", of[40]),
        ("last", of[80]),
        ("60", of[60]),
    ):
        arrays = transformer.flatten(formats.open(run, name).model(), nnx.Param)
        assert all(
            np.array_equal(array, expected[f"params/{path}"].astype(np.float32))
            for path, array in arrays.items()
        ), name
    before = runs.metrics(run)
    for left in (".writing-60", "60"):  # by a process that ended before it removed them
        shutil.copytree(run / "averaged/80", run / "averaged" / left)
    (run / "curves.png").unlink()  # as if no write of it had succeeded
    result = runs.train("--run", run, *options)
    assert (result.code, result.programs, runs.metrics(run)) == (0, [], before), (
        "finished is finished"
    )
    assert [path.name for path in (run / "averaged").iterdir()] == ["80"]
    assert (run / "curves.png").exists()


# Losses that are not finite


def test_a_huge_learning_rate_ends_the_run(trained, tmp_path):
    options = [*runs.with_option(trained.arguments, "--optimizer.learning-rate", 1e30), *QUICK]
    result = runs.train("--run", tmp_path / "run", *options)
    assert (result.code, result.out) == (6, "")
    assert "the loss of step 2 is" in result.err.splitlines()[-1]
    assert "Traceback" not in result.err
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize(
    ("log_every", "spoiled", "saved_steps"),
    [
        (30, 96, []),
        pytest.param(1, 196, [100], marks=pytest.mark.slow),
        pytest.param(1, 100, [], marks=pytest.mark.slow),
    ],
)
def test_arrays_that_are_not_finite_are_never_saved(
    trained, tmp_path, monkeypatch, log_every, spoiled, saved_steps
):
    """A step makes parameters NaN, which the next loss shows; checkpoints are at 100 and 200."""
    make_step = step.make_step

    class Poisoned(step.TrainStep):
        def __call__(self, state, batches, key):
            state, measured = super().__call__(state, batches, key)
            if int(state.step) == spoiled:
                state = state._replace(
                    params={name: array * np.float32("nan") for name, array in state.params.items()}
                )
            return state, measured

    def poisoned(*arguments, **options):
        return Poisoned(**vars(make_step(*arguments, **options)))

    monkeypatch.setattr(step, "make_step", poisoned)
    options = [
        *runs.with_option(trained.arguments, "--log-every", log_every),
        *"--keep 1 --keep-best 0".split(),
    ]
    result = runs.train("--run", tmp_path / "run", *options)
    assert (result.code, result.out) == (6, "")
    assert (
        str(spoiled if spoiled in runs.CHECKPOINTS else spoiled + 1) in result.err.splitlines()[-1]
    )
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == saved_steps
    for saved in saved_steps:
        assert all(
            np.all(np.isfinite(array)) for array in runs.arrays(tmp_path / "run", saved).values()
        )
    assert not any(
        "NaN" in line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    )


# Frozen arrays


def test_lesson10_trains_translates_and_keeps_its_position_table(
    trained, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    result = runs.train("--run", run, *trained.arguments, *QUICK, "--model.preset", "lesson10")
    assert (result.code, result.out) == (0, f"{run}\n")
    arrays = runs.arrays(run)
    frozen = {name: array for name, array in arrays.items() if name.startswith("frozen/")}
    assert set(frozen) == {"frozen/encoder.positions.table", "frozen/decoder.positions.table"}
    config = registry.preset(
        "lesson10", d_model=16, num_heads=2, d_ff=32, num_layers=1, max_length=40, vocab_size=300
    )
    fresh = transformer.flatten(transformer.Transformer(config, rngs=nnx.Rngs(0)), Frozen)
    actual = runs.differing(
        {name.removeprefix("frozen/"): array for name, array in frozen.items()},
        jax.device_get(fresh),
    )
    assert actual == []
    assert not [name for name in arrays if "positions.table" in name and name not in frozen]
    losses = [line["loss"] for line in runs.metrics(run) if "loss" in line]
    assert np.mean(losses[-10:]) < losses[0] - 1
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the cat\na red dog\n")))
    assert runs.main("translate", "--run", run) == 0
    assert capsys.readouterr().out.count("\n") == 2
