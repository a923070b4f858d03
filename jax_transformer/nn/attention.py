"""Scaled dot-product attention, Vaswani et al. 2017, section 3.2."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jax_transformer.config import ScoreScale, TransformerConfig
from jax_transformer.nn.dropout import Dropout
from jax_transformer.nn.linear import linear

Heads = Float[Array, "b n h e"]
Keys = Float[Array, "b _ _ _"]
"""Keys or values: heads (b, k, h, e), or columns (b, h, e, k) as a cache keeps them. For the few queries of a decoding step, matrix products
with columns are several times faster."""


def attend(
    q: Float[Array, "b q h e"],
    k: Keys,
    v: Keys,
    mask: Bool[Array, "#b #h #q k"] | None,
    *,
    scale: float,
    rate: float = 0.0,
    dropout: Dropout | None = None,
    columns: bool = False,
) -> tuple[Float[Array, "b q h e"], Float[Array, "b h q k"]]:
    """The values mixed by softmax(scale · q·k), and the weights that mixed them (after dropout).

    A masked key has weight exactly 0, so a query that may see no key gets 0, as from torch's scaled_dot_product_attention, and never NaN.
    ``k`` and ``v`` are (b, k, h, e), or with ``columns`` (b, h, e, k).
    """
    axes = "bhek" if columns else "bkhe"
    scores = jnp.einsum(f"bqhe,{axes}->bhqk", q * jnp.asarray(scale, q.dtype), k)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if mask is not None:
        weights = jnp.where(mask, weights, jnp.zeros((), weights.dtype))
    if dropout is not None:
        weights = dropout(weights, rate)
    return jnp.einsum(f"bhqk,{axes}->bqhe", weights, v), weights


def score_scale(config: TransformerConfig) -> float:
    """What scores are multiplied by."""
    width = {ScoreScale.HEAD_DIM: config.head_width, ScoreScale.D_MODEL: config.d_model, ScoreScale.NONE: 1}[config.score_scale]
    return 1.0 / math.sqrt(width)


class MultiHeadAttention(nnx.Module):
    """Query, key, value and output projections around :func:`attend`; all kernels are matrices (d, h·e) and (h·e, d)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.heads, self.width = config.num_heads, config.head_width
        self.scale, self.rate = score_scale(config), config.attention_dropout
        inner = self.heads * self.width
        self.query, self.key, self.value = (
            linear(config, config.d_model, inner, bias=config.bias, fused=3, attention=True, rngs=rngs) for _ in range(3)
        )
        self.out = linear(config, inner, config.d_model, bias=config.bias, attention=True, rngs=rngs)

    def keys_values(self, x: Float[Array, "b k d"]) -> tuple[Heads, Heads]:
        """The projected keys and values of ``x``: what a decoder caches, as columns."""
        return self._heads(self.key(x)), self._heads(self.value(x))

    def __call__(
        self,
        x: Float[Array, "b q d"],
        keys_values: tuple[Keys, Keys],
        mask: Bool[Array, "#b #h #q k"] | None,
        dropout: Dropout,
        *,
        columns: bool = False,
    ) -> tuple[Float[Array, "b q d"], Float[Array, "b h q k"]]:
        """The attended values of each query, and the attention weights (after dropout); ``columns`` as of :func:`attend`."""
        keys, values = keys_values
        queries, drop = self._heads(self.query(x)), dropout.scope("weights")
        mixed, weights = attend(queries, keys, values, mask, scale=self.scale, rate=self.rate, dropout=drop, columns=columns)
        return self.out(mixed.reshape(*mixed.shape[:2], -1)), weights

    def _heads(self, x: Float[Array, "b n i"]) -> Heads:
        return x.reshape(*x.shape[:2], self.heads, self.width)
