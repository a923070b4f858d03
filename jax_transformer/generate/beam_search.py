"""Beam search: one loop, and two kinds of scorers.

A scorer says what a hypothesis scores, which ones end, and when a row is done.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.errors import check_numbers
from jax_transformer.generate import logits, prepare
from jax_transformer.generate.ensemble import AnyModel
from jax_transformer.generate.generation_config import BeamScorer, EarlyStopping, GenerationConfig
from jax_transformer.shapes import AnyArray, Source


def beam(
    model: prepare.Models,
    source: Source,
    *,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    max_length: int | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
    prompt: Int[AnyArray, "b p"] | None = None,
    **options: Any,
) -> tuple[Int[Array, "b n"], Float[Array, " b"]]:
    """Return the best hypothesis of a beam search, and its score in float32 at least.

    It knows nothing of a folder's ``generation_config.json``; :class:`jax_transformer.Translator`
    is the object with the folder's own settings.

    ``num_beams`` (4; also as ``beam_size``) unfinished and as many finished hypotheses are kept.
    The score is log-probability / ((5 + length) / 6) ** length_penalty (Wu et al. 2016, section 7;
    0.6), and a row is done when no unfinished hypothesis can beat its worst finished one. With
    ``beam_scorer=BeamScorer.AVERAGE`` it is log-probability / length ** length_penalty, and the
    search is as in transformers' ``generate``, with its ``early_stopping``. Other arguments, ids
    and errors as in :func:`jax_transformer.generate.greedy`.
    """
    options |= {"num_beams": num_beams, "length_penalty": length_penalty}
    options |= {"max_length": max_length, "bos_id": bos_id, "eos_id": eos_id}
    tokens, scores = n_best(
        model, source, 1, forced_bos_token_id=forced_bos_token_id, prompt=prompt, **options
    )
    return tokens[:, 0], scores[:, 0]


def n_best(
    model: prepare.Models,
    source: Source,
    num_return_sequences: int | None = None,
    *,
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
    prompt: Int[AnyArray, "b p"] | None = None,
    **options: Any,
) -> tuple[Int[Array, "b m n"], Float[Array, "b m"]]:
    """Return the best different hypotheses of :func:`beam`'s search, best first, and their scores.

    ``num_return_sequences`` may also be given as ``num_hypotheses``. With the scorer GNMT,
    unfinished hypotheses follow if too few have finished at ``max_new_tokens``.
    """
    model, options = prepare.split(model), {"num_return_sequences": num_return_sequences} | options
    config = prepare.keyword_config(model, GenerationConfig(num_beams=4), options, prompt)
    return search(model, source, config, forced_bos_token_id, prompt)


def search(
    model: prepare.SplitModel,
    source: Source,
    config: GenerationConfig,
    forced_bos_ids: int | Int[AnyArray, " b"] | None,
    prompt: Int[AnyArray, "b p"] | None,
) -> tuple[Int[Array, "b m n"], Float[Array, "b m"]]:
    """Return the hypotheses of a beam search, best first, and their scores."""
    vocabulary, check = model.config.target_vocab_size, partial(check_numbers, config, "")
    between = f"be between 1 and half the vocabulary of {vocabulary}"
    check("num_beams", between, lambda k: k <= vocabulary // 2)
    if config.beam_scorer is BeamScorer.GNMT:
        check("length_penalty", "not be negative", lambda x: x >= 0)
    else:
        check("length_penalty", "be finite", math.isfinite)
    inputs, static_args = prepare.prepare(model, source, config, forced_bos_ids, prompt)
    traced = inputs, jnp.asarray(config.length_penalty)
    return _search(model.structure, model.arrays, *traced, static_args=static_args)


@dataclass(frozen=True)
class Scorer:
    """The part of beam search that differs, for :attr:`BeamScorer.GNMT`: any of the best 2k
    continuations may end. Its methods are called while the loop is traced.
    """

    length_penalty: Float[Array, ""]
    static_args: prepare.StaticArgs
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
        """Return the best continuations' log-probabilities, which end, and which are returned."""
        if self.constrained:  # what constraints forbid neither goes on nor ends
            log_probs = jnp.maximum(log_probs, self.masked)
            is_eos &= log_probs > self.masked
        return log_probs, is_eos, is_eos

    def best_length(self, length: Int[Array, ""]) -> Int[Array, ""]:
        """Return the length that decides if an unfinished hypothesis may beat a finished one."""
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
    cache: Any
    inputs: prepare.Inputs


