"""Greedy decoding and sampling, and :func:`generate`, which takes a :class:`GenerationConfig`."""

import math
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jax_transformer.errors import InputError, check_numbers
from jax_transformer.generate import beam_search, logits, prepare
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.shapes import AnyArray, Source


def generate(
    model: prepare.Models,
    source: Source,
    config: GenerationConfig,
    row_ids: Int[AnyArray, " b"] | None = None,
    prompt: Int[AnyArray, "b p"] | None = None,
) -> tuple[Int[np.ndarray, "b m n"], Float[np.ndarray, "b m"]]:
    """Return the ``num_return_sequences`` hypotheses of each row, best first, and their scores.

    Scores are NaN except from a beam search. Without ``max_new_tokens`` a hypothesis has at most
    twice as many tokens as the source is wide. On a CPU, two halves of the rows are decoded at the
    same time. ``row_ids`` are as in :func:`sample`. Ids and errors as in :func:`greedy` and
    :func:`beam`.
    """
    model = prepare.split(model)
    decode = partial(_hypotheses, model, config)
    tokens, *scores = prepare.in_halves(decode, prepare.Rows(source, row_ids, prompt), model.arrays)
    if scores:
        return tokens, scores[0]
    return tokens[:, None], np.full((len(tokens), 1), np.nan)


def _hypotheses(
    model: prepare.SplitModel, config: GenerationConfig, batch: prepare.Rows
) -> tuple[AnyArray, ...]:
    """Return the tokens of each row, and the scores of a beam search, perhaps still computed."""
    source, row_ids, prompt = batch
    if config.num_beams > 1:
        return beam_search.search(model, source, config, None, prompt)
    key = jax.random.key(config.seed) if config.do_sample else None
    return (_token_by_token(model, source, config, None, prompt, key, row_ids),)


def greedy(
    model: prepare.Models,
    source: Source,
    *,
    max_length: int | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
    prompt: Int[AnyArray, "b p"] | None = None,
    **options: Any,
) -> Int[Array, "b n"]:
    """Return the most likely next token, again and again, until every row has ended or is full.

    It knows nothing of a folder's ``generation_config.json``; :class:`jax_transformer.Translator`
    is the object with the folder's own settings.

    Args:
        model: the model, several models as an ensemble, or :func:`split` of either, which saves
            milliseconds in every call; keys and values are cached.
        source: ids (b, s), padded by the model's ``source_pad_id``, or spectrograms (b, c, w).
        forced_bos_token_id: the first token of all rows or of each, such as the target language in
            mBART-50 and NLLB. Another one compiles nothing.
        prompt: the decoder's inputs (b, p) before the generated tokens, instead of the start token:
            Whisper's start, language and task. Other tokens compile nothing. After more than one
            token, forced_bos_token_id has no effect, as in transformers.
        max_length: most generated tokens n, also as ``max_new_tokens``; None is the model's
            maximum.
        bos_id: the start token, also as ``decoder_start_token_id``; None is the model's.
        eos_id: the end token, also as ``eos_token_id``; None is the model's.
        options: other fields of :class:`GenerationConfig`: ``constraints``, or any of them by its
            name.

    Returns:
        ids (b, n) int32 without the start token or prompt, with ``eos_token_id``, padded after it
            by the model's ``target_pad_id``.

    Raises:
        InputError: the model cannot read the source.
        ConfigError: the model does not have such a length or token, or an option is unknown.
    """
    model = prepare.split(model)
    options |= {"max_length": max_length, "bos_id": bos_id, "eos_id": eos_id}
    config = prepare.keyword_config(model, GenerationConfig(), options, prompt)
    return _token_by_token(model, source, config, forced_bos_token_id, prompt)


def sample(
    model: prepare.Models,
    source: Source,
    key: PRNGKeyArray,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    rows: Int[AnyArray, " b"] | None = None,
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
    prompt: Int[AnyArray, "b p"] | None = None,
    **options: Any,
) -> Int[Array, "b n"]:
    """Draw tokens one after the other from softmax(logits / temperature).

    The other arguments and the returned ids are as in :func:`jax_transformer.generate.greedy`.

    Args:
        key: decides every draw.
        rows: a number for each row, by which its draws differ from other rows' draws; None is 0,
            1, 2, ... A row's tokens depend only on its number and its source, not on the rest of
            the batch (as far as rounding in matrix products does not).
        temperature: above 0 (1); near 0 is greedy decoding.
        top_k: draw from this many most likely tokens (0: all).
        top_p: draw from the fewest of these that together reach this probability (Holtzman et al.
            2020; 1: all).
    """
    model = prepare.split(model)
    options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    config = prepare.keyword_config(model, GenerationConfig(do_sample=True), options, prompt)
    return _token_by_token(model, source, config, forced_bos_token_id, prompt, key, rows)


