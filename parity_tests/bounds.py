"""Largest relative errors that the tests allow at each level, and their derivation.

`python benchmarks/tolerances.py` measures both frameworks against float64 (docs/tolerances.md). A
bound exceeds the worst measured error by the margin that is documented there: hundreds in float64,
where a fault is eleven orders of magnitude larger, 4 to 30 in float32, where rounding is the only
error. No bound is raised to make a test pass.
"""

from parity_tests.levels import LEVELS

_STACKED = ("encoder", "logits", "loss")  # several blocks, one after another
BOUNDS: dict[str, dict[str, float]] = {
    "float64": dict.fromkeys(LEVELS, 1e-12)
    | {"gradients": 1e-12}
    # Adam divides a gradient, rounding included, by its own magnitude
    | {"losses of 10 steps": 1e-10, "weights after 10 steps": 1e-10},
    "float32": dict.fromkeys(LEVELS, 1e-6) | dict.fromkeys(_STACKED, 5e-6),
}
RATIO = 1.5
"""Largest ratio of our bfloat16 error to PyTorch's: medians over configurations and seeds."""
