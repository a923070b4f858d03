"""Lines of text in, lines of text out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from jax_transformer import generate
from jax_transformer.config import TransformerConfig
from jax_transformer.data import batches, encoding
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.transformer import Transformer

_ROOM = 8
"""Positions in the cache of translations, for each of the sources' in a batch."""


class Hypothesis(NamedTuple):
    """A translation, its ids (the end token included where there is one, and nothing behind it), and beam search's score of it."""

    text: str
    ids: Int[np.ndarray, " n"]
    score: float | None


def translate(
    model: Transformer,
    tokenizer: Tokenizer | TokenizerPair,
    lines: Sequence[str],
    generation_config: GenerationConfig | None = None,
    *,
    widths: Sequence[int] = (),
    tokens_per_batch: int = 4096,
) -> list[str]:
    """The translation of each line, in order; an empty line stays empty. Arguments and errors as of :func:`hypotheses`."""
    found = hypotheses(
        model, tokenizer, lines, generation_config, widths=widths, tokens_per_batch=tokens_per_batch
    )
    return [best[0].text for best in found]


def hypotheses(
    model: Transformer,
    tokenizer: Tokenizer | TokenizerPair,
    lines: Sequence[str],
    generation_config: GenerationConfig | None = None,
    *,
    widths: Sequence[int] = (),
    tokens_per_batch: int = 4096,
) -> list[list[Hypothesis]]:
    """The translations of each line, best first: ``generation_config.num_return_sequences`` of them, or one. An empty line has the empty one alone.

    ``generation_config`` is greedy where not given. Lines are batched by length and padded to ``widths`` (those that the model was trained with), or to
    the longest that it reads where none is wide enough; all beams of a batch together take ``tokens_per_batch`` positions, and in the cache of
    translations at most eight times as many. Raises InputError for a line longer than the model reads.
    """
    generation_config = generation_config or GenerationConfig()
    longest, end = (
        model.config.longest,
        model.config.eos_id
        if generation_config.eos_token_id is None
        else generation_config.eos_token_id,
    )
    widths = tuple(sorted({*(width for width in widths if width < longest), longest}))
    full = [i for i, line in enumerate(lines) if line]
    encoded = encoding.encode_sources(lines, tokenizer, longest)
    result = [
        [Hypothesis("", np.zeros(0, np.int32), 0.0 if generation_config.num_beams > 1 else None)]
        for _ in lines
    ]
    rows = batches.rows_per_batch(widths, max(1, tokens_per_batch // generation_config.num_beams))
    # The cache has room for the longest translation, whatever the source's width: rows of short sources are bounded by that
    room = _ROOM * tokens_per_batch // generation_config.num_beams
    rows = tuple(
        min(count, max(1, room // _places(model.config, width, generation_config)))
        for count, width in zip(rows, widths, strict=True)
    )
    sources = [encoded[i] for i in full]
    around = encoding.around_of(tokenizer)
    groups = (
        batches.source_batches(
            sources, widths, rows, pad_id=model.config.source_pad_id, around=around
        )
        if full
        else []
    )
    for indices, source in groups:
        numbers = np.zeros(len(source), np.int32)
        numbers[: len(indices)] = [full[i] for i in indices]
        tokens, scores = decode(model, source, numbers, generation_config)
        for i, row, score in zip(
            indices, tokens, scores, strict=False
        ):  # rows behind the last line are filler
            result[full[i]] = [
                _hypothesis(tokenizer, ids, float(s), end)
                for ids, s in zip(row, score, strict=True)
            ]
    return result


def without_cache(config: TransformerConfig) -> str | None:
    """A line that says so where decoding cannot keep keys and values, and why."""
    if config.uncacheable is None:
        return None
    shorter = (
        "; a translation has at most as many tokens as its padded source"
        if config.equal_lengths
        else ""
    )
    return f"decoding runs the whole decoder again at each token, because {config.uncacheable}{shorter}"


def n_best_lines(found: Sequence[Sequence[Hypothesis]]) -> list[str]:
    """As Moses and fairseq write n-best lists: ``line ||| translation ||| score``, lines counted from 0, best first."""
    return [
        f"{i} ||| {hypothesis.text} ||| {hypothesis.score:.6f}"
        for i, several in enumerate(found)
        for hypothesis in several
    ]


def decode(
    model: Transformer,
    source: Int[np.ndarray, "b s"],
    numbers: Int[np.ndarray, " b"],
    generation_config: GenerationConfig,
) -> tuple[Int[np.ndarray, "b m n"], Float[np.ndarray, "b m"]]:
    """The m hypotheses of each row and their scores, which are NaN where nothing gives one; draws differ by the rows' ``numbers``."""
    shared: dict[str, Any] = {
        "max_length": _places(model.config, source.shape[1], generation_config),
        "bos_id": generation_config.decoder_start_token_id,
        "eos_id": generation_config.eos_token_id,
    }
    shared |= {
        "constraints": generation_config.constraints,
        "forced_bos_token_id": generation_config.forced_bos_token_id,
    }
    if generation_config.do_sample:
        shared |= {
            "temperature": generation_config.temperature,
            "top_k": generation_config.top_k,
            "top_p": generation_config.top_p,
        }
        tokens = generate.sample(
            model, source, jax.random.key(generation_config.seed), rows=numbers, **shared
        )
    elif generation_config.num_beams == 1:
        tokens = generate.greedy(model, source, **shared)
    else:
        shared |= {
            "beam_size": generation_config.num_beams,
            "length_penalty": generation_config.length_penalty,
            "scorer": generation_config.beam_scorer,
            "early_stopping": generation_config.early_stopping,
        }
        several, scores = generate.n_best(
            model, source, generation_config.num_return_sequences, **shared
        )
        return np.asarray(several), np.asarray(scores)
    return np.asarray(tokens)[:, None], np.full((len(source), 1), np.nan)


def _places(config: TransformerConfig, width: int, generation_config: GenerationConfig) -> int:
    """The most tokens of a translation of a source of this width."""
    return (
        min(config.longest, 2 * width)
        if generation_config.max_new_tokens is None
        else generation_config.max_new_tokens
    )


def _hypothesis(
    tokenizer: Tokenizer | TokenizerPair, ids: Int[np.ndarray, " n"], score: float, end: int
) -> Hypothesis:
    ends = np.flatnonzero(ids == end)
    ids = ids[: ends[0] + 1] if len(ends) else ids
    return Hypothesis(tokenizer.decode(ids), ids, None if np.isnan(score) else score)
