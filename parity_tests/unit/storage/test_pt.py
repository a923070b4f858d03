"""Our .pt files without PyTorch: written, described and read, and reproducible to the byte."""

import ast
import collections
import contextlib
import io
import json
import os
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.formats import registry
from jax_transformer.storage import atomic, pt, read_back, safetensors, tensors, untrusted
from jax_transformer.storage.pt import writer, zip_archive
from jax_transformer.storage.tensors import TensorInfo
from parity_tests.unit import hostile, runs

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)
STATE = {
    "model": {
        "weight": WEIGHT,
        "tied": WEIGHT,
        "bfloat16": np.array([1.5, -0.0], ml_dtypes.bfloat16),
        "scalar": np.array(3.0),
    },
    "empty": np.empty((0, 3), np.int64),
    "plain": [
        *(1, -1, 2**31, -(2**31), 2**62, -(2**200), 0.5, True, None, "é", "", b"\x00\xff", b""),
        *((), (1, (2.5,)), {}, [], 1j),
    ],
    3: "a number as a key",
}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "state.pt"


def test_written_files_are_read_back(path):
    writer.write(path, STATE)
    again = pt.read(path)
    assert again["plain"] == STATE["plain"]
    assert list(map(type, again["plain"])) == list(map(type, STATE["plain"]))
    assert again[3] == STATE[3] and list(again) == list(STATE)
    for name, array in {**STATE["model"], "empty": STATE["empty"]}.items():
        read = again["model"].get(name, again["empty"])
        assert runs.bits(read) == runs.bits(array), name
        assert read.flags.c_contiguous and read.flags.writeable and read.flags.owndata
    assert again["model"]["weight"] is again["model"]["tied"]


def test_the_same_state_is_the_same_bytes(path):
    def written(state: dict) -> bytes:
        writer.write(path, state)
        return path.read_bytes()

    contents = [written({"a": WEIGHT.copy(), "b": WEIGHT.T, "c": [1.0]}) for _ in range(3)]
    assert {*contents, written(pt.read(path))} == {contents[0]}
    assert written({"a": WEIGHT.copy(), "b": WEIGHT.T, "c": [1.5]}) != contents[0]


def test_it_is_an_ordinary_zip_file_with_aligned_storages(path):
    writer.write(path, STATE)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = {f"archive/{name}" for name in ("data.pkl", "version", "byteorder", "data/0")}
        assert names <= set(archive.namelist())
    with zip_archive.Archive(path) as ours:
        assert all(member.start % 64 == 0 for member in ours.members.values())


def test_members_are_aligned_whatever_their_names_are(path):
    members = {"é" * number: lambda: np.zeros(5, np.uint8) for number in range(1, 4)}
    with read_back.CheckedFile(path, path) as file:
        starts = zip_archive.write(file, members)
    assert all(start % 64 == 0 for start in starts.values())
    with zip_archive.Archive(path) as archive:
        assert {name: member.start for name, member in archive.members.items()} == starts


def test_every_number_of_a_64_bit_directory_counts(path, monkeypatch):
    """But for the two versions of ZIP that it names."""
    monkeypatch.setattr(zip_archive, "LARGE", 0)  # as if every file were a large one
    writer.write(path, STATE)
    content = path.read_bytes()
    locator = len(content) - zip_archive._END.size - zip_archive._LOCATOR.size
    record = locator - zip_archive._END64.size
    with zip_archive.Archive(path) as archive:
        assert "archive/data.pkl" in archive.members
    refused = pytest.raises((InputError, UnsafeFileError))
    parts = (zip_archive._END64, record, (2, 3)), (zip_archive._LOCATOR, locator, ())
    for form, at, versions in parts:
        signature, *numbers = form.unpack_from(content, at)
        for i in range(len(numbers)):
            changed = [number + (i == place) for place, number in enumerate(numbers)]
            written = form.pack(signature, *changed)
            path.write_bytes(content[:at] + written + content[at + form.size :])
            with contextlib.nullcontext() if i + 1 in versions else refused:
                zip_archive.Archive(path).__exit__()


