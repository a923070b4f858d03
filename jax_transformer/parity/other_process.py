"""A PyTorch model in another Python environment, which need not have JAX.

Arrays travel in both directions as safetensors.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jax_transformer.errors import ConfigError
from jax_transformer.parity.recording import Recording
from jax_transformer.storage import safetensors

TIMEOUT = 1800
"""Seconds that one run in the other environment may take."""


@dataclass
class OtherProcess:
    """A recorder for :func:`jax_transformer.parity.compare_recorded` that starts another Python.

    The model runs in the mode (train, eval) in which its factory leaves it.
    """

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
        """Return the recording in ``dtype``.

        Raises ConfigError with the last line of the other process's stderr if it fails.
        """
        recorded_inputs = seed, *(array.tobytes() for array in batch)
        if self._recorded_inputs != recorded_inputs:
            self._recordings, self._recorded_inputs = {}, recorded_inputs
        if dtype not in self._recordings:
            # Starting the process takes longer than a run, so one start serves both usual dtypes
            usual = ("float64", "float32")
            together = not self._recordings and dtype in usual
            self._run(usual if together else (dtype,), seed, batch)
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
        for dtype, order in json.loads(metadata["order"]).items():
            self._recordings[dtype] = Recording.of_file(recorded, dtype, order)

    def _execute(self, arguments: list[str]) -> None:
        python = self.python or sys.executable
        command = [python, str(script()), *arguments]
        try:
            process = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                env=os.environ | {"PYTHONUTF8": "1"},
            )
        except OSError as error:
            raise ConfigError(f"{python}: cannot be run: {error.strerror or error}") from None
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{python}: {self.factory} took more than {TIMEOUT} seconds"
            ) from None
        if process.returncode:
            lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            raise ConfigError(f"{python}: {self.factory}: {lines[-1]}")


def script() -> Path:
    """Return the file that the other interpreter runs: plain PyTorch. This does not import
    torch.
    """
    spec = importlib.util.find_spec("torch_reference")
    assert spec is not None and spec.submodule_search_locations, (
        "torch_reference comes with this package"
    )
    return Path(spec.submodule_search_locations[0]) / "recording.py"
