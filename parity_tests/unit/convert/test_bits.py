"""``convert`` keeps every bit of every dtype, and the same input gives the same bytes."""

import importlib.util
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from campaigns import round_trips
from jax_transformer.convert.models import ModelDescription
from jax_transformer.formats import registry
from jax_transformer.storage import pt, tensors
from jax_transformer.storage.pt import writer
from parity_tests.unit import runs
from parity_tests.unit.conversions import convert, state_of, write


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_every_bit_is_converted(config, config_file, dtype, tmp_path):
    state = {
        name: round_trips.odd_numbers(dtype, array.size).reshape(array.shape)
        for name, array in state_of(config).items()
    }
    source, described = write(tmp_path / "a.safetensors", state), ModelDescription(str(config_file))
    convert(source, tmp_path / "run", description=described)
    convert(tmp_path / "run/checkpoints/0", tmp_path / "b.pt")
    convert(tmp_path / "b.pt", tmp_path / "7", description=described)
    convert(tmp_path / "7", tmp_path / "run2", description=described)
    outcome = convert(tmp_path / "run2", tmp_path / "c.safetensors", check=True)
    assert (tmp_path / "c.safetensors").read_bytes() == source.read_bytes()
    has_torch = importlib.util.find_spec("torch")
    why = "not all weights are finite" if has_torch else "PyTorch is not installed"
    assert why in outcome.checked.method


def test_integers_are_converted_between_files(tmp_path):
    kinds = ("int64", "int32", "int16", "int8", "uint8", "bool")
    state = {kind: np.arange(-3, 3).astype(kind) for kind in kinds}
    state["f"] = round_trips.odd_numbers("float16", 9)
    source = write(tmp_path / "a.safetensors", state)
    convert(source, tmp_path / "b.pt", dtype="float16")
    convert(tmp_path / "b.pt", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    "kind", ["complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
)
def test_other_dtypes_are_converted_if_the_file_format_has_them(console, tmp_path, kind):
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    shapes = {"x": (2, 3), "scalar": (), "none": (0, 3)}
    state = {name: np.ones(shape, dtype) for name, shape in shapes.items()}
    writer.write(tmp_path / "a.pt", state)
    out = tmp_path / "b.safetensors"
    if kind in ("complex128", "float8_e4m3fnuz"):
        words = [out, f"x is {kind}", f"scalar is {kind}"]
        return console.refused(3, words, "convert", tmp_path / "a.pt", out)
    assert console.say("convert", tmp_path / "a.pt", out)[0] == 0
    assert kind in console.say("inspect", out)[1]
    assert console.say("convert", out, tmp_path / "c.pt")[0] == 0
    before, after = pt.read(tmp_path / "a.pt"), pt.read(tmp_path / "c.pt")
    assert before.keys() == after.keys() and not runs.differing(before, after)


def test_a_cast_reports_its_losses(console, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "_PIECE", 8)  # the loss is measured in pieces
    state = {
        "a": np.array([1 + 2**-12, 70000.0, np.inf, -80000.0, np.nan]),
        "b": np.array([3], np.int64),
        "c": np.array([0.5, -1e9]),
        "d": np.array([0.5], np.float16),
    }
    source = write(tmp_path / "a.safetensors", state)
    code, out, _ = console.say("convert", source, tmp_path / "b.pt", "--dtype", "float16")
    assert code == 0 and "cast 2 tensors to float16: largest error 0.000244 in a" in out
    assert "warning: 3 numbers are too large for float16 and became infinite: a (2), c (1)" in out
    assert pt.read(tmp_path / "b.pt")["b"].dtype == np.int64
    options = ["--dtype", "float16", "--dry-run", "--json"]
    plan = json.loads(console.say("convert", source, tmp_path / "c.pt", *options)[1])["plan"]
    assert [m["source"] for m in plan["moves"] if "cast" in m["operation"]] == [["a"], ["c"]]
    options = ["--dtype", "float32", "--json"]
    data = json.loads(console.say("convert", source, tmp_path / "c.pt", *options)[1])
    assert data["cast"]["overflowed"] == {} and data["cast"]["largest"] == 0


@pytest.mark.parametrize("cast", [[], ["--dtype", "float16"]])
def test_tied_tensors_of_a_file_stay_tied(console, tmp_path, cast):
    tied = np.ones((3, 4), np.float32)
    writer.write(tmp_path / "a.pt", {"x": tied, "y": tied})
    assert console.say("convert", tmp_path / "a.pt", tmp_path / "b.pt", *cast)[0] == 0
    assert pt.ties(tmp_path / "b.pt") == [("x", "y")]


def test_shards_are_one_source(console, config_file, weights, tmp_path):
    state = safetensors.numpy.load_file(weights)
    names = sorted(state)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        write(tmp_path / file, {name: state[name] for name in part})
    index = tmp_path / "model.safetensors.index.json"
    shards = {name: file for file, part in parts.items() for name in part}
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    assert console.say("convert", index, tmp_path / "whole.safetensors")[0] == 0
    assert (tmp_path / "whole.safetensors").read_bytes() == weights.read_bytes()
    options = ["--config", config_file, "--no-check"]
    assert console.say("convert", index, tmp_path / "run", *options)[0] == 0
    description = json.loads(console.say("inspect", index, "--json")[1])
    assert sorted(description["tensors"]) == names
    assert sorted(description["sha256"]) == [index.name, *parts]
    assert registry.open(index).files == (index, *(tmp_path / part for part in parts))
    assert registry.open(weights).files == (weights,)
    target = tmp_path / "x.safetensors.index.json"
    console.refused(2, ["one .safetensors file is written"], "convert", weights, target)


def test_the_same_weights_are_the_same_bytes(config, weights, config_file, tmp_path):
    description = ModelDescription(str(config_file))
    for suffix in (".pt", ".safetensors", ""):
        targets = [tmp_path / f"{i}{suffix or '-run'}" for i in range(2)]
        outcomes = [convert(weights, target, description=description) for target in targets]
        assert len({each.sha256 for each in outcomes}) == 1


def bytes_read() -> int:
    """Bytes that this process has read from files, also those that were in memory."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(("kind", "to"), [("safetensors", "pt"), ("pt", "safetensors")])
def test_no_file_is_read_more_often_than_needed(console, tmp_path, kind, to):
    """The source is read once, or mapped; the result once, to compare it."""
    state = {"a": np.zeros(1 << 20, np.float32), "b": np.ones(1 << 20, np.float32)}
    first, source = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    save = writer.write if kind == "pt" else write
    save(first, {"a": np.zeros(3, np.float32)})
    save(source, state)
    assert console.say("convert", first, tmp_path / f"first.{to}")[0] == 0  # loads the modules
    before = bytes_read()
    assert console.say("convert", source, tmp_path / f"again.{to}")[0] == 0
    size = source.stat().st_size
    assert size < bytes_read() - before < 2.5 * size
    before = bytes_read()
    assert console.say("inspect", source)[0] == 0
    assert bytes_read() - before < 1.5 * size
