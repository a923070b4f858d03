"""Runs and exports of version 0.1 are read, translate, resume and convert as they did."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import jax_transformer as jt
from jax_transformer import cli
from jax_transformer.data import batches
from parity_tests.marks import quick_if
from parity_tests.unit import v0_1_files as v0_1

RECORDED = v0_1.expected()
MODELS = RECORDED["models"]
TRANSLATE = [name for name, model in MODELS.items() if model["lines"]]
FAMILIES = ["marian", "t5"]
REPEATED = ("run 200", "averaged_run averaged", "averaged_run best", "deep_dive_run", *FAMILIES)
"""Other checkpoints of a run, and folders and files that are compared below."""


pytestmark = pytest.mark.usefixtures("as_a_user")


def test_files_are_those_that_v0_1_wrote():
    """Changed or regenerated files would prove nothing."""
    assert v0_1.files() == RECORDED["files"]
    assert RECORDED["made by"]["version"] == "0.1.0"


def test_expectations_differ_between_models():
    """Negative control of the tests below: another checkpoint, or another step, differs."""
    losses = [line["loss"] for line in RECORDED["ends"]["run"] if "loss" in line]
    assert min(abs(a - b) / a for a, b in itertools.pairwise(losses)) > 1e-3
    for one, other in (("run 200", "run last"), ("averaged_run averaged", "averaged_run best")):
        assert MODELS[one]["translations"] != MODELS[other]["translations"]
        with pytest.raises(AssertionError):
            v0_1.assert_near(MODELS[one]["numbers"], MODELS[other]["numbers"])
        assert not MODELS[one]["tensors"].items() & MODELS[other]["tensors"].items()


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_v0_1_are_read_bit_for_bit(name: str):
    recorded = MODELS[name]
    assert v0_1.tensors(recorded["folder"], recorded["weights"]) == recorded["tensors"]


def assert_computes(model: jt.Transformer, recorded: dict) -> None:
    numbers = v0_1.numbers(model, recorded["source"], recorded["target"])
    v0_1.assert_near(numbers, recorded["numbers"])


# The weights of every one are read bit for bit
@pytest.mark.parametrize("name", [quick_if(name not in REPEATED, name) for name in MODELS])
def test_model_of_v0_1_computes_the_same(name: str):
    recorded = MODELS[name]
    model, tokenizer = jt.load(v0_1.HERE / recorded["folder"], recorded["weights"])
    assert_computes(model, recorded)
    assert (tokenizer is not None) == bool(recorded["lines"])


@pytest.mark.parametrize("name", [quick_if(n in ("run last", "t5"), n) for n in TRANSLATE])
def test_run_and_folder_of_v0_1_translate_as_they_did(name: str):
    recorded = MODELS[name]
    lines = v0_1.HERE / "text" / recorded["lines"]
    actual = v0_1.translations(recorded["folder"], recorded["weights"], lines)
    assert actual == recorded["translations"]


@pytest.fixture
def order_of_v0_1(monkeypatch):
    """Train in the order of v0.1, an argsort of Philox's words, so that all else is compared."""

    def table_of(lengths, parts=None):
        table, order = table_of.now(lengths, parts)
        position = np.argsort(order, kind="stable")  # of each pair in the new order
        object.__setattr__(table, "before", (lengths.max(axis=1), position))
        return table, order

    def batch_indices(plan, step):
        epoch, number = divmod(step, plan.batches_per_epoch)
        random = np.random.Philox(key=np.array([plan.seed, epoch], np.uint64))
        longest, position = plan.table.before
        order = np.argsort(random.random_raw(len(longest)), kind="stable")
        buckets = batches.narrowest(longest[order], plan.widths)
        groups, left = [], order[:0]
        for bucket, rows in enumerate(plan.rows):
            pool = np.concatenate([left, order[buckets == bucket]])
            *full, left = np.split(pool, range(rows, len(pool) + 1, rows))
            groups += [(bucket, group) for group in full]
        groups += [(bucket, left)] if len(left) else []
        bucket, group = groups[np.argsort(random.random_raw(len(groups)), kind="stable")[number]]
        return bucket, position[group]

    table_of.now = batches.LengthTable.of
    monkeypatch.setattr(batches.LengthTable, "of", table_of)
    monkeypatch.setattr(batches.BatchPlan, "batch_indices", batch_indices)


