"""docs/adding-a-format.md: its code, from outside the package, converts both ways."""

import copy
import importlib
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import registry
from jax_transformer.storage import pt
from jax_transformer.storage.pt import writer
from parity_tests.unit import conversions, runs

PAGE = (runs.ROOT / "docs/adding-a-format.md").read_text(encoding="utf-8")

CONFIG = conversions.config_of("lesson10", encoder_layers=1, d_ff=20, d_model=16, num_heads=8)


def block(language: str) -> str:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (text,) = (text for name, text in blocks if name == language)
    return text


@pytest.fixture
def nothing_added(tmp_path, monkeypatch):
    """A folder on ``sys.path``; the registry and the modules are as before at the end."""
    monkeypatch.setattr(registry, "_added", dict(registry._added))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raw_arrays.py").write_text(block("python"))
    yield tmp_path
    sys.modules.pop("raw_arrays", None)


@pytest.fixture(params=["register", "entry point"])
def folder(request, nothing_added) -> Path:
    """A folder with the format of the page, which the registry knows."""
    if request.param == "entry point":
        ((group, points),) = tomllib.loads(block("toml"))["project"]["entry-points"].items()
        others = {"a_broken_one": "no_such_module:FORMAT", "another": "raw_arrays:FORMAT"}
        runs.install(nothing_added, group, **others, **points)
    else:
        registry.register(importlib.import_module("raw_arrays").FORMAT)
    return nothing_added


@pytest.fixture
def weights(folder, monkeypatch) -> dict[str, np.ndarray]:
    """The weights of a small lesson10, in ``model.pt`` of the working folder."""
    monkeypatch.chdir(folder)
    state = conversions.state_of(CONFIG)
    writer.save(Path("model.pt"), state, target="model.pt")
    return state


@pytest.mark.parametrize("folder", ["entry point"], indirect=True)
def test_the_commands_of_the_page_convert_both_ways_bit_for_bit(weights, capsys):
    with runs.as_a_user():
        for line in block("").splitlines():
            program, *arguments = line.split()
            assert program == "jax-transformer" and runs.main(*arguments) == 0, line
    assert Path("model.raw").read_bytes().startswith(b"RAW1 {")
    assert Path("again.pt").read_bytes() == Path("model.pt").read_bytes()
    described = capsys.readouterr().out
    assert "model.raw: file of raw arrays" in described and "encoder.layers.0" in described
    # The run is the one that the PyTorch file would have become
    assert runs.main("convert", "runs/imported", "back.raw") == 0
    assert runs.main("convert", "back.raw", "back.pt") == 0
    back = {name: tensor.read() for name, tensor in pt.scan(Path("back.pt")).items()}
    assert not runs.differing(back, weights)
    # Negative control: one bit of the file
    raw = bytearray(Path("model.raw").read_bytes())
    raw[-1] ^= 1
    Path("model.raw").write_bytes(raw)
    assert runs.main("convert", "model.raw", "other.pt") == 0
    assert Path("other.pt").read_bytes() != Path("model.pt").read_bytes()


def test_python_reads_and_writes_it(weights):
    with runs.as_a_user():
        model = jt.convert.load("model.pt", config=CONFIG)
        jt.convert.save(model, "saved.raw")
        again = jt.convert.load("saved.raw", config=CONFIG)
    assert runs.main("convert", "saved.raw", "saved.pt") == 0
    assert Path("saved.pt").read_bytes() == Path("model.pt").read_bytes()
    assert jt.convert.to_torch(again).keys() == weights.keys()


def test_errors_list_it(folder, capsys):
    (folder / "text").write_text("lines")
    with pytest.raises(InputError, match=r"--force does not replace that"):
        registry.get("raw").check_replaceable(folder)
    with pytest.raises(InputError, match=r"nor a file of raw arrays \(RAW1\)") as error:
        registry.of(folder / "text")
    assert "run folder" not in str(error.value)
    with pytest.raises(ConfigError, match=r"\.xyz is none of .*\.raw"):
        registry.to_write(folder / "model.xyz")
    for name in ("model", "v0.1", "v0.2a", "v1."):
        assert registry.to_write(folder / name).name == "run", "no name of a kind of file"
    for name in ("raw", "marian"):  # a file, and a folder that is only read
        with pytest.raises(ConfigError, match=f"^--to {name} is not one of hf, run, "):
            registry.to_write(folder / "out", name)
    with pytest.raises(ConfigError, match="did you mean 'raw'"):
        registry.get("rwa")
    known = registry.get("raw")
    assert registry.register(known) is known
    other = copy.copy(known)
    for other.name in ("raw", "pt"):
        with pytest.raises(ConfigError, match=f"another format is registered as '{other.name}'"):
            registry.register(other)


@pytest.mark.parametrize("folder", ["entry point"], indirect=True)
def test_an_entry_point_has_the_name_of_its_format(folder):
    with pytest.raises(ConfigError, match=r"another = raw_arrays:FORMAT: is the format raw$"):
        registry.get("another")


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"RAW1 ", 3, "not readable JSON"),
        (b'RAW1 {"a": 3}\n', 3, "does not describe arrays"),
        (b'RAW1 {"a": ["float99", [1]]}\n', 3, "does not describe arrays"),
        (b'RAW1 {"a": ["float32", [-1]]}\n', 3, "does not describe arrays"),
        (b'RAW1 {"a": ["float32", [1000000000]]}\n', 3, "instead of 4,000,000,0"),
        (b'RAW1 {"a": ["int8", [1]], "a": ["int8", [1]]}\n1', 4, "appears twice"),
    ],
)
def test_damaged_files_are_refused_by_name(folder, capsys, content, code, message):
    (folder / "bad.raw").write_bytes(content)
    assert runs.main("inspect", folder / "bad.raw") == code
    error = capsys.readouterr().err
    assert "bad.raw" in error and message in error


def test_without_the_package_nothing_knows_the_format(nothing_added):
    (nothing_added / "model.raw").write_bytes(b'RAW1 {"a": ["int8", [1]]}\n1')
    with pytest.raises(InputError) as caught:
        registry.of(nothing_added / "model.raw")
    assert "raw arrays" not in str(caught.value)
