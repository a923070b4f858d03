"""The two kinds of beam search: what a hypothesis scores, which ones end, when a row is done.

Everything else is in the one loop of ``beam_search.py``.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.generate.generation_config import BeamScorer, EarlyStopping
from jax_transformer.generate.prepare import StaticArgs


@dataclass(frozen=True)
class Scorer:
    """The part of beam search that differs, for :attr:`BeamScorer.GNMT`: any of the best 2k
    continuations may end. Its methods are called while the loop is traced.
    """

    length_penalty: Float[Array, ""]
    static_args: StaticArgs
    constrained: bool
    """Constraints may forbid continuations."""
    dtype: np.dtype

    returns_unfinished: ClassVar[bool] = True
    """If too few hypotheses have finished at the greatest length, unfinished ones follow them."""

    @property
    def masked(self) -> Float[Array, ""]:
        """The score of hypotheses that do not exist.

        This and :meth:`mask` decide the order if constraints leave fewer hypotheses than beams.
        """
        return jnp.asarray(jnp.finfo(self.dtype).min / 2, self.dtype)

    def mask(self, scores: Float[Array, "b m"], out: Bool[Array, "b #m"]) -> Float[Array, "b m"]:
        """Return the scores, with those that are ``out`` of the running below all others."""
        return jnp.where(out, self.masked, scores)

    def divisor(self, length: Int[Array, ""]) -> Float[Array, ""]:
        """Return what a log-probability is divided by to get a score."""
        return ((5 + length.astype(self.dtype)) / 6) ** self.length_penalty.astype(self.dtype)

    def candidates(
        self, log_probs: Float[Array, "b m"], is_eos: Bool[Array, "b m"], length: Int[Array, ""]
    ) -> tuple[Float[Array, "b m"], Bool[Array, "b m"], Bool[Array, "b m"]]:
        """Return log-probabilities of the best continuations, which of them end, and which of these
        are returned.
        """
        if self.constrained:  # what constraints forbid neither goes on nor ends
            log_probs = jnp.maximum(log_probs, self.masked)
            is_eos &= log_probs > self.masked
        return log_probs, is_eos, is_eos

    def best_length(self, length: Int[Array, ""]) -> Int[Array, ""]:
        """Return the length that decides if an unfinished hypothesis may beat a finished one.

        ``length`` is the current one.
        """
        # Log-probabilities only fall, and the greatest length divides them most
        return jnp.asarray(self.static_args.max_new_tokens)


class AverageScorer(Scorer):
    """:attr:`BeamScorer.AVERAGE`: only the best k may end; at the last position all do.

    Facts from ``GenerationMixin._beam_search`` of transformers 5.23.
    """

    returns_unfinished = False

    @property
    def masked(self) -> Float[Array, ""]:
        return jnp.asarray(-1e9, self.dtype)

    def mask(self, scores: Float[Array, "b m"], out: Bool[Array, "b #m"]) -> Float[Array, "b m"]:
        return scores + jnp.where(out, self.masked, jnp.zeros((), self.dtype))

    def divisor(self, length: Int[Array, ""]) -> Float[Array, ""]:
        return length.astype(self.dtype) ** self.length_penalty.astype(self.dtype)

    def candidates(
        self, log_probs: Float[Array, "b m"], is_eos: Bool[Array, "b m"], length: Int[Array, ""]
    ) -> tuple[Float[Array, "b m"], Bool[Array, "b m"], Bool[Array, "b m"]]:
        ends = is_eos | (length == self.static_args.max_new_tokens)
        rank = jnp.arange(log_probs.shape[1])
        return log_probs, ends, ends & (rank < self.static_args.config.num_beams)[None]

    def best_length(self, length: Int[Array, ""]) -> Int[Array, ""]:
        if self.static_args.config.early_stopping is not EarlyStopping.NEVER:
            return length
        return jnp.where(self.length_penalty > 0, self.static_args.max_new_tokens, length)


SCORERS: dict[BeamScorer, type[Scorer]] = {
    BeamScorer.GNMT: Scorer,
    BeamScorer.AVERAGE: AverageScorer,
}
