"""``convert`` and ``inspect``: plans, sizes from shapes, strictness, casts, replacing, and what a kill leaves."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import jax_transformer as jt
from benchmarks import round_trips
from jax_transformer.config import TransformerConfig, Tying
from jax_transformer.convert import rules
from jax_transformer.convert.files import pt
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.presets import PRESETS
from jax_transformer.training import exchange
from jax_transformer.training.exchange import conversion, verify, writing
from parity_tests.unit import helpers, runs

SIZES = dict(source_vocab_size=11, target_vocab_size=13, d_model=12, num_heads=3, num_layers=2, max_length=20)


@pytest.fixture
def console(capsys, monkeypatch) -> runs.Console:
    return runs.Console(capsys, monkeypatch)


def config_of(preset: str, **changes) -> TransformerConfig:
    tied = dict(source_vocab_size=13) if jt.preset(preset).tying is Tying.ALL else {}
    return jt.preset(preset, **(SIZES | tied | changes))


def state_of(config: TransformerConfig, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Random weights under PyTorch's names, tied ones equal."""
    return rules.to_torch(conversion.model_of(config).table, helpers.random_arrays(config, dtype=dtype))


def write(path: Path, state: dict[str, np.ndarray]) -> Path:
    safetensors.numpy.save_file(state, path, metadata={"format": "pt"})
    return path


def convert(
    source: Path, destination: Path, *, check: bool = False, description: exchange.Description | None = None, **more
) -> exchange.Outcome:
    request = exchange.Request(str(source), str(destination), description or exchange.Description(), check=check, **more)
    return exchange.convert(exchange.prepare(request))


@pytest.fixture(scope="module")
def config() -> TransformerConfig:
    return config_of("lesson10", encoder_layers=1, d_ff=20)


@pytest.fixture(scope="module")
def weights(config, tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("weights") / "model.safetensors", state_of(config))


@pytest.fixture(scope="module")
def config_file(config, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(config.to_json())
    return path


# Sizes


@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.endswith("_repaired")])
def test_sizes_are_read_from_the_shapes(preset):
    """All but the number of heads; of deep_dive that too, whose heads are as wide as the model."""
    config = config_of(preset, encoder_layers=3, **({} if "d_ff" in PRESETS[preset].multiples else {"d_ff": 20}))
    shown = conversion.model_of(config).shapes
    given = {} if "head_dim" in PRESETS[preset].multiples else {"num_heads": 3}
    hidden = {} if any(shape[:1] == (20,) and "pos" in name for name, shape in shown["torch"].items()) else {"max_length": 20}
    for names in ("torch", "flax") if preset in ("lesson10", "deep_dive") else ("torch",):
        found = exchange.conversion.infer.infer(
            preset, given | hidden, shown[names], lambda config, names=names: conversion.model_of(config).shapes[names]
        )
        assert found.config == config
        assert not found.sizes.keys() & (given | hidden).keys()
    assert "num_heads" in found.sizes or given


def test_equal_sizes_are_told_apart():
    config = jt.preset("lesson10", **helpers.SQUARE)
    shapes = conversion.model_of(config).shapes["torch"]
    found = exchange.conversion.infer.infer(
        "lesson10", {"num_heads": 4}, shapes, lambda config: conversion.model_of(config).shapes["torch"]
    )
    assert found.config == config


def test_what_was_read_and_what_was_not_is_said(console, weights, tmp_path):
    command = ["convert", weights, tmp_path / "new", "--preset", "lesson10"]
    code, out, err = console.say(*command, "--set", "num_heads=3", "--dry-run")
    assert (code, err) == (0, "")
    assert "encoder.layers=1, decoder.layers=2, source_vocab_size=11, target_vocab_size=13, d_model=12, d_ff=20, max_length=20" in out
    console.refused(2, ["d_model=12", "num_heads=8", "from the shapes", "--set"], *command)
    code, out, err = console.say(
        "convert", weights, tmp_path / "new", "--preset", "lesson10_repaired", "--set", "d_model=12", "num_heads=6", "--dry-run"
    )
    assert code == 0 and "d_model" not in out.splitlines()[0] and list(tmp_path.iterdir()) == []


