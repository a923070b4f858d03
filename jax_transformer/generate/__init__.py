"""Generation: pure functions over one cached step, each a single jitted loop.

Importing this package loads no jax: the names below are looked up on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_transformer.generate.beam_search import beam, n_best
    from jax_transformer.generate.decoding import generate, greedy, sample
    from jax_transformer.generate.generation_config import (
        BeamScorer,
        Constraints,
        EarlyStopping,
        GenerationConfig,
    )
    from jax_transformer.generate.prepare import SplitModel, split

_HOMES = {
    "BeamScorer": "generation_config",
    "Constraints": "generation_config",
    "EarlyStopping": "generation_config",
    "GenerationConfig": "generation_config",
    "SplitModel": "prepare",
    "beam": "beam_search",
    "generate": "decoding",
    "greedy": "decoding",
    "n_best": "beam_search",
    "sample": "decoding",
    "split": "prepare",
}

__all__ = [
    "BeamScorer",
    "Constraints",
    "EarlyStopping",
    "GenerationConfig",
    "SplitModel",
    "beam",
    "generate",
    "greedy",
    "n_best",
    "sample",
    "split",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module = importlib.import_module(f"jax_transformer.generate.{_HOMES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module 'jax_transformer.generate' has no attribute {name!r}")
