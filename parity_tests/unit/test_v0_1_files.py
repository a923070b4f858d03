"""Runs, checkpoints and exports that version 0.1 made are read, translate as they did, go on, and
convert to the same bits."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import safetensors.numpy

import jax_transformer as jt
from parity_tests.unit import runs
from parity_tests.unit import v0_1_files as v0_1

TOLD = v0_1.expected()
MODELS = TOLD["models"]
TRANSLATE = [name for name, told in MODELS.items() if told["lines"]]
FAMILIES = ["marian", "t5"]


@pytest.fixture(scope="module", autouse=True)
def _as_a_user(tmp_path_factory):
    with runs.as_a_user(tmp_path_factory.getbasetemp()):
        yield


def test_files_are_those_that_v0_1_wrote():
    """What git, or making them again, has changed proves nothing."""
    assert v0_1.files() == TOLD["files"]
    assert TOLD["made by"]["version"] == "0.1.0"


def test_expectations_tell_models_apart():
    """Negative control of what follows: another checkpoint, or another step, differs."""
    losses = [line["loss"] for line in TOLD["ends"]["run"] if "loss" in line]
    assert min(abs(a - b) / a for a, b in itertools.pairwise(losses)) > 1e-3
    for one, other in (("run 200", "run last"), ("averaged_run averaged", "averaged_run best")):
        assert MODELS[one]["translations"] != MODELS[other]["translations"]
        with pytest.raises(AssertionError):
            v0_1.assert_near(MODELS[one]["numbers"], MODELS[other]["numbers"])
        assert not MODELS[one]["tensors"].items() & MODELS[other]["tensors"].items()


# Read


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_v0_1_are_read_bit_for_bit(name: str):
    told = MODELS[name]
    assert v0_1.tensors(told["folder"], told["weights"]) == told["tensors"]


@pytest.mark.parametrize("name", MODELS)
def test_model_of_v0_1_computes_what_it_did(name: str):
    told = MODELS[name]
    model, tokenizer = jt.load(v0_1.HERE / told["folder"], told["weights"])
    v0_1.assert_near(v0_1.numbers(model, told["source"], told["target"]), told["numbers"])
    assert (tokenizer is not None) == bool(told["lines"])


@pytest.mark.parametrize("name", TRANSLATE)
def test_run_and_folder_of_v0_1_translate_as_they_did(name: str):
    told = MODELS[name]
    lines = v0_1.HERE / "text" / told["lines"]
    assert v0_1.translations(told["folder"], told["weights"], lines) == told["translations"]


# Go on


def trained(name: str, *arguments: str, after: int) -> None:
    """Trains by the recorded command, or another, and compares its end with v0.1's."""
    v0_1.command(*(arguments or TOLD["commands"][name]))
    told = [line for line in TOLD["ends"][name] if line["step"] > after]
    v0_1.assert_near(v0_1.losses(Path(name), after), told)


def test_run_of_v0_1_resumes(tmp_path, monkeypatch):
    """It was stopped at step 203, between two lines of metrics."""
    monkeypatch.chdir(v0_1.copied(tmp_path, "run", "text"))
    before = Path("run/metrics.jsonl").read_text()
    trained("run", after=0)
    assert Path("run/metrics.jsonl").read_text().startswith(before)


def test_averaged_run_of_v0_1_goes_on_and_is_averaged_again(tmp_path, monkeypatch):
    """It had ended at step 200: more steps continue its moving average."""
    monkeypatch.chdir(v0_1.copied(tmp_path, "averaged_run", "text"))
    trained("averaged_run", after=0)
    assert sorted(path.name for path in Path("averaged_run/averaged").iterdir()) == ["300"]


def test_training_state_of_v0_1_in_a_torch_file_is_gone_on_from(tmp_path, monkeypatch):
    """Into a run whose own checkpoint of that step is lost, whose options then stand in a file."""
    monkeypatch.chdir(v0_1.copied(tmp_path, "run", "text", "torch_training.pt"))
    shutil.rmtree("run/checkpoints/203")
    v0_1.command("convert", "torch_training.pt", "run", "--training")
    model, _ = jt.load("run", "203")
    assert v0_1.hashes(jt.convert.to_torch(model)) == MODELS["run last"]["tensors"]
    trained("run", "train", "--config", "run/train_config.json", after=220)


def test_a_new_run_begins_from_a_run_of_v0_1(tmp_path, monkeypatch):
    monkeypatch.chdir(v0_1.copied(tmp_path, "run", "text"))
    trained("from_run", after=0)
    assert Path("from_run/tokenizer.json").read_bytes() == Path("run/tokenizer.json").read_bytes()


