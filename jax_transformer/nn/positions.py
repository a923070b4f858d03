"""Position tables, added to token embeddings or to the input of a feed-forward."""

from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import (
    Init,
    PositionIndex,
    Positions,
    Sinusoids,
    StackConfig,
    TransformerConfig,
)
from jax_transformer.config.model import position_row


class Frozen(nnx.Variable):
    """An array of the checkpoint that is never trained: loaded, used and written back unchanged."""


@lru_cache(maxsize=8)
def sinusoids(
    length: int,
    width: int,
    exponent: float = 1.0,
    layout: Sinusoids = Sinusoids.INTERLEAVED,
    first: int = 0,
) -> Float[np.ndarray, "n d"]:
    """Sinusoids of positions from ``first``, in float64: Vaswani et al. 2017, section 3.5.

    Column 2i is sin(p / 10000^(exponent · 2i/d)), column 2i+1 the cosine; other layouts put all
    sines into the first half.
    """
    powers = np.arange(0, width, 2) / (width - 2 if layout is Sinusoids.TENSOR2TENSOR else width)
    angle = np.arange(first, first + length)[:, None] / 10_000.0 ** (exponent * powers)
    if layout is Sinusoids.INTERLEAVED:
        return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, width)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


class PositionTable(nnx.Module):
    """A table with one row per position, which is added to a sequence."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, rngs: nnx.Rngs):
        self.kind, self.index, self.exponent = (
            stack.positions,
            stack.position_index,
            stack.position_exponent,
        )
        self.layout, self.offset = stack.sinusoids, stack.position_offset
        self.length, self.width = config.max_length + self.offset, config.d_model
        self.table: nnx.Variable
        if self.kind is Positions.SINUSOIDAL_STORED:
            self.table = Frozen(jnp.asarray(self._sinusoids().astype(np.float32)))
        if self.kind is Positions.LEARNED:
            deviation = config.d_model**-0.5 if (stack.init or config.init) is Init.XAVIER else 1.0
            self.table = nnx.Param(
                nnx.initializers.normal(deviation)(
                    rngs.params(), (self.length, self.width), jnp.float32
                )
            )

    def __call__(
        self,
        x: Float[Array, "b n d"],
        positions: Int[Array, " n"],
        valid: Bool[Array, "b n"] | None = None,
        *,
        from_start: bool = True,
    ) -> Float[Array, "b n d"]:
        """``x`` plus the rows at ``positions``.

        ``valid`` is False at padding; ``from_start`` says that x begins with its first token.
        """
        if self.kind not in (Positions.SINUSOIDAL, Positions.SINUSOIDAL_STORED, Positions.LEARNED):
            return x
        table = (
            jnp.asarray(self._sinusoids().astype(x.dtype))
            if self.kind is Positions.SINUSOIDAL
            else self.table[...]
        )
        table = table.astype(x.dtype)
        if self.index is PositionIndex.NOT_PADDING and valid is not None:
            rows = (
                jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)
                if from_start
                else positions[None]
            )
            return x + jnp.where(
                valid[..., None],
                jnp.take(table, rows + self.offset, axis=0),
                jnp.zeros((), x.dtype),
            )
        rows = positions
        if self.index is PositionIndex.TRUNCATED_COSINE:
            rows = jnp.asarray(
                [position_row(self.index, i) for i in range(self.length)], jnp.int32
            )[positions]
        return x + jnp.take(table, rows + self.offset, axis=0)[None]

    def _sinusoids(self) -> Float[np.ndarray, "n d"]:
        return sinusoids(self.length, self.width, self.exponent, self.layout)
