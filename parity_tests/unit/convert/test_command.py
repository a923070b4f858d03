"""``convert``: sizes from shapes, plans, strictness, the self-check, and its functions."""

import json
import sys

import numpy as np
import pytest
import safetensors.numpy

import jax_transformer as jt
from jax_transformer.architectures import registry
from jax_transformer.convert import conversion, models
from jax_transformer.convert.models import ModelDescription
from jax_transformer.errors import ConfigError, DifferentError, InputError
from jax_transformer.formats import registry as formats
from jax_transformer.storage import pt, tensors
from jax_transformer.storage.pt import writer
from jax_transformer.weights import rules
from parity_tests import preset_names
from parity_tests.unit import helpers, runs
from parity_tests.unit.conversions import config_of, convert, state_of, write

STACKS = ("encoder", "decoder")


@pytest.mark.parametrize("preset", preset_names.different_quick(preset_names.TEXT))
def test_sizes_are_read_from_the_shapes(preset):
    """Every size but num_heads; in deep_dive that too, as its heads are as wide as the model."""
    multiples = registry.presets()[preset].multiples
    config = config_of(preset, encoder_layers=3, **({} if "d_ff" in multiples else {"d_ff": 20}))
    shown = registry.model_weights(config).shapes
    sizes = {} if "head_dim" in multiples else {"num_heads": 3}
    rows = [shape[:1] for name, shape in shown["torch"].items() if "pos" in name]
    hidden = {} if (20,) in rows else {"max_length": 20}
    for names in ("torch", "flax") if preset in ("lesson10", "deep_dive") else ("torch",):
        inferred = inferred_sizes(preset, sizes | hidden, shown[names], names)
        assert inferred.config == config
        assert not inferred.sizes.keys() & (sizes | hidden).keys()
    assert "num_heads" in inferred.sizes or sizes


def inferred_sizes(preset: str, sizes: dict, shapes: dict, names: str = "torch") -> models.Settled:
    return models.infer(
        registry.presets()[preset],
        sizes,
        shapes,
        lambda config: registry.model_weights(config).shapes[names],
    )


@pytest.mark.parametrize(
    ("preset", "settings", "fields"),
    [
        ("lesson10", {"d_model": 12}, ["d_model"]),
        ("lesson10", {"d_ff": 20}, ["d_ff"]),
        ("lesson10", {"num_layers": 2}, ["encoder.layers", "decoder.layers"]),
        ("lesson10", {"encoder_layers": 2}, ["encoder.layers"]),
        ("lesson10", {"target_vocab_size": 13}, ["target_vocab_size"]),
        ("small", {"vocab_size": 13}, ["source_vocab_size", "target_vocab_size"]),
    ],
)
def test_sizes_that_are_set_are_not_read_from_the_shapes(preset, settings, fields):
    config = config_of(preset, d_ff=20)
    shapes = registry.model_weights(config).shapes["torch"]
    length = {"max_length": 20} if preset == "small" else {}
    usual = inferred_sizes(preset, {"num_heads": 3, **length}, shapes)
    inferred = inferred_sizes(preset, {"num_heads": 3, **length, **settings}, shapes)
    assert inferred.config == usual.config == config
    assert usual.sizes.keys() - inferred.sizes.keys() == {*fields} <= usual.sizes.keys()


def test_sizes_that_no_shape_shows_are_the_preset_s_and_are_named():
    config = jt.preset("small", vocab_size=13, d_model=16, d_ff=20)
    shapes = registry.model_weights(config).shapes["torch"]
    for settings in ({}, {"num_heads": 2}, {"max_length": 9}, {"head_dim": 5}):
        inferred = inferred_sizes("small", settings, shapes)
        hidden = {name: getattr(config, name) for name in ("num_heads", "max_length")}
        assert inferred.from_preset == {k: v for k, v in hidden.items() if k not in settings}


def test_settings_change_the_configuration_of_a_file(config, config_file, weights):
    description = ModelDescription(str(config_file), changes={"max_length": 7})
    settled = description.settle(formats.open(weights))
    assert settled.config == config.with_sizes(max_length=7) != config


