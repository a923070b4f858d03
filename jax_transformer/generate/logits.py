"""The scores of the next token: :class:`Constraints` applied, the largest found, one drawn.

The order of the constraints is the order of transformers' ``generate``. Facts from transformers
5.23, ``generation/logits_process.py`` and ``GenerationMixin._get_logits_processor``: there, lengths
count the start token, and the generated sequence begins with it. A constraint that is off costs
nothing.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from jax_transformer.generate.generation_config import Constraints
from jax_transformer.generate.prepare import Inputs, StaticArgs, start_tokens

_NONE = Constraints()
_BLOCK = 128


def constrained(static_args: StaticArgs, inputs: Inputs) -> bool:
    """Return True if :func:`constrain` changes any score."""
    return static_args.config.constraints != _NONE or inputs.forced_bos_ids is not None


class Generated(NamedTuple):
    """Hypotheses so far, from the start token on; the first ``length`` tokens are valid."""

    tokens: Int[Array, "b k m"]
    length: Int[Array, ""]
    begin: int
    """The number of tokens before the generated ones."""

    def last(self, count: int) -> Int[Array, "b k c"]:
        """Return the last ``count`` tokens; arbitrary if there are fewer."""
        return jax.lax.dynamic_slice_in_dim(self.tokens, self.length - count, count, axis=2)


def constrain(
    scores: Float[Array, "b k v"],
    tokens: Int[Array, "b k n"],
    step: Int[Array, ""],
    inputs: Inputs,
    static_args: StaticArgs,
) -> Float[Array, "b k v"]:
    """Return the constrained scores of the tokens at position ``step``; forbidden tokens have -inf.

    ``tokens`` are those before the position; whatever follows them is ignored. The scores are
    returned in float32 at least: call this only if they are :func:`constrained`.
    """
    constraints, forced_bos_ids = static_args.config.constraints, inputs.forced_bos_ids
    scores = scores.astype(np.promote_types(scores.dtype, np.float32))
    start = start_tokens(inputs, static_args)[:, None].astype(tokens.dtype)
    start = jnp.broadcast_to(start, (*tokens.shape[:2], start.shape[2]))
    begin = start.shape[2]
    generated = Generated(jnp.concatenate([start, tokens], axis=2), step + begin, begin)
    if constraints.repetition_penalty != 1:
        scores = _penalise_repetition(scores, generated, constraints.repetition_penalty)
    eos_id, vocabulary = static_args.eos_id, scores.shape[2]
    for forbidden in _forbidden(constraints, generated, inputs.source, eos_id, vocabulary):
        scores = jnp.where(forbidden, -jnp.inf, scores)
    scores = _force(constraints, scores, generated, forced_bos_ids)
    scores = _suppress(scores, constraints.suppress_tokens)
    if constraints.begin_suppress_tokens:
        first = begin + 1 if forced_bos_ids is not None and begin == 1 else begin
        suppressed = _suppress(scores, constraints.begin_suppress_tokens)
        scores = jnp.where(generated.length == first, suppressed, scores)
    for processor in constraints.processors:
        scores = processor(scores, tokens, step, static_args.eos_id)
    return jax.nn.log_softmax(scores) if constraints.renormalize_logits else scores


def _token_mask(
    tokens: Int[Array, "b k w"], valid: Bool[Array, "b k w"], vocabulary: int
) -> Bool[Array, "b k v"]:
    """Return True for the tokens of the vocabulary that are among the valid ``tokens``."""
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None, None]
    beams = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :, None]
    inside = jnp.where(valid, tokens, jnp.asarray(vocabulary, tokens.dtype))
    none = jnp.zeros((*tokens.shape[:2], vocabulary), bool)
    return none.at[rows, beams, inside].set(True, mode="drop")


def _constant_mask(ids: tuple[int, ...], vocabulary: int) -> Bool[Array, "1 1 v"]:
    mask = np.zeros((1, 1, vocabulary), bool)
    mask[..., list(ids)] = True
    return jnp.asarray(mask)


def _suppress(scores: Float[Array, "b k v"], ids: tuple[int, ...]) -> Float[Array, "b k v"]:
    return jnp.where(_constant_mask(ids, scores.shape[2]), -jnp.inf, scores) if ids else scores


def _penalise_repetition(
    scores: Float[Array, "b k v"], generated: Generated, penalty: float
) -> Float[Array, "b k v"]:
    tokens, vocabulary = generated.tokens, scores.shape[2]
    positions = jnp.arange(tokens.shape[2], dtype=jnp.int32)[None, None]
    valid = jnp.broadcast_to(positions < generated.length, tokens.shape)
    penalised = jnp.where(scores < 0, scores * penalty, scores / penalty)
    return jnp.where(_token_mask(tokens, valid, vocabulary), penalised, scores)


def _forbidden(
    constraints: Constraints, generated: Generated, source: Array, eos_id: int, vocabulary: int
) -> Iterator[Bool[Array, "#b #k v"]]:
    """Yield masks of forbidden tokens, each to be broadcast to (b, k, v)."""
    if size := constraints.no_repeat_ngram_size:
        yield _ends_ngram(generated, generated.tokens, generated.length, size, vocabulary)
    if size := constraints.encoder_no_repeat_ngram_size:
        width = jnp.asarray(source.shape[1], jnp.int32)
        yield _ends_ngram(generated, source[:, None], width, size, vocabulary)
    words = sorted((word for word in constraints.bad_words_ids if word != (eos_id,)), key=len)
    for length, group in itertools.groupby(words, key=len):
        equally_long = tuple(group)
        if length == 1:
            yield _constant_mask(tuple(token for (token,) in equally_long), vocabulary)
        elif length <= generated.tokens.shape[2]:
            yield _ends_word(generated, equally_long, vocabulary)
    if constraints.min_new_tokens:
        too_short = generated.length - generated.begin < constraints.min_new_tokens
        yield _constant_mask((eos_id,), vocabulary) & too_short


def _ends_ngram(
    generated: Generated,
    text: Int[Array, "b #k w"],
    length: Int[Array, ""],
    size: int,
    vocabulary: int,
) -> Bool[Array, "b k v"]:
    """Return the tokens that would complete an n-gram of the first ``length`` of ``text``."""
    tokens, windows = generated.tokens, text.shape[2] - size + 1
    if windows < 1 or size - 1 > tokens.shape[2]:
        return jnp.zeros((1, 1, vocabulary), bool)
    starts = jnp.arange(windows, dtype=jnp.int32)[None, None]
    inside = (starts + size <= length) & (generated.length >= size - 1)
    matches = jnp.broadcast_to(inside, (*tokens.shape[:2], windows))
    last = generated.last(size - 1)
    for i in range(size - 1):
        matches &= text[:, :, i : i + windows] == last[:, :, i : i + 1]
    return _token_mask(jnp.broadcast_to(text[:, :, size - 1 :], matches.shape), matches, vocabulary)


def _ends_word(
    generated: Generated, words: tuple[tuple[int, ...], ...], vocabulary: int
) -> Bool[Array, "b k v"]:
    """Return the last tokens of the ``words``, equally long, of which all others are generated."""
    prefixes = np.array([word[:-1] for word in words], np.int32)
    ends = np.array([word[-1] for word in words], np.int32)
    size = prefixes.shape[1]
    matches = (generated.last(size)[:, :, None] == prefixes[None, None]).all(axis=3)
    matches &= generated.length >= size
    tokens = jnp.broadcast_to(jnp.asarray(ends)[None, None], matches.shape)
    return _token_mask(tokens, matches, vocabulary)


def _force(
    constraints: Constraints,
    scores: Float[Array, "b k v"],
    generated: Generated,
    forced_bos_ids: Int[Array, " b"] | None,
) -> Float[Array, "b k v"]:
    """Return the scores with 0 for a token at its forced position, and -inf for others there."""
    zero, forbidden = jnp.zeros((), scores.dtype), jnp.asarray(-jnp.inf, scores.dtype)
    vocabulary, length = scores.shape[2], generated.length
    if forced_bos_ids is not None:
        ids = jnp.arange(vocabulary, dtype=jnp.int32)[None, None]
        only = jnp.where(ids == forced_bos_ids[:, None, None], zero, forbidden)
        scores = jnp.where(length == 1, only, scores)
    if constraints.forced_eos_token_ids:
        is_forced = _constant_mask(constraints.forced_eos_token_ids, vocabulary)
        only = jnp.where(is_forced, zero, forbidden)
        scores = jnp.where(length == generated.tokens.shape[2] - 1, only, scores)
    return scores


def argmax(scores: Float[Array, "b v"]) -> Int[Array, " b"]:
    """Return the index of each row's largest score, the first of equal ones: ``jnp.argmax``.

    XLA's own goes through the scores one by one on the CPU, and these passes are vectorised.
    """
    indices = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
    below = scores < scores.max(axis=1, keepdims=True)  # nowhere in a row of NaN: index 0
    return jnp.where(below, scores.shape[1], indices).min(axis=1).astype(jnp.int32)


def largest(
    scores: Float[Array, "b v"], count: int
) -> tuple[Float[Array, "b c"], Int[Array, "b c"]]:
    """Return the ``count`` largest scores of each row and their indices: ``jax.lax.top_k``.

    XLA's own goes through the scores one by one on the CPU. The largest lie in the ``count`` blocks
    with the largest maxima: only these are sorted. Of equal scores, the lowest index comes first.
    """
    rows, size = scores.shape
    if size < 4 * count * _BLOCK:  # nothing to win
        best, index = jax.lax.top_k(scores, count)
        return best, index
    padded = jnp.pad(scores, ((0, 0), (0, -size % _BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(rows, -1, _BLOCK)
    chosen = jnp.sort(jax.lax.top_k(blocks.max(axis=2), count)[1], axis=1)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1)
    best, index = jax.lax.top_k(candidates, count)
    return best, jnp.take_along_axis(chosen, index // _BLOCK, axis=1) * _BLOCK + index % _BLOCK


def most_likely(
    logits: Float[Array, "b v"],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""] | None,
    top_k: int,
) -> tuple[Float[Array, "b c"], Int[Array, "b c"]]:
    """Return the tokens to draw from, most likely first, and their logits in float32 at least.

    Tokens outside the nucleus of ``top_p`` have -inf.
    """
    dtype = np.promote_types(logits.dtype, np.float32)
    scores, tokens = largest(logits.astype(dtype), top_k or logits.shape[1])
    # At most 0, so that division by a small temperature gives no infinity; one that rounds to 0 in
    # this dtype would give 0 / 0
    at_least = jnp.finfo(dtype).tiny
    scores = (scores - scores[:, :1]) / jnp.maximum(temperature.astype(dtype), at_least)
    if top_p is not None:
        probabilities = jax.nn.softmax(scores, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        scores = jnp.where(before < top_p.astype(dtype), scores, -jnp.inf)
    return scores, tokens


def categorical(
    keys: Key[Array, " b"], scores: Float[Array, "b c"], tokens: Int[Array, "b c"]
) -> Int[Array, " b"]:
    """Draw one token of each row, with the probabilities of the softmax of ``scores``.

    ``keys`` are one for each row. The noise of a token depends on its id and not on its rank, which
    the rounding of nearly equal scores decides, and with it the size of the batch.
    """

    def noise(key: PRNGKeyArray, ids: Int[Array, " c"]) -> Float[Array, " c"]:
        own_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ids)
        return jax.vmap(lambda own: jax.random.gumbel(own, dtype=scores.dtype))(own_keys)

    index = argmax(scores + jax.vmap(noise)(keys, tokens))
    return jnp.take_along_axis(tokens, index[:, None], axis=1)[:, 0].astype(jnp.int32)
