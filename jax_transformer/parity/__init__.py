"""Comparison of two models, module by module: the first that differs, and by how much."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_transformer.errors import DifferentError
    from jax_transformer.parity.comparison import compare, compare_recorded
    from jax_transformer.parity.recording import tap
    from jax_transformer.parity.report import Report

_MODULES = {
    "compare": "parity.comparison",
    "compare_recorded": "parity.comparison",
    "Report": "parity.report",
    "DifferentError": "errors",
    "tap": "parity.recording",
}

__all__ = ["DifferentError", "Report", "compare", "compare_recorded", "tap"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"jax_transformer.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'jax_transformer.parity' has no attribute {name!r}")
