"""The largest of many scores, by passes that XLA vectorises on the CPU.

Its own argmax and top-k there go through the scores one by one.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BLOCK = 128


def argmax(scores: Float[Array, "b v"]) -> Int[Array, " b"]:
    """The index of each row's largest score, the first of equal ones; equals ``jnp.argmax``."""
    indices = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
    below = scores < scores.max(axis=1, keepdims=True)  # nowhere in a row of NaN: index 0
    return jnp.where(below, scores.shape[1], indices).min(axis=1).astype(jnp.int32)


def top_k(scores: Float[Array, "b v"], count: int) -> tuple[Float[Array, "b c"], Int[Array, "b c"]]:
    """The ``count`` largest scores of each row and their indices; equals ``jax.lax.top_k``.

    The largest scores lie in the ``count`` blocks that have the largest maxima: only these are
    sorted. Of equal scores, those with the lowest index come first.
    """
    rows, size = scores.shape
    if size < 4 * count * _BLOCK:  # nothing to win
        return _top_k(scores, count)
    padded = jnp.pad(scores, ((0, 0), (0, -size % _BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(rows, -1, _BLOCK)
    chosen = jnp.sort(_top_k(blocks.max(axis=2), count)[1], axis=1)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1)
    best, index = _top_k(candidates, count)
    return best, jnp.take_along_axis(chosen, index // _BLOCK, axis=1) * _BLOCK + index % _BLOCK


def _top_k(
    scores: Float[Array, "b v"], count: int
) -> tuple[Float[Array, "b c"], Int[Array, "b c"]]:
    best, index = jax.lax.top_k(scores, count)
    return best, index
