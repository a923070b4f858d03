"""The loop of greedy decoding and sampling, which have one hypothesis a row."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.generate import constraints
from jax_transformer.generate.prepare import Inputs, ModelStructure, StaticArgs

Choose = Callable[[Float[Array, "b v"], Int[Array, ""]], Int[Array, " b"]]


def generate(
    structure: ModelStructure,
    arrays: list[Array],
    inputs: Inputs,
    choose: Choose,
    static_args: StaticArgs,
) -> Int[Array, "b n"]:
    """Ids until every row has ended or has ``max_new_tokens``, padded after each row's end token.

    ``choose`` returns the rows' next tokens, given their constrained logits and the step's number.
    To be called inside a jitted function.
    """
    model = structure.merge(arrays)
    batch, length = inputs.source.shape[0], static_args.max_new_tokens

    def unfinished(carry) -> Bool[Array, ""]:
        _, _, _, done, step = carry
        return (step < length) & ~done.all()

    def step(carry):
        token, tokens, cache, done, i = carry
        logits, cache = model.decode_step(token[:, None], cache)
        scores = constraints.apply(logits, tokens[:, None], i, inputs, static_args)
        token = jnp.where(done, static_args.pad_id, choose(scores[:, 0], i))
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, axis=1)
        return token, tokens, cache, done | (token == static_args.eos_id), i + 1

    start = (
        jnp.full(batch, static_args.bos_id, jnp.int32),
        jnp.full((batch, length), static_args.pad_id, jnp.int32),
        model.init_cache(inputs.source, length),
        jnp.zeros(batch, bool),
        jnp.zeros((), jnp.int32),
    )
    return jax.lax.while_loop(unfinished, step, start)[1]