# Plans


def test_a_dry_run_names_every_tensor_once_and_writes_nothing(console, config, weights, tmp_path):
    how = ["--preset", "lesson10", "--set", "num_heads=3"]
    code, out, err = console.say("convert", weights, tmp_path / "new", *how, "--dry-run", "--json", "--dtype", "float16")
    assert (code, err) == (0, "") and list(tmp_path.iterdir()) == []
    plan = json.loads(out)["plan"]
    model = conversion.model_of(config)
    assert sorted(name for move in plan["moves"] for name in move["source"]) == sorted(model.shapes["torch"])
    assert sorted(name for move in plan["moves"] for name in move["target"]) == sorted(model.shapes["flax"])
    packed = next(move for move in plan["moves"] if move["source"] == ["encoder.layers.0.self_attn.in_proj_weight"])
    assert packed["operation"] == "split, transpose, cast" and packed["before"] == [{"shape": [36, 12], "dtype": "float32"}]
    assert packed["after"] == [{"shape": [12, 12], "dtype": "float16"}] * 3
    assert plan["bytes"] == 2 * sum(int(np.prod(shape)) for shape in model.shapes["flax"].values())
    text = console.say("convert", weights, tmp_path / "new", *how, "--dry-run")[1]
    assert (
        "  pos_enc.pe [20x1x12 float32] -> encoder.positions.table + decoder.positions.table [20x12 float32]: copy to each, squeeze axis 1"
        in text
    )
    assert text.endswith("nothing was written\n")


def test_a_plan_of_tied_weights_says_what_repeats_what(tmp_path):
    config = config_of("small", d_ff=20)
    source = write(tmp_path / "tied.safetensors", state_of(config))
    there = jt.convert.plan(source, tmp_path / "new", preset="small", num_heads=3, max_length=20)
    assert [note.name for note in there.dropped] == ["src_emb.weight", "linear.weight"] and there.derived == ()
    assert there.ties == (("tgt_emb.weight", "src_emb.weight", "linear.weight"),)
    convert(source, tmp_path / "new", description=exchange.Description(None, "small", {"num_heads": 3, "max_length": 20}))
    back = jt.convert.plan(tmp_path / "new", tmp_path / "back.pt")
    assert [note.name for note in back.derived] == ["src_emb.weight", "linear.weight"] and back.dropped == ()
    convert(tmp_path / "new", tmp_path / "back.pt")
    assert pt.ties(tmp_path / "back.pt") == [("tgt_emb.weight", "src_emb.weight", "linear.weight")]


# Strict


def test_one_error_has_everything_and_nothing_is_written(console, tmp_path):
    state = state_of(config_of("small", d_ff=20))
    state["linear.weight"] = state["linear.weight"] + 1
    state["encoder.layers.0.linear1.weigth"] = state.pop("encoder.layers.0.linear1.weight")
    state["encoder.layers.0.linear2.weight"] = state["encoder.layers.0.linear2.weight"].T.copy()
    state["decoder.norm.bias"] = state["decoder.norm.bias"].astype(np.int64)
    source = write(tmp_path / "bad.safetensors", state)
    sizes = ["num_heads=3", "max_length=20", "d_ff=20"]
    words = [
        "5 problems",
        "missing encoder.layers.0.linear1.weight (20, 12)",
        "unexpected encoder.layers.0.linear1.weigth (20, 12) (did you mean 'encoder.layers.0.linear1.weight'?)",
        "mis-shaped encoder.layers.0.linear2.weight: the checkpoint has (20, 12), the model (12, 20)",
        "decoder.norm.bias is int64",
        "linear.weight differs from tgt_emb.weight, but the model ties them",
    ]
    console.refused(3, words, "convert", source, tmp_path / "new", "--preset", "small", "--set", *sizes)
    console.refused(3, words[1:5], "convert", source, tmp_path / "new", "--preset", "small", "--set", *sizes, "--dry-run")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.safetensors"]