def test_shapes_are_read_without_reading_storages(path):
    writer.write(path, STATE)
    content = path.read_bytes()
    path.write_bytes(content.replace(WEIGHT.tobytes(), b"\xff" * WEIGHT.nbytes))
    described = pt.describe(path)
    expected = pt.TensorView((3, 4), np.dtype(np.float32), "0", 0, (4, 1))
    assert described["model"]["weight"] == expected
    assert described["model"]["scalar"].shape == ()
    assert described["model"]["bfloat16"].dtype == ml_dtypes.bfloat16
    assert described["plain"] == STATE["plain"]
    with pytest.raises(InputError, match=r"archive/data/0' is damaged"):
        pt.read(path)


def test_the_tensors_of_several_states_are_named_by_their_prefixes(path):
    writer.write(
        path, {"one": {"w": WEIGHT, "steps": 3, 4: WEIGHT}, "other": {"m": {"b": WEIGHT + 1}}}
    )
    state = pt.states(path, {"a.": ("one",), "": ("other", "m")})
    assert [*state] == ["a.w", "b"] and np.array_equal(state["b"].read(), WEIGHT + 1)


def test_tied_tensors_stay_tied(path):
    state = {"a": WEIGHT, "b": [WEIGHT, WEIGHT.copy()], "c": {"d": WEIGHT[:]}, "e": WEIGHT[:2]}
    writer.write(path, state | {"f": np.empty(0), "g": np.empty(0)})
    assert pt.ties(path) == [("a", "b.0", "c.d")]
    assert pt.tied(pt.describe(path)) == pt.ties(path)


def test_regions_are_equal_if_their_elements_are():
    def region(shape, stride, offset=0, dtype=np.float32, storage="0"):
        return tensors.TensorView(shape, np.dtype(dtype), storage, offset, stride).region()

    full = region((3, 4), (4, 1))
    assert full == region((4, 3), (1, 4)) == region((12,), (1,))
    assert full == region((1, 3, 1, 4), (77, 4, 5, 1)) == region((2, 2, 3), (6, 3, 1))
    others = [region((3, 4), (4, 2)), region((3, 4), (4, 1), 1), region((3, 3), (4, 1))]
    others += [region((12,), (0,)), region((12,), (1,), storage="1")]
    assert full not in others and full != region((12,), (1,), dtype=np.int32)


@pytest.mark.parametrize(
    "message, value",
    {
        r"'a\.b\.1' is a set": {"a": {"b": [0, {1}]}},
        r"'a' is a float32": {"a": np.float32(1)},
        r"'a' is <U1, which PyTorch does not have": {"a": np.array("x")},
        r"'a' is object, which PyTorch": {"a": np.array([object()])},
        r"'a key of a' is a tuple": {"a": {(1, 2): 1}},
        r"'a' is an integer of 500 bytes": {"a": 2 ** (8 * 500 - 2)},
        r"'a' is a module": {"a": os},
    }.items(),
)
def test_an_unwritable_state_is_named_and_leaves_no_file(message, value, path):
    path.write_bytes(b"before")
    with pytest.raises(InputError, match=message):
        writer.write(path, value)
    assert path.read_bytes() == b"before" and [*path.parent.iterdir()] == [path]


def test_other_byte_orders_are_written_as_little(path):
    writer.write(path, {"a": WEIGHT.astype(">f4"), "b": np.arange(3, dtype=">i8")[::-1]})
    again = pt.read(path)
    assert again["a"].dtype == np.dtype("<f4")
    assert again["a"].tolist() == WEIGHT.tolist()
    assert again["b"].tolist() == [2, 1, 0]


