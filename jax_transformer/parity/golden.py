"""PyTorch models outside this process: in another Python environment, which needs no JAX, or as
goldens, their recorded numbers in a .safetensors file, which need no torch here.
"""

import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.parity import difference
from jax_transformer.parity.comparison import TorchRecorder
from jax_transformer.parity.difference import FAULT
from jax_transformer.parity.recording import Recording, below
from jax_transformer.storage import safetensors

DTYPES = ("float64", "float32")
VERSION = 1
TIMEOUT = 1800
"""Seconds that one run in the other environment may take."""
_OLDER = (
    "the golden is of an older version, which left modules that compute in float32 as they are:"
    " make it again"
)


@dataclass(frozen=True)
class Golden:
    """The content of a golden file; also a recorder for :func:`.comparison.compare_recorded`."""

    path: Path
    batch: tuple[np.ndarray, ...]
    seed: int
    """Seed of R in ``sum(R * output)``, whose gradients are recorded."""
    state: dict[str, np.ndarray]
    """Weights under PyTorch's names; empty if the module's own factory sets them."""
    arrays: dict[str, np.ndarray]
    order: dict[str, list[str]]
    source: dict[str, Any]
    """The recorded model: ``{"factory": "package.module:callable"}``, or ``{"config": ...}`` of a
    PyTorch twin."""
    versions: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    """By dtype, what :meth:`Recording.of_file` takes; older files have none."""

    def __call__(self, dtype: str, seed: int | None, batch: Sequence[np.ndarray]) -> Any:
        """Return the recording. Raises ConfigError unless dtype, seed and batch are its own."""
        if dtype not in self.order:
            raise ConfigError(f"{self.path}: has {' and '.join(self.order)}, not {dtype}")
        if seed not in (None, self.seed):
            raise ConfigError(f"{self.path}: its gradients belong to seed {self.seed}, not {seed}")
        if len(batch) != len(self.batch) or not all(
            np.array_equal(one, other, equal_nan=True)
            for one, other in zip(batch, self.batch, strict=True)
        ):
            raise ConfigError(f"{self.path}: was recorded on another batch: use the golden's own")
        return Recording.of_file(
            self.arrays, dtype, self.order[dtype], self.about.get(dtype) or {"note": _OLDER}
        )


def create(
    path: str | Path,
    recorder: TorchRecorder,
    batch: Sequence[np.ndarray],
    *,
    source: Mapping[str, Any],
    seed: int = 0,
    state: Mapping[str, np.ndarray] | None = None,
) -> Golden:
    """Record a PyTorch model in float64 and float32 with gradients, write the file atomically, and
    return the golden as read back from it.

    ``recorder`` and ``batch`` are those of :func:`jax_transformer.parity.compare_recorded`;
    ``source`` is that of :class:`Golden`, which :func:`recheck` needs; ``seed`` is the one of the
    gradients' weights; ``state`` has the model's weights, if ``source`` does not bring them.
    """
    batch = [np.asarray(array) for array in batch]
    recordings = {dtype: recorder(dtype, seed, batch) for dtype in DTYPES}
    arrays = {
        f"{dtype}/{name}": array
        for dtype, recording in recordings.items()
        for name, array in _named_arrays(recording)
    }
    arrays |= {f"batch/{i}": array for i, array in enumerate(batch)}
    arrays |= {f"state/{name}": array for name, array in (state or {}).items()}
    fields = ("narrow", "rounded", "note", "sizes", "outputs")
    if not (versions := getattr(recorder, "versions", None)):
        versions = {"torch": metadata.version("torch"), "numpy": np.__version__}
        versions["python"] = platform.python_version()
    description = {
        "version": VERSION,
        "seed": seed,
        "source": dict(source),
        "order": {dtype: recording.order for dtype, recording in recordings.items()},
        "about": {
            dtype: {name: getattr(recording, name) for name in fields}
            for dtype, recording in recordings.items()
        },
        "versions": versions,
        "sha256": _hashes(arrays),
    }
    safetensors.write(path, arrays, {"golden": json.dumps(description)})
    return load(path)


