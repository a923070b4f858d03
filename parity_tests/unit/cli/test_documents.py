"""The presets of documents through the commands: train, translate, convert both ways."""

import pytest

import jax_transformer as jt
from parity_tests.marks import quick_if
from parity_tests.unit import runs

# lesson10 is what the other tests of training and commands train
FAITHFUL = [
    name
    for name in jt.preset_names()
    if f"{name}_repaired" in jt.preset_names() and name != "lesson10"
]
LINES = ["the cat", "a red dog sees the small bird", "", "house"]
FEW = ["--steps", "6", "--eval-every", "6", "--data.buckets", "1", "--optimizer.warmup-steps", "1"]


pytestmark = pytest.mark.usefixtures("as_a_user")


# The others train as lesson10 does, which test_training.py trains
@pytest.mark.parametrize("name", [quick_if(name == "part2_encoder", name) for name in FAITHFUL])
def test_a_document_is_trained_translates_and_is_converted(name: str, tmp_path, capsys):
    run, page = tmp_path / "run", tmp_path / "page.html"
    # whose target is padded to its source
    attention = ["--attention", page] if name == "blog2023" else []
    training = runs.train(
        "--run", run, "--model.preset", name, *runs.write_text(tmp_path), *runs.OPTIONS, *FEW
    )
    assert training.code == 0, training.err
    losses = [line["loss"] for line in runs.metrics(run) if "loss" in line]
    assert losses[-1] < losses[0]

    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in LINES))
    capsys.readouterr()
    assert runs.main("translate", "--run", run, "--input", tmp_path / "lines", *attention) == 0
    told_now = capsys.readouterr()
    lines = told_now.out.removesuffix("\n").split("\n")
    assert len(lines) == len(LINES) and lines[2] == ""
    assert ("decoding runs the whole decoder again at each token" in told_now.err) == (
        name == "blog2023"
    )
    assert not attention or "<html" in page.read_text()

    weights, again = tmp_path / "weights.safetensors", tmp_path / "again.safetensors"
    assert runs.main("convert", run, weights, "--no-check") == 0
    command = ["convert", weights, tmp_path / "imported", "--config", run / "config.json"]
    assert runs.main(*command) == 0
    assert runs.main("convert", tmp_path / "imported", again, "--no-check") == 0
    assert again.read_bytes() == weights.read_bytes()
