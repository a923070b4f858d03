"""The differences of two modules' arrays, in multiples of rounding, and the verdict. NumPy only."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

FAULT = 1000.0
"""Multiple of the rounding floor from which a difference is a fault. Correct twins stay under 30;
the smallest known fault (an epsilon of 1e-6 for 1e-5) is at 1e9."""
IN_FLOAT32 = 4.0 * 2**29
"""The same multiple, for each position, of a module that computes in float32 by itself and has a
constant that was rounded to it in one of the models; 2**29 is float32's epsilon in float64's. The
angle of a sine grows with its position, and so does what its rounding changes. In transformers, the
frequencies of Llama 3 are up to 2.7 epsilons off, since they are rounded several times."""
AFTER_FLOAT32 = 32.0
"""The multiple of such a limit for all that the difference reaches."""


@dataclass(frozen=True)
class Difference:
    """Element-wise difference of ``ours`` from ``theirs``; equal NaN and infinities agree."""

    shape: tuple[int, ...]
    dtype: str
    max_abs: float
    """Maximum over the elements that are finite on both sides; infinite if an element is finite
    on one side only."""
    max_relative: float
    """``max_abs`` divided by the largest absolute value of ``theirs``."""
    ulps: float
    """Largest difference in units in the last place of the larger of the two numbers."""
    cosine: float
    """Cosine similarity of the flattened arrays; 1 if both are zero."""
    where: tuple[int, ...]
    """Index of the element with the largest difference; ``ours`` and ``theirs`` are its numbers."""
    ours: float
    theirs: float
    nan_ours: int
    nan_theirs: int
    infinite_ours: int
    infinite_theirs: int
    agreeing_nan: int
    """Number of elements that are NaN on both sides."""

    def to_data(self) -> dict[str, Any]:
        """Return the fields for JSON, which has no NaN and no infinity: these become text."""
        return {name: _json_value(value) for name, value in asdict(self).items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def difference(ours: np.ndarray, theirs: np.ndarray, dtype: str | None = None) -> Difference:
    """Return the difference of two arrays of one shape, both computed in ``dtype`` if given."""
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


_MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
DTYPES = tuple(_MANTISSA_BITS)
"""The dtypes that models can be compared in."""


def epsilon(dtype: str) -> float:
    """Return the distance from 1 to the next larger number."""
    return 2.0 ** -_MANTISSA_BITS[dtype]


def _ulps(a: np.ndarray, b: np.ndarray, gap: np.ndarray, dtype: str) -> float:
    larger = np.maximum(np.abs(a), np.abs(b))
    counted = np.isfinite(larger)
    if not np.isfinite(gap).all():
        return math.inf
    if not counted.any():
        return 0.0
    _, exponent = np.frexp(larger[counted])
    return float((gap[counted] / np.ldexp(epsilon(dtype), exponent - 1)).max())


def _cosine(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> float:
    norm_a, norm_b = np.linalg.norm(a), np.linalg.norm(b)
    if norm_a == 0 or norm_b == 0:
        return 1.0 if norm_a == norm_b else 0.0
    return float(np.dot(a / norm_a, b / norm_b))


def rounding_floor(
    sides: Sequence[tuple[np.ndarray, np.ndarray]],
    dtype: str,
    narrowest: Sequence[str] | None = None,
) -> float:
    """Return the largest difference that rounding in ``dtype`` explains. ``sides`` holds each
    framework's array as computed in (float32, float64); the larger of their differences is scaled
    to ``dtype``. It is at least half a unit in the last place of the largest value. ``narrowest``
    has each framework's narrowest dtype in its run in float32, if one is below float32.
    """
    dtypes = narrowest or ["float32"] * len(sides)
    errors = itertools.starmap(rounding_error, sides)
    measured = max(x / epsilon(name) for x, name in zip(errors, dtypes, strict=True))
    largest = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for _, x in sides)
    return max(measured, largest / 2) * epsilon(dtype)


def rounding_error(narrow: np.ndarray, wide: np.ndarray) -> float:
    """Return the largest difference of an array from the same in float64, where both are finite."""
    finite = np.isfinite(narrow) & np.isfinite(wide)
    return float(np.abs(narrow[finite].astype(np.float64) - wide[finite]).max(initial=0.0))


def times_floor(measured: Difference, floor: float) -> float:
    """Return ``max_abs`` as a multiple of the rounding floor."""
    if measured.max_abs == 0:
        return 0.0
    return measured.max_abs / floor if floor else math.inf


@dataclass(frozen=True)
class Measurement:
    """The difference of one array between the two models: in float64, and ``narrow`` in the dtype
    that was asked for.
    """

    wide: Difference
    times: float
    """``wide`` as a multiple of the rounding floor: this tells faults from rounding."""
    narrow: Difference
    narrow_times: float
    """``narrow`` as a multiple of its own rounding floor."""
    error_ours: float
    """Largest difference of the Flax model's narrow array from its own float64 array."""
    error_theirs: float
    limit: float = FAULT
    """The multiple from which it counts as a fault."""

    @property
    def agrees(self) -> bool:
        """True if rounding explains the difference; a NaN on one side only never agrees."""
        same_nan = self.narrow.nan_ours == self.narrow.nan_theirs == self.narrow.agreeing_nan
        return self.times < self.limit and same_nan

    @property
    def bound(self) -> float:
        """The smallest ``wide.max_abs`` that counts as a fault."""
        known = self.times and math.isfinite(self.times)
        return self.limit * self.wide.max_abs / self.times if known else 0.0

    def to_data(self) -> dict[str, Any]:
        """Return the measurement for JSON."""
        errors = [self.error_ours, self.error_theirs]
        times = _json_value(self.times), _json_value(self.narrow_times)
        return {
            "agrees": self.agrees,
            "float64": self.wide.to_data() | {"times_floor": times[0]},
            "run": self.narrow.to_data() | {"times_floor": times[1], "errors": errors},
        }


