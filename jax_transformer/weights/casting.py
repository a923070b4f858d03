"""Another dtype for weights, and what that costs. NumPy only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jax_transformer.errors import ConfigError
from jax_transformer.storage.tensors import is_float

DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Loss:
    """What a cast has lost."""

    dtype: str
    cast: int
    """How many tensors changed their dtype."""
    largest: float
    """The largest difference of a number that stayed finite,"""
    where: str
    """and the tensor that it is in."""
    overflowed: dict[str, int]
    """How many finite numbers became infinite, by tensor."""

    def lines(self) -> Iterator[str]:
        where = f" in {self.where}" if self.where else ""
        yield f"cast {self.cast} tensors to {self.dtype}: largest error {self.largest:.3g}{where}"
        if self.overflowed:
            names = ", ".join(f"{name} ({count})" for name, count in self.overflowed.items())
            yield f"warning: {sum(self.overflowed.values())} numbers are too large for {self.dtype} and became infinite: {names}"


def check(dtype: str | None) -> None:
    """Raises ConfigError where it is none that weights can have."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")


def cast(state: Mapping[str, np.ndarray], dtype: str) -> tuple[dict[str, np.ndarray], Loss]:
    """Every floating-point array in ``dtype``; arrays that are one stay one."""
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    made: dict[int, np.ndarray] = {}
    count, largest, where, overflowed = 0, 0.0, "", {}
    result = {}
    for name, array in state.items():
        if not is_float(array.dtype.name) or array.dtype == wanted:
            result[name] = array
            continue
        if id(array) not in made:
            with np.errstate(over="ignore", invalid="ignore"):
                made[id(array)] = array.astype(wanted)
            error, infinite = _difference(array, made[id(array)])
            if error > largest:
                largest, where = error, name
            if infinite:
                overflowed[name] = infinite
        result[name] = made[id(array)]
        count += 1
    return result, Loss(dtype, count, largest, where, overflowed)


def _difference(before: np.ndarray, after: np.ndarray) -> tuple[float, int]:
    finite = np.isfinite(before.astype(np.float64))
    kept = finite & np.isfinite(after.astype(np.float64))
    differences = np.abs(before.astype(np.float64)[kept] - after.astype(np.float64)[kept])
    return float(differences.max(initial=0.0)), int((finite & ~kept).sum())
