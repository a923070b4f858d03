"""Checkpoints of T5X: their arrays, names, sizes and configuration, and what is refused."""

import contextlib
import gzip
import json
import random
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import serialization

import jax_transformer as jt
from jax_transformer import cli
from jax_transformer.architectures import huggingface_config
from jax_transformer.config import EXECUTION, Positions
from jax_transformer.config.model import MOST_LAYERS
from jax_transformer.convert.models import ModelDescription
from jax_transformer.errors import ConfigError, InputError, UnsafeFileError
from jax_transformer.extras.toolkits import msgpack
from jax_transformer.extras.toolkits.t5x import t5x_checkpoint, t5x_format, zarr
from jax_transformer.extras.toolkits.t5x import t5x_names as layouts
from jax_transformer.formats import registry
from jax_transformer.formats.base import Destination
from jax_transformer.storage import tensors
from jax_transformer.storage.tensors import LazyTensor, TensorInfo
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Rule
from parity_tests import t5x_files
from parity_tests.t5x_files import Sizes
from parity_tests.unit import helpers, runs

GATED: dict[str, Any] = {"activations": ("gelu", "linear"), "via_embedding": False}
SMALL: dict[str, Any] = {"emb": 4, "head_dim": 2, "mlp": 5, "encoder": 1, "decoder": 1, "vocab": 7}


def infos(arrays: t5x_files.Arrays) -> dict[str, TensorInfo]:
    return {name: TensorInfo(array.shape, array.dtype.name) for name, array in arrays.items()}


def written(folder: Path, sizes: Sizes | None = None, **options: Any) -> Path:
    sizes = sizes or Sizes(**SMALL)
    t5x_files.write(folder, t5x_files.params(sizes, dtype=np.float32), **options)
    (folder / "config.gin").write_text(sizes.gin())
    return folder


def read(folder: Path) -> t5x_files.Arrays:
    return {name: tensor.read() for name, tensor in t5x_checkpoint.find(folder).weights.items()}


# Arrays


@pytest.mark.parametrize(
    "options",
    [
        {"metadata": {"compressor": None}},
        {"metadata": {"compressor": {"id": "zlib", "level": 9}}},
        {"metadata": {"dimension_separator": "/"}, "chunks": lambda shape: [2] * len(shape)},
        {"kvstore": {"driver": "gcs", "bucket": "t5x-dummy-bucket"}},
    ],
    ids=["plain", "zlib", "folders of chunks", "written to gcs"],
)
def test_arrays_are_read_as_tensorstore_reads_them(options, tmp_path):
    weights = t5x_files.params(Sizes(**SMALL), dtype=np.float32)
    assert not runs.differing(read(t5x_files.write(tmp_path / "t5x", weights, **options)), weights)


def test_version_2_keeps_the_bits_of_bfloat16_as_integers(tmp_path):
    weights = t5x_files.params(Sizes(**SMALL), dtype=ml_dtypes.bfloat16)
    stored = {name: array.view(np.uint16) for name, array in weights.items()}
    assert not runs.differing(read(t5x_files.write(tmp_path / "t5x", stored, version=2)), weights)


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    # The first six are what T5X's own _choose_chunk_shape returns
    [
        ((32128, 4096), 4, (4016, 4096)),
        ((4096, 24, 10240), 4, (512, 24, 1024)),
        ((250112, 1024), 2, (31264, 1024)),
        ((4096, 4096), 4, (4096, 4096)),
        ((5120,), 4, (5120,)),
        ((), 4, ()),
        ((1_000_003, 37), 4, (453_438, 37)),
    ],
)
def test_chunks_are_those_of_t5x_unless_there_would_be_a_million(shape, itemsize, expected):
    assert zarr.chunk_shape(shape, itemsize) == expected


