"""Where in the sequence a token stands, added to its embedding."""

from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_transformer.config import Init, Positions, TransformerConfig


class Frozen(nnx.Variable):
    """An array that belongs to the checkpoint and is never trained: loaded, used and given back as it is."""


@lru_cache(maxsize=8)
def sinusoids(length: int, width: int) -> Float[np.ndarray, "n d"]:
    """Vaswani et al. 2017, section 3.5: column 2i is sin(p / 10000^(2i/d)), column 2i+1 the cosine. float64."""
    angle = np.arange(length)[:, None] / 10_000.0 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, width)


class PositionTable(nnx.Module):
    """Rows to add to the embeddings, one a position."""

    def __init__(self, config: TransformerConfig, kind: Positions, *, rngs: nnx.Rngs):
        self.kind = kind
        self.length, self.width = config.max_length, config.d_model
        self.table: nnx.Variable
        if kind is Positions.SINUSOIDAL_STORED:
            self.table = Frozen(jnp.asarray(sinusoids(self.length, self.width).astype(np.float32)))
        if kind is Positions.LEARNED:
            deviation = config.d_model**-0.5 if config.init is Init.XAVIER else 1.0
            self.table = nnx.Param(nnx.initializers.normal(deviation)(rngs.params(), (self.length, self.width), jnp.float32))

    def __call__(self, x: Float[Array, "b n d"], positions: Int[Array, " n"]) -> Float[Array, "b n d"]:
        """``x`` plus the rows at ``positions``."""
        if self.kind is Positions.NONE:
            return x
        table = jnp.asarray(sinusoids(self.length, self.width).astype(x.dtype)) if self.kind is Positions.SINUSOIDAL else self.table[...]
        return x + jnp.take(table.astype(x.dtype), positions, axis=0)[None]
