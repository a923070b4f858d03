"""Greedy decoding and beam search."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.errors import ConfigError
from jax_transformer.generate import arguments, stepwise
from jax_transformer.generate.arguments import Ids
from jax_transformer.nn.cache import Cache, Prefix
from jax_transformer.shapes import SourceIds
from jax_transformer.transformer import Transformer


def greedy(
    model: Transformer, source: SourceIds, *, max_length: int | None = None, bos_id: int | None = None, eos_id: int | None = None
) -> Int[Array, "b n"]:
    """The likeliest next token, again and again, until every row has ended or has ``max_length`` tokens.

    Args:
        model: the model; its keys and values are cached, so each token costs one position.
        source: ids (b, s), padded by the model's ``source_pad_id``.
        max_length: the number n of generated tokens; the model's own maximum where None.
        bos_id: the start token. eos_id: the token that ends a row. The config's where None.

    Returns:
        ids (b, n) int32 without the start token, ``eos_id`` included, padded behind it by the model's ``target_pad_id``.
    """
    source = model.check_source(source)
    return _greedy(*nnx.split(model), source, places=arguments.places(model, source, max_length), ids=arguments.ids(model, bos_id, eos_id))


@partial(jax.jit, static_argnames=("graphdef", "places", "ids"))
def _greedy(graphdef: Any, state: Any, source: Array, *, places: int, ids: Ids) -> Int[Array, "b n"]:
    return stepwise.generate(graphdef, state, source, lambda logits, _: jnp.argmax(logits, axis=-1).astype(jnp.int32), places, ids)


def beam(
    model: Transformer,
    source: SourceIds,
    *,
    beam_size: int = 4,
    max_length: int | None = None,
    length_penalty: float = 0.6,
    bos_id: int | None = None,
    eos_id: int | None = None,
) -> tuple[Int[Array, "b n"], Float[Array, " b"]]:
    """The best hypothesis of a beam search, by log-probability over ((5 + length) / 6) ** length_penalty (Wu et al. 2016, section 7).

    ``beam_size`` unfinished and as many finished hypotheses are kept; a row stops when no unfinished one could still beat its worst finished
    one. Arguments and ids as in :func:`greedy`; also the score of each hypothesis (b,), in float32 at least.
    """
    tokens, scores = n_best(
        model, source, 1, beam_size=beam_size, max_length=max_length, length_penalty=length_penalty, bos_id=bos_id, eos_id=eos_id
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
    bos_id: int | None = None,
    eos_id: int | None = None,
) -> tuple[Int[Array, "b m n"], Float[Array, "b m"]]:
    """The ``count`` best different hypotheses of :func:`beam`'s search, best first, and their scores.

    Finished hypotheses come before those that had no room to finish, which are there only where too few have finished.
    """
    if not 1 <= beam_size <= model.config.target_vocab_size // 2:
        raise ConfigError(f"beam_size={beam_size} must be between 1 and half the vocabulary of {model.config.target_vocab_size}")
    if not 1 <= count <= beam_size:
        raise ConfigError(f"count={count} must be between 1 and beam_size={beam_size}")
    if not length_penalty >= 0:
        raise ConfigError(f"length_penalty={length_penalty} must not be negative")
    source = model.check_source(source)
    places, ids = arguments.places(model, source, max_length), arguments.ids(model, bos_id, eos_id)
    return _beam(*nnx.split(model), source, jnp.asarray(length_penalty), count=count, size=beam_size, places=places, ids=ids)


class _Beams(NamedTuple):
    """Hypotheses of each row: those that go on, by log-probability, and those that have ended, by score."""

    step: Int[Array, ""]
    tokens: Int[Array, "b k n"]
    log_probs: Float[Array, "b k"]
    ended_tokens: Int[Array, "b k n"]
    ended_scores: Float[Array, "b k"]
    cache: Cache | Prefix


def _pick(x: Array, beams: Int[Array, "b m"]) -> Array:
    """``x[row, beams[row]]`` for every row of (b, k, ...)."""
    return jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1)


@partial(jax.jit, static_argnames=("graphdef", "count", "size", "places", "ids"))
def _beam(graphdef: Any, state: Any, source: Array, length_penalty: Array, *, count: int, size: int, places: int, ids: Ids):
    model: Transformer = nnx.merge(graphdef, state)
    batch = source.shape[0]
    cache = model.init_cache(source, places, size)
    logits = jax.eval_shape(model.decode_step, jnp.zeros((batch, size), jnp.int32), cache)[0]
    dtype = np.promote_types(logits.dtype, np.float32)  # what 16 bits would round away adds up over a hypothesis
    lowest = jnp.asarray(jnp.finfo(dtype).min / 2, dtype)

    def penalty(length: Array) -> Array:
        return ((5 + length.astype(dtype)) / 6) ** length_penalty.astype(dtype)

    def unfinished(beams: _Beams) -> Bool[Array, ""]:
        reachable = beams.log_probs[:, 0] / penalty(jnp.asarray(places))  # log-probabilities only fall, and the longest divides them most
        return (beams.step < places) & jnp.any(reachable > beams.ended_scores.min(axis=1))

    def continuations(beams: _Beams) -> tuple[Array, Array, Array, Cache | Prefix]:
        last = beams.tokens[:, :, jnp.maximum(beams.step - 1, 0)]
        logits, cache = model.decode_step(jnp.where(beams.step == 0, ids.bos, last), beams.cache)
        log_probs = jax.nn.log_softmax(logits.astype(dtype)) + beams.log_probs[:, :, None]
        vocabulary = log_probs.shape[-1]
        # Twice as many as beams: at most one continuation of each beam is the end token, so enough go on
        best, where = jax.lax.top_k(log_probs.reshape(batch, -1), 2 * size)
        return best, where // vocabulary, (where % vocabulary).astype(jnp.int32), cache

    def step(beams: _Beams) -> _Beams:
        best, parents, tokens, cache = continuations(beams)
        grown = jax.lax.dynamic_update_slice_in_dim(_pick(beams.tokens, parents), tokens[:, :, None], beams.step, axis=2)
        ends = tokens == ids.eos
        scores = jnp.where(ends, best / penalty(beams.step + 1), lowest)
        ended_scores, kept = jax.lax.top_k(jnp.concatenate([beams.ended_scores, scores], axis=1), size)
        ended_tokens = _pick(jnp.concatenate([beams.ended_tokens, grown], axis=1), kept)
        live, chosen = jax.lax.top_k(jnp.where(ends, lowest, best), size)
        cache = cache.follow(_pick(parents, chosen))
        return _Beams(beams.step + 1, _pick(grown, chosen), live, ended_tokens, ended_scores, cache)

    empty = jnp.full((batch, size, places), ids.pad, jnp.int32)
    first = jnp.full((batch, size), lowest).at[:, 0].set(0)  # all beams start equal: only one may speak at first
    none = jnp.full((batch, size), lowest)
    beams = jax.lax.while_loop(unfinished, step, _Beams(jnp.zeros((), jnp.int32), empty, first, empty, none, cache))
    # The ended ones, and behind them as many of the others as there is room for
    ended = (beams.ended_scores > lowest).sum(axis=1, keepdims=True)
    index = jnp.arange(count, dtype=ended.dtype)[None]
    index = jnp.where(index < ended, index, size + index - ended)
    tokens = jnp.concatenate([beams.ended_tokens, beams.tokens], axis=1)
    scores = jnp.concatenate([beams.ended_scores, beams.log_probs / penalty(beams.step)], axis=1)
    return _pick(tokens, index), _pick(scores, index)