def is_golden(path: str | Path) -> bool:
    """Return True if the file is a golden."""
    return safetensors.is_safetensors(path) and "golden" in safetensors.metadata(path)


def load(path: str | Path) -> Golden:
    """Return a file's golden. Raises InputError if it is none, of another version, or changed."""
    text = safetensors.metadata(path).get("golden")
    if text is None:
        origin = "it was not written by `jax-transformer golden make`"
        raise InputError(f"{path}: is not a golden: {origin}")
    try:
        description = json.loads(text)
        names = ("version", "sha256", "seed", "order", "source", "versions")
        version, hashes, seed, order, source, versions = (description[name] for name in names)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: its description as a golden cannot be read: {error!r}") from None
    about = description.get("about", {})
    if not isinstance(about, dict) or not all(
        isinstance(each, dict) for each in (hashes, order, *about.values())
    ):
        problem = "sha256, order or about"
        raise InputError(f"{path}: its description as a golden cannot be read: {problem}")
    if version != VERSION:
        reads = f"this program reads version {VERSION}"
        raise InputError(f"{path}: is a golden of version {version}, {reads}: make it again")
    arrays = safetensors.read(path)
    changed = [group for group, digest in _hashes(arrays).items() if hashes.get(group) != digest]
    if changed:
        raise InputError(f"{path}: changed since it was written: SHA-256 of {', '.join(changed)}")
    batch = tuple(arrays[f"batch/{i}"] for i in range(len(below("batch", arrays))))
    state = below("state", arrays)
    return Golden(Path(path), batch, seed, state, arrays, order, source, versions, about)


@dataclass(frozen=True)
class GoldenCheck:
    """The numbers of arrays that a new run of a golden's model gives bit for bit and within
    rounding, and a line for each that differs by more, or that one side lacks.
    """

    exact: int
    rounded: int
    wrong: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the text to print: the first differences and the counts."""
        return [
            *self.wrong[:20],
            f"{self.exact} arrays are the same bit for bit, {self.rounded} within rounding,"
            f" {len(self.wrong)} differ",
        ]


def recheck(golden: Golden, recorder: TorchRecorder) -> GoldenCheck:
    """Record the model again and compare with the golden."""
    exact, rounded, wrong = 0, 0, []
    recordings = {dtype: recorder(dtype, golden.seed, golden.batch) for dtype in golden.order}
    for dtype, recording in recordings.items():
        now, then = dict(_named_arrays(recording)), below(dtype, golden.arrays)
        wrong += [
            f"{dtype} {name}: {'only in the golden' if name in then else 'not in the golden'}"
            for name in sorted(then.keys() ^ now.keys())
        ]
        for name in sorted(then.keys() & now.keys()):
            if then[name].tobytes() == now[name].tobytes() and then[name].shape == now[name].shape:
                exact += 1
            elif (problem := _problem(golden, dtype, name, now[name])) is None:
                rounded += 1
            else:
                wrong.append(problem)
    return GoldenCheck(exact, rounded, tuple(wrong))


def _problem(golden: Golden, dtype: str, name: str, now: np.ndarray) -> str | None:
    """Return the difference of an array from the recorded one, None if rounding explains it."""
    then = golden.arrays[f"{dtype}/{name}"]
    if then.shape != now.shape:
        return f"{dtype} {name}: shape {then.shape} in the golden, {now.shape} now"
    sides = [(golden.arrays[f"float32/{name}"], golden.arrays[f"float64/{name}"])]
    measured = difference.difference(now, then, dtype)
    times = difference.times_floor(measured, difference.rounding_floor(sides, dtype))
    if times < FAULT:
        return None
    largest = f"{measured.max_abs:.3g} at {measured.where}"
    return f"{dtype} {name}: differs by {largest}, {times:.0e}× rounding"


def _named_arrays(recording: Any) -> list[tuple[str, np.ndarray]]:
    groups = [
        (f"{group}/{name}", array)
        for group in ("arrays", "parameters")
        for name, array in getattr(recording, group).items()
    ]
    return [*groups, ("result", recording.result)]


def _hashes(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return SHA-256 by group: batch, state, and each dtype."""
    digests: dict[str, Any] = {}
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest = digests.setdefault(name.partition("/")[0], hashlib.sha256())
        digest.update(f"{name}\n{array.dtype}\n{array.shape}\n".encode() + array.tobytes())
    return {group: digest.hexdigest() for group, digest in digests.items()}


