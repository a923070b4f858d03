"""Decoding: pure functions over one cached step, each a single jitted loop."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.errors import ConfigError
from jax_transformer.nn.cache import Cache
from jax_transformer.shapes import SourceIds
from jax_transformer.transformer import Transformer


class _Ids(NamedTuple):
    bos: int
    eos: int
    pad: int


def _ids(model: Transformer, bos_id: int | None, eos_id: int | None) -> _Ids:
    config = model.config
    ids = _Ids(config.bos_id if bos_id is None else bos_id, config.eos_id if eos_id is None else eos_id, config.target_pad_id)
    for name, value in (("bos_id", ids.bos), ("eos_id", ids.eos)):
        if not 0 <= value < config.target_vocab_size:
            raise ConfigError(f"{name}={value} is outside the vocabulary of {config.target_vocab_size}")
    return ids


def _places(model: Transformer, max_length: int | None) -> int:
    places = model.config.max_length if max_length is None else max_length
    if not 1 <= places <= model.config.max_length:
        raise ConfigError(f"max_length={places} must be between 1 and the model's {model.config.max_length}")
    return places


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
    return _greedy(*nnx.split(model), source, places=_places(model, max_length), ids=_ids(model, bos_id, eos_id))


@partial(jax.jit, static_argnames=("graphdef", "places", "ids"))
def _greedy(graphdef: Any, state: Any, source: Array, *, places: int, ids: _Ids) -> Int[Array, "b n"]:
    model: Transformer = nnx.merge(graphdef, state)
    batch = source.shape[0]

    def unfinished(carry) -> Bool[Array, ""]:
        _, _, _, done, step = carry
        return (step < places) & ~done.all()

    def step(carry):
        token, tokens, cache, done, i = carry
        logits, cache = model.decode_step(token, cache)
        token = jnp.where(done, ids.pad, jnp.argmax(logits, axis=-1).astype(jnp.int32))
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, axis=1)
        return token, tokens, cache, done | (token == ids.eos), i + 1

    start = (
        jnp.full(batch, ids.bos, jnp.int32),
        jnp.full((batch, places), ids.pad, jnp.int32),
        model.init_cache(source, places),
        jnp.zeros(batch, bool),
        jnp.zeros((), jnp.int32),
    )
    return jax.lax.while_loop(unfinished, step, start)[1]


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
    one. Arguments and ids as in :func:`greedy`; also the score of each hypothesis (b,).
    """
    if not 1 <= beam_size <= model.config.target_vocab_size // 2:
        raise ConfigError(f"beam_size={beam_size} must be between 1 and half the vocabulary of {model.config.target_vocab_size}")
    if not length_penalty >= 0:
        raise ConfigError(f"length_penalty={length_penalty} must not be negative")
    source = model.check_source(source)
    places, ids = _places(model, max_length), _ids(model, bos_id, eos_id)
    return _beam(*nnx.split(model), source, jnp.asarray(length_penalty), size=beam_size, places=places, ids=ids)


class _Beams(NamedTuple):
    """Hypotheses of each row: those that go on, by log-probability, and those that have ended, by score."""

    step: Int[Array, ""]
    tokens: Int[Array, "b k n"]
    log_probs: Float[Array, "b k"]
    ended_tokens: Int[Array, "b k n"]
    ended_scores: Float[Array, "b k"]
    cache: Cache


def _pick(x: Array, beams: Int[Array, "b m"]) -> Array:
    """``x[row, beams[row]]`` for every row of (b, k, ...)."""
    return jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1)


def _pick_cache(cache: Cache, beams: Int[Array, "b k"]) -> Cache:
    """The cache (of b·k rows) of the beams that live on. What belongs to the source is the same for all beams of a row and stays."""
    batch, size = beams.shape

    def pick(x: Array) -> Array:
        return _pick(x.reshape(batch, size, *x.shape[1:]), beams).reshape(x.shape)

    blocks = tuple(b._replace(self_keys=pick(b.self_keys), self_values=pick(b.self_values)) for b in cache.blocks)
    return cache._replace(blocks=blocks, target_valid=pick(cache.target_valid))


@partial(jax.jit, static_argnames=("graphdef", "size", "places", "ids"))
def _beam(graphdef: Any, state: Any, source: Array, length_penalty: Array, *, size: int, places: int, ids: _Ids):
    model: Transformer = nnx.merge(graphdef, state)
    batch = source.shape[0]
    cache = model.init_cache(jnp.repeat(source, size, axis=0), places)
    dtype = jax.eval_shape(model.decode_step, jnp.zeros(batch * size, jnp.int32), cache)[0].dtype
    lowest = jnp.asarray(jnp.finfo(dtype).min / 2, dtype)

    def penalty(length: Array) -> Array:
        return ((5 + length.astype(dtype)) / 6) ** length_penalty.astype(dtype)

    def unfinished(beams: _Beams) -> Bool[Array, ""]:
        reachable = beams.log_probs[:, 0] / penalty(jnp.asarray(places))  # log-probabilities only fall, and the longest divides them most
        return (beams.step < places) & jnp.any(reachable > beams.ended_scores.min(axis=1))

    def step(beams: _Beams) -> _Beams:
        last = beams.tokens[:, :, jnp.maximum(beams.step - 1, 0)]
        token = jnp.where(beams.step == 0, ids.bos, last)
        logits, cache = model.decode_step(token.reshape(-1), beams.cache)
        log_probs = jax.nn.log_softmax(logits).reshape(batch, size, -1) + beams.log_probs[:, :, None]
        vocabulary = log_probs.shape[-1]
        # Twice as many as beams: at most one continuation of each beam is the end token, so enough go on
        best, where = jax.lax.top_k(log_probs.reshape(batch, -1), 2 * size)
        parents, tokens = where // vocabulary, (where % vocabulary).astype(jnp.int32)
        grown = jax.lax.dynamic_update_slice_in_dim(_pick(beams.tokens, parents), tokens[:, :, None], beams.step, axis=2)
        ends = tokens == ids.eos
        scores = jnp.where(ends, best / penalty(beams.step + 1), lowest)
        ended_scores, kept = jax.lax.top_k(jnp.concatenate([beams.ended_scores, scores], axis=1), size)
        ended_tokens = _pick(jnp.concatenate([beams.ended_tokens, grown], axis=1), kept)
        live, chosen = jax.lax.top_k(jnp.where(ends, lowest, best), size)
        cache = _pick_cache(cache, _pick(parents, chosen))
        return _Beams(beams.step + 1, _pick(grown, chosen), live, ended_tokens, ended_scores, cache)

    empty = jnp.full((batch, size, places), ids.pad, jnp.int32)
    first = jnp.full((batch, size), lowest).at[:, 0].set(0)  # all beams start equal: only one may speak at first
    none = jnp.full((batch, size), lowest)
    beams = jax.lax.while_loop(unfinished, step, _Beams(jnp.zeros((), jnp.int32), empty, first, empty, none, cache))
    ended = beams.ended_scores[:, 0] > lowest
    tokens = jnp.where(ended[:, None], beams.ended_tokens[:, 0], beams.tokens[:, 0])
    return tokens, jnp.where(ended, beams.ended_scores[:, 0], beams.log_probs[:, 0] / penalty(beams.step))