def trained(name: str, *arguments: str, after: int) -> None:
    """Train by the recorded command, or another, and compare the end with v0.1's."""
    v0_1.command(*(arguments or RECORDED["commands"][name]))
    recorded = [line for line in RECORDED["ends"][name] if line["step"] > after]
    v0_1.assert_near(v0_1.losses(Path(name), after), recorded)


@pytest.mark.usefixtures("order_of_v0_1")
def test_run_of_v0_1_resumes(tmp_path, monkeypatch):
    """It was stopped at step 203, between two lines of metrics."""
    monkeypatch.chdir(v0_1.copied(tmp_path, "run", "text"))
    before = Path("run/metrics.jsonl").read_text()
    trained("run", after=0)
    assert Path("run/metrics.jsonl").read_text().startswith(before)


def test_a_run_of_v0_1_goes_on_in_another_order_with_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(v0_1.copied(tmp_path, "run", "text"))
    assert cli.main(RECORDED["commands"]["run"]) == 0
    assert "run began with the order of pairs of version 0.1" in capsys.readouterr().err
    steps = [line["step"] for line in v0_1.losses(Path("run"), 0)]
    assert steps == [line["step"] for line in RECORDED["ends"]["run"]]


@pytest.mark.usefixtures("order_of_v0_1")
def test_averaged_run_of_v0_1_resumes_and_is_averaged_again(tmp_path, monkeypatch):
    """It had ended at step 200: more steps continue its moving average."""
    monkeypatch.chdir(v0_1.copied(tmp_path, "averaged_run", "text"))
    trained("averaged_run", after=0)
    assert sorted(path.name for path in Path("averaged_run/averaged").iterdir()) == ["300"]


@pytest.mark.slow
@pytest.mark.usefixtures("order_of_v0_1")
def test_training_resumes_from_a_torch_file_of_v0_1(tmp_path, monkeypatch):
    """The run has lost its checkpoint of that step, and its options are passed as a file."""
    monkeypatch.chdir(v0_1.copied(tmp_path, "run", "text", "torch_training.pt"))
    shutil.rmtree("run/checkpoints/203")
    v0_1.command("convert", "torch_training.pt", "run", "--training")
    model, _ = jt.load("run", "203")
    assert v0_1.hashes(jt.convert.to_torch(model)) == MODELS["run last"]["tensors"]
    trained("run", "train", "--config", "run/train_config.json", after=220)


@pytest.mark.slow
@pytest.mark.usefixtures("order_of_v0_1")
def test_a_new_run_starts_from_a_run_of_v0_1(tmp_path, monkeypatch):
    monkeypatch.chdir(v0_1.copied(tmp_path, "run", "text"))
    defaults = "--optimizer.schedule cosine --optimizer.warmup-steps 200".split()  # 0.1's
    trained("from_run", *RECORDED["commands"]["from_run"], *defaults, after=0)
    assert Path("from_run/tokenizer.json").read_bytes() == Path("run/tokenizer.json").read_bytes()


def converted(tmp_path: Path, source: str | Path, *options: str | Path) -> dict[str, str]:
    """Convert ``source`` to a .safetensors file and return the hashes of its tensors."""
    target = tmp_path / "made.safetensors"
    v0_1.command("convert", v0_1.HERE / source, target, "--no-check", "--force", *options)
    return v0_1.in_file(target)


