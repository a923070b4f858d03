"""Where in the sequence a token stands: rows of a table, added to its embedding or to what a feed-forward reads."""

from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_transformer.config import Init, PositionIndex, Positions, StackConfig, TransformerConfig
from jax_transformer.config.model import position_row


class Frozen(nnx.Variable):
    """An array that belongs to the checkpoint and is never trained: loaded, used and given back as it is."""


@lru_cache(maxsize=8)
def sinusoids(length: int, width: int, exponent: float = 1.0) -> Float[np.ndarray, "n d"]:
    """Vaswani et al. 2017, section 3.5: column 2i is sin(p / 10000^(2i/d)), column 2i+1 the cosine; ``exponent`` times that power. float64."""
    angle = np.arange(length)[:, None] / 10_000.0 ** (exponent * np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, width)


class PositionTable(nnx.Module):
    """Rows to add to a sequence, one a position."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, rngs: nnx.Rngs):
        self.kind, self.index, self.exponent = stack.positions, stack.position_index, stack.position_exponent
        self.length, self.width = config.max_length, config.d_model
        self.table: nnx.Variable
        if self.kind is Positions.SINUSOIDAL_STORED:
            self.table = Frozen(jnp.asarray(self._sinusoids().astype(np.float32)))
        if self.kind is Positions.LEARNED:
            deviation = config.d_model**-0.5 if (stack.init or config.init) is Init.XAVIER else 1.0
            self.table = nnx.Param(nnx.initializers.normal(deviation)(rngs.params(), (self.length, self.width), jnp.float32))

    def __call__(self, x: Float[Array, "b n d"], positions: Int[Array, " n"]) -> Float[Array, "b n d"]:
        """``x`` plus the rows at ``positions``."""
        if self.kind is Positions.NONE:
            return x
        table = jnp.asarray(self._sinusoids().astype(x.dtype)) if self.kind is Positions.SINUSOIDAL else self.table[...]
        rows = positions
        if self.index is not PositionIndex.ORDER:
            rows = jnp.asarray([position_row(self.index, i) for i in range(self.length)], jnp.int32)[positions]
        return x + jnp.take(table.astype(x.dtype), rows, axis=0)[None]

    def _sinusoids(self) -> Float[np.ndarray, "n d"]:
        return sinusoids(self.length, self.width, self.exponent)
