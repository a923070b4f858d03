"""``convert`` and ``inspect``: round trips are exact; nothing is guessed or overwritten."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import jax_transformer as jt
from jax_transformer.errors import CheckpointError, InputError
from jax_transformer.storage import run_files
from parity_tests.unit import runs

TINY = "d_model=16 num_heads=2 d_ff=32 num_layers=1 max_length=40 vocab_size=300".split()
SMALL = ["--preset", "small", "--set", *TINY]


pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.fixture(scope="module")
def weights(run, tmp_path_factory) -> Path:
    """The run's weights as a .safetensors file."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    assert runs.main("convert", run, path) == 0
    return path


def tensors(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path)


def test_weights_round_trip_byte_for_byte(console, run, weights, tmp_path):
    folder, again = tmp_path / "folder", tmp_path / "again.safetensors"
    assert console.say("convert", weights, folder, *SMALL)[0] == 0
    code, out, err = console.say("convert", folder, again)
    assert (code, err) == (0, "") and out.startswith(f"{folder} (last, step 0) -> {again}: ")
    assert "float32" in out and str(len(tensors(weights))) in out
    assert again.read_bytes() == weights.read_bytes()
    assert (folder / "config.json").read_bytes() == (run / "config.json").read_bytes()
    by_config = ["convert", weights, tmp_path / "by_config", "--config", run / "config.json"]
    assert console.say(*by_config)[0] == 0
    groups = ("params/", "frozen/")
    params = {name: a for name, a in runs.arrays(run).items() if name.startswith(groups)}
    for written in ("folder", "by_config"):
        assert runs.differing(runs.arrays(tmp_path / written, 0), params) == []


def test_weights_are_under_the_names_of_pytorch(weights):
    state = tensors(weights)
    assert state["encoder.layers.0.self_attn.in_proj_weight"].shape == (48, 16)
    assert state["decoder.layers.0.linear1.weight"].shape == (32, 16)
    names = ("linear.weight", "src_emb.weight", "tgt_emb.weight")
    assert len({runs.bits(state[name]) for name in names}) == 1
    with safetensors.safe_open(weights, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_dtype_casts_the_file_and_is_kept_on_the_way_back(console, weights, tmp_path):
    half, again = tmp_path / "half.safetensors", tmp_path / "again.safetensors"
    folder = tmp_path / "half"
    assert console.say("convert", weights, tmp_path / "folder", *SMALL)[0] == 0
    assert console.say("convert", tmp_path / "folder", half, "--dtype", "bfloat16")[0] == 0
    expected = {name: a.astype(ml_dtypes.bfloat16) for name, a in tensors(weights).items()}
    assert runs.differing(tensors(half), expected) == []
    assert console.say("convert", half, folder, *SMALL)[0] == 0
    assert console.say("convert", folder, again)[0] == 0
    assert again.read_bytes() == half.read_bytes()


def test_float64_converts_in_32_bit_mode_and_is_refused_if_narrowed(
    console, run, weights, tmp_path
):
    double = tmp_path / "double.safetensors"
    assert console.say("convert", run, double, "--dtype", "float64")[0] == 0
    assert console.say("convert", double, tmp_path / "folder", *SMALL)[0] == 0
    arrays = runs.arrays(tmp_path / "folder", 0).values()
    assert {str(array.dtype) for array in arrays} == {"float64"}
    assert console.say("convert", tmp_path / "folder", tmp_path / "again.safetensors")[0] == 0
    assert (tmp_path / "again.safetensors").read_bytes() == double.read_bytes()
    with pytest.raises(CheckpointError, match="JAX_ENABLE_X64"):
        jt.load(tmp_path / "folder")
    with pytest.raises(InputError, match="float64"):
        jt.convert.load(double, preset="small")
    single = ["convert", double, tmp_path / "single.safetensors", *SMALL, "--dtype", "float32"]
    assert console.say(*single)[0] == 0
    assert (tmp_path / "single.safetensors").read_bytes() == weights.read_bytes()


def test_nothing_is_overwritten(console, run, weights, tmp_path):
    file, folder = tmp_path / "file.safetensors", tmp_path / "folder"
    file.write_text("mine")
    folder.mkdir()
    console.refused(3, [file, "exists"], "convert", run, file)
    console.refused(3, [folder, "exists"], "convert", weights, folder, *SMALL)
    assert file.read_text() == "mine" and list(folder.iterdir()) == []


@pytest.mark.parametrize("here", [".", "run", "run/checkpoints"])
def test_weights_are_no_checkpoint_of_a_trained_run(console, weights, tmp_path, monkeypatch, here):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/train_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / here)
    step = tmp_path / "run/checkpoints/7"
    for target in (step, step.relative_to(Path.cwd())):
        words = [f"{target}: is in a trained run", "--training"]
        console.refused(2, words, "convert", weights, target, *SMALL)


