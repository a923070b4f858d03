"""The loop of beam search. Its scores and its rules of stopping are a scorer's (``scorers.py``)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.generate import constraints
from jax_transformer.generate.generation_config import EarlyStopping
from jax_transformer.generate.prepare import Inputs, ModelStructure, StaticArgs
from jax_transformer.generate.scorers import SCORERS, Scorer
from jax_transformer.nn.cache import Cache, Prefix
from jax_transformer.transformer import Transformer


class _Beams(NamedTuple):
    """Hypotheses of each row: unfinished ones, by log-probability, and finished ones, by score."""

    length: Int[Array, ""]
    """Number of tokens of the unfinished ones."""
    tokens: Int[Array, "b k n"]
    log_probs: Float[Array, "b k"]
    finished_tokens: Int[Array, "b k n"]
    finished_scores: Float[Array, "b k"]
    finished: Bool[Array, "b k"]
    """False for finished hypotheses that are not there yet."""
    open: Bool[Array, " b"]
    """False for rows that are done."""
    cache: Cache | Prefix


class _Continuations(NamedTuple):
    """The best 2k continuations of a row's k beams, best first."""

    log_probs: Float[Array, "b m"]
    parents: Int[Array, "b m"]
    """The beams that they continue."""
    tokens: Int[Array, "b m"]
    cache: Cache | Prefix


@partial(jax.jit, static_argnames=("structure", "static_args"))
def search(
    structure: ModelStructure,
    arrays: list[Array],
    inputs: Inputs,
    length_penalty: Float[Array, ""],
    *,
    static_args: StaticArgs,
) -> tuple[Int[Array, "b m n"], Float[Array, "b m"]]:
    """The ``num_return_sequences`` best hypotheses (b, m, n) and their scores (b, m)."""
    model = structure.merge(arrays)
    config, batch = static_args.config, inputs.source.shape[0]
    cache = model.init_cache(inputs.source, static_args.max_new_tokens, config.num_beams)
    scorer = SCORERS[config.beam_scorer](
        length_penalty,
        static_args,
        constraints.any_in(static_args, inputs),
        _score_dtype(model, cache, batch, config.num_beams),
    )
    stops_when_full = config.early_stopping is EarlyStopping.FULL

    def unfinished(beams: _Beams) -> Bool[Array, ""]:
        go_on = (beams.length < static_args.max_new_tokens) & beams.open.any()
        return go_on & ~beams.finished.all() if stops_when_full else go_on

    def step(beams: _Beams) -> _Beams:
        best = _continuations(model, beams, inputs, static_args)
        length = beams.length + 1
        tokens = jax.lax.dynamic_update_slice_in_dim(
            pick(beams.tokens, best.parents), best.tokens[:, :, None], beams.length, axis=2
        )
        log_probs, ends, finishes = scorer.candidates(
            best.log_probs, best.tokens == static_args.eos_id, length
        )
        closed = ~beams.open
        if stops_when_full:
            closed |= beams.finished.all(axis=1)
        scores = scorer.mask(log_probs / scorer.divisor(length), closed[:, None])
        beams = _keep_finished(beams, tokens, scorer.mask(scores, ~finishes), finishes)
        live, chosen = jax.lax.top_k(scorer.mask(log_probs, ends), config.num_beams)
        beams = beams._replace(
            length=length,
            tokens=pick(tokens, chosen),
            log_probs=live,
            cache=best.cache.follow(pick(best.parents, chosen)),
        )
        return beams._replace(open=beams.open & _can_improve(beams, scorer))

    beams = jax.lax.while_loop(unfinished, step, _start(batch, cache, scorer.masked, static_args))
    count = config.num_return_sequences
    if scorer.returns_unfinished:
        return _finished_then_unfinished(beams, scorer, count)
    return beams.finished_tokens[:, :count], beams.finished_scores[:, :count]


def pick(x: Array, beams: Int[Array, "b m"]) -> Array:
    """``x[row, beams[row]]`` for every row of (b, k, ...)."""
    return jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1)


