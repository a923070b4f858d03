"""Files that version 0.1 made (``parity_tests/v0_1``), and what is recorded and asked of them.

``make.py`` there records with the same functions that the tests ask with. Of the package they use
what users have: the command line, ``jt.load``, ``jt.convert.to_torch`` and ``jt.generate``.
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
NOT_MADE = {"expected.json", "make.py", "__pycache__"}
TOLERANCE = 1e-5
"""Relative, of float32 numbers: 1e-7 were seen between two sets of XLA's flags on one machine."""


@functools.cache
def expected() -> dict[str, Any]:
    """What version 0.1 said of its files."""
    return json.loads((HERE / "expected.json").read_text(encoding="utf-8"))


def copied(to: Path, *names: str) -> Path:
    """A folder with a copy of these files and folders, which a test may change; the folder."""
    for name in names:
        copy = shutil.copytree if (HERE / name).is_dir() else shutil.copy
        copy(HERE / name, to / name)
    return to


def command(*arguments: str | Path, code: int = 0) -> str:
    """What a command prints, run in this process. The one place that knows where ``main`` is."""
    from jax_transformer import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = cli.main([str(argument) for argument in arguments])
    assert found == code, err.getvalue()
    return out.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files() -> dict[str, str]:
    """The SHA-256 of every file that version 0.1 made, by its path."""
    paths = [path.relative_to(HERE) for path in HERE.rglob("*") if path.is_file()]
    made = [path for path in paths if path.parts[0] not in NOT_MADE]
    return {path.as_posix(): sha256((HERE / path).read_bytes()) for path in sorted(made)}


def hashes(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The SHA-256 of each array's dtype, shape and bytes."""
    told = {name: f"{array.dtype} {array.shape} ".encode() for name, array in arrays.items()}
    return {name: sha256(told[name] + array.tobytes()) for name, array in sorted(arrays.items())}


def in_file(path: Path) -> dict[str, str]:
    """The hashes of a .safetensors file's tensors."""
    return hashes(safetensors.numpy.load_file(path))


def tensors(folder: str | Path, weights: str = "auto") -> dict[str, str]:
    """The hashes of a folder's weights under PyTorch's names."""
    model, _ = jt.load(HERE / folder, weights)
    return hashes(jt.convert.to_torch(model))


def numbers(model: Any, source: list, target: list) -> dict[str, Any]:
    """Logits of recorded ids, and the tokens that decoding gives: float32 printed as float64."""
    ids = np.array(source, np.int32)
    logits = np.asarray(model(ids, np.array(target, np.int32)))
    assert logits.dtype == np.float32
    found, scores = jt.generate.beam(model, ids, beam_size=3, max_length=8)
    return {
        "sum of logits": float(np.abs(logits.astype(np.float64)).sum()),
        "some logits": chosen(logits),
        "beam scores": np.asarray(scores, np.float64).tolist(),
        "greedy": np.asarray(jt.generate.greedy(model, ids, max_length=8)).tolist(),
        "beam": np.asarray(found).tolist(),
    }


def chosen(logits: np.ndarray) -> list[float]:
    """Some of the logits of every row."""
    return logits[:, ::2, ::67].astype(np.float64).ravel().tolist()


def translations(folder: str, weights: str, lines: Path) -> dict[str, list[str]]:
    """What ``translate`` makes of some lines: as the folder says, greedily, and the best two of a
    beam of 4 as ``line ||| translation``."""
    how = {"default": [], "greedy": ["--beam", "1"], "beam": ["--beam", "4", "--n-best", "2"]}
    given = ["translate", "--run", HERE / folder, "--weights", weights, "--input", lines]
    told = {name: command(*given, *more).splitlines() for name, more in how.items()}
    return told | {"beam": [line.rpartition(" ||| ")[0] for line in told["beam"]]}


def losses(run: Path, after: int = 0) -> list[dict[str, float]]:
    """The lines of metrics.jsonl behind a step, without speeds and scores of translations."""
    names = ("step", "loss", "valid_loss", "gradient_norm", "learning_rate")
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    told = [{name: line[name] for name in names if name in line} for line in lines]
    return [line for line in told if line["step"] > after]


def assert_near(found: Any, told: Any) -> None:
    """Asserts that two values of the same structure have the same numbers, but for rounding."""
    if isinstance(told, dict):
        assert found.keys() == told.keys()
        for name in told:
            assert_near(found[name], told[name])
    elif told and isinstance(told, list) and isinstance(told[0], dict):
        assert len(found) == len(told)
        for one, other in zip(found, told, strict=True):
            assert_near(one, other)
    else:
        largest = np.abs(np.array(told, np.float64)).max()
        np.testing.assert_allclose(found, told, rtol=TOLERANCE, atol=TOLERANCE * largest)
