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

_NAMES = {
    "generation_config": ["BeamScorer", "Constraints", "EarlyStopping", "GenerationConfig"],
    "prepare": ["SplitModel", "split"],
    "beam_search": ["beam", "n_best"],
    "decoding": ["generate", "greedy", "sample"],
}
__all__ = ["BeamScorer", "Constraints", "EarlyStopping", "GenerationConfig", "SplitModel"]
__all__ += ["beam", "generate", "greedy", "n_best", "sample", "split"]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
