"""``inspect``, and the detection of file kinds, without jax."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from jax_transformer.formats.contents import Contents
from jax_transformer.storage.pt import writer
from jax_transformer.storage.tensors import TensorInfo
from parity_tests.unit import runs
from parity_tests.unit.conversions import write


@pytest.mark.parametrize("name", ["a.pt", "folder/pytorch_model.bin"])
def test_a_checksum_that_does_not_hold_is_refused(console, tmp_path, name):
    path, state = tmp_path / name, {"x": np.arange(1 << 19, dtype=np.float32)}  # two chunks
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "marian"}')
    writer.write(path, state)
    source = path if path.parent == tmp_path else path.parent
    content = path.read_bytes()
    report = json.loads(console.say("inspect", source, "--json")[1])
    assert report["sha256"][path.name] == hashlib.sha256(content).hexdigest()
    last = content.rindex(state["x"][-1].tobytes())
    path.write_bytes(content[:last] + b"\0" + content[last + 1 :])
    console.refused(3, [path, "archive/data/0' is damaged"], "inspect", source)


def test_a_name_in_a_file_cannot_print_lines(console, tmp_path):
    source = write(tmp_path / "a.safetensors", {"a\nsha256 0\x1b[31m": np.zeros(2, np.float32)})
    convert = ["convert", source, tmp_path / "b.pt", "--dry-run"]
    for command in (["inspect", source], ["inspect", source, "--json"], convert):
        _, out, err = console.say(*command)
        assert "\x1b" not in out + err and "\nsha256 0" not in out + err


def test_the_lines_of_a_content_are_in_columns_by_the_order_of_names():
    infos = {"b.long": TensorInfo((2, 3), "float32"), "a": TensorInfo((), "float16")}
    values, ties = {"step": 3, "text": "x" * 300}, [("a", "b.long")]
    assert list(Contents("x", "a file", infos, {"x": "00"}, values, ties).lines()) == [
        "x: a file",
        "a               scalar  float16",
        "b.long             2x3  float32",
        "step = 3",
        f"text = '{'x' * 192}",
        "tied a = b.long",
        "2 arrays, 7 numbers",
        "26 bytes",
        "sha256 00  x",
    ]


LOADED = """
import sys
from jax_transformer import cli
assert cli.main(sys.argv[1:]) == 0
print(*sys.modules, file=sys.stderr)
"""


def loaded_by(*command: str | Path) -> set[str]:
    """Run a command in a process of its own and return the modules that it imported."""
    done = runs.python("-c", LOADED, *command)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def test_commands_that_only_read_files_import_little(weights, tmp_path):
    slow = {"jax", "flax", "torch", "tensorstore", "orbax"}
    others = {"jax_transformer.cli.train", "jax_transformer.training.options"}
    assert loaded_by("--version").isdisjoint({*slow, *others, "numpy"})
    assert loaded_by("--help").isdisjoint({*slow, "numpy", "jax_transformer.cli.golden"})
    assert loaded_by("train", "--help").isdisjoint(slow)
    assert loaded_by("convert", weights, tmp_path / "a.pt").isdisjoint(slow | others)
    described = loaded_by("inspect", tmp_path / "a.pt")
    assert described.isdisjoint({*slow, *others, "jax_transformer.cli.convert"})
    assert {"numpy", "jax_transformer.cli.inspect"} <= described  # so that names are as above
