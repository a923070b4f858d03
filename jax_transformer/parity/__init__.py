"""Comparison of two models, module by module: the first that differs, and by how much."""

from typing import TYPE_CHECKING

from jax_transformer import lazy

if TYPE_CHECKING:
    from jax_transformer.errors import DifferentError
    from jax_transformer.parity.comparison import compare, compare_recorded
    from jax_transformer.parity.recording import tap
    from jax_transformer.parity.report import Report
    from jax_transformer.parity.steps import compare_training

__all__ = ["DifferentError", "Report", "compare", "compare_recorded", "compare_training", "tap"]
_NAMES = {
    "errors": ["DifferentError"],
    "parity.comparison": ["compare", "compare_recorded"],
    "parity.recording": ["tap"],
    "parity.report": ["Report"],
    "parity.steps": ["compare_training"],
}
__getattr__ = lazy.attributes(__name__, _NAMES)
