"""Sampling: tokens drawn from the model's distribution."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.generate import stepwise
from jax_transformer.generate.generation_config import Constraints, GenerationConfig
from jax_transformer.generate.prepare import (
    Inputs,
    ModelStructure,
    SplitModel,
    StaticArgs,
    prepare,
    split,
)
from jax_transformer.shapes import AnyArray, SourceIds
from jax_transformer.transformer import Transformer


class _Draws(NamedTuple):
    """Arrays that decide the draws."""

    key: PRNGKeyArray
    row_ids: Int[Array, " b"]
    temperature: Float[Array, ""]
    top_p: Float[Array, ""] | None
    """None for all tokens, which saves their sum."""


def sample(
    model: Transformer | SplitModel,
    source: SourceIds,
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
) -> Int[Array, "b n"]:
    """Tokens drawn one after the other from softmax(logits / temperature).

    Args:
        model, source, max_length, bos_id, eos_id, constraints, forced_bos_token_id: as in
            :func:`jax_transformer.generate.greedy`, as are the returned ids.
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
        max_new_tokens=model.config.longest if max_length is None else max_length,
        decoder_start_token_id=bos_id,
        eos_token_id=eos_id,
        constraints=constraints,
    )
    inputs, static_args = prepare(model, source, config, forced_bos_token_id)
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

    def draw(logits: Float[Array, "b v"], step: Int[Array, ""]) -> Int[Array, " b"]:
        scores, tokens = most_likely(
            logits, draws.temperature, draws.top_p, static_args.config.top_k
        )
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
        index = jax.vmap(jax.random.categorical)(step_keys, scores)
        return jnp.take_along_axis(tokens, index[:, None], axis=1)[:, 0].astype(jnp.int32)

    return stepwise.generate(structure, arrays, inputs, draw, static_args)


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
    scores, tokens = jax.lax.top_k(logits.astype(dtype), top_k or logits.shape[1])
    # At most 0, so that division by a small temperature gives no infinity
    scores = (scores - scores[:, :1]) / temperature.astype(dtype)
    if top_p is not None:
        probabilities = jax.nn.softmax(scores, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        scores = jnp.where(before < top_p.astype(dtype), scores, -jnp.inf)
    return scores, tokens