# Convert


def converted(tmp_path: Path, source: str | Path, *how: str | Path) -> dict[str, str]:
    """The hashes of the tensors of a .safetensors file made of ``source``."""
    made = tmp_path / "made.safetensors"
    v0_1.command("convert", v0_1.HERE / source, made, "--no-check", "--force", *how)
    return v0_1.in_file(made)


@pytest.mark.parametrize("name", MODELS)
def test_conversion_of_what_v0_1_made_has_the_same_bits(name: str, tmp_path):
    told = MODELS[name]
    assert converted(tmp_path, told["folder"], "--weights", told["weights"]) == told["tensors"]


def test_single_checkpoint_of_v0_1_is_converted(tmp_path):
    assert converted(tmp_path, "run/checkpoints/200") == MODELS["run 200"]["tensors"]


def test_carried_arrays_are_in_the_files_that_v0_1_exported(tmp_path):
    """Idle blocks, which deep_dive never trains, among them."""
    told = MODELS["deep_dive_run"]["tensors"]
    assert [name for name in told if ".transformer_block.attention_mechanism." in name]
    assert v0_1.in_file(v0_1.HERE / "deep_dive.safetensors") == told
    assert converted(tmp_path, "deep_dive.pt") == told


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("how", ["preset", "config"])
def test_export_of_v0_1_becomes_the_run_that_it_came_from(how: str, suffix: str, tmp_path):
    config = ["--config", v0_1.HERE / "deep_dive_run" / "config.json"]
    described = {"preset": TOLD["deep_dive"], "config": config}[how]
    source, run = v0_1.HERE / f"deep_dive.{suffix}", tmp_path / "run"
    v0_1.command("convert", source, run, "--no-check", *described)
    told = MODELS["deep_dive_run"]
    assert v0_1.tensors(run) == told["tensors"]
    model, _ = jt.load(run)
    v0_1.assert_near(v0_1.numbers(model, told["source"], told["target"]), told["numbers"])


@pytest.mark.parametrize("name", FAMILIES)
def test_huggingface_folder_comes_out_of_the_run_as_v0_1_exported_it(name: str, tmp_path):
    """Every file beside the weights byte for byte, and every tensor of the weights."""
    folder, made = v0_1.HERE / name, tmp_path / name
    v0_1.command("convert", v0_1.HERE / f"{name}_run", made, "--to", "hf", "--no-check")
    weights = "model.safetensors"
    assert v0_1.in_file(made / weights) == v0_1.in_file(folder / weights)
    assert contents(made, weights) == contents(folder, weights)


@pytest.mark.parametrize("name", FAMILIES)
def test_huggingface_folder_of_v0_1_becomes_the_run_that_v0_1_made_of_it(name: str, tmp_path):
    run, made = v0_1.HERE / f"{name}_run", tmp_path / "run"
    v0_1.command("convert", v0_1.HERE / name, made, "--no-check")
    assert v0_1.tensors(made) == MODELS[f"{name}_run"]["tensors"]
    assert contents(made / "huggingface") == contents(run / "huggingface")
    lines = v0_1.HERE / "text" / MODELS[name]["lines"]
    assert v0_1.translations(made, "auto", lines) == MODELS[name]["translations"]


def contents(folder: Path, *but: str) -> dict[str, bytes]:
    """The files of a folder, but for some, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in but}


# Negative controls of reading and comparing


def test_a_changed_bit_is_noticed(tmp_path):
    state = safetensors.numpy.load_file(v0_1.HERE / "deep_dive.safetensors")
    name = min(state)
    state[name].view("uint32")[(0,) * state[name].ndim] ^= 1
    safetensors.numpy.save_file(state, tmp_path / "changed.safetensors")
    found, told = v0_1.in_file(tmp_path / "changed.safetensors"), MODELS["deep_dive_run"]["tensors"]
    assert {key for key in told if found[key] != told[key]} == {name}


def test_a_run_resumed_with_other_draws_is_noticed(tmp_path, monkeypatch):
    """Everything is as v0.1 left it but the seed, which decides dropout and the order of text."""
    monkeypatch.chdir(v0_1.copied(tmp_path, "run", "text"))
    options = Path("run/train_config.json")
    options.write_text(json.dumps(json.loads(options.read_text()) | {"seed": 1}))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        trained("run", *TOLD["commands"]["run"], "--seed", "1", after=0)
