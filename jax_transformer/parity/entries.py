"""Measurements of two paired modules: the differences of their arrays, and the verdict."""

import math
from dataclasses import dataclass, field
from typing import Any

from jax_transformer.parity.difference import FAULT, Difference


@dataclass(frozen=True)
class Measurement:
    """The difference of one array between the two models."""

    wide: Difference
    """In float64."""
    times: float
    """``wide`` as a multiple of the rounding floor: this tells faults from rounding."""
    narrow: Difference
    """In the dtype that was asked for."""
    narrow_times: float
    """``narrow`` as a multiple of its own rounding floor."""
    error_ours: float
    """Largest difference of the Flax model's narrow array from its own float64 array."""
    error_theirs: float
    """The same for the PyTorch model."""

    @property
    def agrees(self) -> bool:
        """True if rounding explains the difference; a NaN on one side only never agrees."""
        return (
            self.times < FAULT
            and self.narrow.nan_ours == self.narrow.nan_theirs == self.narrow.agreeing_nan
        )

    def to_data(self) -> dict[str, Any]:
        """The measurement for JSON."""
        errors = [self.error_ours, self.error_theirs]
        return {
            "agrees": self.agrees,
            "float64": self.wide.to_data() | {"times_floor": _number(self.times)},
            "run": self.narrow.to_data()
            | {"times_floor": _number(self.narrow_times), "errors": errors},
        }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


@dataclass(frozen=True)
class Entry:
    """One call of two paired modules."""

    ours: str
    theirs: str
    call: int
    input: Measurement | None = None
    """The input that is furthest apart; None if no floating-point input exists on both sides, as
    for an embedding."""
    output: Measurement | None = None
    input_gradient: Measurement | None = None
    output_gradient: Measurement | None = None
    parameters: dict[str, Measurement] = field(default_factory=dict)
    """Gradients of the module's own parameters, by PyTorch's names; by the Flax leaf if the model
    has no weight table."""
    note: str = ""
    """The reason why something was not compared."""

    @property
    def title(self) -> str:
        """Both names, and the number of the call after the first."""
        return f"{self.ours} | {self.theirs}" + (f" (call {self.call + 1})" if self.call else "")

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
        return (
            (self.input is None or self.input.agrees)
            and self.output is not None
            and not self.output.agrees
        )

    @property
    def faulty_backward(self) -> bool:
        """True if the forward pass and the gradient of the output agree, and the gradient of the
        input or of a parameter does not."""
        if any(side is not None and not side.agrees for side in (self.input, self.output)):
            return False
        agrees_above = self.output_gradient is not None and self.output_gradient.agrees
        return agrees_above and self.gradients is not None and not self.gradients.agrees
