"""Goldens and models in another Python, without torch: the file's content, and refusals."""

import json
import stat
from typing import ClassVar

import numpy as np
import pytest

from jax_transformer import cli
from jax_transformer.errors import ConfigError
from jax_transformer.parity import from_files, golden
from jax_transformer.parity.recording import Recording
from jax_transformer.storage import safetensors

BATCH = [np.array([[1.0, 2.0]])]


class FakeRecorder:
    """A stand-in for a PyTorch model: its only layer doubles its input and adds ``wrong``."""

    versions: ClassVar[dict[str, str]] = {"torch": "2.0", "numpy": "2.0", "python": "3.11"}

    def __init__(self, wrong: float = 0.0):
        self.wrong = wrong

    def __call__(self, dtype, seed, batch):
        out = (2 * batch[0] + self.wrong).astype(dtype)
        arrays = {"layer#0/input": batch[0].astype(dtype), "layer#0/output": out}
        return Recording(["layer#0"], arrays, {"layer.weight": out[0]}, out)


@pytest.fixture
def path(tmp_path):
    path, state = tmp_path / "golden.safetensors", {"layer.weight": np.ones(2)}
    golden.create(path, FakeRecorder(), BATCH, source={"factory": "a:b"}, seed=3, state=state)
    return path


def test_a_golden_returns_the_recorded_arrays(path):
    loaded = golden.load(path)
    assert golden.is_golden(path) and (loaded.seed, loaded.source) == (3, {"factory": "a:b"})
    assert loaded.versions == FakeRecorder.versions
    recording = loaded("float64", 3, BATCH)
    assert recording.order == ["layer#0"]
    np.testing.assert_array_equal(recording.arrays["layer#0/output"], [[2.0, 4.0]])
    assert loaded("float32", None, BATCH).result.dtype == np.float32
    np.testing.assert_array_equal(loaded.state["layer.weight"], [1.0, 1.0])
    description = json.loads(safetensors.metadata(path)["golden"])
    assert description["versions"] == FakeRecorder.versions
    assert description["sha256"].keys() == {"batch", "state", "float64", "float32"}


def test_other_dtypes_seeds_and_batches_are_refused(path):
    loaded = golden.load(path)
    for arguments, message in (
        (("bfloat16", 3, BATCH), "has float64 and float32, not bfloat16"),
        (("float64", 4, BATCH), "belong to seed 3, not 4"),
        (("float64", 3, [BATCH[0] + 1]), "was recorded on another batch"),
        (("float64", 3, [*BATCH, BATCH[0]]), "was recorded on another batch"),
    ):
        with pytest.raises(ConfigError, match=message):
            loaded(*arguments)


def test_recheck_counts_exact_rounded_and_wrong_arrays(path):
    loaded = golden.load(path)
    same = golden.recheck(loaded, FakeRecorder())
    assert (same.exact, same.rounded, same.wrong) == (8, 0, ())
    assert golden.recheck(loaded, FakeRecorder(1e-16)).wrong == ()
    assert golden.recheck(loaded, FakeRecorder(4e-16)).rounded == 3
    wrong = golden.recheck(loaded, FakeRecorder(1e-3))
    first = "float64 arrays/layer#0/output: differs by 0.001 at (0, "
    assert len(wrong.wrong) == 6 and wrong.wrong[0].startswith(first)
    many = golden.GoldenCheck(1, 2, ("differs",) * 21).lines()
    counts = "1 arrays are the same bit for bit, 2 within rounding, 21 differ"
    assert many == ["differs"] * 20 + [counts]


def test_a_file_that_is_not_a_golden_is_refused(tmp_path, capsys):
    safetensors.write(tmp_path / "weights.safetensors", {"a": np.ones(2)})
    assert not golden.is_golden(tmp_path / "weights.safetensors") and not golden.is_golden(tmp_path)
    assert cli.main(["golden", "check", str(tmp_path / "weights.safetensors")]) == 3
    assert "is not a golden" in capsys.readouterr().err


def test_the_message_of_a_golden_on_standard_output_is_on_standard_error(
    path, tmp_path, monkeypatch, capsys
):
    recorded = golden.load(path)
    monkeypatch.setattr(from_files, "create_golden", lambda *_: recorded)
    for file in ("-", str(tmp_path / "a.safetensors")):
        assert cli.main(["golden", "make", file, "model.pt"]) == 0
        out, err = capsys.readouterr()
        message, other = (err, out) if file == "-" else (out, err)
        assert other == "" and message.startswith(f"{file}: {len(recorded.arrays)} arrays, seed 3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["golden", "mkae", "x.safetensors"], "must be make or check (did you mean 'make'?)"),
        (["golden", "make", "x.safetensors"], "golden make FILE MODEL, or golden check FILE"),
        (["golden", "check", "x", "model"], "golden make FILE MODEL, or golden check FILE"),
        (["golden", "make", "x.safetensors", "a:b"], "--batch: give a .safetensors file"),
        (
            ["parity", "run", "twin", "--lengths", "1,x"],
            "--lengths 1,x: must be lengths with commas, for example 1,7,31",
        ),
        (["parity", "/nowhere/run", "twin"], "/nowhere/run: no such file or folder"),
    ],
    ids=["action", "no model", "model with check", "no batch", "lengths", "no run"],
)
def test_the_command_line_refuses(arguments, message, capsys):
    assert cli.main(arguments) in (2, 3)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# Another Python


def python(tmp_path, text: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_error_is_the_last_line_of_the_other_python(tmp_path):
    text = "echo Traceback >&2; echo \"ModuleNotFoundError: No module named 'a'\" >&2; exit 1"
    process = golden.OtherProcess("a:b", python(tmp_path, text))
    with pytest.raises(ConfigError, match=r"a:b: ModuleNotFoundError: No module named 'a'$"):
        process("float64", 0, BATCH)


def test_a_missing_python_and_a_factory_without_a_callable_are_refused():
    with pytest.raises(ConfigError, match="/nowhere/python: cannot be run: No such file"):
        golden.OtherProcess("a:b", "/nowhere/python")("float64", 0, BATCH)
    with pytest.raises(ConfigError, match=r"package\.module:callable"):
        golden.OtherProcess("model")("float64", 0, BATCH)