def test_kinds_are_known_by_content(path):
    writer.write(path, {})
    assert registry.of(path).name == "pt" and not pt.is_legacy(path)
    assert not safetensors.is_safetensors(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/other.txt", "x")
    with pytest.raises(InputError, match=r"it has no data\.pkl"):
        pt.read(path)
    path.write_bytes(b"PK\x03\x04 and then it ends")
    assert registry.of(path).name == "pt"  # so that its reader names the fault
    safetensors.write(path, {"a": WEIGHT})
    assert safetensors.is_safetensors(path)
    assert registry.of(path).name == "safetensors"
    assert not pt.is_legacy(path.parent)
    assert not safetensors.is_safetensors(path.parent / "none")


@pytest.mark.parametrize("length", range(4))
def test_a_header_of_safetensors_fits_its_file(length, path):
    for rest in (b"", b"\0"):
        path.write_bytes(length.to_bytes(8, "little") + b"{}" + rest)
        assert safetensors.is_safetensors(path) == (length <= 2 + len(rest))


TILE = tensors._TILE
SHAPES = [(3, 2 * TILE + 6), (2 * TILE + 6, 3), (TILE, TILE + 1), (2 * TILE, TILE - 1)]
SHAPES += [(1, 2 * TILE + 1), (0, 4), (2, 3, TILE + 8), (5,), ()]


@pytest.mark.parametrize("shape", SHAPES)
def test_any_array_is_copied_in_c_order(shape):
    array = np.random.default_rng(0).normal(size=shape)
    views = [array[..., ::2], array[::-1].T] if shape else []
    for each in (array, array.T, *views):
        again = tensors.contiguous(each)
        assert again.flags.c_contiguous and (again.shape, again.dtype) == (each.shape, each.dtype)
        np.testing.assert_array_equal(again, each)


@pytest.mark.parametrize("number", [7, 8, 9, 10])
def test_a_count_that_fits_has_no_wide_record(number, path, monkeypatch):
    monkeypatch.setattr(zip_archive, "FULL16", 9)
    members = {str(i): lambda: np.zeros(1, np.uint8) for i in range(number)}
    with read_back.CheckedFile(path, path) as file:
        zip_archive.write(file, members)
    assert (b"PK\x06\x06" in path.read_bytes()) == (number >= 9)


@pytest.mark.parametrize("longest", [6, 7, 8])
@pytest.mark.parametrize("value", ["abcde", b"abcd", [1, 2], 1234567, "\u00e9", "abcdefghijklmnop"])
def test_a_value_is_shown_as_a_whole_up_to_its_limit(value, longest):
    text = ascii(value)
    expected = text if len(text) <= longest else f"{text[:longest]}..."
    assert untrusted.shown(value, longest) == expected


@pytest.mark.parametrize("reader", [pt, safetensors])
def test_missing_files_and_folders(reader, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="none: no such file"):
        reader.read(tmp_path / "none")
    with pytest.raises(InputError, match="not a file"):
        reader.read(tmp_path)
    (tmp_path / "mine").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)
    with pytest.raises(InputError, match="mine: cannot be read: permission denied"):
        reader.read(tmp_path / "mine")


def test_python_2_names_and_text(path):
    """Files that PyTorch wrote under Python 2.7."""
    arguments = hostile.text("a\xff"), hostile.text("latin-1")
    byte_array = hostile.call(hostile.name("__builtin__", "bytearray"), *arguments)
    body = b"}U\x06weight" + hostile.tensor() + b"s(U\x01b" + byte_array + b"u"
    path.write_bytes(hostile.file(body))
    read = {name: list(value) for name, value in pt.read(path).items()}
    assert read == {"weight": [0.0] * 4, "b": [97, 255]}


def test_module_versions_are_dropped(path):
    ordered = hostile.name("collections", "OrderedDict") + b")R"
    weights = ordered + hostile.text("w") + hostile.tensor() + b"s"
    path.write_bytes(hostile.file(weights + b"}" + hostile.text("_metadata") + ordered + b"sb"))
    assert type(pt.read(path)) is dict and pt.read(path)["w"].shape == (4,)


def test_overlapping_tensors_are_read_up_to_the_file_s_size(path):
    body = b"](" + hostile.tensor(shape=hostile.numbers(3))
    body += hostile.tensor(shape=hostile.numbers(3, 3), stride=hostile.numbers(0, 1)) + b"e"
    data = np.arange(4, dtype=np.float32).tobytes()
    path.write_bytes(hostile.zipped(hostile.members(hostile.pickle(body), data)))
    first, second = pt.read(path)
    assert first.tolist() == [0, 1, 2] and second.tolist() == [[0, 1, 2]] * 3
    writer.write(path, dict.fromkeys("abcd", np.zeros((90, 90), np.float32)))
    assert [array.shape for array in pt.read(path).values()] == [(90, 90)] * 4
    body = hostile.tensor(shape=hostile.numbers(300), stride=hostile.numbers(0))
    path.write_bytes(hostile.zipped(hostile.members(hostile.pickle(body), data)))
    with pytest.raises(UnsafeFileError, match="more memory than the file has bytes"):
        pt.describe(path)


