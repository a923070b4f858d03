"""Decoding: pure functions over one cached step, each a single jitted loop."""

from jax_transformer.generate.sampling import sample
from jax_transformer.generate.search import beam, greedy, n_best

__all__ = ["beam", "greedy", "n_best", "sample"]