HIDDEN = -1e4
"""An additive mask has no number but 0 and those up to this."""


def mask_difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> str:
    """Return the words for the difference of two modules' masks, if each has one of one shape.

    A mask is booleans, or numbers that are added to scores. True may mean visible on one side and
    hidden on the other.
    """
    both = [
        [np.squeeze(x) for x in map(_visible, side) if x is not None] for side in (ours, theirs)
    ]
    if any(len(side) != 1 for side in both) or both[0][0].shape != both[1][0].shape:
        return ""
    a, b = both[0][0], both[1][0]
    inverted = np.mean(a == b) < 0.5
    meaning = " (inverted there)" if inverted else ""
    return _first_place(f"its mask{meaning} differs", a, b, (a == b) if inverted else (a != b))


def ids_difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> str:
    """Return the words for the difference of two modules' integers, if each has one such array, and
    both are of one shape.
    """
    both = [[np.squeeze(x) for x in side if x.dtype.kind in "iu"] for side in (ours, theirs)]
    if any(len(side) != 1 for side in both) or both[0][0].shape != both[1][0].shape:
        return ""
    return _first_place("its integers differ", both[0][0], both[1][0], both[0][0] != both[1][0])


def _first_place(text: str, a: np.ndarray, b: np.ndarray, differing: np.ndarray) -> str:
    indices = np.argwhere(differing)
    if not len(indices):
        return ""
    at = tuple(indices[0].tolist())
    return (
        f"{text} in {len(indices)} of {a.size} places, first at "
        f"({', '.join(map(str, at))}): {a[at]} here, {b[at]} there"
    )


def _visible(array: np.ndarray) -> np.ndarray | None:
    """Return a mask as booleans; None if the array is none."""
    if array.dtype == bool:
        return array
    hidden = array <= HIDDEN
    return array == 0 if hidden.any() and (hidden | (array == 0)).all() else None


def differs(measurement: Measurement | None) -> bool:
    """Return True if an array was measured and does not agree."""
    return measurement is not None and not measurement.agrees


@dataclass(frozen=True)
class Entry:
    """One call of two paired modules."""

    ours: str
    theirs: str
    call: int
    input: Measurement | None = None
    """The input that is furthest apart; None without floating-point inputs on both sides."""
    output: Measurement | None = None
    input_gradient: Measurement | None = None
    output_gradient: Measurement | None = None
    parameters: dict[str, Measurement] = field(default_factory=dict)
    """Gradients of the module's own parameters, by PyTorch's names; by the Flax leaf if the model
    has no weight table."""
    note: str = ""
    """The reason why something was not compared."""
    own: Measurement | None = None
    """The module's own difference: its output on the other model's input, with its paired parts'
    outputs taken from there too; or, if that is larger, the input of a paired part of it. None if
    modules were not run by themselves, which is needed only if something differs."""
    own_place: str = ""
    """The part whose input ``own`` measures."""
    narrow: str = ""
    """The dtype below float64 that the module computes in by itself in one of the models."""
    lower: str = ""
    """The model, Flax or PyTorch, in which only the module computes in 16 bits in the run in
    float32, where its output then differs."""
    mask: str = ""
    """The words for a difference of its mask; empty if both are equal, or cannot be compared."""
    ids: str = ""
    """The same for the integers that it reads, as ids of tokens or positions."""
    layout: str = ""
    """The shape or the order of axes of its output on either side; empty if both are the same."""

    @property
    def title(self) -> str:
        """Both names, and the number of the call after the first."""
        return f"{self.ours} | {self.theirs}" + (f" (call {self.call + 1})" if self.call else "")

    def is_inside(self, outer: "Entry") -> bool:
        """Return True if the module is a part of another one, in the same call."""
        return self.ours.startswith(f"{outer.ours}.") and self.call == outer.call

    @property
    def gradients(self) -> Measurement | None:
        """The gradient of the input or of a parameter that is furthest apart."""
        measurements = list(self.parameters.values())
        if self.input_gradient is not None:
            measurements.append(self.input_gradient)
        return max(measurements, key=lambda measurement: measurement.times, default=None)

    @property
    def faulty(self) -> bool:
        """True if the input agrees and the output does not."""
        return bool(self.lower) or (differs(self.output) and not differs(self.input))

    @property
    def faulty_backward(self) -> bool:
        """True if the forward pass and the gradient of the output agree, and the gradient of the
        input or of a parameter does not."""
        if differs(self.input) or differs(self.output):
            return False
        above = self.output_gradient
        return above is not None and above.agrees and differs(self.gradients)


def loosened(value: Any, limit: float) -> Any:
    """Return a measurement, or those of an entry or a dict, with another limit."""
    if isinstance(value, Measurement):
        return replace(value, limit=limit)
    if isinstance(value, Entry):
        return Entry(**loosened(vars(value), limit))
    if isinstance(value, dict):
        return {name: loosened(each, limit) for name, each in value.items()}
    return value
