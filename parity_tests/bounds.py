"""What the tests allow, as relative error at each level, and how that is derived.

`python benchmarks/tolerances.py` measures both frameworks against float64 (docs/tolerances.md). A bound stands above the worst that was measured by
the margin that is written there: hundreds in float64, where a fault is eleven orders away, 4 to 30 in float32, where rounding is all there
is. No bound is raised to make a test pass.
"""

from parity_tests.levels import LEVELS

_STACKED = ("encoder", "logits", "loss")  # several blocks, one after another
BOUNDS: dict[str, dict[str, float]] = {
    "float64": dict.fromkeys(LEVELS, 1e-12)
    | {"gradients": 1e-12}
    | {
        "losses of 10 steps": 1e-10,
        "weights after 10 steps": 1e-10,
    },  # Adam divides a gradient by its own size, and its rounding with it
    "float32": dict.fromkeys(LEVELS, 1e-6) | dict.fromkeys(_STACKED, 5e-6),
}
RATIO = 1.5
"""Of our error in bfloat16 to PyTorch's own: the medians over configurations and seeds."""
