"""The beam search of transformers' ``generate``, hypothesis for hypothesis.

Facts from ``GenerationMixin._beam_search`` of transformers 5.23. It differs from the search in ``search.py`` in what a length costs, and in three
more things: a hypothesis ends only where it is among the best k continuations of its step; what has no room left has ended; and a row is left by
one of three rules (:class:`jax_transformer.generate.generation_config.EarlyStopping`), of which the first two may miss something better.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.generate import beams as beams_
from jax_transformer.generate.arguments import Given
from jax_transformer.generate.beams import Continuations, Search, pick
from jax_transformer.generate.generation_config import EarlyStopping
from jax_transformer.nn.cache import Cache, Prefix
from jax_transformer.transformer import Transformer

# The score of what is not there, and what is added to one that is out of the running: which of these is the better matters where rules leave
# fewer hypotheses than there are beams, so that both are transformers' own
_OUT = -1e9


class _Beams(NamedTuple):
    """Hypotheses of each row: those that go on, by log-probability, and those that have ended, by score."""

    step: Int[Array, ""]
    tokens: Int[Array, "b k n"]
    log_probs: Float[Array, "b k"]
    ended_tokens: Int[Array, "b k n"]
    ended_scores: Float[Array, "b k"]
    ended: Bool[Array, "b k"]
    """Which of the latter are there."""
    open: Bool[Array, " b"]
    """Whether a row may still find something better."""
    cache: Cache | Prefix


@partial(jax.jit, static_argnames=("graphdef", "search"))
def best(
    graphdef: Any, state: Any, given: Given, length_penalty: Array, *, search: Search
) -> tuple[Int[Array, "b m n"], Float[Array, "b m"]]:
    """The ``search.wanted`` best hypotheses (b, m, n) and their scores (b, m): the sums of log-probabilities over length ** length_penalty."""
    model: Transformer = nnx.merge(graphdef, state)
    penalty = length_penalty

    def unfinished(beams: _Beams) -> Bool[Array, ""]:
        full = (
            beams.ended.all()
            if search.early_stopping is EarlyStopping.FULL
            else jnp.zeros((), bool)
        )
        return (beams.step < search.frame.places) & beams.open.any() & ~full

    def step(beams: _Beams) -> _Beams:
        found = beams_.continuations(
            model, beams.tokens, beams.log_probs, beams.cache, beams.step, search, given
        )
        ends = (found.tokens == search.frame.ids.eos) | (beams.step + 1 == search.frame.places)
        grown = found.grown(beams.tokens, beams.step)
        live, chosen = jax.lax.top_k(
            found.log_probs + _out(ends, found.log_probs.dtype), search.size
        )
        beams = _end(beams, found, grown, ends, penalty, search)
        cache = found.cache.follow(pick(found.parents, chosen))
        beams = beams._replace(
            step=beams.step + 1, tokens=pick(grown, chosen), log_probs=live, cache=cache
        )
        return beams._replace(open=beams.open & _improvable(beams, penalty, search))

    beams = jax.lax.while_loop(unfinished, step, _start(model, given.source, search))
    return beams.ended_tokens[:, : search.wanted], beams.ended_scores[:, : search.wanted]


def _start(model: Transformer, source: Int[Array, "b s"], search: Search) -> _Beams:
    shape = (source.shape[0], search.size)
    cache = model.init_cache(source, search.frame.places, search.size)
    dtype = beams_.score_dtype(model, cache, *shape)
    empty = jnp.full((*shape, search.frame.places), search.frame.ids.pad, jnp.int32)
    out = jnp.full(shape, _OUT, dtype)
    none, every = jnp.zeros(shape, bool), jnp.ones(shape[0], bool)
    # All beams start equal: only one may speak at first
    return _Beams(
        jnp.zeros((), jnp.int32), empty, out.at[:, 0].set(0), empty, out, none, every, cache
    )


def _out(where: Bool[Array, "..."], dtype: np.dtype) -> Float[Array, "..."]:
    return jnp.where(where, jnp.asarray(_OUT, dtype), jnp.zeros((), dtype))


def _per_length(length: Array, penalty: Float[Array, ""], dtype: np.dtype) -> Float[Array, ""]:
    return length.astype(dtype) ** penalty.astype(dtype)


def _end(
    beams: _Beams,
    found: Continuations,
    grown: Array,
    ends: Bool[Array, "b m"],
    penalty: Array,
    search: Search,
) -> _Beams:
    """With the best of those that have just ended among those that had."""
    dtype = found.log_probs.dtype
    finished = ends & (jnp.arange(2 * search.size) < search.size)[None]
    closed = ~beams.open
    if search.early_stopping is EarlyStopping.FULL:
        closed |= beams.ended.all(axis=1)
    scores = found.log_probs / _per_length(beams.step + 1, penalty, dtype)
    scores = scores + _out(closed, dtype)[:, None] + _out(~finished, dtype)
    best, kept = jax.lax.top_k(jnp.concatenate([beams.ended_scores, scores], axis=1), search.size)
    return beams._replace(
        ended_tokens=pick(jnp.concatenate([beams.ended_tokens, grown], axis=1), kept),
        ended_scores=best,
        ended=pick(jnp.concatenate([beams.ended, finished], axis=1), kept),
    )


def _improvable(beams: _Beams, penalty: Float[Array, ""], search: Search) -> Bool[Array, " b"]:
    """Whether a row's best unfinished hypothesis may still take the place of one that has ended, or a place is free."""
    length = beams.step
    if search.early_stopping is EarlyStopping.NEVER:
        length = jnp.where(penalty > 0, search.frame.places, length)
    reachable = beams.log_probs[:, :1] / _per_length(length, penalty, beams.log_probs.dtype)
    worst = jnp.where(
        beams.ended,
        beams.ended_scores.min(axis=1, keepdims=True),
        jnp.asarray(_OUT, beams.ended_scores.dtype),
    )
    return (reachable > worst).any(axis=1)