def test_sizes_of_a_model_that_reads_sound_are_read_from_the_shapes():
    sizes = {"vocab_size": 13, "num_heads": 3, "d_model": 12, "d_ff": 20, "mel_bins": 7}
    config = registry.presets()["whisper_tiny"].with_sizes(**sizes, mel_frames=22)
    shapes = registry.model_weights(config).shapes["torch"]
    inferred = inferred_sizes("whisper_tiny", {"num_heads": 3}, shapes)
    assert inferred.config == config
    assert {"mel_bins", "mel_frames", "target_vocab_size"} <= inferred.sizes.keys()


def test_equal_sizes_are_distinguished():
    config = jt.preset("lesson10", **helpers.SQUARE)
    shapes = registry.model_weights(config).shapes["torch"]
    assert inferred_sizes("lesson10", {"num_heads": 4}, shapes).config == config


def test_a_tensor_that_is_missing_from_the_last_layer_is_no_layer_less(config):
    shapes = dict(registry.model_weights(config).shapes["torch"])
    for name in [name for name in shapes if name.startswith("decoder.layers.1.norm1.")]:
        del shapes[name]
    assert inferred_sizes("lesson10", {"num_heads": 3}, shapes).config == config


def test_a_size_is_the_one_that_most_tensors_have(config):
    """Also if the first or the last has another width."""
    shapes = registry.model_weights(config).shapes["torch"]
    names = [name for name, shape in shapes.items() if 12 in shape]
    for name in (names[0], names[-1]):
        other = {name: tuple(24 if length == 12 else length for length in shapes[name])}
        assert inferred_sizes("lesson10", {"num_heads": 3}, shapes | other).config == config


def test_a_dry_run_names_every_tensor_once_and_writes_nothing(console, config, weights, tmp_path):
    options = ["--preset", "lesson10", "--set", "num_heads=3"]
    command = ["convert", weights, tmp_path / "new", *options, "--dry-run"]
    code, out, err = console.say(*command, "--json", "--dtype", "float16")
    assert (code, err) == (0, "") and list(tmp_path.iterdir()) == []
    plan = json.loads(out)["plan"]
    model = registry.model_weights(config)
    for side, names in (("source", model.shapes["torch"]), ("target", model.shapes["flax"])):
        assert sorted(name for move in plan["moves"] for name in move[side]) == sorted(names)
    name = "encoder.layers.0.self_attn.in_proj_weight"
    (packed,) = (move for move in plan["moves"] if move["source"] == [name])
    assert packed["operation"] == "split, transpose, cast"
    assert packed["before"] == [{"shape": [36, 12], "dtype": "float32"}]
    assert packed["after"] == [{"shape": [12, 12], "dtype": "float16"}] * 3
    assert plan["bytes"] == 2 * sum(int(np.prod(shape)) for shape in model.shapes["flax"].values())
    text = console.say(*command)[1]
    assert (
        "  pos_enc.pe [20x1x12 float32] -> encoder.positions.table + decoder.positions.table "
        "[20x12 float32]: copy to each, squeeze axis 1" in text
    )
    assert text.endswith("nothing was written\n")


def test_a_dtype_that_a_file_cannot_hold_is_refused_unless_its_tensor_is_ignored(tmp_path):
    """Before anything is read."""
    arrays = {"weight": np.ones(2, np.float32), "odd": np.ones(2, np.complex128)}
    writer.save(tmp_path / "a.pt", arrays, target="a.pt")
    files = tmp_path / "a.pt", tmp_path / "b.safetensors"
    with pytest.raises(InputError, match=r"b\.safetensors: .* cannot hold odd is complex128$"):
        jt.convert.plan(*files)
    assert [move.source for move in jt.convert.plan(*files, ignore=("odd",)).moves] == [("weight",)]


def test_a_twin_may_put_the_length_first():
    ours = np.arange(3 * 7 * 2).reshape(3, 7, 2)
    for theirs in (ours, ours.swapaxes(0, 1)):
        assert np.array_equal(conversion._batch_first(ours, theirs), theirs)
        assert np.array_equal(conversion._batch_first(theirs, ours), ours)
    assert conversion._batch_first(ours[0, 0], ours).shape == (2,)  # is refused by the check