def test_a_write_that_went_wrong_is_detected(path, monkeypatch):
    """Control of the comparison: another storage or order, a list for a tuple, 0.0 for -0.0."""
    describe = pt.describe
    writer.write(path, [WEIGHT, WEIGHT + 1])
    other = describe(path)[1]
    for value, wrong in (
        ({"a": WEIGHT}, {"a": other}),
        ({"a": ()}, {"a": []}),
        ({"a": []}, {"a": ()}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": -0.0}, {"a": 0.0}),
        ({"a": 1}, {"a": True}),
        ({}, {"a": 1}),
    ):
        monkeypatch.setattr(pt, "describe", lambda _, wrong=wrong: wrong)
        with pytest.raises(InputError, match="reads back different"):
            writer.write(path, value)
        monkeypatch.setattr(pt, "describe", describe)
        writer.write(path, value)
    write, moved = zip_archive.write, lambda at: {name: start + 64 for name, start in at.items()}
    monkeypatch.setattr(zip_archive, "write", lambda *arguments: moved(write(*arguments)))
    with pytest.raises(InputError, match="reads back different"):
        writer.write(path, {"a": WEIGHT})


class FlippingFile(io.FileIO):
    """Flips the last bit of what is as long as ``WEIGHT``."""

    def __init__(self, path, mode, buffering):
        super().__init__(path, mode.replace("b", ""))

    def write(self, content):
        content = bytearray(content)
        content[-1] ^= len(content) == WEIGHT.nbytes
        return super().write(content)


@pytest.mark.parametrize("write", [writer.write, safetensors.write])
def test_a_byte_that_reaches_the_disk_wrong_is_detected(path, write, monkeypatch):
    """Control of the comparison."""
    monkeypatch.setattr(read_back, "open", FlippingFile, raising=False)
    with pytest.raises(InputError, match=r"(w|data/0) reads back different"):
        write(path, {"w": WEIGHT})
    assert not path.exists()


def test_ordered_dicts_and_tuples_of_a_subclass_are_plain(path):
    writer.write(path, collections.OrderedDict(a=1))
    assert pt.read(path) == {"a": 1} and type(pt.read(path)) is dict


def test_sharded_safetensors_are_read_by_their_index(tmp_path):
    safetensors.write(tmp_path / "a.safetensors", {"x": WEIGHT, "s": np.array(1.0)})
    safetensors.write(tmp_path / "b.safetensors", {"y": np.arange(3, dtype=np.int8)})
    index = tmp_path / "model.safetensors.index.json"
    files = {"x": "a.safetensors", "s": "a.safetensors", "y": "b.safetensors"}
    index.write_text("\n " + json.dumps({"metadata": {"total_size": 59}, "weight_map": files}))
    assert safetensors.is_index(index) and not safetensors.is_safetensors(index)
    (tmp_path / "config.json").write_text('{"weights": {}}')
    assert not safetensors.is_index(tmp_path / "config.json")
    assert untrusted.files(index) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    infos = {"x": TensorInfo((3, 4), "float32"), "s": TensorInfo((), "float64")}
    assert safetensors.describe(index) == infos | {"y": TensorInfo((3,), "int8")}
    read = {name: array.tolist() for name, array in safetensors.read(index).items()}
    assert read == {"x": WEIGHT.tolist(), "s": 1.0, "y": [0, 1, 2]}
    (tmp_path / "b.safetensors").unlink()
    message = r"names 'b\.safetensors', which is missing \(did you mean 'a\.safetensors'\?\)"
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            safetensors.read(index)
        (tmp_path / "b.safetensors").mkdir(exist_ok=True)


@pytest.mark.parametrize("other", ["y", "z"])
def test_shards_of_pytorch_have_the_tensors_of_their_index(tmp_path, other):
    for file, name in (("a.bin", "x"), ("b.bin", "y")):
        writer.write(tmp_path / file, {name: WEIGHT})
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.bin", other: "b.bin"}}))
    refused = pytest.raises(InputError, match=r"are without 'z', with unexpected 'y'$")
    with refused if other == "z" else contextlib.nullcontext():
        assert registry.get("pt").scan(index).keys() == {"x", "y"}


def test_the_usual_key_of_weights_is_chosen_among_several(path):
    state = tensors.in_memory({"w": WEIGHT})

    def keys(*names: str) -> tuple[str, ...]:
        return pt.open_state(path, content=dict.fromkeys(names, state)).keys

    for usual in ("model", "state_dict", "model_state_dict", "module", "net", "weights"):
        assert keys("ema", usual) == keys(usual, "ema") == keys(usual) == (usual,)
    for several in (("ema", "teacher"), ("model", "weights")):
        with pytest.raises(InputError, match=f"give --key with one of {', '.join(several)}"):
            keys(*several)


def test_the_rest_of_a_file_is_named_by_the_keys_that_lead_to_it(path):
    inner = {"w": WEIGHT, "count": 3}
    writer.write(path, {"epoch": 2, "a": {"step": 1, "model": inner, "more": {"x": 0}}})
    opened = pt.open_state(path, "a.model")
    assert [note.name for note in opened.others] == ["epoch", "a.step", "a.more", "a.model.count"]
    assert [*opened.state] == ["w"]


def test_safetensors_are_read_as_the_library_reads_them(path):
    import safetensors.numpy as library

    random = np.random.default_rng(0)
    state = {
        "strided": random.normal(size=(4, 6))[::2, ::3].T,
        "scalar": np.array(-0.0),
        "empty": np.empty((3, 0), np.uint16),
    }
    for dtype in safetensors.DTYPES.values():
        # Random bytes are no valid bools, and the library reads no 8-bit floats
        if dtype != np.bool_ and "float8" not in str(dtype):
            state[str(dtype)] = np.frombuffer(random.bytes(6 * dtype.itemsize), dtype).reshape(2, 3)
    state["bool"] = np.array([True, False])
    safetensors.write(path, state)
    ours, theirs = safetensors.read(path), library.load_file(path)
    assert not runs.differing(ours, state) and not runs.differing(theirs, state)


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_every_kind_of_file_has_the_mode_of_a_new_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        writer.write(tmp_path / "a.pt", {"x": WEIGHT})
        safetensors.write(tmp_path / "a.safetensors", {"x": WEIGHT})
        with atomic.file(tmp_path / "a") as temporary:  # by a library that makes it anew
            temporary.unlink()
            temporary.touch(0o600)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(["a", "a.pt", "a.safetensors"], 0o666 & ~mask)


def test_reading_needs_neither_torch_nor_jax(path):
    writer.write(path, STATE)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['jax'] = None\n"
        "from jax_transformer.storage import pt, safetensors\n"
        "from jax_transformer.storage.pt import writer\n"
        f"path = {str(path)!r}\n"
        "assert pt.read(path)['model']['scalar'] == 3; writer.write(path, pt.read(path))\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not {'flax', 'transformers', 'tokenizers'} & loaded"
    )
    done = runs.python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