# Another Python environment


@dataclass
class OtherProcess:
    """A recorder that runs another Python, in the mode (train, eval) that its factory sets."""

    factory: str
    """``package.module:callable``, which returns the module. It is imported in the other process,
    with the current folder on the path."""
    python: str | None = None
    """Interpreter of the other environment, which needs torch and safetensors; this one if None."""
    state: Mapping[str, np.ndarray] | None = None
    """Weights under PyTorch's names; the factory's if None."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of torch, NumPy and Python there, after the first run."""
    _recordings: dict[str, Recording] = field(default_factory=dict)
    _recorded_inputs: tuple = ()

    def __call__(self, dtype: str, seed: int | None, batch: Sequence[np.ndarray]) -> Recording:
        """Return the recording. Raises ConfigError with the last line of the other's stderr."""
        recorded_inputs = seed, _hashes({f"batch/{i}": array for i, array in enumerate(batch)})
        if self._recorded_inputs != recorded_inputs:
            self._recordings, self._recorded_inputs = {}, recorded_inputs
        if dtype not in self._recordings:
            # Starting the process takes longer than a run, so one start serves both usual dtypes
            together = not self._recordings and dtype in DTYPES
            self._run(DTYPES if together else (dtype,), seed, batch)
        return self._recordings[dtype]

    def _run(self, dtypes: Sequence[str], seed: int | None, batch: Sequence[np.ndarray]) -> None:
        if ":" not in self.factory:
            raise ConfigError(
                f"{self.factory}: name the callable that returns the PyTorch module, as"
                " package.module:callable"
            )
        arrays = {f"batch/{i}": array for i, array in enumerate(batch)}
        arrays |= {f"state/{name}": array for name, array in (self.state or {}).items()}
        settings = json.dumps({"batch": len(batch), "dtypes": dtypes, "seed": seed})
        with tempfile.TemporaryDirectory() as folder:
            request = Path(folder, "request.safetensors")
            result = Path(folder, "result.safetensors")
            safetensors.write(request, arrays, {"settings": settings})
            self._execute([str(request), str(result), self.factory])
            metadata, recorded = safetensors.metadata(result), safetensors.read(result)
        self.versions = json.loads(metadata["versions"])
        about = json.loads(metadata["about"])
        for dtype, order in json.loads(metadata["order"]).items():
            self._recordings[dtype] = Recording.of_file(recorded, dtype, order, about[dtype])

    def _execute(self, arguments: list[str]) -> None:
        python = self.python or sys.executable
        command, env = [python, script(), *arguments], os.environ | {"PYTHONUTF8": "1"}
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT, env=env
            )
        except OSError as error:
            raise ConfigError(f"{python}: cannot be run: {error.strerror or error}") from None
        except subprocess.TimeoutExpired:
            problem = f"{self.factory} took more than {TIMEOUT} seconds"
            raise ConfigError(f"{python}: {problem}") from None
        if process.returncode:
            lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            raise ConfigError(f"{python}: {self.factory}: {lines[-1]}")


def script() -> str:
    """Return the file that the other interpreter runs: plain PyTorch; torch is not imported."""
    spec = importlib.util.find_spec("torch_reference.recording")
    assert spec and spec.origin, "torch_reference comes with this package"
    return spec.origin