@partial(jax.jit, static_argnames=("structure", "static_args"))
def _search(
    structure: prepare.ModelStructure,
    arrays: list[Array],
    inputs: prepare.Inputs,
    length_penalty: Float[Array, ""],
    *,
    static_args: prepare.StaticArgs,
) -> tuple[Int[Array, "b m n"], Float[Array, "b m"]]:
    """Return the ``num_return_sequences`` best hypotheses (b, m, n) and their scores (b, m)."""
    model = structure.merge(arrays)
    config, batch = static_args.config, inputs.source.shape[0]
    cache = prepare.primed_cache(model, inputs, static_args, config.num_beams)
    tokens = jnp.zeros((batch, config.num_beams), jnp.int32)
    outputs = jax.eval_shape(model.decode_step, tokens, cache)[0]
    dtype = np.promote_types(outputs.dtype, np.float32)  # sums of log-probabilities round
    constrained = logits.constrained(static_args, inputs)
    scorer = SCORERS[config.beam_scorer](length_penalty, static_args, constrained, dtype)
    stops_when_full = config.early_stopping is EarlyStopping.FULL

    def is_open(beams: _Beams) -> Bool[Array, " b"]:
        rows = beams.open & (beams.length < static_args.max_new_tokens)
        return rows & ~beams.finished.all(axis=1) if stops_when_full else rows

    def step(beams: _Beams) -> _Beams:
        best, parents, last, cache = _continuations(model, beams, static_args)
        length = beams.length + 1
        tokens = jax.lax.dynamic_update_slice_in_dim(
            pick(beams.tokens, parents), last[:, :, None], beams.length, axis=2
        )
        is_eos = last == static_args.eos_id
        log_probs, ends, finishes = scorer.candidates(best, is_eos, length)
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
            cache=cache.follow(pick(parents, chosen)),
        )
        return beams._replace(open=beams.open & _can_improve(beams, scorer))

    def results(beams: _Beams) -> tuple[Int[Array, "b m n"], Float[Array, "b m"]]:
        count = config.num_return_sequences
        if scorer.returns_unfinished:
            return _finished_then_unfinished(beams, scorer, count)
        return beams.finished_tokens[:, :count], beams.finished_scores[:, :count]

    start = _start(inputs, cache, scorer.masked, static_args)
    return prepare.while_loop(is_open, step, start, results, prepare.batch_sizes(batch))


def pick(x: Array, beams: Int[Array, "b m"]) -> Array:
    """Return ``x[row, beams[row]]`` for every row of (b, k, ...)."""
    return jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1)


def _start(
    inputs: prepare.Inputs, cache: Any, masked: Float[Array, ""], static_args: prepare.StaticArgs
) -> _Beams:
    shape = batch, _ = (inputs.source.shape[0], static_args.config.num_beams)
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
        inputs=inputs,
    )


def _continuations(
    model: AnyModel, beams: _Beams, static_args: prepare.StaticArgs
) -> tuple[Float[Array, "b m"], Int[Array, "b m"], Int[Array, "b m"], Any]:
    """Return the log-probabilities of the best 2k continuations of a row's k beams, best first, the
    beams that they continue, their tokens, and the cache."""
    length = beams.length
    last = beams.tokens[:, :, jnp.maximum(length - 1, 0)]
    start = prepare.start_tokens(beams.inputs, static_args)[:, -1:]
    outputs, cache = model.decode_step(jnp.where(length == 0, start, last), beams.cache)
    scores = jax.nn.log_softmax(outputs.astype(beams.log_probs.dtype))
    if logits.constrained(static_args, beams.inputs):
        scores = logits.constrain(scores, beams.tokens, length, beams.inputs, static_args)
    totals = scores + beams.log_probs[:, :, None]
    vocabulary = totals.shape[-1]
    # Twice as many as beams: at most one continuation of a beam is the end token, so enough go on
    count = 2 * static_args.config.num_beams
    best, index = logits.largest(totals.reshape(totals.shape[0], -1), count)
    return best, index // vocabulary, (index % vocabulary).astype(jnp.int32), cache


def _keep_finished(
    beams: _Beams,
    tokens: Int[Array, "b m n"],
    scores: Float[Array, "b m"],
    finishes: Bool[Array, "b m"],
) -> _Beams:
    """Return the beams with the best k of the hypotheses that are finished or finish now."""
    every = jnp.concatenate([beams.finished_scores, scores], axis=1)
    best, chosen = jax.lax.top_k(every, scores.shape[1] // 2)
    return beams._replace(
        finished_tokens=pick(jnp.concatenate([beams.finished_tokens, tokens], axis=1), chosen),
        finished_scores=best,
        finished=pick(jnp.concatenate([beams.finished, finishes], axis=1), chosen),
    )


def _can_improve(beams: _Beams, scorer: Scorer) -> Bool[Array, " b"]:
    """Return True for rows with fewer than k finished hypotheses, or perhaps a better one."""
    reachable = beams.log_probs[:, :1] / scorer.divisor(scorer.best_length(beams.length))
    worst = beams.finished_scores.min(axis=1, keepdims=True)
    worst = jnp.where(beams.finished, worst, scorer.masked)
    return (reachable > worst).any(axis=1)


def _finished_then_unfinished(
    beams: _Beams, scorer: Scorer, count: int
) -> tuple[Int[Array, "b m n"], Float[Array, "b m"]]:
    """Return the first ``count`` of the finished hypotheses followed by the unfinished ones."""
    finished = beams.finished.sum(axis=1, keepdims=True)
    index = jnp.arange(count, dtype=finished.dtype)[None]
    index = jnp.where(index < finished, index, beams.tokens.shape[1] + index - finished)
    unfinished = beams.log_probs / scorer.divisor(beams.length)
    tokens = jnp.concatenate([beams.finished_tokens, beams.tokens], axis=1)
    scores = jnp.concatenate([beams.finished_scores, unfinished], axis=1)
    return pick(tokens, index), pick(scores, index)
