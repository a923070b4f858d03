"""Recorded numbers of a PyTorch model in one .safetensors file: where torch is not installed, a Flax model is held to these."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.parity import difference
from jax_transformer.parity.comparison import Theirs
from jax_transformer.parity.difference import FAULT
from jax_transformer.parity.other_process import recording_of
from jax_transformer.storage import safetensors

DTYPES = ("float64", "float32")
VERSION = 1


@dataclass(frozen=True)
class Golden:
    """What a file holds. Called, it is the PyTorch model of :func:`jax_transformer.parity.compare_recorded`."""

    path: Path
    batch: tuple[np.ndarray, ...]
    seed: int
    """Of the numbers R in ``sum(R * output)``, whose gradients are recorded."""
    state: dict[str, np.ndarray]
    """The weights under PyTorch's names; empty where the module's own factory gives them."""
    arrays: dict[str, np.ndarray]
    order: dict[str, list[str]]
    source: dict[str, Any]
    """How it is made again: ``{"factory": "package.module:callable"}``, or ``{"config": ...}`` for a PyTorch twin."""
    versions: dict[str, str] = field(default_factory=dict)

    def __call__(self, dtype: str, seed: int | None, batch: Sequence[np.ndarray]) -> Any:
        """Raises ConfigError for another dtype, seed or batch than the recorded."""
        if dtype not in self.order:
            raise ConfigError(f"{self.path}: has {' and '.join(self.order)}, not {dtype}")
        if seed not in (None, self.seed):
            raise ConfigError(
                f"{self.path}: its gradients are those of seed {self.seed}, not {seed}"
            )
        if len(batch) != len(self.batch) or not all(
            np.array_equal(one, other) for one, other in zip(batch, self.batch, strict=True)
        ):
            raise ConfigError(f"{self.path}: was recorded on another batch: take the golden's own")
        return recording_of(self.arrays, dtype, self.order[dtype])


def make(
    path: str | Path,
    theirs: Theirs,
    batch: Sequence[np.ndarray],
    *,
    source: Mapping[str, Any],
    seed: int = 0,
    state: Mapping[str, np.ndarray] | None = None,
) -> Golden:
    """Record a PyTorch model in float64 and float32, with gradients, and write it: whole or not at all, and read back.

    ``theirs`` as of :func:`jax_transformer.parity.compare_recorded`; ``source`` says how to make it again.
    """
    batch = [np.asarray(array) for array in batch]
    recorded = {dtype: theirs(dtype, seed, batch) for dtype in DTYPES}
    arrays = {
        f"{dtype}/{name}": array for dtype, made in recorded.items() for name, array in _named(made)
    }
    arrays |= {f"batch/{i}": array for i, array in enumerate(batch)} | {
        f"state/{name}": array for name, array in (state or {}).items()
    }
    about = {
        "version": VERSION,
        "seed": seed,
        "source": dict(source),
        "order": {dtype: made.order for dtype, made in recorded.items()},
        "versions": getattr(theirs, "versions", None) or _versions(),
        "sha256": _hashes(arrays),
    }
    safetensors.write(path, arrays, {"golden": json.dumps(about)})
    return load(path)


def is_golden(path: str | Path) -> bool:
    """Whether a file is one."""
    return safetensors.is_safetensors(path) and "golden" in safetensors.metadata(path)


def load(path: str | Path) -> Golden:
    """Raises InputError where the file is no golden, of another version, or not as it was written."""
    text = safetensors.metadata(path).get("golden")
    if text is None:
        raise InputError(
            f"{path}: is no golden: it was not written by `jax-transformer golden make`"
        )
    try:
        about = json.loads(text)
        version, hashes = about["version"], about["sha256"]
        parts = about["seed"], about["order"], about["source"], about["versions"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: its description as a golden cannot be read: {error!r}") from None
    if version != VERSION:
        raise InputError(
            f"{path}: is a golden of version {version}, and this reads version {VERSION}: make it again"
        )
    arrays = safetensors.read(path)
    if wrong := [group for group, found in _hashes(arrays).items() if hashes.get(group) != found]:
        raise InputError(
            f"{path}: {', '.join(wrong)} are not as they were written: their SHA-256 differs"
        )
    seed, order, source, versions = parts
    batch = tuple(
        arrays[f"batch/{i}"] for i in range(sum(name.startswith("batch/") for name in arrays))
    )
    state = {
        name.removeprefix("state/"): array
        for name, array in arrays.items()
        if name.startswith("state/")
    }
    return Golden(Path(path), batch, seed, state, arrays, order, source, versions)


@dataclass(frozen=True)
class Again:
    """A golden beside what its model gives now."""

    exact: int
    """Arrays that are the same bit for bit,"""
    rounded: int
    """that differ within rounding,"""
    wrong: tuple[str, ...]
    """and that differ by more, or are on one side alone: the first places, with how much."""

    def lines(self) -> list[str]:
        """What is printed."""
        counted = f"{self.exact} arrays are the same bit for bit, {self.rounded} within rounding, {len(self.wrong)} differ"
        return [*self.wrong[:20], counted]


def again(golden: Golden, theirs: Theirs) -> Again:
    """Run the model again and compare."""
    exact, rounded, wrong = 0, 0, []
    made = {dtype: dict(_named(theirs(dtype, golden.seed, golden.batch))) for dtype in golden.order}
    for dtype, now in made.items():
        then = {
            n.removeprefix(f"{dtype}/"): a
            for n, a in golden.arrays.items()
            if n.startswith(f"{dtype}/")
        }
        wrong += [
            f"{dtype} {name}: only {'recorded' if name in then else 'made now'}"
            for name in sorted(then.keys() ^ now.keys())
        ]
        for name in sorted(then.keys() & now.keys()):
            if then[name].shape != now[name].shape:
                wrong.append(
                    f"{dtype} {name}: {then[name].shape} was recorded, {now[name].shape} is made now"
                )
            elif then[name].tobytes() == now[name].tobytes():
                exact += 1
            else:
                sides = [(golden.arrays[f"float32/{name}"], golden.arrays[f"float64/{name}"])]
                found = difference.difference(now[name], then[name], dtype)
                times = difference.times(found, difference.floor(sides, dtype))
                if times < FAULT:
                    rounded += 1
                else:
                    wrong.append(
                        f"{dtype} {name}: differs by {found.max_abs:.3g} at {found.where}, {times:.0e}× rounding"
                    )
    return Again(exact, rounded, tuple(wrong))


def _named(made: Any) -> list[tuple[str, np.ndarray]]:
    groups = [
        (f"{group}/{name}", array)
        for group in ("arrays", "parameters")
        for name, array in getattr(made, group).items()
    ]
    return [*groups, ("result", made.result)]


def _hashes(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """By group: batch, state, and each dtype."""
    made: dict[str, Any] = {}
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest = made.setdefault(name.partition("/")[0], hashlib.sha256())
        digest.update(f"{name}\n{array.dtype}\n{array.shape}\n".encode() + array.tobytes())
    return {group: digest.hexdigest() for group, digest in made.items()}


def _versions() -> dict[str, str]:
    return {
        "torch": metadata.version("torch"),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