def _score_dtype(model: Transformer, cache: Cache | Prefix, batch: int, beams: int) -> np.dtype:
    """The dtype of sums of log-probabilities: float32 at least, because rounding adds up, too."""
    logits = jax.eval_shape(model.decode_step, jnp.zeros((batch, beams), jnp.int32), cache)[0]
    return np.promote_types(logits.dtype, np.float32)


def _start(
    batch: int, cache: Cache | Prefix, masked: Float[Array, ""], static_args: StaticArgs
) -> _Beams:
    shape = (batch, static_args.config.num_beams)
    empty = jnp.full((*shape, static_args.max_new_tokens), static_args.pad_id, jnp.int32)
    scores = jnp.full(shape, masked)
    return _Beams(
        length=jnp.zeros((), jnp.int32),
        tokens=empty,
        log_probs=scores.at[:, 0].set(0),  # all beams start equal: only one is continued
        finished_tokens=empty,
        finished_scores=scores,
        finished=jnp.zeros(shape, bool),
        open=jnp.ones(batch, bool),
        cache=cache,
    )


def _continuations(
    model: Transformer, beams: _Beams, inputs: Inputs, static_args: StaticArgs
) -> _Continuations:
    """The best of all beams continued by all tokens."""
    length = beams.length
    last = beams.tokens[:, :, jnp.maximum(length - 1, 0)]
    logits, cache = model.decode_step(jnp.where(length == 0, static_args.bos_id, last), beams.cache)
    scores = jax.nn.log_softmax(logits.astype(beams.log_probs.dtype))
    scores = constraints.apply(scores, beams.tokens, length, inputs, static_args)
    totals = scores + beams.log_probs[:, :, None]
    vocabulary = totals.shape[-1]
    # Twice as many as beams: at most one continuation of a beam is the end token, so enough go on
    best, index = jax.lax.top_k(totals.reshape(len(totals), -1), 2 * static_args.config.num_beams)
    return _Continuations(best, index // vocabulary, (index % vocabulary).astype(jnp.int32), cache)


def _keep_finished(
    beams: _Beams,
    tokens: Int[Array, "b m n"],
    scores: Float[Array, "b m"],
    finishes: Bool[Array, "b m"],
) -> _Beams:
    """True for rows that have fewer than k finished hypotheses, or may find a better one."""
    best, chosen = jax.lax.top_k(
        jnp.concatenate([beams.finished_scores, scores], axis=1), scores.shape[1] // 2
    )
    return beams._replace(
        finished_tokens=pick(jnp.concatenate([beams.finished_tokens, tokens], axis=1), chosen),
        finished_scores=best,
        finished=pick(jnp.concatenate([beams.finished, finishes], axis=1), chosen),
    )


def _can_improve(beams: _Beams, scorer: Scorer) -> Bool[Array, " b"]:
    """True for rows that have fewer than k finished hypotheses, or may still find a better one."""
    reachable = beams.log_probs[:, :1] / scorer.divisor(scorer.best_length(beams.length))
    worst = jnp.where(
        beams.finished, beams.finished_scores.min(axis=1, keepdims=True), scorer.masked
    )
    return (reachable > worst).any(axis=1)


def _finished_then_unfinished(
    beams: _Beams, scorer: Scorer, count: int
) -> tuple[Int[Array, "b m n"], Float[Array, "b m"]]:
    """The first ``count`` of the finished hypotheses followed by the unfinished ones."""
    finished = beams.finished.sum(axis=1, keepdims=True)
    index = jnp.arange(count, dtype=finished.dtype)[None]
    index = jnp.where(index < finished, index, beams.tokens.shape[1] + index - finished)
    unfinished = beams.log_probs / scorer.divisor(beams.length)
    tokens = jnp.concatenate([beams.finished_tokens, beams.tokens], axis=1)
    scores = jnp.concatenate([beams.finished_scores, unfinished], axis=1)
    return pick(tokens, index), pick(scores, index)