@pytest.mark.parametrize("name", MODELS)
def test_conversions_of_v0_1_files_have_the_same_bits(name: str, tmp_path):
    recorded = MODELS[name]
    actual = converted(tmp_path, recorded["folder"], "--weights", recorded["weights"])
    assert actual == recorded["tensors"]


def test_single_checkpoint_of_v0_1_is_converted(tmp_path):
    assert converted(tmp_path, "run/checkpoints/200") == MODELS["run 200"]["tensors"]


def test_frozen_arrays_are_in_the_files_that_v0_1_exported(tmp_path):
    """They include unused blocks, which deep_dive never trains."""
    hashes = MODELS["deep_dive_run"]["tensors"]
    assert [name for name in hashes if ".transformer_block.attention_mechanism." in name]
    assert v0_1.in_file(v0_1.HERE / "deep_dive.safetensors") == hashes
    assert converted(tmp_path, "deep_dive.pt") == hashes


@pytest.mark.parametrize(("suffix", "described_by"), [("pt", "config"), ("safetensors", "preset")])
def test_export_of_v0_1_converts_to_its_run(described_by: str, suffix: str, tmp_path):
    config = ["--config", v0_1.HERE / "deep_dive_run" / "config.json"]
    described = {"preset": RECORDED["deep_dive"], "config": config}[described_by]
    source, run = v0_1.HERE / f"deep_dive.{suffix}", tmp_path / "run"
    v0_1.command("convert", source, run, "--no-check", *described)
    recorded = MODELS["deep_dive_run"]
    assert v0_1.tensors(run) == recorded["tensors"]
    assert_computes(jt.load(run)[0], recorded)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_of_v0_1_exports_the_same_huggingface_folder(name: str, tmp_path):
    """Every file except the weights is equal byte for byte, and so is every tensor."""
    folder, exported = v0_1.HERE / name, tmp_path / name
    v0_1.command("convert", v0_1.HERE / f"{name}_run", exported, "--to", "hf", "--no-check")
    weights = "model.safetensors"
    assert v0_1.in_file(exported / weights) == v0_1.in_file(folder / weights)
    assert contents(exported, weights) == contents(folder, weights)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_huggingface_folder_of_v0_1_converts_to_the_same_run(name: str, tmp_path):
    run, converted_run = v0_1.HERE / f"{name}_run", tmp_path / "run"
    v0_1.command("convert", v0_1.HERE / name, converted_run, "--no-check")
    assert v0_1.tensors(converted_run) == MODELS[f"{name}_run"]["tensors"]
    assert contents(converted_run / "huggingface") == contents(run / "huggingface")
    lines = v0_1.HERE / "text" / MODELS[name]["lines"]
    assert v0_1.translations(converted_run, "auto", lines) == MODELS[name]["translations"]


def contents(folder: Path, *but: str) -> dict[str, bytes]:
    """Return the files of a folder by name, except for some."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in but}


# Negative controls of reading and comparing


def test_a_changed_bit_is_detected(tmp_path):
    state = safetensors.numpy.load_file(v0_1.HERE / "deep_dive.safetensors")
    name = min(state)
    state[name].view("uint32")[(0,) * state[name].ndim] ^= 1
    safetensors.numpy.save_file(state, tmp_path / "changed.safetensors")
    changed = v0_1.in_file(tmp_path / "changed.safetensors")
    recorded = MODELS["deep_dive_run"]["tensors"]
    assert {key for key in recorded if changed[key] != recorded[key]} == {name}


@pytest.mark.slow
@pytest.mark.usefixtures("order_of_v0_1")
def test_a_run_resumed_with_another_seed_is_detected(tmp_path, monkeypatch):
    """Only the seed, which decides dropout and the order of text, is not v0.1's."""
    monkeypatch.chdir(v0_1.copied(tmp_path, "run", "text"))
    options = Path("run/train_config.json")
    options.write_text(json.dumps(json.loads(options.read_text()) | {"seed": 1}))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        trained("run", *RECORDED["commands"]["run"], "--seed", "1", after=0)
