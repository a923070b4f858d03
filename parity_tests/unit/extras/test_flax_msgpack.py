"""Files of flax's serialization: read as flax reads them, and refused if they are malformed."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import msgpack as library
import numpy as np
import pytest
from flax import serialization, traverse_util

from jax_transformer.errors import InputError, Refusal, UnsafeFileError
from jax_transformer.extras.toolkits import flax_msgpack, msgpack
from jax_transformer.formats import registry
from jax_transformer.storage.tensors import TensorInfo
from parity_tests.unit import helpers, runs


def tree() -> dict[str, Any]:
    random = np.random.default_rng(0)
    embedding = random.normal(size=(5, 4)).astype(np.float32)
    kernel = random.normal(size=(4, 4)).astype(ml_dtypes.bfloat16)
    return {
        "shared": {"embedding": embedding},
        "encoder": {"layers": {"0": {"fc1": {"kernel": kernel, "bias": np.zeros(4, np.float16)}}}},
        # sixteen bytes have their own form in the format
        "scalar": {"scale": np.array(2.5, np.float32)},
        "empty": {"scale": np.zeros((0, 3), bool)},
        "flags": {"bias": np.array([True, False])},
        "long": {"bias": np.arange(300)},
    }


def small() -> bytes:
    """A file to be changed at every byte."""
    kernel = np.arange(4, dtype=ml_dtypes.bfloat16).reshape(2, 2)
    return serialization.msgpack_serialize(
        {"a": {"kernel": kernel, "bias": np.ones(1, np.int8)}, "b": {"scale": np.array(True)}}
    )


def written(folder: Path, content: bytes | dict[str, Any]) -> Path:
    """Write a file of these bytes, or of a tree as flax writes it."""
    path = folder / "flax_model.msgpack"
    if isinstance(content, dict):
        content = serialization.msgpack_serialize(content)
    path.write_bytes(content)
    return path


def read(path: Path) -> dict[tuple[str, ...], np.ndarray]:
    return {keys: msgpack.read(described) for keys, described in msgpack.header(path).items()}


@pytest.mark.parametrize("chunk", [2**30, 24])
def test_files_of_flax_are_read_as_flax_reads_them(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", chunk)
    content = serialization.msgpack_serialize(tree())
    assert (b"__msgpack_chunked_array__" in content) == (chunk == 24)
    loaded = read(written(tmp_path, content))
    for expected in (serialization.msgpack_restore(content), tree()):
        assert not runs.differing(loaded, traverse_util.flatten_dict(expected))


@pytest.mark.parametrize("count", [1, 5, 6, 1006])
def test_five_wrong_names_are_listed_and_the_others_counted(tmp_path, count):
    path = written(tmp_path, {"a": {f"{i:04}": np.zeros(1) for i in range(count)}})
    with pytest.raises(InputError) as error:
        flax_msgpack._names(path, msgpack.header(path))
    listed = [f"'a/{i:04}' is not a parameter of a Dense, Embed or norm" for i in range(count)]
    more = {6: "; and 1 more", 1006: "; and 1,001 more"}.get(count, "")
    what = "not weights of transformers' Flax encoder-decoders"
    assert str(error.value) == f"{path}: {what}: {'; '.join(listed[:5])}{more}"


def test_a_numpy_scalar_is_an_array_without_dimensions(tmp_path):
    loaded = read(written(tmp_path, {"a": {"scale": np.float32(3)}}))
    assert not runs.differing(loaded, {("a", "scale"): np.array(3, np.float32)})


def test_arrays_own_their_memory(tmp_path):
    loaded = read(written(tmp_path, tree()))
    assert all(array.flags.writeable for array in loaded.values())


def test_describing_a_file_reads_no_array(tmp_path):
    path = written(tmp_path, {"a": {"kernel": np.zeros((1000, 1000, 2))}})
    with helpers.memory_below(100_000):
        described = msgpack.header(path)
    assert described["a", "kernel"].shape == (1000, 1000, 2)


def test_a_file_that_cannot_be_opened_is_refused(tmp_path):
    for path, reason in ((tmp_path / "none", "no such file"), (tmp_path, "not a file")):
        with pytest.raises(InputError, match=f"{path}: {reason}"):
            msgpack.header(path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    content = small()
    for length in range(len(content)):
        with pytest.raises(InputError) as error:
            msgpack.header(written(tmp_path, content[:length]))
        assert str(error.value).isprintable()


def test_a_file_that_becomes_shorter_while_it_is_described_is_refused(tmp_path):
    """The size is that of before. Numbers of arrays are passed over and not read."""
    content, refused = small(), 0
    complete = msgpack.tree(written(tmp_path, content))
    for length in range(len(content)):
        path = written(tmp_path, content[:length])
        with path.open("rb") as file:
            try:
                assert msgpack._Reader(path, file, len(content)).value(0) == complete
            except InputError as error:
                assert "became shorter while" in str(error)
                refused += 1
    assert refused > len(content) // 2


def test_a_changed_byte_is_refused_or_changes_only_a_value_or_a_name(tmp_path):
    content, values, names = small(), {}, 0

    def shapes_of(arrays: dict[Any, np.ndarray]) -> list[tuple]:
        return sorted((array.shape, array.dtype.name) for array in arrays.values())

    shapes = shapes_of(read(written(tmp_path, content)))
    for at in range(len(content)):
        for bits in (0x01, 0x80, 0xFF):
            changed = bytearray(content)
            changed[at] ^= bits
            try:
                loaded = read(written(tmp_path, bytes(changed)))
            except Refusal as error:
                assert str(error).isprintable()
                continue
            values[at] = sum(array.nbytes for array in loaded.values())
            names += shapes_of(loaded) == shapes
    # the nine bytes of values, one of them a bool
    assert max(values.values()) < len(content) and names >= 3 * 9
    assert len(values) < len(content) / 2


def array(shape: Any = (2,), dtype: Any = "float32", content: Any = bytes(8)) -> library.ExtType:
    return library.ExtType(1, library.packb((shape, dtype, content)))


def nested(depth: int) -> bytes:
    return b"\x81\xa1a" * depth + b"\x80"


def of(*arguments: Any, **options: Any) -> bytes:
    return library.packb({"a": array(*arguments, **options)})


def triple(*values: Any) -> bytes:
    return library.packb({"a": library.ExtType(1, library.packb(*values))})


def pieces(shape: dict[str, int], chunks: dict[str, library.ExtType]) -> bytes:
    own = {"__msgpack_chunked_array__": True, "shape": shape, "chunks": chunks}
    return library.packb({"a": own})


MANY, MORE = struct.pack(">I", 2000), array().data + b"\xc0"
SHAPELESS = {"__msgpack_chunked_array__": True, "chunks": {"0": array()}}
MOST, FOLLOW = b"\xff" * 4, "4,294,967,295 bytes are said to follow"
INVALID: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "at byte 0 1 bytes are said to follow, and the file has 0"),
    "no map": (library.packb([1]), "is not a map"),
    "bytes after the end": (library.packb({}) + b"\xc0", "ends at byte 1, and the file has 2"),
    "an unused byte": (b"\x81\xa1a\xc1", "byte 3 is 0xc1"),
    "a number": (library.packb({"a": {"b": -7}}), "'a/b' is -7, and not an array"),
    "nothing": (library.packb({"a": None}), "'a' is None"),
    "a list": (library.packb({"a": [array()]}), "'a' is "),
    "bytes": (library.packb({"a": b"xyz"}), "'a' is "),
    "a complex number": (serialization.msgpack_serialize({"a": 1j}), "an extension of type 2"),
    "a time": (library.packb({"a": library.Timestamp(1)}), "an extension of type 255"),
    "a number for a name": (library.packb({1: array()}), "stands 1 where a name should"),
    "text in pieces of UTF-8": (b"\x81\xa1\xff\xc0", "is not UTF-8"),
    "a map of four thousand million": (b"\xdf" + MOST, "8,589,934,590 bytes are said to follow"),
    "a list of four thousand million": (b"\x81\xa1a\xdd" + MOST, FOLLOW),
    "long bytes": (b"\x81\xa1a\xc6" + MOST, FOLLOW),
    "a long extension": (b"\x81\xa1a\xc9" + MOST + b"\x01", FOLLOW),
    "a dtype of objects": (of(dtype="object"), "of dtype 'object', which is not known"),
    "a dtype of fields": (of(dtype="f4,f4"), "of dtype 'f4,f4'"),
    "no triple": (triple(((2,), "float32")), "is not a triple"),
    "a triple in a triple": (triple(((2,), "float32", array())), "is not a triple"),
    "more in an array": (library.packb({"a": library.ExtType(1, MORE)}), "ends at"),
    "a truth value of 2": (of((8,), "bool", b"\x02" * 8), "truth values other than 0 and 1"),
    "pieces without shape": (library.packb({"a": SHAPELESS}), "'a' is not in pieces"),
    "pieces of two dtypes": (
        pieces({"0": 4}, {"0": array(), "1": array((1,), "float64")}),
        "are not flat arrays of one dtype",
    ),
    "pieces that are no arrays": (
        pieces({"0": 4}, {"0": array(), "1": 4}),
        "are not flat arrays of one dtype",
    ),
    "pieces with a number missing": (pieces({"0": 2}, {"1": array()}), "'a' is not in pieces"),
}
UNSAFE: dict[str, tuple[bytes, str]] = {
    "a name twice": (b"\x82\xa1a\xc0\xa1a\xc0", "'a' appears twice in one map"),
    "a name with a slash": (library.packb({"a/b": array()}), "'a/b' is not a plain name"),
    "a name with a dot": (library.packb({"a.b": array()}), "'a.b' is not a plain name"),
    "a name without letters": (library.packb({"": array()}), "'' is not a plain name"),
    "a name that moves the cursor": (library.packb({"a\x1b[2J": array()}), "is not a plain name"),
    "a long name": (library.packb({"a" * 1025: array()}), "a name of 1,025 bytes"),
    "too deep": (nested(100), "more than 32 maps"),
    "much too deep": (nested(100_000), "more than 32 maps"),
    "lists too deep": (b"\x81\xa1a" + b"\x91" * 100 + b"\xc0", "more than 32 maps"),
    "long text": (b"\x81\xa1a\xdb\xff\xff\xff\xff", "a name of 4,294,967,295 bytes"),
    "too many values": (b"\x81\xa1a\xdd" + MANY + b"\xc0" * 2000, "more than 1,000 values"),
    "an array larger than its bytes": (of((2**40,)), "an array of 8 bytes declares another"),
    "an array smaller than its bytes": (of((1,)), "declares another size, [1] of float32"),
    "a length below zero": (of((-2, -1)), "an array has the shape [-2, -1]"),
    "a length that is true": (of((True, 2)), "an array has the shape [True, 2]"),
    "a fraction of a length": (of((2.0,)), "an array has the shape [2.0]"),
    "bytes that overflow": (of((2**61, 0), content=b""), "an array has the shape"),
    "a shape that overflows": (of((2**62, 2**62, 0), content=b""), "an array has the shape"),
    "65 dimensions": (of((1,) * 64 + (2,)), "an array has the shape"),
    "pieces of another size": (
        pieces({"0": 2**40}, {"0": array()}),
        "'a' declares another size than its pieces have",
    ),
    "pieces longer than their array": (
        pieces({"0": 1}, {"0": array()}),
        "'a' declares another size than its pieces have",
    ),
    "pieces of a length below zero": (
        pieces({"0": -2, "1": -1}, {"0": array()}),
        "'a' has the shape [-2, -1]",
    ),
}
HOSTILE = {name: (content, InputError, words) for name, (content, words) in INVALID.items()}
HOSTILE |= {name: (content, UnsafeFileError, words) for name, (content, words) in UNSAFE.items()}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_little_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(msgpack, "MOST_VALUES", 1000)
    content, kind, words = HOSTILE[name]
    path = written(tmp_path, content)
    with helpers.memory_below(1_000_000), pytest.raises(kind) as error:
        read(path)
    assert words in str(error.value)
    assert str(error.value).startswith(str(path)) and str(error.value).isprintable()


def test_kernels_are_transposed_and_names_are_pytorch_s(tmp_path):
    kernel = np.arange(9.0).reshape(3, 3)
    arrays = {
        ("model", "shared", "embedding"): np.ones((2, 3)),
        ("model", "encoder", "layers", "0", "fc1", "kernel"): kernel,
        ("model", "encoder", "layers", "0", "fc1", "bias"): np.ones(3),
        ("encoder", "final_layer_norm", "weight"): np.ones(3),
        ("model", "decoder", "layer_norm", "scale"): np.ones(3),
        ("final_logits_bias",): np.ones((1, 2)),
    }
    state = flax_msgpack.FORMAT.open(written(tmp_path, traverse_util.unflatten_dict(arrays))).read()
    parts = "shared encoder.layers.0.fc1 decoder.layer_norm".split()
    names = {f"model.{part}.weight" for part in parts} | {"model.encoder.layers.0.fc1.bias"}
    assert state.keys() == names | {"encoder.final_layer_norm.weight", "final_logits_bias"}
    turned = state["model.encoder.layers.0.fc1.weight"]
    assert np.array_equal(turned, kernel.T) and turned.flags.c_contiguous


def test_all_unknown_weights_are_one_error(tmp_path):
    one = np.ones(3)
    arrays = {"a": {"kernel": one}, "b": {"mean": one}, "bias": one}
    arrays["c"] = {"scale": one, "weight": one}
    path = written(tmp_path, arrays)
    with pytest.raises(InputError) as error:
        flax_msgpack.FORMAT.open(path)
    for words in (
        "'a/kernel' has the shape (3,)",
        "'b/mean' is not a parameter",
        "'bias' is not a parameter",
        "'c/weight' would be a second 'c.weight'",
    ):
        assert words in str(error.value)


def sharded(folder: Path, arrays: dict[str, Any]) -> Path:
    """Write two files with their index, as transformers 4 did, and return the index."""
    flat, weight_map = list(traverse_util.flatten_dict(arrays, sep="/").items()), {}
    for i in range(2):
        name, shard = f"flax_model-0000{i + 1}-of-00002.msgpack", dict(flat[i::2])
        content = serialization.msgpack_serialize(traverse_util.unflatten_dict(shard, sep="/"))
        (folder / name).write_bytes(content)
        weight_map |= dict.fromkeys(shard, name)
    path = folder / flax_msgpack.INDEX
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def test_shards_are_read_as_one_file(tmp_path):
    single = flax_msgpack.FORMAT.open(written(tmp_path, tree())).read()
    index = sharded(tmp_path, tree())
    opened = registry.open(index)
    assert not runs.differing(opened.read(), single)
    described = {name: TensorInfo(a.shape, a.dtype.name) for name, a in single.items()}
    assert opened.tensors == described
    shards = [f"flax_model-0000{i}-of-00002.msgpack" for i in (1, 2)]
    assert [file.name for file in opened.files] == [index.name, *shards]
    assert list(flax_msgpack.FORMAT.inspect(index).sha256) == [index.name, *shards]


@pytest.mark.parametrize(("count", "more"), [(1, ""), (5, ""), (6, " and 1 more")])
def test_shards_with_other_tensors_are_refused(tmp_path, count, more):
    index = sharded(tmp_path, tree())
    content = json.loads(index.read_text())
    del content["weight_map"]["scalar/scale"]
    names = [f"more/{i}" for i in range(count)]
    content["weight_map"] |= dict.fromkeys(names, "flax_model-00001-of-00002.msgpack")
    index.write_text(json.dumps(content))
    message = f"without {', '.join(map(repr, names[:5]))}{more}, with unexpected 'scalar/scale'"
    with pytest.raises(InputError, match=message):
        flax_msgpack.FORMAT.open(index)


def test_jax_arrays_are_written_as_numpys(tmp_path):
    content = serialization.to_bytes({"a": {"bias": jnp.ones(3, jnp.bfloat16)}})
    loaded = read(written(tmp_path, content))
    assert not runs.differing(loaded, {("a", "bias"): np.ones(3, ml_dtypes.bfloat16)})


@pytest.mark.parametrize("more", [0, 1])
def test_maps_are_read_up_to_their_greatest_depth(more, tmp_path):
    path, deep = tmp_path / "a.msgpack", msgpack.DEEPEST + more
    path.write_bytes(b"\x81\xa1a" * deep + b"\xc0")
    refused = pytest.raises(UnsafeFileError, match=f"more than {msgpack.DEEPEST} maps")
    with refused if more else contextlib.nullcontext():
        assert [len(keys) for keys, _ in msgpack.leaves(path, msgpack.tree(path))] == [deep]