def test_invalid_conversions_are_refused(console, run, weights, tmp_path):
    new, none, config = tmp_path / "new", tmp_path / "none", run / "config.json"
    for words, arguments in (
        (["--config", "--preset"], []),
        (["--config", "--preset"], [*SMALL, "--config", config]),
        (["smal", "did you mean 'small'?"], ["--preset", "smal"]),
        (["d_model", "name=value"], ["--preset", "small", "--set", "d_model"]),
        (["dmodel", "did you mean 'd_model'?"], ["--preset", "small", "--set", "dmodel=16"]),
        (["d_model", "'wide'"], ["--preset", "small", "--set", "d_model=wide"]),
        (["tying", "'some'"], ["--preset", "small", "--set", "tying=some"]),
        (["--dtype", "int8"], [*SMALL, "--dtype", "int8"]),
        (["--weights"], [*SMALL, "--weights", "best"]),
        (["--key"], [*SMALL, "--key", "model"]),
    ):
        console.refused(2, words, "convert", weights, new, *arguments)
    to_file = ("convert", run, tmp_path / "new.safetensors")
    console.refused(2, ["its own config.json"], *to_file, *SMALL)
    console.refused(2, [".npz", ".safetensors"], "convert", run, tmp_path / "new.npz")
    # one folder is made
    console.refused(3, [none / "runs"], "convert", weights, none / "runs" / "new", *SMALL)
    console.refused(3, [none], "convert", none, new, *SMALL)
    console.refused(3, [f"{none}.json"], "convert", weights, new, "--config", f"{none}.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "word"),
    [('{"d_model": 1', "JSON"), ('{"d_modle": 1}', "d_modle"), ("[1]", "object")],
)
def test_an_unreadable_configuration_is_named(console, weights, tmp_path, content, word):
    (tmp_path / "config.json").write_text(content)
    command = ["convert", weights, tmp_path / "new", "--config", tmp_path / "config.json"]
    console.refused(3, [tmp_path / "config.json", word], *command)


def test_settings_keep_the_types_of_their_values(console, run, weights, tmp_path):
    settings = "tying=all dropout=0.25 output_bias=false encoder.positions=sinusoidal".split()
    assert console.say("convert", weights, tmp_path / "new", *SMALL, *settings)[0] == 0
    written, original = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "new", run)
    )
    assert written == {**original, "dropout": 0.25}


def test_inspect_lists_a_file(console, weights):
    code, out, err = console.say("inspect", weights)
    lines = out.splitlines()
    assert (code, err, lines[0]) == (0, "", f"{weights}: safetensors")
    cells = [line.split() for line in lines[1:] if not line.startswith("sha256")]
    shown = {words[0]: words[1] for words in cells if len(words) == 3}
    state = tensors(weights)
    assert shown == {name: "x".join(map(str, array.shape)) for name, array in state.items()}
    assert f"{len(state)} arrays, {sum(array.size for array in state.values()):,} numbers" in lines
    assert lines[-1].startswith("sha256 ") and lines[-1].endswith("  model.safetensors")


def test_inspect_lists_a_run(console, run):
    code, out, err = console.say("inspect", run)
    assert (code, err, out.splitlines()[0]) == (0, "", f"{run}: checkpoint of step {runs.STEPS}")
    assert not [name for name in runs.arrays(run) if f"{name} " not in out]
    assert "300x16" in out and "float32" in out
    last = run / "checkpoints" / str(runs.STEPS)
    listed = {name: run / name for name in run_files.read_sums(run)}
    listed |= {str(path.relative_to(last)): path for path in last.rglob("*") if path.is_file()}
    del listed["manifest.json"]  # it has the hashes of the others
    hashes = json.loads(console.say("inspect", run, "--json")[1])["sha256"]
    assert hashes == {name: run_files.sha256(path) for name, path in listed.items()}


def test_files_that_cannot_be_inspected_are_named(console, weights, tmp_path):
    console.refused(3, [tmp_path / "none"], "inspect", tmp_path / "none")
    console.refused(3, [tmp_path], "inspect", tmp_path)
    good, path = weights.read_bytes(), tmp_path / "bad.safetensors"
    longer, other = (2**62).to_bytes(8, "little") + good[8:], good.replace(b"F32", b"Q99", 1)
    for content in (b"", b"text", good[:100], good[:-1], longer, other):
        path.write_bytes(content)
        console.refused(3, [path], "inspect", path)
        console.refused(3, [path], "convert", path, tmp_path / "new", *SMALL)