OF_RUNS = set("atomic checkpoint run_folder saving stored_arrays".split())
"""Files of storage/ that handle our own runs; all others read untrusted files."""


def test_no_reader_can_run_code():
    """Check their imports, and the names they call."""
    harmless = (
        "__future__ collections concurrent contextlib dataclasses enum functools hashlib itertools "
        "json math ml_dtypes numpy os pathlib re safetensors struct tempfile typing weakref zlib"
    )
    others = {
        "t5x_checkpoint": {"flax"},  # imported by functions that write
        "yaml_data": {"yaml"},  # the events of its parser, of which nothing is constructed
    }
    storage = Path(untrusted.__file__).parent
    readers = [path for path in storage.rglob("*.py") if path.stem not in OF_RUNS]
    toolkits = storage.parent / "extras" / "toolkits"
    names = "msgpack.py flax_msgpack.py t5x/zarr.py t5x/t5x_checkpoint.py"
    readers += [toolkits / name for name in (*names.split(), "marian/marian_model.py")]
    assert len(readers) > 15
    for source in readers:
        imported, called = set(), set()
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
            elif isinstance(node, ast.Call):
                called |= {getattr(node.func, "id", ""), getattr(node.func, "attr", "")}
        imported -= {"jax_transformer"} | others.get(source.stem, set())
        assert imported <= set(harmless.split()), source.name
        harmful = "eval exec compile __import__ system popen globals vars load"
        assert not called & set(harmful.split()), source.name
