"""Generation: pure functions over one cached step, each a single jitted loop.

Importing this package loads no jax: the names below are looked up on first use.
"""

from typing import TYPE_CHECKING

from jax_transformer import lazy

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

__all__ = ["BeamScorer", "Constraints", "EarlyStopping", "GenerationConfig", "SplitModel"]
__all__ += ["beam", "generate", "greedy", "n_best", "sample", "split"]
_NAMES = {
    "generate.beam_search": ["beam", "n_best"],
    "generate.decoding": ["generate", "greedy", "sample"],
    "generate.generation_config": [
        "BeamScorer",
        "Constraints",
        "EarlyStopping",
        "GenerationConfig",
    ],
    "generate.prepare": ["SplitModel", "split"],
}
__getattr__ = lazy.attributes(__name__, _NAMES)