def test_an_array_of_many_chunks_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(zarr, "CHUNK", 40)
    monkeypatch.setattr(zarr, "_MOST_CHUNKS", 5)
    array = np.arange(7 * 5 * 3, dtype=np.float32).reshape(7, 5, 3)
    zarr.write(tmp_path / "a", array)
    stored = zarr.open_array(tmp_path / "a")
    assert stored.chunks == (1, 5, 3) and [*stored.indices()] == [(i, 0, 0) for i in range(7)]
    np.testing.assert_array_equal(stored.read(), array)


def test_an_array_of_one_number_is_the_chunk_0(tmp_path):
    zarr.write(tmp_path / "a", np.array(3, np.float32))
    assert {path.name for path in (tmp_path / "a").iterdir()} == {".zarray", "0"}
    assert zarr.open_array(tmp_path / "a").read() == 3


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_layers_of_one_array_take_the_memory_of_one_array(axis, tmp_path):
    stack = np.random.default_rng(0).normal(size=(4, 300, 200)).astype(np.float32)
    stack = np.ascontiguousarray(np.moveaxis(stack, 0, axis))
    zarr.write(tmp_path / "a", stack)
    shape = np.take(stack, 0, axis).shape
    axes = {0: "part a b", 1: "a part b", -1: "a b part"}[axis]
    rule = Rule("a", tuple("0123"), f"{axes} -> a b")
    stored = {"a": zarr.open_array(tmp_path / "a").lazy()}
    arrays = t5x_format._to_flax([rule], stored, dict.fromkeys("0123", shape))
    with helpers.memory_below(stack.nbytes + 3 * stack.nbytes // 4 + 2_200_000):
        for number in range(4):
            expected = np.take(stack, number, axis)
            np.testing.assert_array_equal(arrays[str(number)].read(), expected)
    again = rules.to_torch_lazily([rule], arrays)["a"].read()
    assert (again.shape, again.tobytes()) == (stack.shape, stack.tobytes())


def test_each_array_of_several_layers_is_decompressed_once(monkeypatch):
    reads = []

    def stored(name: str) -> LazyTensor:
        array = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
        return LazyTensor(TensorInfo((4, 3, 2), "float32"), lambda: reads.append(name) or array)

    table = [Rule(name, tuple(f"{name}{i}" for i in range(4)), "part a b -> a b") for name in "xy"]
    names = [f"{name}{i}" for i in range(4) for name in "xy"]
    arrays = t5x_format._to_flax(table, {n: stored(n) for n in "xy"}, dict.fromkeys(names, (3, 2)))
    assert [arrays[name].read()[0, 0] for name in names] == [0, 0, 6, 6, 12, 12, 18, 18]
    assert reads == ["x", "y"]


def test_layers_of_one_array_have_one_dtype():
    arrays = tensors.in_memory({"0": np.ones(3), "1": np.ones(3, np.float32)})
    with pytest.raises(InputError, match="a: its parts are float32 and float64"):
        rules.to_torch_lazily([Rule("a", ("0", "1"), "part a -> a")], arrays)


# Names and sizes


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_the_axis_of_the_layers_is_found(axis):
    sizes = Sizes(**GATED, scalable=True, scan_axis=axis, encoder=2, decoder=6)
    layout = layouts.find(infos(t5x_files.params(sizes)))
    assert (layout.encoder_layers, layout.decoder_layers) == (2, 6)
    assert layout.shapes() == {name: a.shape for name, a in t5x_files.params(sizes).items()}


@pytest.mark.parametrize("layers", [MOST_LAYERS, MOST_LAYERS + 1])
def test_layers_are_read_up_to_their_limit(layers):
    sizes = Sizes(**SMALL | {"encoder": 2, "decoder": 3, "scan_axis": 1}, scalable=True)
    described = {
        name: TensorInfo((x.shape[0], layers, *x.shape[2:]), x.dtype)
        if name.startswith("decoder.decoder.")
        else x
        for name, x in infos(t5x_files.params(sizes)).items()
    }
    if layers > MOST_LAYERS:
        with pytest.raises(InputError, match=f"{layers:,} layers, and no model has so many"):
            layouts.find(described, 1)
    else:
        assert layouts.find(described, 1).decoder_layers == layers


def test_an_axis_that_shapes_do_not_show_has_to_be_given(tmp_path, capsys):
    same = {"mlp": 4, "heads": 4, "encoder": 4, "decoder": 4}
    sizes = Sizes(**GATED | SMALL | same, scalable=True, scan_axis=0)
    folder = written(tmp_path / "t5x", sizes)
    assert cli.main(["inspect", str(folder)]) == 0
    assert cli.main(["convert", str(folder), str(tmp_path / "run")]) == 3
    assert "the layers may be axis 1 or 0 of the arrays" in capsys.readouterr().err
    expected = np.asarray(read(folder)["encoder.encoder.mlp.wi_0.kernel"][3])
    with pytest.raises(InputError, match="axis 1 or 0"):
        jt.convert.load(folder)
    names = registry.open(folder, scan_axis=0).stored_names
    kernel = names["encoder.blocks.3.feed_forward.up.kernel"]
    assert kernel == "encoder.encoder.mlp.wi_0.kernel[layer 3 of axis 0]"
    assert names["encoder.final_norm.scale"] == "encoder.encoder_norm.scale"
    model = jt.convert.load(folder, scan_axis=0)
    np.testing.assert_array_equal(model.encoder.blocks[3].feed_forward.up.kernel[...], expected)
    (folder / "config.gin").write_text(sizes.gin() + "network.T5Config.param_scan_axis = 0\n")
    for asked, axis in ((None, 0), (1, 1)):
        opened = registry.open(folder, scan_axis=asked)
        assert opened.layout.scan_axis == axis and folder / "config.gin" in opened.files


WO, NORM = "decoder.layers_2.mlp.wo.kernel", "decoder.decoder_norm.scale"
RELATIVE = "encoder.relpos_bias.rel_embedding"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_embedder.embedding": None}, "missing token_embedder.embedding"),
        ({"encoder.layers_1.mlp.wo.kernel": None}, "missing encoder.layers_1.mlp.wo"),
        ({"encoder.layers_1.mlp.bias": np.ones(3)}, "unexpected .*mlp.bias"),
        ({WO: np.ones((12, 14))}, rf"mis-shaped {WO}.*\(12, 14\), the model \(14, 12\)"),
        ({RELATIVE: np.ones((0, 32))}, r"rel_embedding has the shape \(0, 32\)"),
        ({RELATIVE: np.ones(3)}, "2 axes"),
        ({NORM: np.ones(12, np.int32)}, "decoder_norm.scale is int32"),
    ],
)
def test_arrays_that_are_no_t5_are_named(change: dict[str, np.ndarray | None], message):
    changed = t5x_files.params(Sizes()) | change
    arrays = {name: array for name, array in changed.items() if array is not None}
    with pytest.raises(InputError, match=message):
        layouts.find(infos(arrays))


