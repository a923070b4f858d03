"""The best checkpoints, the end by patience, and what a resumed run may change."""

import dataclasses
import re
from pathlib import Path

import jax
import pytest

from jax_transformer.config import codec
from jax_transformer.errors import CheckpointError
from jax_transformer.storage import checkpoint, run_folder
from jax_transformer.storage.run_folder import RunFolder, best_first
from jax_transformer.training import resume
from jax_transformer.training.optimizer import OptimizerName, OptimizerOptions
from jax_transformer.training.options import (
    AverageOf,
    Criterion,
    DataOptions,
    ModelOptions,
    TrainOptions,
)
from parity_tests.unit import helpers, runs

FIGURES = {
    100: {"bleu": 10.0, "chrf": 30.0, "exact_match": 0.0, "valid_loss": 3.0},
    200: {"bleu": 30.0, "chrf": 40.0, "exact_match": 5.0, "valid_loss": 1.5},
    300: {"bleu": 20.0, "chrf": 50.0, "exact_match": 5.0, "valid_loss": 1.0},
    400: {"bleu": 30.0, "chrf": 45.0, "exact_match": 4.0, "valid_loss": 2.0},
}


@pytest.mark.parametrize(
    ("criterion", "order"),
    [
        (Criterion.BLEU, [200, 400, 300, 100]),
        (Criterion.CHRF, [300, 400, 200, 100]),
        (Criterion.EXACT_MATCH, [300, 200, 400, 100]),
        (Criterion.LOSS, [300, 200, 400, 100]),
    ],
)
def test_best_steps_come_first_and_ties_go_to_the_lower_loss(criterion, order):
    assert best_first(FIGURES, criterion.value) == order
    assert best_first({20: FIGURES[100], 10: FIGURES[100]}, criterion.value) == [10, 20]


@pytest.mark.parametrize(("criterion", "count"), [(Criterion.BLEU, 2), (Criterion.LOSS, 1)])
def test_patience_counts_validations_since_the_best(criterion, count):
    assert resume.since_best(FIGURES, criterion) == count
    assert resume.since_best({}, criterion) == 0
    for patience in range(4):
        options = TrainOptions(patience=patience, best_by=criterion)
        assert resume.stops_early(options, FIGURES) == (0 < patience <= count)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, []),
        (dict(average=2), [300, 400]),
        (dict(average=3, average_of=AverageOf.BEST), [200, 300, 400]),
        (dict(average=2, average_of=AverageOf.BEST, best_by=Criterion.LOSS), [200, 300]),
        (dict(average=9), [100, 200, 300, 400]),
    ],
)
def test_the_best_checkpoints_are_averaged(options, steps):
    assert resume.to_average(TrainOptions(**options), FIGURES) == steps


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(keep=1, keep_best=0), {400}),
        (dict(keep=1, keep_best=1), {200, 400}),
        (dict(keep=2, keep_best=1, best_by=Criterion.LOSS), {300, 400}),
        (dict(keep=1, keep_best=0, average=3), {200, 300, 400}),
    ],
)
def test_the_best_and_newest_checkpoints_are_kept(options, expected):
    steps = [100, 200, 300, 400, 450]
    assert resume.to_keep(TrainOptions(**options), FIGURES, steps) == {*expected, 450}
    assert resume.to_keep(TrainOptions(), {}, [7]) == {7}, "stopped before the first validation"


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("auto", "averaged 20, best 20, best 10, last 40, last 30"),
        ("averaged", "averaged 20"),
        ("best", "best 20"),
        ("last", "last 40"),
        ("30", "30 30"),
        ("35", ""),
    ],
)
def test_weights_name_checkpoints_in_order_of_preference(tmp_path, monkeypatch, weights, expected):
    folder = RunFolder(tmp_path)
    folder.train_config.write_text("{}")
    saved = {folder.checkpoints: [10, 20, 30, 40], folder.averaged: [20]}
    monkeypatch.setattr(checkpoint, "steps", saved.get)
    monkeypatch.setattr(RunFolder, "best_first", lambda self: [20, 10])
    chosen = [f"{each.name} {each.step}" for each in run_folder.candidates(folder, weights)]
    assert ", ".join(chosen) == expected


