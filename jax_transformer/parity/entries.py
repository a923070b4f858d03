"""What is known of two paired modules: of each array the differences, and what they say of the module."""

import math
from dataclasses import dataclass, field
from typing import Any

from jax_transformer.parity.difference import FAULT, Difference


@dataclass(frozen=True)
class Measured:
    """One array of both models."""

    wide: Difference
    """In float64,"""
    times: float
    """that as so many times the floor of rounding: this tells faults from rounding."""
    narrow: Difference
    """In the dtype that was asked for,"""
    narrow_times: float
    """and as so many times its floor."""
    error_ours: float
    """How far the Flax model is from its own float64 there,"""
    error_theirs: float
    """and the PyTorch model from its own."""

    @property
    def agrees(self) -> bool:
        """Whether rounding explains it; NaN on one side alone, in either dtype, nothing explains."""
        return (
            self.times < FAULT
            and self.narrow.nan_ours == self.narrow.nan_theirs == self.narrow.agreeing_nan
        )

    def to_data(self) -> dict[str, Any]:
        return {
            "agrees": self.agrees,
            "float64": self.wide.to_data() | {"times_floor": _number(self.times)},
            "run": self.narrow.to_data()
            | {
                "times_floor": _number(self.narrow_times),
                "errors": [self.error_ours, self.error_theirs],
            },
        }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


@dataclass(frozen=True)
class Entry:
    """One call of two paired modules."""

    ours: str
    theirs: str
    call: int
    input: Measured | None = None
    """Of several inputs, the one that is furthest apart. None where nothing that is a number goes in, as into an embedding."""
    output: Measured | None = None
    input_gradient: Measured | None = None
    output_gradient: Measured | None = None
    parameters: dict[str, Measured] = field(default_factory=dict)
    """The gradients of its own parameters, by their name here."""
    note: str = ""
    """Why something could not be compared."""

    @property
    def title(self) -> str:
        """Both names, and which call where there are several."""
        return f"{self.ours} | {self.theirs}" + (f" (call {self.call + 1})" if self.call else "")

    @property
    def gradients(self) -> Measured | None:
        """Of the gradients of its input and its parameters, the one that is furthest apart."""
        found = [
            *self.parameters.values(),
            *([self.input_gradient] if self.input_gradient is not None else []),
        ]
        return max(found, key=lambda measured: measured.times, default=None)

    @property
    def faulty(self) -> bool:
        """Whether what goes in agrees and what comes out does not."""
        return (
            (self.input is None or self.input.agrees)
            and self.output is not None
            and not self.output.agrees
        )

    @property
    def faulty_backward(self) -> bool:
        """The same of gradients, of a module that computes the same: that of the output agrees, that of the input or of its parameters does not."""
        if any(found is not None and not found.agrees for found in (self.input, self.output)):
            return False
        agree_above = self.output_gradient is not None and self.output_gradient.agrees
        return agree_above and self.gradients is not None and not self.gradients.agrees