@pytest.mark.parametrize("axis", [-3, 9])
def test_an_axis_that_arrays_do_not_have_is_refused(axis):
    sizes = Sizes(**GATED, scalable=True, scan_axis=1)
    with pytest.raises(InputError, match=f"param_scan_axis={axis} is not one of 1, 0, -1, -2"):
        layouts.find(infos(t5x_files.params(sizes)), axis)


def test_changed_names_and_shapes_are_refused_or_fit_a_layout():
    draw = random.Random(0)
    kinds: list[dict[str, Any]] = [{}, {"scalable": True}, {"scalable": True, "scan_axis": 1}]
    for _ in range(100):
        described = infos(t5x_files.params(Sizes(**SMALL, **draw.choice(kinds))))
        for _ in range(draw.choice((1, 2))):
            name = draw.choice(list(described))
            shape = list(described.pop(name).shape)
            at = draw.randrange(len(shape))
            other = draw.choice((name, name.replace("encoder", "decoder"), f"{name}.more"))
            shape[at : at + draw.randrange(2)] = [draw.choice((0, 1, 3, 4, 7, 2**40))]
            described[other] = TensorInfo(tuple(shape), "float32")
        try:
            layout = layouts.find(described, draw.choice((None, 0, 1)))
            assert layout.shapes() == {name: info.shape for name, info in described.items()}
        except InputError as error:
            assert str(error).isprintable()