def test_a_prefix_is_named_and_stripped_only_when_asked(console, config_file, weights, tmp_path):
    state = safetensors.numpy.load_file(weights)
    wrapped = write(tmp_path / "wrapped.safetensors", {f"_orig_mod.module.{name}": array for name, array in state.items()})
    command = ["convert", wrapped, tmp_path / "new", "--config", config_file, "--no-check"]
    console.refused(3, ["--strip-prefix _orig_mod.module."], *command)
    console.refused(3, ["do not begin with it"], *command, "--strip-prefix", "model.")
    assert console.say(*command, "--strip-prefix", "_orig_mod.module.")[0] == 0
    convert(tmp_path / "new", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == weights.read_bytes()


def test_a_state_dict_is_found_in_a_training_checkpoint(console, config_file, weights, tmp_path):
    state, path = safetensors.numpy.load_file(weights), tmp_path / "training.pt"
    pt.write(path, {"model": state, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3})
    code, out, _ = console.say("convert", path, tmp_path / "out.safetensors", "--config", config_file, "--no-check")
    assert code == 0 and "training.pt (model)" in out and "not carried: optimizer" in out and "not carried: epoch" in out
    assert (tmp_path / "out.safetensors").read_bytes() == weights.read_bytes()
    pt.write(path, {"first": state, "second": state})
    console.refused(3, ["--key", "first, second"], "convert", path, tmp_path / "two.safetensors")
    console.refused(3, ["third", "first, second"], "convert", path, tmp_path / "two.safetensors", "--key", "third")
    assert console.say("convert", path, tmp_path / "two.safetensors", "--key", "second")[0] == 0
    assert (tmp_path / "two.safetensors").read_bytes() == weights.read_bytes()


# Lossless


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_every_bit_crosses(config, config_file, dtype, tmp_path):
    state = {name: round_trips.odd_numbers(dtype, array.size).reshape(array.shape) for name, array in state_of(config).items()}
    source = write(tmp_path / "a.safetensors", state)
    convert(source, tmp_path / "run", description=exchange.Description(str(config_file)))
    convert(tmp_path / "run/checkpoints/0", tmp_path / "b.pt")
    convert(tmp_path / "b.pt", tmp_path / "7", description=exchange.Description(str(config_file)))
    convert(tmp_path / "7", tmp_path / "run2", description=exchange.Description(str(config_file)))
    outcome = convert(tmp_path / "run2", tmp_path / "c.safetensors", check=True)
    assert (tmp_path / "c.safetensors").read_bytes() == source.read_bytes()
    why = "not all weights are finite" if importlib.util.find_spec("torch") else "PyTorch is not installed"
    assert why in outcome.checked.how


def test_integers_cross_between_files(tmp_path):
    state = {kind: np.arange(-3, 3).astype(kind) for kind in ("int64", "int32", "int16", "int8", "uint8", "bool")} | {
        "f": round_trips.odd_numbers("float16", 9)
    }
    source = write(tmp_path / "a.safetensors", state)
    convert(source, tmp_path / "b.pt", dtype="float16")
    convert(tmp_path / "b.pt", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("kind", ["complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_other_numbers_cross_where_the_file_has_a_name_for_them(console, tmp_path, kind):
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    pt.write(tmp_path / "a.pt", {"x": np.zeros((2, 3), dtype), "scalar": np.ones((), dtype), "none": np.ones((0, 3), dtype)})
    out = tmp_path / "b.safetensors"
    if kind in ("complex128", "float8_e4m3fnuz"):
        console.refused(3, [out, f"x is {kind}", f"scalar is {kind}"], "convert", tmp_path / "a.pt", out)
        return
    assert console.say("convert", tmp_path / "a.pt", out)[0] == 0
    assert kind in console.say("inspect", out)[1]
    assert console.say("convert", out, tmp_path / "c.pt")[0] == 0
    before, after = pt.read(tmp_path / "a.pt"), pt.read(tmp_path / "c.pt")
    assert before.keys() == after.keys() and not runs.differing(before, after)


def test_a_cast_says_what_it_loses(console, tmp_path):
    state = {"a": np.array([1 + 2**-12, 70000.0, np.inf, np.nan]), "b": np.array([3], np.int64), "c": np.array([0.5, -1e9])}
    code, out, _ = console.say("convert", write(tmp_path / "a.safetensors", state), tmp_path / "b.pt", "--dtype", "float16")
    assert code == 0 and "cast 2 tensors to float16: largest error 0.000244 in a" in out
    assert "warning: 2 numbers are too large for float16 and became infinite: a (1), c (1)" in out
    assert pt.read(tmp_path / "b.pt")["b"].dtype == np.int64
    data = json.loads(console.say("convert", tmp_path / "a.safetensors", tmp_path / "c.pt", "--dtype", "float32", "--json")[1])
    assert data["cast"]["overflowed"] == {} and data["cast"]["largest"] == 0


# Replacing, and what a kill leaves


def test_force_replaces_the_like_and_nothing_more(console, weights, config_file, tmp_path):
    file, folder = tmp_path / "file.pt", tmp_path / "folder"
    file.write_text("old")
    console.refused(3, [file, "--force"], "convert", weights, file)
    assert console.say("convert", weights, file, "--force")[0] == 0 and pt.is_pt(file)
    to_folder = ["convert", weights, folder, "--config", config_file, "--no-check"]
    assert console.say(*to_folder)[0] == 0
    console.refused(3, [folder, "--force"], *to_folder)
    before = (folder / "checkpoints/0/manifest.json").read_bytes()
    assert console.say(*to_folder, "--force", "--dtype", "float16")[0] == 0
    assert (folder / "checkpoints/0/manifest.json").read_bytes() != before
    (folder / "metrics.jsonl").write_text("")
    console.refused(3, ["metrics.jsonl"], *to_folder, "--force")
    console.refused(3, [file], "convert", weights, file / "x.pt")
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "mine").write_text("")
    console.refused(3, ["12", "no checkpoint"], "convert", weights, tmp_path / "12", "--config", config_file, "--force")
    os.symlink(file, tmp_path / "link.pt")
    console.refused(3, ["link"], "convert", weights, tmp_path / "link.pt", "--force")
    console.refused(2, ["source"], "convert", file, file, "--force")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["12", "file.pt", "folder", "link.pt"]


KILLED = """
import os, signal, sys
from jax_transformer import cli
calls = 0
def counted(event, arguments):
    global calls
    watched = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir") or event == "ctypes.call_function"
    watched |= event == "open" and isinstance(arguments[0], str) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
    if watched and armed and sys.argv[2] in str(arguments[0]):
        calls += 1
        if calls == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
armed = True
sys.addaudithook(counted)
code = cli.main(sys.argv[3:])
print(calls)
sys.exit(code)
"""


def killed_at(number: int, *command: str | Path) -> subprocess.CompletedProcess:
    arguments = [sys.executable, "-c", KILLED, str(number), str(Path(command[2]).parent), *map(str, command)]
    return subprocess.run(arguments, env=runs.environment(), capture_output=True, text=True, timeout=100)


def test_killed_at_any_call_it_leaves_the_old_file_or_the_new_one(weights, tmp_path):
    target = tmp_path / "model.pt"
    command = ["convert", weights, target, "--force"]
    assert runs.main(*command) == 0
    new, old = target.read_bytes(), b"old"
    seen = set()
    for number in range(1, 20):
        target.write_bytes(old)
        done = killed_at(number, *command)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        seen.add(target.read_bytes())
        assert seen <= {old, new}
        for path in tmp_path.glob(".*"):
            path.unlink()
    assert done.returncode == 0 and int(done.stdout.split()[-1]) == number - 1 >= 2 and old in seen
    assert target.read_bytes() == new


def test_a_folder_is_replaced_in_one_call(weights, config_file, tmp_path, monkeypatch):
    """At the moments before and after the call, what has the name is whole."""
    folder, seen = tmp_path / "folder", []
    given = exchange.Description(str(config_file))
    convert(weights, folder, description=given)
    exchange_names = writing._exchange

    def watched(one: Path, other: Path) -> None:
        seen.append(set(map(str, (a.dtype for a in runs.arrays(other, 0).values()))))
        exchange_names(one, other)
        seen.append(set(map(str, (a.dtype for a in runs.arrays(other, 0).values()))))

    monkeypatch.setattr(writing, "_exchange", watched)
    convert(weights, folder, description=given, dtype="float16", force=True)
    assert seen == [{"float32"}, {"float16"}] and [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("kind", ["file.pt", "file.safetensors", "folder", "12"])
def test_what_is_refused_at_the_end_leaves_what_was_there(weights, config_file, tmp_path, monkeypatch, kind):
    target, given = tmp_path / kind, exchange.Description(str(config_file))
    outcome = convert(weights, target, description=given)

    def different(*_):
        raise verify.DifferentError("different")

    monkeypatch.setattr(verify, "check", different)
    with pytest.raises(verify.DifferentError):
        convert(weights, target, description=given, dtype="float16", force=True, check=True)
    assert [path.name for path in tmp_path.iterdir()] == [kind]
    monkeypatch.undo()
    again = convert(target, tmp_path / "again.safetensors", description=given if kind == "12" else None)
    assert "float32" in again.summary and (tmp_path / "again.safetensors").read_bytes() == weights.read_bytes() and outcome.sha256


# The self-check without a twin, and the library


def test_the_check_sees_a_wrong_table(config):
    model = conversion.model_of(config)
    flax = helpers.random_arrays(config)
    state = rules.to_torch(model.table, flax)
    with pytest.raises(verify.DifferentError, match=r"linear1\.weight"):
        verify.check(config, model.table, state | {"encoder.layers.0.linear1.weight": state["encoder.layers.0.linear1.weight"] + 1}, flax)


def test_the_library_reads_and_writes_what_the_command_does(config, weights, tmp_path):
    model = jt.convert.load(weights, config)
    assert jt.convert.save(model, tmp_path / "a.safetensors").read_bytes() == weights.read_bytes()
    jt.convert.save(model, tmp_path / "run")
    jt.convert.save(model, tmp_path / "b.pt")
    found = [jt.convert.load(tmp_path / "run"), jt.convert.load(tmp_path / "b.pt", preset="lesson10", num_heads=3)]
    found.append(jt.convert.load(tmp_path / "run/checkpoints/0"))
    for other in found:
        assert other.config == config
        assert runs.differing(jt.convert.to_torch(other), jt.convert.to_torch(model)) == []
    assert jt.convert.load(weights, config, dtype="float16").decoder.final_norm.scale[...].dtype == np.float16
    with pytest.raises(ConfigError, match="config or preset"):
        jt.convert.load(weights)
    with pytest.raises(ConfigError, match=r"config\.json of its own"):
        jt.convert.load(tmp_path / "run", preset="lesson10")
    with pytest.raises(ConfigError, match="num_heads"):
        jt.convert.load(weights, config, num_heads=3)
    with pytest.raises(InputError, match="exists"):
        jt.convert.save(model, tmp_path / "run")


# Inspect


def test_inspect_for_machines(console, weights, tmp_path):
    state = safetensors.numpy.load_file(weights)
    shared = np.ones((2, 3), np.float32)
    pt.write(tmp_path / "a.pt", {"model": {"x": shared, "y": shared, "z": np.zeros(2, ml_dtypes.bfloat16)}, "step": 7})
    found = json.loads(console.say("inspect", weights, "--json")[1])
    assert found["tensors"].keys() == state.keys() and list(found["sha256"]) == ["model.safetensors"]
    found = json.loads(console.say("inspect", tmp_path / "a.pt", "--json")[1])
    assert found["ties"] == [["model.x", "model.y"]] and found["values"] == {"step": 7}
    assert found["tensors"]["model.z"] == {"shape": [2], "dtype": "bfloat16", "bytes": 4}
    out = console.say("inspect", tmp_path / "a.pt")[1]
    assert "tied model.x = model.y" in out and "step = 7" in out and "PyTorch file" in out


def test_a_name_in_a_file_cannot_write_lines(console, tmp_path):
    source = write(tmp_path / "a.safetensors", {"a\nsha256 0\x1b[31m": np.zeros(2, np.float32)})
    for command in (["inspect", source], ["inspect", source, "--json"], ["convert", source, tmp_path / "b.pt", "--dry-run"]):
        _, out, err = console.say(*command)
        assert "\x1b" not in out + err and "\nsha256 0" not in out + err


def test_kinds_are_known_by_content(console, weights, tmp_path):
    (tmp_path / "model.bin").write_bytes(weights.read_bytes())
    assert "safetensors" in console.say("inspect", tmp_path / "model.bin")[1]
    (tmp_path / "text.pt").write_text("nothing of it")
    console.refused(3, ["text.pt"], "inspect", tmp_path / "text.pt")


def test_several_files_are_one_source(console, config_file, weights, tmp_path):
    state = safetensors.numpy.load_file(weights)
    names = sorted(state)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        write(tmp_path / file, {name: state[name] for name in part})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}))
    assert console.say("convert", index, tmp_path / "whole.safetensors")[0] == 0
    assert (tmp_path / "whole.safetensors").read_bytes() == weights.read_bytes()
    assert console.say("convert", index, tmp_path / "run", "--config", config_file, "--no-check")[0] == 0
    found = json.loads(console.say("inspect", index, "--json")[1])
    assert sorted(found["tensors"]) == names and sorted(found["sha256"]) == [index.name, *parts]
    console.refused(2, ["one .safetensors file is written"], "convert", weights, tmp_path / "x.safetensors.index.json")


def test_files_are_described_and_converted_without_jax(weights, tmp_path):
    program = (
        "import sys\nfrom jax_transformer import cli\n"
        f"assert cli.main(['convert', {str(weights)!r}, {str(tmp_path / 'a.pt')!r}]) == 0\n"
        f"assert cli.main(['inspect', {str(tmp_path / 'a.pt')!r}]) == 0\n"
        "assert not {'jax', 'flax', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=runs.environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_what_asks_for_more_than_weights_is_refused_as_unsafe(console, tmp_path):
    """A pickle that would call something, inside a real zip."""
    import pickle
    import zipfile

    class Call:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    with zipfile.ZipFile(tmp_path / "bad.pt", "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({"a": Call()}, protocol=2))
        file.writestr("archive/version", "3\n")
    for command in (["inspect", tmp_path / "bad.pt"], ["convert", tmp_path / "bad.pt", tmp_path / "out.safetensors"]):
        console.refused(4, ["bad.pt", "mkdir"], *command)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.pt"]


def test_the_same_weights_are_the_same_bytes(config, weights, config_file, tmp_path):
    given = exchange.Description(str(config_file))
    hashes = {convert(weights, tmp_path / f"{i}.pt", description=given).sha256 for i in range(2)}
    hashes |= {convert(weights, tmp_path / f"{i}.safetensors", description=given).sha256 for i in range(2)}
    folders = {convert(weights, tmp_path / f"run{i}", description=given).sha256 for i in range(2)}
    assert len(hashes) == 2 and len(folders) == 1


WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "torch" else super().find_spec(name, path, target)
sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from jax_transformer import cli
"""


def test_where_pytorch_is_not_installed_everything_but_the_twin_works(weights, config_file, tmp_path):
    commands = [
        ["convert", weights, tmp_path / "run", "--config", config_file],
        ["convert", tmp_path / "run", tmp_path / "a.pt"],
        ["convert", tmp_path / "a.pt", tmp_path / "again.safetensors", "--preset", "lesson10", "--set", "num_heads=3"],
    ]
    program = WITHOUT_TORCH + "".join(f"assert cli.main({list(map(str, command))!r}) == 0\n" for command in commands)
    done = subprocess.run([sys.executable, "-c", program], env=runs.environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("there and back bit for bit (PyTorch is not installed") == 3
    assert (tmp_path / "again.safetensors").read_bytes() == weights.read_bytes()
