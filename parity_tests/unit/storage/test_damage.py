"""A changed byte anywhere: in a folder that is inspected, and in a file that is being written."""

import contextlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_transformer.errors import Refusal
from jax_transformer.formats import registry
from jax_transformer.storage import read_back, safetensors, tensors
from jax_transformer.storage.read_back import CheckedFile
from parity_tests.unit.conversions import convert

CHUNK = read_back._CHUNK


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A run, a Hugging Face folder in shards and one in one file, of the same weights."""
    from parity_tests.unit.formats.test_huggingface import theirs

    folder = tmp_path_factory.mktemp("damage")
    convert(theirs.__wrapped__(tmp_path_factory), folder / "run")
    convert(folder / "run", folder / "hf", to="hf")
    convert(folder / "run", folder / "shards", to="hf", shard_size="1KB")
    return folder


FOLDERS = [(name, ".") for name in ("hf", "shards", "run", "run/checkpoints/0")]


@pytest.mark.parametrize(
    ("folder", "inspected"), [*FOLDERS, ("shards", "model.safetensors.index.json")]
)
def test_inspect_sees_a_changed_byte_of_every_file(folder, inspected, folders, tmp_path):
    top = folder.split("/")[0]
    shutil.copytree(folders / top, tmp_path / top)
    path = tmp_path / folder / inspected

    def seen() -> Any:
        with contextlib.suppress(Refusal):
            return registry.of(path).inspect(path).sha256
        return None

    intact = seen()
    files = [file for file in (tmp_path / folder).rglob("*") if file.is_file()]
    if inspected != ".":
        files = [file for file in files if ".safetensors" in file.name]
    assert intact is not None and len(files) > 3
    for file in files:
        content = file.read_bytes()
        if (file.name, folder) == ("README.md", "run"):
            continue  # for people
        for at in {0, len(content) // 2, len(content) - 1} if content else ():
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert seen() != intact, (file, at)
        file.write_bytes(content + b"\0")
        assert seen() != intact, (file, "longer")
        file.write_bytes(content)
    assert seen() == intact


def test_a_header_that_names_other_tensors_is_noticed(tmp_path, monkeypatch):
    text = safetensors.header_text
    swapped = lambda state, *more: text(dict(reversed(state.items())), *more)  # noqa: E731
    monkeypatch.setattr(safetensors, "header_text", swapped)
    with pytest.raises(Refusal, match=r"a\.safetensors: its header reads back different"):
        safetensors.write(tmp_path / "a.safetensors", {"x": np.zeros(3), "y": np.ones(3)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("value", "is_read"), [(0, True), (1, True), (2, False), (255, False)])
def test_truth_values_are_0_and_1(value, is_read, tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.write(path, {"x": np.zeros(3, bool)})
    path.write_bytes(path.read_bytes()[:-1] + bytes([value]))
    refused = pytest.raises(Refusal, match="truth values other than 0 and 1")
    with contextlib.nullcontext() if is_read else refused:
        safetensors.read(path)


@pytest.mark.parametrize("size", [1, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_a_byte_that_reads_back_different_is_noticed(size, tmp_path):
    class Faulty:
        def __init__(self, file: Any, at: int):
            self.file, self.at = file, at

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def readinto(self, buffer: Any) -> int:
            begin = self.file.tell()
            count = self.file.readinto(buffer)
            if begin <= self.at < begin + count:
                buffer[self.at - begin] ^= 1
            return count

    content = np.arange(size, dtype=np.uint8)
    for at in {0, size // 2, size - 1}:
        with CheckedFile(tmp_path / "a", "target") as file:
            file._file = Faulty(file._file, at)
            with pytest.raises(Refusal, match="target: x reads back different"):
                file.write(content, "x")


def test_the_tensors_that_differ_on_the_disk_are_named(tmp_path):
    state = {name: np.random.default_rng(i).normal(size=3) for i, name in enumerate("abc")}
    for changed in ({"b"}, {"a", "c"}, set()):
        with read_back.new_folder(tmp_path / "new", tensors.in_memory(state)) as new:
            new.path.mkdir()
            for tensor in new.state.values():
                tensor.read()
            again = {name: -array if name in changed else array for name, array in state.items()}
            with pytest.raises(Refusal, match="new: b, d reads back different"):
                new.compare(tensors.in_memory({"a": state["a"], "c": state["c"], "d": state["a"]}))
            if changed:
                message = f"{', '.join(sorted(changed))} reads back different"
                with pytest.raises(Refusal, match=message):
                    new.compare(tensors.in_memory(again))
            else:
                new.compare(tensors.in_memory(again))
            (new.path / "sub").mkdir()
            (new.path / "sub" / "file").write_bytes(b"b")
            new.compare_files({"file": b"b"}, "sub")
            for other in (b"a", b"c", b"bb"):
                with pytest.raises(Refusal, match="new: file reads back different"):
                    new.compare_files({"file": other}, "sub")


@pytest.mark.parametrize("shape", [(13,), (9, 13), (13, 9), (3, 5, 4)])
def test_a_number_that_differs_anywhere_is_noticed(shape, monkeypatch):
    """Whatever the layout of the two arrays, which are compared in pieces."""
    monkeypatch.setattr(tensors, "_PIECE", 64)
    monkeypatch.setattr(tensors, "_TILE", 4)
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    layouts = (np.array, np.asfortranarray)
    for one, other in itertools.product(layouts, layouts):
        assert tensors.same(one(array), other(array.copy()))
        for at in np.ndindex(shape):
            changed = array.copy()
            changed[at] += 1
            assert not tensors.same(one(array), other(changed)), at
