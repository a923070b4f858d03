"""Decoding: pure functions over one cached step, each a single jitted loop.

Importing this package loads no jax: the names below are looked up on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_transformer.generate.sampling import sample
    from jax_transformer.generate.search import beam, greedy, n_best

_HOMES = {"beam": "search", "greedy": "search", "n_best": "search", "sample": "sampling"}

__all__ = ["beam", "greedy", "n_best", "sample"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module = importlib.import_module(f"jax_transformer.generate.{_HOMES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module 'jax_transformer.generate' has no attribute {name!r}")
