"""Which module of two models that should be one is the first to differ, and by how much more than rounding."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_transformer.parity.comparison import compare, compare_recorded
    from jax_transformer.parity.report import DifferentError, Report

_HOMES = {
    "compare": "comparison",
    "compare_recorded": "comparison",
    "Report": "report",
    "DifferentError": "report",
}

__all__ = ["DifferentError", "Report", "compare", "compare_recorded"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"jax_transformer.parity.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jax_transformer.parity' has no attribute {name!r}")
