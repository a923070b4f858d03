"""The rules of :class:`jax_transformer.generate.generation_config.Rules` on the scores of the next token, in the order of transformers' ``generate``.

Facts from transformers 5.23, ``generation/logits_process.py`` and ``GenerationMixin._get_logits_processor``: lengths count the start token there, and
what has been said begins with it. A rule that is not set costs nothing.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.generate.arguments import NONE, Given, Ids
from jax_transformer.generate.generation_config import Constraints


class Said(NamedTuple):
    """Hypotheses so far: the start token and what followed it, and how many of the places hold a token."""

    tokens: Int[Array, "b k m"]
    length: Int[Array, ""]

    def last(self, count: int) -> Int[Array, "b k c"]:
        """The last tokens; rubbish where there are not so many."""
        return jax.lax.dynamic_slice_in_dim(self.tokens, self.length - count, count, axis=2)


def apply(
    rules: Constraints,
    scores: Float[Array, "b k v"],
    tokens: Int[Array, "b k n"],
    step: Int[Array, ""],
    given: Given,
    ids: Ids,
) -> Float[Array, "b k v"]:
    """Scores of the tokens at place ``step``, -inf where one may not be said; ``tokens`` are those before it, and anything behind it.

    As they are where there are no rules, else in float32 at least.
    """
    if rules == NONE and given.first is None:
        return scores
    scores = scores.astype(np.promote_types(scores.dtype, np.float32))
    start = jnp.full((*tokens.shape[:2], 1), ids.bos, tokens.dtype)
    said = Said(jnp.concatenate([start, tokens], axis=2), step + 1)
    if rules.repetition_penalty != 1:
        scores = _repeated(scores, said, rules.repetition_penalty)
    for banned in _bans(rules, said, given.source, ids, scores.shape[2]):
        scores = jnp.where(banned, -jnp.inf, scores)
    scores = _forced(rules, scores, said, given.first)
    scores = _without(scores, rules.suppress_tokens)
    if rules.begin_suppress_tokens:
        begin = 1 if given.first is None else 2
        scores = jnp.where(
            said.length == begin, _without(scores, rules.begin_suppress_tokens), scores
        )
    return jax.nn.log_softmax(scores) if rules.renormalize_logits else scores


def _marked(
    tokens: Int[Array, "b k w"], where: Bool[Array, "b k w"], vocabulary: int
) -> Bool[Array, "b k v"]:
    """Which tokens of the vocabulary are among those."""
    rows, beams = (
        jnp.arange(size, dtype=jnp.int32).reshape(shape)
        for size, shape in zip(tokens.shape, ((-1, 1, 1), (1, -1, 1)), strict=False)
    )
    nowhere = jnp.asarray(vocabulary, tokens.dtype)
    return (
        jnp.zeros((*tokens.shape[:2], vocabulary), bool)
        .at[rows, beams, jnp.where(where, tokens, nowhere)]
        .set(True, mode="drop")
    )


def _among(ids: tuple[int, ...], vocabulary: int) -> Bool[Array, "1 1 v"]:
    mask = np.zeros((1, 1, vocabulary), bool)
    mask[..., list(ids)] = True
    return jnp.asarray(mask)


def _without(scores: Float[Array, "b k v"], ids: tuple[int, ...]) -> Float[Array, "b k v"]:
    return jnp.where(_among(ids, scores.shape[2]), -jnp.inf, scores) if ids else scores


def _repeated(scores: Float[Array, "b k v"], said: Said, penalty: float) -> Float[Array, "b k v"]:
    places = jnp.arange(said.tokens.shape[2], dtype=jnp.int32)[None, None]
    been = _marked(
        said.tokens, jnp.broadcast_to(places < said.length, said.tokens.shape), scores.shape[2]
    )
    return jnp.where(been, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


def _bans(rules: Constraints, said: Said, source: Int[Array, "b s"], ids: Ids, vocabulary: int):
    """Masks of what may not be said, each broadcast to (b, k, v)."""
    if rules.no_repeat_ngram_size:
        yield _again(said, said.tokens, said.length, rules.no_repeat_ngram_size, vocabulary)
    if rules.encoder_no_repeat_ngram_size:
        whole = jnp.asarray(source.shape[1], jnp.int32)
        yield _again(said, source[:, None], whole, rules.encoder_no_repeat_ngram_size, vocabulary)
    words = sorted((word for word in rules.bad_words_ids if word != (ids.eos,)), key=len)
    for length, several in itertools.groupby(words, key=len):
        alike = tuple(several)
        if length == 1:
            yield _among(tuple(token for (token,) in alike), vocabulary)
        elif length <= said.tokens.shape[2]:
            yield _completed(said, alike, vocabulary)
    if rules.min_new_tokens:
        yield _among((ids.eos,), vocabulary) & (said.length <= rules.min_new_tokens)


def _again(
    said: Said, text: Int[Array, "b #k w"], length: Int[Array, ""], size: int, vocabulary: int
) -> Bool[Array, "b k v"]:
    """What would make the last tokens a sequence of ``size`` that is in the first ``length`` tokens of ``text``."""
    windows = text.shape[2] - size + 1
    if windows < 1 or size - 1 > said.tokens.shape[2]:
        return jnp.zeros((1, 1, vocabulary), bool)
    starts = jnp.arange(windows, dtype=jnp.int32)[None, None]
    found = jnp.broadcast_to(
        (starts + size <= length) & (said.length >= size - 1), (*said.tokens.shape[:2], windows)
    )
    if size > 1:
        last = said.last(size - 1)
        for i in range(size - 1):
            found &= text[:, :, i : i + windows] == last[:, :, i : i + 1]
    return _marked(jnp.broadcast_to(text[:, :, size - 1 :], found.shape), found, vocabulary)


def _completed(
    said: Said, words: tuple[tuple[int, ...], ...], vocabulary: int
) -> Bool[Array, "b k v"]:
    """The last tokens of those words, all equally long, of which all others have just been said."""
    before, ends = (
        np.array([word[:-1] for word in words], np.int32),
        np.array([word[-1] for word in words], np.int32),
    )
    last = said.last(before.shape[1])
    found = (last[:, :, None] == before[None, None]).all(axis=3) & (said.length >= before.shape[1])
    return _marked(jnp.broadcast_to(jnp.asarray(ends)[None, None], found.shape), found, vocabulary)


def _forced(
    rules: Constraints, scores: Float[Array, "b k v"], said: Said, first: Int[Array, " b"] | None
) -> Float[Array, "b k v"]:
    """Where one token must be said, it has the score 0 and all others -inf."""
    zero, never = jnp.zeros((), scores.dtype), jnp.asarray(-jnp.inf, scores.dtype)
    vocabulary = scores.shape[2]
    if first is not None:
        only = jnp.where(
            jnp.arange(vocabulary, dtype=jnp.int32)[None, None] == first[:, None, None], zero, never
        )
        scores = jnp.where(said.length == 1, only, scores)
    if rules.forced_eos_token_ids:
        only = jnp.where(_among(rules.forced_eos_token_ids, vocabulary), zero, never)
        scores = jnp.where(said.length == said.tokens.shape[2] - 1, only, scores)
    return scores
