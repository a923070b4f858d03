"""The loop of one hypothesis a row: greedy decoding and sampling differ in how they choose a token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.generate import constraints
from jax_transformer.generate.arguments import Frame, Given
from jax_transformer.transformer import Transformer

Choose = Callable[[Float[Array, "b v"], Int[Array, ""]], Int[Array, " b"]]


def generate(
    graphdef: Any, state: Any, given: Given, choose: Choose, frame: Frame
) -> Int[Array, "b n"]:
    """Tokens until every row has ended or the places are full; ``choose`` picks the rows' next tokens from what the rules make of their
    logits, and from the step's number.

    Runs inside a jitted function; ``graphdef`` and ``state`` are the model, split.
    """
    model: Transformer = nnx.merge(graphdef, state)
    (batch, _), (places, ids, _) = given.source.shape, frame

    def unfinished(carry) -> Bool[Array, ""]:
        _, _, _, done, step = carry
        return (step < places) & ~done.all()

    def step(carry):
        token, tokens, cache, done, i = carry
        logits, cache = model.decode_step(token[:, None], cache)
        scores = constraints.apply(frame.rules, logits, tokens[:, None], i, given, ids)
        token = jnp.where(done, ids.pad, choose(scores[:, 0], i))
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, axis=1)
        return token, tokens, cache, done | (token == ids.eos), i + 1

    start = (
        jnp.full(batch, ids.bos, jnp.int32),
        jnp.full((batch, places), ids.pad, jnp.int32),
        model.init_cache(given.source, places),
        jnp.zeros(batch, bool),
        jnp.zeros((), jnp.int32),
    )
    return jax.lax.while_loop(unfinished, step, start)[1]
