"""Greedy decoding, beam search, and :func:`generate`, which takes a :class:`GenerationConfig`."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_transformer.errors import ConfigError
from jax_transformer.generate import beam_search, sampling, stepwise
from jax_transformer.generate.generation_config import (
    BeamScorer,
    Constraints,
    EarlyStopping,
    GenerationConfig,
)
from jax_transformer.generate.prepare import (
    Inputs,
    ModelStructure,
    SplitModel,
    StaticArgs,
    default_length,
    prepare,
    split,
)
from jax_transformer.shapes import AnyArray, SourceIds
from jax_transformer.transformer import Transformer


def generate(
    model: Transformer | SplitModel,
    source: SourceIds,
    config: GenerationConfig,
    row_ids: Int[AnyArray, " b"] | None = None,
) -> tuple[Int[np.ndarray, "b m n"], Float[np.ndarray, "b m"]]:
    """The ``num_return_sequences`` hypotheses of each row, best first, and their scores.

    Scores are NaN except from a beam search. Without ``max_new_tokens`` a hypothesis has at most
    twice as many tokens as the source is wide.
    ``row_ids`` are as in :func:`sample`. Ids and errors as in :func:`greedy` and :func:`beam`.
    """
    model = split(model)
    length = config.max_new_tokens
    if length is None:
        length = default_length(model.config, np.shape(source)[1])
    options: dict[str, Any] = {
        "max_length": length,
        "bos_id": config.decoder_start_token_id,
        "eos_id": config.eos_token_id,
        "constraints": config.constraints,
        "forced_bos_token_id": config.forced_bos_token_id,
    }
    if config.do_sample:
        options |= {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
        key = jax.random.key(config.seed)
        tokens = sampling.sample(model, source, key, rows=row_ids, **options)
    elif config.num_beams == 1:
        tokens = greedy(model, source, **options)
    else:
        options |= {
            "beam_size": config.num_beams,
            "length_penalty": config.length_penalty,
            "scorer": config.beam_scorer,
            "early_stopping": config.early_stopping,
        }
        several, scores = n_best(model, source, config.num_return_sequences, **options)
        return np.asarray(several), np.asarray(scores)
    return np.asarray(tokens)[:, None], np.full((len(tokens), 1), np.nan)


def greedy(
    model: Transformer | SplitModel,
    source: SourceIds,
    *,
    max_length: int | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    constraints: Constraints = Constraints(),
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
) -> Int[Array, "b n"]:
    """The most likely next token, again and again, until every row has ended or is full.

    It knows nothing of a folder's ``generation_config.json``; :class:`jax_transformer.Translator`
    is the object with the folder's own settings.

    Args:
        model: the model, or :func:`split` of it, which saves milliseconds in every call; keys and
            values are cached.
        source: ids (b, s), padded by the model's ``source_pad_id``.
        max_length: the number n of generated tokens; None is the model's maximum.
        bos_id: the start token; None is the model's.
        eos_id: the token that ends a row; None is the model's.
        constraints: tokens that are forbidden, forced or penalised.
        forced_bos_token_id: the first token of all rows or of each, such as the target language in
            mBART-50 and NLLB. Another one compiles nothing.

    Returns:
        ids (b, n) int32 without the start token, with ``eos_id``, padded after it by the model's
            ``target_pad_id``.

    Raises:
        InputError: the model cannot read the source.
        ConfigError: the model does not have such a length or token.
    """
    model = split(model)
    config = GenerationConfig(
        max_new_tokens=model.config.longest if max_length is None else max_length,
        decoder_start_token_id=bos_id,
        eos_token_id=eos_id,
        constraints=constraints,
    )
    inputs, static_args = prepare(model, source, config, forced_bos_token_id)
    return _greedy(model.structure, model.arrays, inputs, static_args=static_args)


@partial(jax.jit, static_argnames=("structure", "static_args"))
def _greedy(
    structure: ModelStructure, arrays: list[Array], inputs: Inputs, *, static_args: StaticArgs
) -> Int[Array, "b n"]:
    return stepwise.generate(
        structure,
        arrays,
        inputs,
        lambda scores, _: jnp.argmax(scores, axis=-1).astype(jnp.int32),
        static_args,
    )


def beam(
    model: Transformer | SplitModel,
    source: SourceIds,
    *,
    beam_size: int = 4,
    max_length: int | None = None,
    length_penalty: float = 0.6,
    scorer: BeamScorer = BeamScorer.GNMT,
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC,
    bos_id: int | None = None,
    eos_id: int | None = None,
    constraints: Constraints = Constraints(),
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
) -> tuple[Int[Array, "b n"], Float[Array, " b"]]:
    """The best hypothesis of a beam search, and its score in float32 at least.

    It knows nothing of a folder's ``generation_config.json``; :class:`jax_transformer.Translator`
    is the object with the folder's own settings.

    ``beam_size`` unfinished and as many finished hypotheses are kept. The score is log-probability
    / ((5 + length) / 6) ** length_penalty (Wu et al. 2016, section 7), and a row is done when no
    unfinished hypothesis can beat its worst finished one. With ``scorer=BeamScorer.AVERAGE`` it is
    log-probability / length ** length_penalty, and the search is that of transformers'
    ``generate``, with its ``early_stopping``. Other arguments, ids and errors as in :func:`greedy`.
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
    model: Transformer | SplitModel,
    source: SourceIds,
    num_hypotheses: int,
    *,
    beam_size: int = 4,
    max_length: int | None = None,
    length_penalty: float = 0.6,
    scorer: BeamScorer = BeamScorer.GNMT,
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC,
    bos_id: int | None = None,
    eos_id: int | None = None,
    constraints: Constraints = Constraints(),
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
) -> tuple[Int[Array, "b m n"], Float[Array, "b m"]]:
    """The best different hypotheses of :func:`beam`'s search, best first, and their scores.

    With the scorer GNMT, unfinished hypotheses follow if too few have finished at ``max_length``.
    """
    model = split(model)
    vocabulary = model.config.target_vocab_size
    if not 1 <= beam_size <= vocabulary // 2:
        raise ConfigError(
            f"beam_size={beam_size} must be between 1 and half the vocabulary of {vocabulary}"
        )
    if not 1 <= num_hypotheses <= beam_size:
        raise ConfigError(
            f"num_hypotheses={num_hypotheses} must be between 1 and beam_size={beam_size}"
        )
    if scorer is BeamScorer.GNMT and not length_penalty >= 0:
        raise ConfigError(f"length_penalty={length_penalty} must not be negative")
    if scorer is BeamScorer.AVERAGE and not math.isfinite(length_penalty):
        raise ConfigError(f"length_penalty={length_penalty} must be finite")
    config = GenerationConfig(
        num_beams=beam_size,
        num_return_sequences=num_hypotheses,
        max_new_tokens=model.config.longest if max_length is None else max_length,
        beam_scorer=scorer,
        early_stopping=early_stopping,
        constraints=constraints,
        decoder_start_token_id=bos_id,
        eos_token_id=eos_id,
    )
    inputs, static_args = prepare(model, source, config, forced_bos_token_id)
    return beam_search.search(
        model.structure,
        model.arrays,
        inputs,
        jnp.asarray(length_penalty),
        static_args=static_args,
    )
