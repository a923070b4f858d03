"""Casts of weights to another dtype, and what they lose. NumPy only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jax_transformer.errors import ConfigError
from jax_transformer.storage.tensors import is_float

DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Loss:
    """Numbers that a cast has changed."""

    dtype: str
    cast: int
    """Number of tensors that changed their dtype."""
    largest: float
    """Largest difference of a number that stayed finite."""
    where: str
    """Tensor of that number."""
    overflowed: dict[str, int]
    """Count of finite numbers that became infinite, by tensor."""

    def lines(self) -> Iterator[str]:
        where = f" in {self.where}" if self.where else ""
        yield f"cast {self.cast} tensors to {self.dtype}: largest error {self.largest:.3g}{where}"
        if self.overflowed:
            names = ", ".join(f"{name} ({count})" for name, count in self.overflowed.items())
            count = sum(self.overflowed.values())
            yield (
                f"warning: {count} numbers are too large for {self.dtype} and became infinite:"
                f" {names}"
            )


def check(dtype: str | None) -> None:
    """Raise ConfigError if weights cannot have this dtype. None is allowed."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")


def cast(state: Mapping[str, np.ndarray], dtype: str) -> tuple[dict[str, np.ndarray], Loss]:
    """Return floating-point arrays in ``dtype``, and the loss; shared arrays stay shared."""
    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    casts: dict[int, np.ndarray] = {}
    count, largest, where, overflowed = 0, 0.0, "", {}
    result = {}
    for name, array in state.items():
        if not is_float(array.dtype.name) or array.dtype == target:
            result[name] = array
            continue
        if id(array) not in casts:
            with np.errstate(over="ignore", invalid="ignore"):
                casts[id(array)] = array.astype(target)
            error, infinite = _difference(array, casts[id(array)])
            if error > largest:
                largest, where = error, name
            if infinite:
                overflowed[name] = infinite
        result[name] = casts[id(array)]
        count += 1
    return result, Loss(dtype, count, largest, where, overflowed)


def _difference(before: np.ndarray, after: np.ndarray) -> tuple[float, int]:
    finite = np.isfinite(before.astype(np.float64))
    both = finite & np.isfinite(after.astype(np.float64))
    differences = np.abs(before.astype(np.float64)[both] - after.astype(np.float64)[both])
    return float(differences.max(initial=0.0)), int((finite & ~both).sum())