class _Draws(NamedTuple):
    """Arrays that decide the draws."""

    key: PRNGKeyArray
    row_ids: Int[Array, " b"]
    temperature: Float[Array, ""]
    top_p: Float[Array, ""] | None
    """None for all tokens, which saves their sum."""


def _token_by_token(
    model: prepare.SplitModel,
    source: Source,
    config: GenerationConfig,
    forced_bos_ids: int | Int[AnyArray, " b"] | None,
    prompt: Int[AnyArray, "b p"] | None,
    key: PRNGKeyArray | None = None,
    row_ids: Int[AnyArray, " b"] | None = None,
) -> Int[Array, "b n"]:
    """Return the ids of greedy decoding, or of draws with ``key``."""
    inputs, static_args = prepare.prepare(model, source, config, forced_bos_ids, prompt)
    draws = None if key is None else _draws(model, config, key, row_ids, len(inputs.source))
    return _decode(model.structure, model.arrays, inputs, draws, static_args=static_args)


def _draws(
    model: prepare.SplitModel,
    config: GenerationConfig,
    key: PRNGKeyArray,
    row_ids: Int[AnyArray, " b"] | None,
    batch: int,
) -> _Draws:
    vocabulary = model.config.target_vocab_size
    between = f"be between 1 and the vocabulary of {vocabulary}, or 0 for all of it"
    check = partial(check_numbers, config, "")
    check("temperature", "be above 0 and finite", lambda x: 0 < x < math.inf)
    check("top_k", between, lambda k: 0 <= k <= vocabulary)
    check("top_p", "be above 0 and at most 1", lambda p: 0 < p <= 1)
    rows = jnp.arange(batch) if row_ids is None else jnp.asarray(row_ids)
    if len(rows) != batch:
        raise InputError(f"source has {batch} rows and rows {len(rows)} numbers")
    top_p = jnp.asarray(config.top_p) if config.top_p < 1 else None
    return _Draws(key, rows, jnp.asarray(config.temperature), top_p)


class _Tokens(NamedTuple):
    """The tokens of each row that is still in the batch."""

    length: Int[Array, ""]
    last: Int[Array, " b"]
    tokens: Int[Array, "b n"]
    open: Bool[Array, " b"]
    """False for rows that have ended."""
    cache: Any
    inputs: prepare.Inputs
    rows: Int[Array, " b"]
    """Their numbers in the whole batch."""


@partial(jax.jit, static_argnames=("structure", "static_args"))
def _decode(
    structure: prepare.ModelStructure,
    arrays: list[Array],
    inputs: prepare.Inputs,
    draws: _Draws | None,
    *,
    static_args: prepare.StaticArgs,
) -> Int[Array, "b n"]:
    """Return ids until every row has ended or has ``max_new_tokens``, padded after each end."""
    model = structure.merge(arrays)
    batch, length = inputs.source.shape[0], static_args.max_new_tokens
    keys: Any = None
    if draws is not None:
        keys = jax.vmap(partial(jax.random.fold_in, draws.key))(draws.row_ids)

    def step(carry: _Tokens) -> _Tokens:
        scores, cache = model.decode_step(carry.last[:, None], carry.cache)
        if logits.constrained(static_args, inputs):
            before = carry.tokens[:, None]
            scores = logits.constrain(scores, before, carry.length, carry.inputs, static_args)
        scores = scores[:, 0]
        if draws is None:
            chosen = logits.argmax(scores)
        else:
            fold_in = jax.vmap(jax.random.fold_in, in_axes=(0, None))
            top_k = static_args.config.top_k
            best = logits.most_likely(scores, draws.temperature, draws.top_p, top_k)
            chosen = logits.categorical(fold_in(keys[carry.rows], carry.length), *best)
        token = jnp.where(carry.open, chosen, static_args.pad_id)
        length, tokens = carry.length + 1, carry.tokens
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], carry.length, axis=1)
        more = carry.open & (token != static_args.eos_id) & (length < static_args.max_new_tokens)
        return carry._replace(length=length, last=token, tokens=tokens, open=more, cache=cache)

    start = _Tokens(
        length=jnp.zeros((), jnp.int32),
        last=prepare.start_tokens(inputs, static_args)[:, -1],
        tokens=jnp.full((batch, length), static_args.pad_id, jnp.int32),
        open=jnp.ones(batch, bool),
        cache=prepare.primed_cache(model, inputs, static_args),
        inputs=inputs,
        rows=jnp.arange(batch, dtype=jnp.int32),
    )
    is_open, results = map(attrgetter, ("open", "tokens"))
    return prepare.while_loop(is_open, step, start, results, prepare.batch_sizes(batch))
