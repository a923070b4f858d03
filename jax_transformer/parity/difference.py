"""How two arrays differ, and by how much more than rounding explains. NumPy only."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

FAULT = 1000.0
"""Times the rounding floor from which on a difference is a fault. Correct twins measured so far stay under 30, the smallest fault known (an
epsilon of 1e-6 for 1e-5) is at 1e9."""


@dataclass(frozen=True)
class Difference:
    """Of ``ours`` from ``theirs``, element by element; NaN in the same place on both sides agrees, and so does an infinity of one sign."""

    shape: tuple[int, ...]
    dtype: str
    max_abs: float
    """Over the elements that are finite on both sides; infinite where only one side is not finite."""
    max_relative: float
    """The largest difference over the largest absolute value of theirs."""
    ulps: float
    """The largest difference in units of the last place of the larger of the two numbers."""
    cosine: float
    """Between the two as vectors; 1 where both are zero."""
    where: tuple[int, ...]
    """The element of the largest difference,"""
    ours: float
    theirs: float
    """and the numbers there."""
    nan_ours: int
    nan_theirs: int
    infinite_ours: int
    infinite_theirs: int
    agreeing_nan: int
    """How many elements are NaN on both sides."""

    def to_data(self) -> dict[str, Any]:
        """For JSON, which has no NaN and no infinity: these become text."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def difference(ours: np.ndarray, theirs: np.ndarray, dtype: str | None = None) -> Difference:
    """The difference of two arrays of one shape. ``dtype`` names the precision that both were computed in, where the arrays are wider."""
    assert ours.shape == theirs.shape, f"{ours.shape} and {theirs.shape}"
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    both_nan = np.isnan(a) & np.isnan(b)
    same = both_nan | (a == b)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(same, 0.0, np.abs(a - b))
    gap = np.where(np.isnan(gap), np.inf, gap)
    at = np.unravel_index(int(gap.argmax()), gap.shape) if gap.size else ()
    largest = float(gap[at]) if gap.size else 0.0
    finite = np.isfinite(a) & np.isfinite(b)
    scale = float(np.abs(b[finite]).max(initial=0.0))
    name = dtype or min((ours.dtype, theirs.dtype), key=lambda kind: kind.itemsize).name
    return Difference(
        shape=tuple(ours.shape),
        dtype=name,
        max_abs=largest,
        max_relative=largest / scale if scale else (0.0 if largest == 0 else math.inf),
        ulps=_ulps(a, b, gap, name),
        cosine=_cosine(a[finite], b[finite]),
        where=tuple(int(i) for i in at),
        ours=float(a[at]) if gap.size else 0.0,
        theirs=float(b[at]) if gap.size else 0.0,
        nan_ours=int(np.isnan(a).sum()),
        nan_theirs=int(np.isnan(b).sum()),
        infinite_ours=int(np.isinf(a).sum()),
        infinite_theirs=int(np.isinf(b).sum()),
        agreeing_nan=int(both_nan.sum()),
    )


_DIGITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
DTYPES = tuple(_DIGITS)
"""What models are compared in."""


def epsilon(dtype: str) -> float:
    """The distance from 1 to the next number."""
    return 2.0 ** -_DIGITS[dtype]


def _ulps(a: np.ndarray, b: np.ndarray, gap: np.ndarray, dtype: str) -> float:
    larger = np.maximum(np.abs(a), np.abs(b))
    ok = np.isfinite(larger) & (gap > 0)
    if not ok.any():
        return math.inf if np.isinf(gap).any() else 0.0
    _, exponent = np.frexp(larger[ok])
    return (
        float((gap[ok] / np.ldexp(epsilon(dtype), exponent - 1)).max())
        if np.isfinite(gap).all()
        else math.inf
    )


def _cosine(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> float:
    one, other = np.linalg.norm(a), np.linalg.norm(b)
    if one == 0 or other == 0:
        return 1.0 if one == other else 0.0
    return float(np.dot(a / one, b / other))


def floor(pairs: list[tuple[np.ndarray, np.ndarray]], dtype: str) -> float:
    """What rounding in ``dtype`` does to an array: the largest difference between its values in float32 and in float64, of either framework, by
    ``(narrow, wide)``, carried over to ``dtype``; at least half a unit in the last place of the largest value."""
    measured, largest = 0.0, 0.0
    for narrow, wide in pairs:
        measured = max(measured, error(narrow, wide))
        largest = max(largest, float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0)))
    return max(measured * epsilon(dtype) / epsilon("float32"), largest * epsilon(dtype) / 2)


def error(narrow: np.ndarray, wide: np.ndarray) -> float:
    """How far an array is from the same in float64, where both are finite."""
    finite = np.isfinite(narrow) & np.isfinite(wide)
    return float(np.abs(narrow[finite].astype(np.float64) - wide[finite]).max(initial=0.0))


def times(found: Difference, rounding: float) -> float:
    """A difference as so many times the floor."""
    if found.max_abs == 0:
        return 0.0
    return found.max_abs / rounding if rounding else math.inf