def test_a_plan_names_the_copies_of_tied_weights(tmp_path):
    config = config_of("small", d_ff=20)
    source = write(tmp_path / "tied.safetensors", state_of(config))
    sizes, copies = {"num_heads": 3, "max_length": 20}, ["src_emb.weight", "linear.weight"]
    plan = jt.convert.plan(source, tmp_path / "new", preset="small", **sizes)
    assert [note.name for note in plan.dropped] == copies and plan.derived == ()
    assert plan.ties == (("tgt_emb.weight", *copies),)
    convert(source, tmp_path / "new", description=ModelDescription(None, "small", sizes))
    back = jt.convert.plan(tmp_path / "new", tmp_path / "back.pt")
    assert [note.name for note in back.derived] == copies and back.dropped == ()
    convert(tmp_path / "new", tmp_path / "back.pt")
    assert pt.ties(tmp_path / "back.pt") == [("tgt_emb.weight", *copies)]
    named = ModelDescription(None, "small", sizes)
    convert(source, tmp_path / "straight.pt", description=named)
    assert pt.ties(tmp_path / "straight.pt") == [("tgt_emb.weight", *copies)]
    alone = {name: array for name, array in state_of(config).items() if name != "tgt_emb.weight"}
    source = write(tmp_path / "alone.safetensors", alone)
    with pytest.raises(InputError, match=r"missing tgt_emb\.weight"):
        convert(source, tmp_path / "other", description=named)


def test_one_error_names_everything_and_nothing_is_written(console, tmp_path):
    state = state_of(config_of("small", d_ff=20))
    up, down = (f"encoder.layers.0.linear{i}.weight" for i in (1, 2))
    state["linear.weight"] = state["linear.weight"] + 1
    state[f"{up[:-2]}th"] = state.pop(up)
    state[down] = state[down].T.copy()
    state["decoder.norm.bias"] = state["decoder.norm.bias"].astype(np.int64)
    source = write(tmp_path / "bad.safetensors", state)
    sizes = ["num_heads=3", "max_length=20", "d_ff=20"]
    words = [
        "5 problems",
        f"missing {up} (20, 12)",
        f"unexpected {up[:-2]}th (20, 12) (did you mean '{up}'?)",
        f"mis-shaped {down}: the checkpoint has (20, 12), the model (12, 20)",
        "decoder.norm.bias is int64",
        "linear.weight differs from tgt_emb.weight, but the model ties them",
    ]
    command = ["convert", source, tmp_path / "new", "--preset", "small", "--set", *sizes]
    console.refused(3, words, *command)
    console.refused(3, words[1:5], *command, "--dry-run")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.safetensors"]


def test_a_state_dict_is_found_in_a_training_checkpoint(console, config_file, weights, tmp_path):
    state, path = safetensors.numpy.load_file(weights), tmp_path / "training.pt"
    writer.write(path, {"model": state, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3})
    options = ["--config", config_file, "--no-check"]
    code, out, _ = console.say("convert", path, tmp_path / "out.safetensors", *options)
    assert code == 0 and "training.pt (model)" in out
    assert "not converted: optimizer" in out and "not converted: epoch" in out
    assert (tmp_path / "out.safetensors").read_bytes() == weights.read_bytes()
    writer.write(path, {"first": state, "second": state})
    command = ["convert", path, tmp_path / "two.safetensors"]
    console.refused(3, ["--key", "first, second"], *command)
    console.refused(3, ["third", "first, second"], *command, "--key", "third")
    assert console.say(*command, "--key", "second")[0] == 0
    assert (tmp_path / "two.safetensors").read_bytes() == weights.read_bytes()


def test_the_check_detects_a_wrong_table(config):
    model = registry.model_weights(config)
    flax = helpers.random_arrays(config)
    state = rules.to_torch(model.table, flax)
    names = [f"{stack}.layers.0.linear{i}.weight" for stack in STACKS for i in (1, 2)]
    wrong = tensors.in_memory(state | {name: state[name] + 1 for name in names})
    with pytest.raises(DifferentError, match=f"self-check: {', '.join(names)} do not come back"):
        conversion.check(config, model.table, wrong, tensors.in_memory(flax))


def test_the_check_detects_copies_of_a_tied_tensor_that_differ():
    model = registry.model_weights(config_of("small"))
    flax = helpers.random_arrays(config_of("small"))
    state = rules.to_torch(model.table, flax)
    apart = {name: array.copy() for name, array in state.items()}
    sides = tensors.in_memory(apart), tensors.in_memory(flax)
    assert conversion.check(config_of("small"), model.table, *sides).method
    apart["src_emb.weight"][0, 0] += 1
    with pytest.raises(DifferentError, match=r"self-check: src_emb\.weight do not come back"):
        conversion.check(config_of("small"), model.table, *sides)


