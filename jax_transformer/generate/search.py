"""Greedy decoding and beam search."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.errors import ConfigError
from jax_transformer.generate import arguments, average, stepwise
from jax_transformer.generate import beams as beams_
from jax_transformer.generate.arguments import NONE, Frame, Given
from jax_transformer.generate.beams import Search, pick
from jax_transformer.generate.generation_config import BeamScorer, Constraints, EarlyStopping
from jax_transformer.nn.cache import Cache, Prefix
from jax_transformer.shapes import AnyArray, SourceIds
from jax_transformer.transformer import Transformer


def greedy(
    model: Transformer,
    source: SourceIds,
    *,
    max_length: int | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    constraints: Constraints = NONE,
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
) -> Int[Array, "b n"]:
    """The likeliest next token, again and again, until every row has ended or has ``max_length`` tokens.

    Args:
        model: the model; its keys and values are cached, so each token costs one position.
        source: ids (b, s), padded by the model's ``source_pad_id``.
        max_length: the number n of generated tokens; the model's own maximum where None.
        bos_id: the start token. eos_id: the token that ends a row. The config's where None.
        rules: what may not be said, and what must be.
        forced_bos_token_id: the token that all rows, or each, must begin with, as the target's language in mBART-50 and NLLB; another one compiles nothing.

    Returns:
        ids (b, n) int32 without the start token, ``eos_id`` included, padded behind it by the model's ``target_pad_id``.
    """
    given, frame = arguments.prepare(
        model, source, max_length, bos_id, eos_id, constraints, forced_bos_token_id
    )
    return _greedy(*nnx.split(model), given, frame=frame)


@partial(jax.jit, static_argnames=("graphdef", "frame"))
def _greedy(graphdef: Any, state: Any, given: Given, *, frame: Frame) -> Int[Array, "b n"]:
    return stepwise.generate(
        graphdef,
        state,
        given,
        lambda scores, _: jnp.argmax(scores, axis=-1).astype(jnp.int32),
        frame,
    )


def beam(
    model: Transformer,
    source: SourceIds,
    *,
    beam_size: int = 4,
    max_length: int | None = None,
    length_penalty: float = 0.6,
    scorer: BeamScorer = BeamScorer.GNMT,
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC,
    bos_id: int | None = None,
    eos_id: int | None = None,
    constraints: Constraints = NONE,
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
) -> tuple[Int[Array, "b n"], Float[Array, " b"]]:
    """The best hypothesis of a beam search, by log-probability over ((5 + length) / 6) ** length_penalty (Wu et al. 2016, section 7).

    ``beam_size`` unfinished and as many finished hypotheses are kept; a row stops when no unfinished one could still beat its worst finished
    one. Arguments and ids as in :func:`greedy`; also the score of each hypothesis (b,), in float32 at least.

    ``scorer=BeamScorer.AVERAGE`` is the search of transformers' ``generate`` instead: log-probability over length ** length_penalty, and
    ``early_stopping`` says when a row is left (``generate/average.py``).
    """
    tokens, scores = n_best(
        model,
        source,
        1,
        beam_size=beam_size,
        max_length=max_length,
        length_penalty=length_penalty,
        scorer=scorer,
        early_stopping=early_stopping,
        bos_id=bos_id,
        eos_id=eos_id,
        constraints=constraints,
        forced_bos_token_id=forced_bos_token_id,
    )
    return tokens[:, 0], scores[:, 0]


def n_best(
    model: Transformer,
    source: SourceIds,
    count: int,
    *,
    beam_size: int = 4,
    max_length: int | None = None,
    length_penalty: float = 0.6,
    scorer: BeamScorer = BeamScorer.GNMT,
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC,
    bos_id: int | None = None,
    eos_id: int | None = None,
    constraints: Constraints = NONE,
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
) -> tuple[Int[Array, "b m n"], Float[Array, "b m"]]:
    """The ``count`` best different hypotheses of :func:`beam`'s search, best first, and their scores.

    Finished hypotheses come before those that had no room to finish, which are there only where too few have finished.
    """
    if not 1 <= beam_size <= model.config.target_vocab_size // 2:
        raise ConfigError(
            f"beam_size={beam_size} must be between 1 and half the vocabulary of {model.config.target_vocab_size}"
        )
    if not 1 <= count <= beam_size:
        raise ConfigError(f"count={count} must be between 1 and beam_size={beam_size}")
    if scorer is BeamScorer.GNMT and not length_penalty >= 0:
        raise ConfigError(f"length_penalty={length_penalty} must not be negative")
    if scorer is BeamScorer.AVERAGE and not math.isfinite(length_penalty):
        raise ConfigError(f"length_penalty={length_penalty} must be finite")
    if scorer is BeamScorer.GNMT and early_stopping is not EarlyStopping.HEURISTIC:
        raise ConfigError(f"early_stopping={early_stopping} needs scorer=average, not {scorer}")
    given, frame = arguments.prepare(
        model, source, max_length, bos_id, eos_id, constraints, forced_bos_token_id
    )
    found = _beam if scorer is BeamScorer.GNMT else average.best
    search = Search(count, beam_size, frame, early_stopping)
    return found(*nnx.split(model), given, jnp.asarray(length_penalty), search=search)


class _Beams(NamedTuple):
    """Hypotheses of each row: those that go on, by log-probability, and those that have ended, by score."""

    step: Int[Array, ""]
    tokens: Int[Array, "b k n"]
    log_probs: Float[Array, "b k"]
    ended_tokens: Int[Array, "b k n"]
    ended_scores: Float[Array, "b k"]
    cache: Cache | Prefix


@partial(jax.jit, static_argnames=("graphdef", "search"))
def _beam(graphdef: Any, state: Any, given: Given, length_penalty: Array, *, search: Search):
    model: Transformer = nnx.merge(graphdef, state)
    (batch, _), (count, size, (places, ids, rules), _) = given.source.shape, search
    cache = model.init_cache(given.source, places, size)
    dtype = beams_.score_dtype(model, cache, batch, size)
    lowest = jnp.asarray(jnp.finfo(dtype).min / 2, dtype)

    def penalty(length: Array) -> Array:
        return ((5 + length.astype(dtype)) / 6) ** length_penalty.astype(dtype)

    def unfinished(beams: _Beams) -> Bool[Array, ""]:
        reachable = beams.log_probs[:, 0] / penalty(
            jnp.asarray(places)
        )  # log-probabilities only fall, and the longest divides them most
        return (beams.step < places) & jnp.any(reachable > beams.ended_scores.min(axis=1))

    def step(beams: _Beams) -> _Beams:
        found = beams_.continuations(
            model, beams.tokens, beams.log_probs, beams.cache, beams.step, search, given
        )
        grown = found.grown(beams.tokens, beams.step)
        best, ends = found.log_probs, found.tokens == ids.eos
        if rules != NONE or given.first is not None:  # what they rule out neither goes on nor ends
            best = jnp.maximum(best, lowest)
            ends &= best > lowest
        scores = jnp.where(ends, best / penalty(beams.step + 1), lowest)
        ended_scores, kept = jax.lax.top_k(
            jnp.concatenate([beams.ended_scores, scores], axis=1), size
        )
        ended_tokens = pick(jnp.concatenate([beams.ended_tokens, grown], axis=1), kept)
        live, chosen = jax.lax.top_k(jnp.where(ends, lowest, best), size)
        cache = found.cache.follow(pick(found.parents, chosen))
        return _Beams(beams.step + 1, pick(grown, chosen), live, ended_tokens, ended_scores, cache)

    empty = jnp.full((batch, size, places), ids.pad, jnp.int32)
    first = (
        jnp.full((batch, size), lowest).at[:, 0].set(0)
    )  # all beams start equal: only one may speak at first
    none = jnp.full((batch, size), lowest)
    beams = jax.lax.while_loop(
        unfinished, step, _Beams(jnp.zeros((), jnp.int32), empty, first, empty, none, cache)
    )
    # The ended ones, and behind them as many of the others as there is room for
    ended = (beams.ended_scores > lowest).sum(axis=1, keepdims=True)
    index = jnp.arange(count, dtype=ended.dtype)[None]
    index = jnp.where(index < ended, index, size + index - ended)
    tokens = jnp.concatenate([beams.ended_tokens, beams.tokens], axis=1)
    scores = jnp.concatenate([beams.ended_scores, beams.log_probs / penalty(beams.step)], axis=1)
    return pick(tokens, index), pick(scores, index)