def test_the_damaged_checkpoints_are_the_newest(tmp_path, monkeypatch, capsys):
    damaged = [CheckpointError(f"checkpoints/{step}: damaged") for step in (40, 30)]
    saved, moved = helpers.stand_in(checkpoint.Checkpoint, step=20), []
    monkeypatch.setattr(run_folder, "newest_intact", lambda folder: (saved, damaged))
    monkeypatch.setattr(checkpoint, "steps", lambda folder: [10, 20, 30, 40])
    monkeypatch.setattr(
        run_folder, "quarantine", lambda _, step: moved.append(step) or Path(f"damaged-{step}")
    )
    assert resume.newest_intact(RunFolder(tmp_path)) is saved and moved == [40, 30]
    for step, line in zip(moved, capsys.readouterr().err.splitlines(), strict=True):
        begin = f"warning: checkpoints/{step}: damaged; renamed to damaged-{step}; "
        assert line == f"{begin}continuing from step 20"


DEVICES = "number of devices"
BEFORE = TrainOptions(run="a", steps=100, devices=2)
TEXT = dict(train_source=("a",), train_target=("b",), valid_source=("c",), valid_target=("d",))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (dict(run="b", log_every=1, keep=5, compilation_cache="/tmp"), []),
        (dict(data=DataOptions(**TEXT)), []),
        (dict(steps=200), ["steps (100 -> 200)"]),
        (dict(devices=0), ["devices (2 -> all)"]),
    ],
)
def test_changes_are_silent_if_harmless_and_named_otherwise(changed, named):
    assert resume.option_changes(dataclasses.replace(BEFORE, **changed), BEFORE) == ([], named)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(seed=1), "seed (0 -> 1)"),
        (dict(model=ModelOptions(d_model=8)), "model.d_model (None -> 8)"),
        (dict(data=DataOptions(vocab_size=7)), "data.vocab_size (1000 -> 7)"),
        (dict(optimizer=OptimizerOptions(ema=0.5)), "optimizer.ema (0.0 -> 0.5)"),
        (dict(optimizer=OptimizerOptions(accumulate=2)), "optimizer.accumulate (1 -> 2)"),
        (dict(optimizer=OptimizerOptions(OptimizerName.SGD)), "optimizer.name ('adamw' -> 'sgd')"),
    ],
)
def test_changes_that_break_a_resumed_run_are_refused(changed, message):
    assert resume.option_changes(dataclasses.replace(BEFORE, **changed), BEFORE) == ([message], [])


def test_every_rule_names_an_option():
    assert set(codec.names(TrainOptions)) >= resume.FREE | resume.WARNED
    assert not resume.FREE & resume.WARNED


def test_the_documented_table_of_options_is_complete():
    text = (runs.ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    rows = [
        set(re.findall(r"`([^`]+)`", line.split("|")[1]))
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    assert resume.FREE in rows and resume.WARNED in rows


def test_versions_and_machines_are_compared(monkeypatch):
    monkeypatch.setattr(resume.distributed, "cores", lambda: 3)
    now = resume.environment()
    assert now["machine"]["cores"] == 3, "those of the process, not of the machine"
    assert " ".join(now["versions"]) == "python jax jaxlib flax optax orbax-checkpoint numpy"
    now["machine"]["XLA_FLAGS"] = ""
    assert resume.environment_changes(now, now) == []
    before = {
        **now,
        "versions": {**now["versions"], "jax": "0.1"},
        "machine": {**now["machine"], "cores": 96, "XLA_FLAGS": "--xla_a=1", DEVICES: 4},
    }
    assert resume.environment_changes(now, before) == [
        f"jax 0.1 -> {now['versions']['jax']}",
        f"number of devices 4 -> {jax.device_count()}",
        f"cores 96 -> {now['machine']['cores']}",
        "XLA_FLAGS --xla_a=1 -> unset",
    ]
    del before["machine"][DEVICES]
    assert not [x for x in resume.environment_changes(now, before) if DEVICES in x], "version 0.1"
    assert len(resume.environment_changes(now, {})) == len(now["versions"]) + len(now["machine"]), (
        "a checkpoint that does not say"
    )
