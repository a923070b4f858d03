"""Tokens drawn from the model's distribution."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.generate import arguments, stepwise
from jax_transformer.generate.arguments import NONE, Frame, Given
from jax_transformer.generate.generation_config import Constraints
from jax_transformer.shapes import AnyArray, SourceIds
from jax_transformer.transformer import Transformer


def sample(
    model: Transformer,
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
    constraints: Constraints = NONE,
    forced_bos_token_id: int | Int[AnyArray, " b"] | None = None,
) -> Int[Array, "b n"]:
    """Tokens drawn one after the other from softmax(logits / temperature), cut to the likeliest.

    Args:
        model, source, max_length, bos_id, eos_id, constraints, forced_bos_token_id: as in :func:`jax_transformer.generate.greedy`, and so are the ids that come back.
        key: decides every draw.
        temperature: above 0; near 0 is greedy decoding.
        top_k: only the so many likeliest tokens are drawn; all where 0.
        top_p: of these only the fewest that together reach this probability (Holtzman et al. 2020); all where 1.
        rows: a number for each row, by which its draws differ from those of other rows; 0, 1, 2, ... where None. A row's tokens depend on
            its number and its source alone, and not on the rest of the batch (as far as rounding in matrix products does not).
    """
    vocabulary = model.config.target_vocab_size
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"temperature={temperature} must be above 0 and finite")
    if not 0 <= top_k <= vocabulary:
        raise ConfigError(
            f"top_k={top_k} must be between 1 and the vocabulary of {vocabulary}, or 0 for all of it"
        )
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p} must be above 0 and at most 1")
    given, frame = arguments.prepare(
        model, source, max_length, bos_id, eos_id, constraints, forced_bos_token_id
    )
    batch = len(given.source)
    rows = jnp.arange(batch) if rows is None else jnp.asarray(rows)
    if len(rows) != batch:
        raise InputError(f"source has {batch} rows and rows {len(rows)} numbers")
    cut = (top_k, top_p < 1)
    return _sample(
        *nnx.split(model),
        given,
        key,
        rows,
        jnp.asarray(temperature),
        jnp.asarray(top_p),
        cut=cut,
        frame=frame,
    )


@partial(jax.jit, static_argnames=("graphdef", "cut", "frame"))
def _sample(
    graphdef: Any,
    state: Any,
    given: Given,
    key: Array,
    rows: Array,
    temperature: Array,
    top_p: Array,
    *,
    cut,
    frame: Frame,
):
    keys = jax.vmap(partial(jax.random.fold_in, key))(rows)

    def draw(logits: Float[Array, "b v"], step: Int[Array, ""]) -> Int[Array, " b"]:
        scores, tokens = likeliest(logits, temperature, top_p, *cut)
        now = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
        drawn = jax.vmap(jax.random.categorical)(now, scores)
        return jnp.take_along_axis(tokens, drawn[:, None], axis=1)[:, 0].astype(jnp.int32)

    return stepwise.generate(graphdef, state, given, draw, frame)


def likeliest(
    logits: Float[Array, "b v"],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    top_k: int,
    nucleus: bool,
) -> tuple[Float[Array, "b c"], Int[Array, "b c"]]:
    """The tokens to draw from, likeliest first, and their logits in float32 at least; those outside the nucleus of ``top_p`` have -inf."""
    dtype = np.promote_types(logits.dtype, np.float32)
    scores, tokens = jax.lax.top_k(logits.astype(dtype), top_k or logits.shape[1])
    scores = (scores - scores[:, :1]) / temperature.astype(
        dtype
    )  # never over 0, so that no small temperature makes infinities of them
    if nucleus:
        probabilities = jax.nn.softmax(scores, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        scores = jnp.where(before < top_p.astype(dtype), scores, -jnp.inf)
    return scores, tokens
