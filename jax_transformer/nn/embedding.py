"""Token embeddings."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import Init, TransformerConfig


class Embedding(nnx.Module):
    """A table (v, d) that is looked up by id, and is also the output layer if that is tied to it.

    flax.nnx.Embed rounds to the dtype that it was built in, whatever dtype its table was loaded in.
    """

    def __init__(
        self, config: TransformerConfig, size: int, init: Init | None = None, *, rngs: nnx.Rngs
    ):
        self.padding_trained = config.padding_trained
        deviation = config.d_model**-0.5 if (init or config.init) is Init.XAVIER else 1.0
        self.dtype = config.compute_dtype
        self.embedding = nnx.Param(
            nnx.initializers.normal(deviation)(rngs.params(), (size, config.d_model), jnp.float32)
        )

    def __call__(self, ids: Int[Array, "b n"], valid: Bool[Array, "b n"]) -> Float[Array, "b n d"]:
        """The rows of ``ids``, which must lie inside the table; ``valid`` is False at padding."""
        rows = jnp.take(self._table(), ids, axis=0, mode="clip")
        return (
            rows
            if self.padding_trained
            else jnp.where(valid[..., None], rows, jax.lax.stop_gradient(rows))
        )

    def attend(self, x: Float[Array, "b n d"]) -> Float[Array, "b n v"]:
        """The logits: the product of ``x`` with every row."""
        return (x.reshape(-1, x.shape[-1]) @ self._table().T).reshape(*x.shape[:-1], -1)

    def _table(self) -> Float[Array, "v d"]:
        table = self.embedding[...]
        return table if self.dtype is None else table.astype(self.dtype)