# The configuration


def test_the_activation_is_not_guessed(tmp_path, capsys):
    folder = written(tmp_path / "t5x", Sizes(**GATED | SMALL))
    (folder / "config.gin").unlink()
    run = [str(folder), str(tmp_path / "run"), "--dry-run", "--json"]
    t5 = ["--preset", "t5"]
    for more, message in (
        ([], "no config.gin tells mlp_activations: give --preset t5"),
        (t5, "has wi_0 and wi_1, and the preset t5 does not say"),
        ([*t5, "--set", "activation=swiglu"], "give one of relu, gelu_tanh, silu"),
        (["--preset", "lesson10"], "is a model of T5X"),
    ):
        assert cli.main(["convert", *run, *more]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["convert", *run, *t5, "--set", "activation=gelu_tanh"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["plan"]["inferred"]["num_heads"] == 3 and data["kept"] == {"dropout": 0.1}
    moves = {tuple(move["target"]): move["source"] for move in data["plan"]["moves"]}
    gate = moves["encoder.blocks.0.feed_forward.gate.kernel",]
    assert gate == ["encoder.layers_0.mlp.wi_1.kernel"]
    config = {"model_type": "t5", "vocab_size": 7, "d_model": 4, "d_kv": 2, "d_ff": 5}
    config |= {"num_layers": 1, "num_heads": 3, "tie_word_embeddings": False}
    config |= {"feed_forward_proj": "gated-silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = ["--config", str(tmp_path / "config.json")]
    assert cli.main(["convert", *run, *described]) == 0
    description = ModelDescription(described[1], None, {"dropout": 0.25})
    assert description.settle(registry.open(folder)).config.dropout == 0.25


GIN = """
from __gin__ import dynamic_registration
include 't5x/examples/t5/t5_1_1/base.gin'
seqio.SentencePieceVocabulary.sentencepiece_model_file = \\
    'gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model'
network.T5Config:
  emb_dim = 4
  dropout_rate = %DROPOUT_RATE
  mlp_activations = (
      'gelu',
      'linear')
DROPOUT_RATE = 0.25  # a macro, after its use and after the block
"""


def test_gin_is_read_line_by_line(tmp_path):
    folder = written(tmp_path / "model/checkpoint_1", Sizes(**GATED | SMALL))
    (folder / "config.gin").unlink()
    (tmp_path / "model/config.gin").write_text(GIN)
    config = registry.open(folder).config
    assert (config.architecture, config.dropout) == ("mt5", 0.25)
    assert (config.encoder.gated, config.encoder.activation.value) == (True, "gelu_tanh")
    (folder / "config.gin").write_text("dense.MlpBlock.activations = ('relu', 'linear')")
    assert registry.open(folder).config.encoder.activation.value == "relu"
    for text, message in (
        ("network.T5Config.mlp_activations = ('gelu',)", "do not belong to the kernels wi_0"),
        ("network.T5Config.mlp_activations = ('exp', 'linear')", "are none of"),
        ("x" * 1_000_001, "1,000,001 bytes, more than 1,000,000"),
    ):
        (folder / "config.gin").write_text(text)
        with pytest.raises((InputError, UnsafeFileError), match=message):
            registry.open(folder)
    (folder / "config.gin").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"config\.gin: is not text in UTF-8"):
        registry.open(folder)


def test_a_bracket_that_is_never_closed_takes_only_a_part_of_a_gin():
    short, long = (["a.b = (", *["  1,"] * count, "c.d = 2"] for count in (3, 6_000))
    assert t5x_format._statements(short) == ["a.b = ( 1, 1, 1, c.d = 2"]
    assert t5x_format._statements(long)[-1] == "c.d = 2"
    assert t5x_format._statements(["a = (1,  # one", " 2)", "b = 3"]) == ["a = (1, 2)", "b = 3"]


def test_gin_in_the_folder_of_a_checkpoint_goes_first_and_its_dropout_counts(tmp_path):
    folder = written(tmp_path / "t5x", Sizes(**SMALL))
    (folder / "config.gin").unlink(missing_ok=True)
    text = "network.T5Config.mlp_activations = ('relu',)\nnetwork.T5Config.dropout_rate = "
    for rate, config in ((0.25, folder.parent / "config.gin"), (0.0, folder / "config.gin")):
        config.write_text(f"{text}{rate}\n")
        assert registry.open(folder).config.dropout == rate


@pytest.mark.parametrize(("axis", "expected"), [(None, 1), (0, 0), (1, 1), (-1, -1), (-2, -2)])
def test_layers_of_both_stacks_are_written_along_the_axis_that_is_asked_for(axis, expected):
    config = jt.preset("t5", num_layers=2)
    per_block = replace(config.encoder, positions=Positions.RELATIVE_PER_BLOCK)
    decoder = replace(config.decoder, positions=Positions.RELATIVE_PER_BLOCK, layers=3)
    config = replace(config, encoder=per_block, decoder=decoder, architecture="umt5")
    layout = layouts.layout_of(config, scan_layers=True, scan_axis=axis)
    assert (layout.scan_axis, layout.encoder_layers, layout.decoder_layers) == (expected, 2, 3)
    gin = t5x_format.to_gin(config, layout)
    assert f"scan_layers = True\nnetwork.T5Config.param_scan_axis = {expected}\n" in gin
    assert layouts.layout_of(config).scan_axis is None
    assert "scan_layers = False\n" in t5x_format.to_gin(config, layouts.layout_of(config))


def test_a_preset_goes_before_the_gin_of_a_checkpoint_that_is_loaded(tmp_path):
    folder = written(tmp_path / "t5x", Sizes(**GATED | SMALL))
    assert registry.open(folder).config.encoder.activation.value == "gelu_tanh"
    model = jt.convert.load(folder, preset="t5", activation="silu")
    assert model.config.encoder.activation.value == "silu"
    kernel = read(folder)["decoder.layers_0.mlp.wi_1.kernel"]
    np.testing.assert_array_equal(model.decoder.blocks[0].feed_forward.gate.kernel[...], kernel)


# Commands


def test_the_names_of_an_index_have_jax_s_order_whatever_theirs_is(tmp_path):
    weights = tensors.in_memory(t5x_files.params(Sizes(**SMALL), dtype=np.float32))
    for folder, names in (("a", [*weights]), ("b", [*weights][::-1])):
        t5x_checkpoint.write(tmp_path / folder, {name: weights[name] for name in names}, 3)
    one, other = ((tmp_path / folder / "checkpoint").read_bytes() for folder in "ab")
    target = msgpack.tree(tmp_path / "a/checkpoint")["optimizer"]["target"]
    order = [keys for keys, _ in msgpack.leaves(tmp_path, target, stop="kvstore")]
    assert one == other and order == sorted(order)


def test_inspect_lists_the_moments_of_adafactor_and_checks_every_chunk(tmp_path, capsys):
    weights = t5x_files.params(Sizes(**SMALL), dtype=np.float32)
    folder = tmp_path / "checkpoint_7"
    t5x_files.write(folder, weights, state=t5x_files.adafactor(weights))
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    shapes = {name: entry["shape"] for name, entry in data["tensors"].items()}
    kernel = "encoder.layers_0.mlp.wi.kernel"
    assert data["kind"] == "checkpoint of T5X" and data["values"] == {"version": 3}
    assert shapes[f"target.{kernel}"] == [4, 5] and shapes["state.step"] == []
    moments = [shapes[f"state.param_states.{kernel}.{name}"] for name in ("v_row", "v_col", "m")]
    assert moments == [[4], [5], [1]]
    chunk = folder / f"target.{kernel}/0.0"
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 4
    chunk.write_bytes(bytes(content))
    assert cli.main(["inspect", str(folder)]) == 3
    assert str(chunk) in capsys.readouterr().err
    for step in (8, 10, 9):  # of which the newest is meant
        newer = tmp_path / f"checkpoint_{step}"
        newer.mkdir()
        shutil.copy(folder / "checkpoint", newer)
    assert cli.main(["inspect", str(tmp_path)]) == 3
    assert f"did you mean {tmp_path / 'checkpoint_10'}?" in capsys.readouterr().err


def test_what_t5x_has_no_network_for_is_refused(tmp_path, capsys):
    folder = written(tmp_path / "t5x")
    out = [str(tmp_path / "out"), "--to", "t5x"]
    sharded = ["--preset", "t5", "--set", "activation=relu"]
    for extra, message in (
        (["--scan-layers"], "T5X scans only layers that have their own"),
        (["--param-scan-axis", "1"], "no array holds several layers"),
        (["--preset", "t5", "--set", "norm_epsilon=1e-5"], "norm_epsilon=1e-05, and T5X has 1e-06"),
        (
            ["--preset", "t5", "--set", "logit_scale=none"],
            "logit_scale=none, and T5X has inverse_sqrt",
        ),
        ([*sharded, "--shard-size", "1GB"], "not a Hugging Face"),
    ):
        assert cli.main(["convert", str(folder), *out, *extra]) in (2, 3)
        assert message in capsys.readouterr().err
    out = [str(tmp_path / "hf"), "--to", "hf", "--scan-layers"]
    assert cli.main(["convert", str(folder), *out]) == 2
    assert "not a checkpoint of T5X, which --to t5x makes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("positions", ["relative", "relative_per_block"])
def test_every_field_comes_back_from_a_checkpoint_or_is_refused_by_name(positions, tmp_path):
    sides = {f"{stack}.positions": positions for stack in ("encoder", "decoder")}
    family = "t5" if positions == "relative" else "umt5"
    config = helpers.tiny("t5", source_vocab_size=13, architecture=family, **sides)
    refused = set()
    for field, changed in helpers.with_one_field_changed(config):
        to = Destination(t5x_format.FORMAT, tmp_path, config=changed)
        try:
            (gin,) = t5x_format.FORMAT.files(to).values()
        except (ConfigError, InputError) as error:
            assert f"{field.rpartition('.')[2]}=" in str(error), error
            refused.add(field)
            continue
        (tmp_path / "config.gin").write_bytes(gin)
        gin = t5x_format.find_gin(tmp_path)
        again = t5x_format.configuration(layouts.layout_of(changed), gin)
        assert not huggingface_config.differences(changed, again), field
        assert again.dropout == changed.dropout
    assert {"eos_id", "encoder.mixing", "decoder.d_ff", "decoder.relative_buckets"} < refused
    assert not refused & {"d_model", "encoder.layers", "max_length", *EXECUTION}
    fewer = {f"{stack}.relative_buckets": 16 for stack in ("encoder", "decoder")}
    to = Destination(t5x_format.FORMAT, tmp_path, config=config.with_sizes(**fewer))
    with pytest.raises(ConfigError, match="relative_buckets=16, and T5X has 32"):
        t5x_format.FORMAT.files(to)


def test_only_weights_are_replaced(tmp_path, capsys):
    source = written(tmp_path / "source")
    plain, trained = written(tmp_path / "plain"), tmp_path / "trained"
    weights = t5x_files.params(Sizes(**SMALL), dtype=np.float32)
    t5x_files.write(trained, weights, state=t5x_files.adafactor(weights))
    (plain / "state.step").mkdir()
    convert = ["convert", str(source), "--to", "t5x", "--no-check", "--force"]
    assert cli.main([*convert, str(plain)]) == 0
    assert cli.main([*convert, str(trained)]) == 3
    assert "holds more than weights (state.param_states." in capsys.readouterr().err


# Hostile files


def zarray(folder: Path) -> Path:
    return folder / "target.token_embedder.embedding/.zarray"


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"compressor": {"id": "blosc", "cname": "lz4"}}, 3, "compressor 'blosc' is not supported"),
        ({"compressor": {"id": ["gzip"]}}, 3, "is not supported"),
        ({"filters": [{"id": "delta"}]}, 3, "filters"),
        ({"order": "F"}, 3, "order 'F'"),
        ({"zarr_format": 3}, 3, "zarr 2"),
        ({"dtype": "|O"}, 3, "dtype '|O'"),
        ({"dtype": [["a", "<f4"]]}, 3, "dtype"),
        ({"more": 1}, 3, "unknown key 'more'"),
        ({"dimension_separator": "../"}, 3, "dimension_separator"),
        ({"shape": [7, 40]}, 3, "its chunk 0.1 is missing"),
        ({"shape": [7, 40], "chunks": [7, 40]}, 3, "has the shape [7, 4], and its folder"),
        ({"shape": [2**40, 4], "chunks": [2**40, 4]}, 4, "cannot hold them"),
        ({"shape": [2**40, 4], "chunks": [1, 4]}, 3, "its chunk 1.0 is missing"),
        ({"shape": [2**60, 4]}, 4, "refused: shape"),
        ({"shape": [-7, 4]}, 4, "refused: shape"),
        ({"shape": [7, 4.0]}, 4, "refused: shape"),
        ({"shape": [0, 4]}, 3, "has no numbers"),
        ({"chunks": [0, 4]}, 3, "do not divide"),
        ({"chunks": [7]}, 3, "do not divide"),
        ({"shape": [1] * 33}, 3, "and not a list of lengths"),
        ({"shape": [1] * 32}, 3, "do not divide"),
        ({"chunks": [7, 2**40]}, 4, "cannot hold them"),
        ({"chunks": [9, 9]}, 3, "does not hold the 324 bytes of a chunk"),
        ({"compressor": None}, 3, "a chunk has 112"),
    ],
)
def test_false_descriptions_of_an_array_are_refused(change, code, message, tmp_path, capsys):
    path = zarray(written(tmp_path / "t5x"))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert cli.main(["inspect", str(tmp_path / "t5x")]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_false_chunks_are_refused_within_their_size(tmp_path):
    chunk = zarray(written(tmp_path / "t5x")).with_name("0.0")
    good = chunk.read_bytes()
    for content, message in (
        (b"", "cannot hold them"),
        *((good[:-cut], "does not hold the 112 bytes") for cut in (9, 1)),
        (good + b"x", "has bytes after its chunk"),
        (good + good, "has bytes after its chunk"),
        (zlib.compress(b"\0" * 112), "is damaged"),
        (gzip.compress(bytes(8_000_000), 1), "does not hold the 112 bytes"),
        (None, "its chunk 0.0 is missing"),
    ):
        chunk.unlink() if content is None else chunk.write_bytes(content)
        refused = pytest.raises((InputError, UnsafeFileError), match=message)
        with helpers.memory_below(4_000_000), refused:
            zarr.open_array(chunk.parent).read()


@pytest.mark.parametrize("size", [11, 12, 13])
def test_a_plain_chunk_has_as_many_bytes_as_it_declares(size, tmp_path):
    zarr.write(tmp_path / "a", np.zeros(3, np.float32))
    about = json.loads((tmp_path / "a/.zarray").read_text())
    (tmp_path / "a/.zarray").write_text(json.dumps(about | {"compressor": None}))
    (tmp_path / "a/0").write_bytes(bytes(size))
    refused = pytest.raises(InputError, match=f"a/0: has {size} bytes, and a chunk has 12")
    with contextlib.nullcontext() if size == 12 else refused:
        assert zarr.open_array(tmp_path / "a").read().tolist() == [0, 0, 0]


OTHER = {"driver": "file", "path": "target.encoder.encoder_norm.scale"}


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"kvstore": {"driver": "file", "path": "../other"}}, 4, "is not a plain name"),
        ({"kvstore": {"driver": "file", "path": "/etc"}}, 4, "is not a plain name"),
        ({"kvstore": {"driver": "file", "path": ".."}}, 4, "is not a plain name"),
        ({"kvstore": {"driver": "file", "path": "checkpoint"}}, 4, "is not a plain name"),
        ({"kvstore": {"driver": "file", "path": "a" * 300}}, 4, "is not a plain name"),
        ({"kvstore": {"driver": "http", "path": "a"}}, 3, "is in a store 'http'"),
        ({"kvstore": {"driver": "file", "path": "nothing"}}, 3, "no such file"),
        ({"kvstore": OTHER}, 4, "one fol"),
        ({"driver": "zarr3"}, 3, "by the driver 'zarr3'"),
        ({"dtype": "int8"}, 3, "is 'int8', and in its folder float32"),
        ({"transform": {"input_exclusive_max": [7, 3]}}, 3, "is a part of its folder"),
        ({"transform": [1]}, 3, "is a part of its folder"),
    ],
)
def test_false_descriptions_in_the_index_are_refused(change, code, message, tmp_path, capsys):
    index = written(tmp_path / "t5x") / "checkpoint"
    tree = serialization.msgpack_restore(index.read_bytes())
    tree["optimizer"]["target"]["decoder"]["decoder_norm"]["scale"] |= change
    index.write_bytes(serialization.msgpack_serialize(tree))
    assert cli.main(["inspect", str(index.parent)]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_index_may_describe_the_whole_of_an_array_in_other_words(tmp_path):
    """Other versions of TensorStore did."""
    index = written(tmp_path / "t5x") / "checkpoint"
    tree = serialization.msgpack_restore(index.read_bytes())
    expected, leaf = read(index.parent), tree["optimizer"]["target"]["token_embedder"]["embedding"]
    leaf["path"] = leaf["kvstore"].pop("path")
    for longest in ([7, 4], [[7], [4]]):
        leaf["transform"] = {"input_inclusive_min": [0, 0], "input_exclusive_max": longest}
        index.write_bytes(serialization.msgpack_serialize(tree))
        assert not runs.differing(read(index.parent), expected)


def test_what_is_written_is_read_back_and_compared(tmp_path, monkeypatch, capsys):
    source, write = written(tmp_path / "t5x"), zarr.write
    monkeypatch.setattr(zarr, "write", lambda folder, array: write(folder, array + 1))
    out = [str(tmp_path / "out"), "--to", "t5x", "--no-check"]
    assert cli.main(["convert", str(source), *out]) != 0 and not (tmp_path / "out").exists()
    assert "differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"version": 1, "optimizer": {}}, "is version 1 of T5X's checkpoints"),
        ({"version": 3, "optimizer": [1]}, "is version 3"),
        ({"version": 3, "optimizer": {"target": {"a": "PLACEHOLDER://a"}}}, "'PLACEHOLDER://a'"),
    ],
)
def test_other_indexes_are_refused(tree, message, tmp_path, capsys):
    (tmp_path / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    assert cli.main(["inspect", str(tmp_path)]) == 3
    assert message in capsys.readouterr().err
