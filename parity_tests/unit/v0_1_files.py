"""Files of version 0.1 (``parity_tests/v0_1``), with functions to record and to check them.

``tools/record_v0_1.py`` recorded them with the functions that the tests use: only a user's part of
the package, the command line, ``jt.load``, ``jt.convert.to_torch`` and ``jt.generate``.
"""

import contextlib
import functools
import hashlib
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

import jax_transformer as jt

HERE = Path(__file__).resolve().parents[1] / "v0_1"
NOT_RECORDED = {"expected.json", "__pycache__"}
TOLERANCE = 1e-5
"""Relative error of float32 numbers: two sets of XLA flags on one machine differ by 1e-7."""


@functools.cache
def expected() -> dict[str, Any]:
    """Return the recorded expectations of version 0.1."""
    return json.loads((HERE / "expected.json").read_text(encoding="utf-8"))


def copied(to: Path, *names: str) -> Path:
    """Copy these files and folders to a folder that a test may change, and return it."""
    for name in names:
        copy = shutil.copytree if (HERE / name).is_dir() else shutil.copy
        copy(HERE / name, to / name)
    return to


def command(*arguments: str | Path, code: int = 0) -> str:
    """Run a command in this process and return its output. Only this function imports ``main``."""
    from jax_transformer import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        exit_code = cli.main([str(argument) for argument in arguments])
    assert exit_code == code, err.getvalue()
    return out.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files() -> dict[str, str]:
    """Return the SHA-256 of every file of version 0.1, by path."""
    paths = [path.relative_to(HERE) for path in HERE.rglob("*") if path.is_file()]
    recorded = [path for path in paths if path.parts[0] not in NOT_RECORDED]
    return {path.as_posix(): sha256((HERE / path).read_bytes()) for path in sorted(recorded)}


def hashes(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the SHA-256 of each array's dtype, shape and bytes."""
    headers = {name: f"{array.dtype} {array.shape} ".encode() for name, array in arrays.items()}
    return {name: sha256(headers[name] + array.tobytes()) for name, array in sorted(arrays.items())}


def in_file(path: Path) -> dict[str, str]:
    """Return the hashes of a .safetensors file's tensors."""
    return hashes(safetensors.numpy.load_file(path))


def tensors(folder: str | Path, weights: str = "auto") -> dict[str, str]:
    """Return the hashes of a folder's weights under PyTorch's names."""
    model, _ = jt.load(HERE / folder, weights)
    return hashes(jt.convert.to_torch(model))


def numbers(model: Any, source: list, target: list) -> dict[str, Any]:
    """Return logits of recorded ids, and the tokens of each search: float32 printed as float64."""
    ids = np.array(source, np.int32)
    logits = np.asarray(model(ids, np.array(target, np.int32)))
    assert logits.dtype == np.float32
    beams, scores = jt.generate.beam(model, ids, beam_size=3, max_length=8)
    return {
        "sum of logits": float(np.abs(logits.astype(np.float64)).sum()),
        "some logits": chosen(logits),
        "beam scores": np.asarray(scores, np.float64).tolist(),
        "greedy": np.asarray(jt.generate.greedy(model, ids, max_length=8)).tolist(),
        "beam": np.asarray(beams).tolist(),
    }


def chosen(logits: np.ndarray) -> list[float]:
    """Return some of the logits of every row."""
    return logits[:, ::2, ::67].astype(np.float64).ravel().tolist()


def translations(folder: str, weights: str, lines: Path) -> dict[str, list[str]]:
    """Return translations by the folder's settings, greedily, and the best two of a beam."""
    options = {"default": [], "greedy": ["--beam", "1"], "beam": ["--beam", "4", "--n-best", "2"]}
    arguments = ["translate", "--run", HERE / folder, "--weights", weights, "--input", lines]
    outputs = {name: command(*arguments, *more).splitlines() for name, more in options.items()}
    return outputs | {"beam": [line.rpartition(" ||| ")[0] for line in outputs["beam"]]}


def losses(run: Path, after: int = 0) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl after a step, without speeds and scores of translations."""
    names = ("step", "loss", "valid_loss", "gradient_norm", "learning_rate")
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    entries = [{name: line[name] for name in names if name in line} for line in lines]
    return [line for line in entries if line["step"] > after]


def assert_near(actual: Any, expected: Any) -> None:
    """Assert that two values of the same structure have the same numbers, up to rounding."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_near(actual[name], expected[name])
    elif expected and isinstance(expected, list) and isinstance(expected[0], dict):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_near(one, other)
    else:
        largest = np.abs(np.array(expected, np.float64)).max()
        np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE * largest)
