"""Relative position biases of the attention scores: Raffel et al. 2020, section 2.1."""

import math
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_transformer.config import Mask, StackConfig, TransformerConfig


@lru_cache(maxsize=8)
def buckets(length: int, count: int, max_distance: int) -> Int[np.ndarray, " n"]:
    """The bucket of each distance below ``length``, of ``count`` buckets for one direction.

    The first half of them are for single distances. The others grow logarithmically up to
    ``max_distance``; all longer distances share the last bucket. In float32 and in this order of
    operations, as transformers computes it: an edge between two buckets depends on its rounding.
    """
    single = count // 2
    distances = np.arange(length)
    ratios = np.maximum(distances, 1).astype(np.float32) / np.float32(single)
    scaled = (
        np.log(ratios) / np.float32(math.log(max_distance / single)) * np.float32(count - single)
    )
    return np.where(
        distances < single, distances, np.minimum(single + scaled.astype(np.int64), count - 1)
    ).astype(np.int32)


class RelativeBias(nnx.Module):
    """A number for every head and bucket.

    If a query may see keys after it, half of the buckets are for those.
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, rngs: nnx.Rngs):
        self.max_distance = stack.relative_max_distance
        self.directions = 1 if Mask.CAUSAL in stack.self_mask else 2
        self.dtype = config.compute_dtype
        shape = (stack.relative_buckets, config.heads(stack))
        self.embedding = nnx.Param(
            nnx.initializers.normal(config.d_model**-0.5)(rngs.params(), shape, jnp.float32)
        )

    def __call__(
        self, query_positions: Int[Array, " q"], key_positions: Int[Array, " k"]
    ) -> Float[Array, "1 h q k"]:
        """The bias of the attention scores."""
        table = self.embedding[...]
        count = table.shape[0] // self.directions
        distances = key_positions[None, :] - query_positions[:, None]
        known = buckets(
            self.max_distance + 1, count, self.max_distance
        )  # longer distances share the last
        index = jnp.asarray(known)[jnp.minimum(jnp.abs(distances), self.max_distance)]
        after = distances > 0
        index = (
            index + jnp.where(after, count, 0)
            if self.directions == 2
            else jnp.where(after, 0, index)
        )
        bias = jnp.take(table if self.dtype is None else table.astype(self.dtype), index, axis=0)
        return bias.transpose(2, 0, 1)[None]