def test_weights_that_do_not_fit_or_are_not_finite_are_not_run(monkeypatch):
    pytest.importorskip("torch")
    state = tensors.in_memory({"a": np.zeros(10, np.float32)})
    needed = 10 * conversion._BYTES_A_NUMBER
    for free, runs_next_to_the_twin in ((None, True), (needed, True), (needed - 1, False)):
        monkeypatch.setattr(conversion, "_available_memory", lambda free=free: free)
        assert (conversion._cannot_run(state) is None) == runs_next_to_the_twin
    for value in (np.nan, np.inf, -np.inf):
        reason = conversion._cannot_run(tensors.in_memory({"a": np.array([0, value])}))
        assert reason is not None and "finite" in reason


def test_blocks_of_two_digits_are_their_own():
    layers = {"encoder": 12, "decoder": 11}
    config = config_of("lesson10", encoder_layers=12, decoder_layers=11)
    blocks = conversion._blocks(config, registry.model_weights(config).table)
    assert blocks == {
        f"{s}.blocks.{i}": f"{s}.layers.{i}" for s in STACKS for i in range(layers[s])
    }


def test_the_library_reads_and_writes_what_the_command_does(config, weights, tmp_path):
    model = jt.convert.load(weights, config)
    assert jt.convert.save(model, tmp_path / "a.safetensors").read_bytes() == weights.read_bytes()
    jt.convert.save(model, tmp_path / "run")
    jt.convert.save(model, tmp_path / "b.pt")
    frozen = {f"frozen/{name}" for name in registry.model_weights(config).frozen}
    assert frozen and {n for n in runs.arrays(tmp_path / "run", 0) if n[0] == "f"} == frozen
    models = [jt.convert.load(tmp_path / path) for path in ("run", "run/checkpoints/0")]
    models.append(jt.convert.load(tmp_path / "b.pt", preset="lesson10", num_heads=3))
    for other in models:
        assert other.config == config
        assert runs.differing(jt.convert.to_torch(other), jt.convert.to_torch(model)) == []
    narrow = jt.convert.load(weights, config, dtype="float16")
    assert narrow.decoder.final_norm.scale[...].dtype == np.float16
    for arguments, sizes, message in (
        ((weights,), {}, "config or preset"),
        ((tmp_path / "run",), {"preset": "lesson10"}, r"its own config\.json"),
        ((weights, config), {"num_heads": 3}, "num_heads"),
        ((weights, config), {"preset": "lesson10"}, "config or preset"),
        ((tmp_path / "run", config), {}, r"its own config\.json"),
        ((tmp_path / "run",), {"num_heads": 3}, r"its own config\.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            jt.convert.load(*arguments, **sizes)
    with pytest.raises(InputError, match="missing"):
        jt.convert.plan(weights, tmp_path / "other", preset="deep_dive", num_heads=3)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/run has its own config\.json"):
        jt.convert.plan(weights, tmp_path / "run/checkpoints/1", preset="lesson10", num_heads=3)
    for language in ("source_lang", "target_lang"):
        with pytest.raises(InputError, match="tokenizer"):
            jt.load(tmp_path / "run", **{language: "de"})
    with pytest.raises(InputError, match="exists"):
        jt.convert.save(model, tmp_path / "run")


def test_without_pytorch_everything_but_the_twin_works(
    console, weights, config_file, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    again = [tmp_path / "again.safetensors", *"--preset lesson10 --set num_heads=3".split()]
    for command in (
        [weights, tmp_path / "run", "--config", config_file],
        [tmp_path / "run", tmp_path / "a.pt"],
        [tmp_path / "a.pt", *again],
    ):
        code, out, err = console.say("convert", *command)
        assert code == 0, err
        assert "there and back bit for bit (PyTorch is not installed" in out
    assert (tmp_path / "again.safetensors").read_bytes() == weights.read_bytes()


@pytest.mark.parametrize(
    "option",
    "config=c preset=small set=d_ff=3 dtype=float32 key=model strip-prefix=a ignore=a rename=a=b "
    "no-check".split(),
)
def test_a_training_state_is_converted_without_options_of_weights(console, option):
    words = [f"--{option.partition('=')[0]}", "not with --training"]
    flag = f"--{option}".replace("=", " ", 1).split()
    console.refused(2, words, "convert", "a.pt", "b", "--training", *flag)
