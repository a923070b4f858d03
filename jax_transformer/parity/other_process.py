"""A PyTorch model that runs in another Python environment, which need not have JAX: arrays go there and come back as safetensors."""

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

LIMIT = 1800
"""Seconds that one run in the other environment may take."""


@dataclass
class OtherProcess:
    """A PyTorch model as :func:`jax_transformer.parity.compare_recorded` asks for one, in the mode (train, eval) that its factory leaves it in."""

    factory: str
    """``package.module:callable``, which gives the module; imported there, with the current folder on the path."""
    python: str | None = None
    """The other environment's interpreter, which needs torch and safetensors; this one where None."""
    state: Mapping[str, np.ndarray] | None = None
    """The weights, under PyTorch's names; those that the factory gives where None."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of torch, NumPy and Python there, after the first run."""
    _made: dict[str, Recording] = field(default_factory=dict)
    _of: tuple = ()

    def __call__(self, dtype: str, seed: int | None, batch: Sequence[np.ndarray]) -> Recording:
        """Raises ConfigError, with the last line that the other process said, where it fails."""
        asked = seed, *(array.tobytes() for array in batch)
        if self._of != asked:
            self._made, self._of = {}, asked
        if dtype not in self._made:
            # Starting the other process takes longer than a run: both of a comparison's in one
            self._run(
                ("float64", "float32")
                if not self._made and dtype in ("float64", "float32")
                else (dtype,),
                seed,
                batch,
            )
        return self._made[dtype]

    def _run(self, dtypes: Sequence[str], seed: int | None, batch: Sequence[np.ndarray]) -> None:
        if ":" not in self.factory:
            raise ConfigError(
                f"{self.factory}: say which callable gives the PyTorch module, as package.module:callable"
            )
        arrays = {f"batch/{i}": array for i, array in enumerate(batch)} | {
            f"state/{name}": a for name, a in (self.state or {}).items()
        }
        settings = json.dumps({"batch": len(batch), "dtypes": dtypes, "seed": seed})
        with tempfile.TemporaryDirectory() as folder:
            request, result = (
                Path(folder, "request.safetensors"),
                Path(folder, "result.safetensors"),
            )
            safetensors.write(request, arrays, {"settings": settings})
            self._execute([str(request), str(result), self.factory])
            about, found = safetensors.metadata(result), safetensors.read(result)
        self.versions = json.loads(about["versions"])
        for dtype, order in json.loads(about["order"]).items():
            self._made[dtype] = recording_of(found, dtype, order)

    def _execute(self, arguments: list[str]) -> None:
        python = self.python or sys.executable
        command = [python, str(script()), *arguments]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=LIMIT,
                env=os.environ | {"PYTHONUTF8": "1"},
            )
        except OSError as error:
            raise ConfigError(f"{python}: cannot be run: {error.strerror or error}") from None
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{python}: {self.factory} took more than {LIMIT} seconds") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ConfigError(f"{python}: {self.factory}: {said[-1]}")


def script() -> Path:
    """The file that the other interpreter runs: plain PyTorch. Finding it imports no torch."""
    found = importlib.util.find_spec("torch_reference")
    assert found is not None and found.submodule_search_locations, (
        "torch_reference comes with this package"
    )
    return Path(found.submodule_search_locations[0]) / "recording.py"


def recording_of(arrays: Mapping[str, np.ndarray], dtype: str, order: Sequence[str]) -> Recording:
    """What a file holds of one dtype, under ``DTYPE/arrays/...``, ``DTYPE/parameters/...`` and ``DTYPE/result``."""
    own = {
        name.removeprefix(f"{dtype}/"): array
        for name, array in arrays.items()
        if name.startswith(f"{dtype}/")
    }
    groups = [
        {n.partition("/")[2]: a for n, a in own.items() if n.startswith(f"{group}/")}
        for group in ("arrays", "parameters")
    ]
    return Recording(list(order), groups[0], groups[1], own["result"])
