"""Greedy decoding and sampling, and :func:`generate`, which takes a :class:`GenerationConfig`."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.generate import (
    beam_search,
    compaction,
    selection,
    split_batch,
)
from jax_transformer.generate import constraints as logits_processors
from jax_transformer.generate.generation_config import Constraints, GenerationConfig
from jax_transformer.generate.prepare import (
    Inputs,
    Models,
    ModelStructure,
    SplitModel,
    StaticArgs,
    longest,
    max_new_tokens,
    prepare,
    primed_cache,
    prompt_length,
    split,
    start_tokens,
)
from jax_transformer.generate.split_batch import Rows
from jax_transformer.shapes import AnyArray, Source

_Choose = Callable[[Float[Array, "b v"], Int[Array, ""], Int[Array, " b"]], Int[Array, " b"]]


def generate(
    model: Models,
    source: Source,
    config: GenerationConfig,
    row_ids: Int[AnyArray, " b"] | None = None,
    prompt: Int[AnyArray, "b p"] | None = None,
) -> tuple[Int[np.ndarray, "b m n"], Float[np.ndarray, "b m"]]:
    """The ``num_return_sequences`` hypotheses of each row, best first, and their scores.

    Scores are NaN except from a beam search. Without ``max_new_tokens`` a hypothesis has at most
    twice as many tokens as the source is wide. On a CPU, two halves of the rows are decoded at the
    same time. ``row_ids`` are as in :func:`sample`. Ids and errors as in :func:`greedy` and
    :func:`beam`.
    """
    model = split(model)
    length = config.max_new_tokens
    if length is None:
        length = max_new_tokens(model.config, np.shape(source)[1], None, prompt_length(prompt))
    config = dataclasses.replace(config, max_new_tokens=length)
    decode = partial(_hypotheses, model, config)
    tokens, *scores = split_batch.run(decode, Rows(source, row_ids, prompt), model.arrays)
    if scores:
        return tokens, scores[0]
    return tokens[:, None], np.full((len(tokens), 1), np.nan)


def _hypotheses(model: SplitModel, config: GenerationConfig, batch: Rows) -> tuple[AnyArray, ...]:
    """The tokens of each row, and the scores of a beam search; these may still be computed."""
    options: dict[str, Any] = {
        "max_length": config.max_new_tokens,
        "bos_id": config.decoder_start_token_id,
        "eos_id": config.eos_token_id,
        "constraints": config.constraints,
        "forced_bos_token_id": config.forced_bos_token_id,
        "prompt": batch.prompt,
    }
    if config.do_sample:
        options |= {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
        key = jax.random.key(config.seed)
        return (sample(model, batch.source, key, rows=batch.row_ids, **options),)
    if config.num_beams == 1:
        return (greedy(model, batch.source, **options),)
    options |= {
        "beam_size": config.num_beams,
        "length_penalty": config.length_penalty,
        "scorer": config.beam_scorer,
        "early_stopping": config.early_stopping,
    }
    return beam_search.n_best(model, batch.source, config.num_return_sequences, **options)


def greedy(
    model: Models,
    source: Source,
    *,
    max_length: int | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    constraints: Constraints = Constraints(),
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
    prompt: Int[AnyArray, "b p"] | None = None,
) -> Int[Array, "b n"]:
    """The most likely next token, again and again, until every row has ended or is full.

    It knows nothing of a folder's ``generation_config.json``; :class:`jax_transformer.Translator`
    is the object with the folder's own settings.

    Args:
        model: the model, several models as an ensemble, or :func:`split` of either, which saves
            milliseconds in every call; keys and values are cached.
        source: ids (b, s), padded by the model's ``source_pad_id``, or spectrograms (b, c, w).
        max_length: the number n of generated tokens; None is the model's maximum.
        bos_id: the start token; None is the model's.
        eos_id: the token that ends a row; None is the model's.
        constraints: tokens that are forbidden, forced or penalised.
        forced_bos_token_id: the first token of all rows or of each, such as the target language in
            mBART-50 and NLLB. Another one compiles nothing.
        prompt: the decoder's inputs (b, p) before the generated tokens, instead of the start token:
            Whisper's start, language and task. Other tokens compile nothing. After more than one
            token, forced_bos_token_id has no effect, as in transformers.

    Returns:
        ids (b, n) int32 without the start token or prompt, with ``eos_id``, padded after it by the
            model's ``target_pad_id``.

    Raises:
        InputError: the model cannot read the source.
        ConfigError: the model does not have such a length or token.
    """
    model = split(model)
    config = GenerationConfig(
        max_new_tokens=longest(model, prompt) if max_length is None else max_length,
        decoder_start_token_id=bos_id,
        eos_token_id=eos_id,
        constraints=constraints,
    )
    inputs, static_args = prepare(model, source, config, forced_bos_token_id, prompt)
    return _greedy(model.structure, model.arrays, inputs, static_args=static_args)


@partial(jax.jit, static_argnames=("structure", "static_args"))
def _greedy(
    structure: ModelStructure, arrays: list[Array], inputs: Inputs, *, static_args: StaticArgs
) -> Int[Array, "b n"]:
    return _token_by_token(
        structure, arrays, inputs, lambda scores, step, rows: selection.argmax(scores), static_args
    )


class _Draws(NamedTuple):
    """Arrays that decide the draws."""

    key: PRNGKeyArray
    row_ids: Int[Array, " b"]
    temperature: Float[Array, ""]
    top_p: Float[Array, ""] | None
    """None for all tokens, which saves their sum."""


def sample(
    model: Models,
    source: Source,
    key: PRNGKeyArray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    rows: Int[AnyArray, " b"] | None = None,
    max_length: int | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    constraints: Constraints = Constraints(),
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
    prompt: Int[AnyArray, "b p"] | None = None,
) -> Int[Array, "b n"]:
    """Tokens drawn one after the other from softmax(logits / temperature).

    The other arguments and the returned ids are those of :func:`jax_transformer.generate.greedy`.

    Args:
        key: decides every draw.
        temperature: above 0; near 0 is greedy decoding.
        top_k: draw from this many most likely tokens; 0 is all.
        top_p: of these, draw from the fewest that together reach this probability (Holtzman et al.
            2020); 1 is all.
        rows: a number for each row, by which its draws differ from those of other rows; None is 0,
            1, 2, ... A row's tokens depend only on its number and its source, not on the rest of
            the batch (as far as rounding in matrix products does not).
    """
    model = split(model)
    vocabulary = model.config.target_vocab_size
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"temperature={temperature} must be above 0 and finite")
    if not 0 <= top_k <= vocabulary:
        raise ConfigError(
            f"top_k={top_k} must be between 1 and the vocabulary of {vocabulary}, "
            "or 0 for all of it"
        )
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p} must be above 0 and at most 1")
    config = GenerationConfig(
        do_sample=True,
        top_k=top_k,
        max_new_tokens=longest(model, prompt) if max_length is None else max_length,
        decoder_start_token_id=bos_id,
        eos_token_id=eos_id,
        constraints=constraints,
    )
    inputs, static_args = prepare(model, source, config, forced_bos_token_id, prompt)
    batch = len(inputs.source)
    row_ids = jnp.arange(batch) if rows is None else jnp.asarray(rows)
    if len(row_ids) != batch:
        raise InputError(f"source has {batch} rows and rows {len(row_ids)} numbers")
    draws = _Draws(
        key, row_ids, jnp.asarray(temperature), jnp.asarray(top_p) if top_p < 1 else None
    )
    return _sample(model.structure, model.arrays, inputs, draws, static_args=static_args)


@partial(jax.jit, static_argnames=("structure", "static_args"))
def _sample(
    structure: ModelStructure,
    arrays: list[Array],
    inputs: Inputs,
    draws: _Draws,
    *,
    static_args: StaticArgs,
) -> Int[Array, "b n"]:
    keys = jax.vmap(partial(jax.random.fold_in, draws.key))(draws.row_ids)

    def draw(
        logits: Float[Array, "b v"], step: Int[Array, ""], rows: Int[Array, " b"]
    ) -> Int[Array, " b"]:
        scores, tokens = most_likely(
            logits, draws.temperature, draws.top_p, static_args.config.top_k
        )
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys[rows], step)
        return categorical(step_keys, scores, tokens)

    return _token_by_token(structure, arrays, inputs, draw, static_args)


def _token_by_token(
    structure: ModelStructure,
    arrays: list[Array],
    inputs: Inputs,
    choose: _Choose,
    static_args: StaticArgs,
) -> Int[Array, "b n"]:
    """Ids until every row has ended or has ``max_new_tokens``, padded after each row's end token.

    ``choose`` returns the rows' next tokens, given their constrained logits, the step's number, and
    the rows' numbers in the batch. To be called inside a jitted function.
    """
    model = structure.merge(arrays)
    batch, length = inputs.source.shape[0], static_args.max_new_tokens

    def step(carry: _Tokens) -> _Tokens:
        logits, cache = model.decode_step(carry.last[:, None], carry.cache)
        scores = logits_processors.apply(
            logits, carry.tokens[:, None], carry.length, carry.inputs, static_args
        )
        chosen = choose(scores[:, 0], carry.length, carry.rows)
        token = jnp.where(carry.open, chosen, static_args.pad_id)
        length = carry.length + 1
        return carry._replace(
            length=length,
            last=token,
            tokens=jax.lax.dynamic_update_slice_in_dim(
                carry.tokens, token[:, None], carry.length, axis=1
            ),
            open=carry.open & (token != static_args.eos_id) & (length < static_args.max_new_tokens),
            cache=cache,
        )

    start = _Tokens(
        length=jnp.zeros((), jnp.int32),
        last=start_tokens(inputs, static_args)[:, -1],
        tokens=jnp.full((batch, length), static_args.pad_id, jnp.int32),
        open=jnp.ones(batch, bool),
        cache=primed_cache(model, inputs, static_args),
        inputs=inputs,
        rows=jnp.arange(batch, dtype=jnp.int32),
    )
    return compaction.while_loop(
        lambda carry: carry.open, step, start, lambda carry: carry.tokens, batch
    )


class _Tokens(NamedTuple):
    """The tokens of each row that is still in the batch."""

    length: Int[Array, ""]
    last: Int[Array, " b"]
    tokens: Int[Array, "b n"]
    open: Bool[Array, " b"]
    """False for rows that have ended."""
    cache: Any
    inputs: Inputs
    rows: Int[Array, " b"]
    """Their numbers in the whole batch."""


def most_likely(
    logits: Float[Array, "b v"],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""] | None,
    top_k: int,
) -> tuple[Float[Array, "b c"], Int[Array, "b c"]]:
    """The tokens to draw from, most likely first, and their logits in float32 at least.

    Tokens outside the nucleus of ``top_p`` have -inf.
    """
    dtype = np.promote_types(logits.dtype, np.float32)
    scores, tokens = selection.top_k(logits.astype(dtype), top_k or logits.shape[1])
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
    """One token of each row, with the probabilities that are the softmax of ``scores``.

    ``keys`` are one for each row. The noise of a token depends on its id and not on its rank, which
    the rounding of nearly equal scores decides, and with it the size of the batch.
    """

    def noise(key: PRNGKeyArray, ids: Int[Array, " c"]) -> Float[Array, " c"]:
        own_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ids)
        return jax.vmap(lambda own: jax.random.gumbel(own, dtype=scores.dtype))(own_keys)

    index = selection.argmax(scores + jax.vmap(noise)(keys, tokens))
    return jnp.take_along_axis(tokens, index[:, None], axis=1)[:, 0].astype(jnp.int32)
