"""Scaled dot-product attention, Vaswani et al. 2017, section 3.2, its masks, and the KV cache.

The cache is a pytree that goes into a decoding step and comes out of it. k hypotheses (beams) of a
source row share it. Each step writes the keys of its k beams next to one another, so the target
axis of m = n·k entries runs through the positions and, within a position, through the beams.
Nothing that was written moves: if hypotheses are dropped or copied, only ``beam_indices`` changes,
which says in which beam's entry each hypothesis finds its own past.
"""

import math
from collections.abc import Collection
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import StackConfig, TransformerConfig, enums
from jax_transformer.nn import sharding
from jax_transformer.nn.dropout import Dropout
from jax_transformer.nn.fused_attention import cudnn_attend, fused_attend, tokamax_attend
from jax_transformer.nn.layers import linear
from jax_transformer.nn.sharding import ROWS, TENSOR

Heads = Float[Array, "b n h e"]
Keys = Float[Array, "b _ _ _"]
"""Keys or values: (b, k, h, e), or in the layout of the KV cache (b, h, e, k).

With the few queries of a decoding step, matrix products in the cache's layout are several times
faster.
"""


def attend(
    q: Float[Array, "b q h e"],
    k: Keys,
    v: Keys,
    mask: Bool[Array, "#b #h #q k"] | None,
    bias: Float[Array, "#b h q k"] | None = None,
    *,
    scale: float,
    rate: float = 0.0,
    dropout: Dropout | None = None,
    cache_layout: bool = False,
    fill: enums.MaskFill | float = enums.MaskFill.EXCLUDED,
    mixing: enums.Mixing = enums.Mixing.WEIGHTED,
) -> tuple[Float[Array, "b q h e"], Float[Array, "b h q k"]]:
    """Return the values weighted by softmax(scale · q·k + bias), and these weights (after dropout).

    A masked key has weight exactly 0; ``fill`` decides the output of a query that may see no key.
    ``k`` and ``v`` are (b, k, h, e), or with ``cache_layout`` (b, h, e, k).
    """
    axes = "bhek" if cache_layout else "bkhe"
    scores = jnp.einsum(f"bqhe,{axes}->bhqk", q * jnp.asarray(scale, q.dtype), k)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    weights = masked_softmax(scores, mask, fill, scale=scale)
    if dropout is not None:
        weights = dropout(weights, rate)
    if mixing is enums.Mixing.SUMMED:
        summed = weights.sum(axis=-1).transpose(0, 2, 1)[..., None]
        return summed * jnp.einsum(f"{axes}->bhe", v)[:, None], weights
    return jnp.einsum(f"bhqk,{axes}->bqhe", weights, v), weights


def masked_softmax(
    scores: Float[Array, "b h q k"],
    mask: Bool[Array, "#b #h #q k"] | None,
    fill: enums.MaskFill | float,
    *,
    scale: float,
) -> Float[Array, "b h q k"]:
    """Return the softmax of scaled scores over the keys that the mask leaves visible.

    Scores of 16 bits are computed in float32, and the weights are rounded once.
    """
    if scores.dtype.itemsize < 4:
        wide = masked_softmax(scores.astype(jnp.float32), mask, fill, scale=scale)
        return wide.astype(scores.dtype)
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    fills: dict[enums.MaskFill | float, float] = {
        enums.MaskFill.EXCLUDED: float(jnp.finfo(scores.dtype).min),
        enums.MaskFill.MINUS_INFINITY: -jnp.inf,
        enums.MaskFill.MINUS_1E20: -1e20 * scale,
    }
    hidden = fills[fill] if isinstance(fill, enums.MaskFill) else fill
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.asarray(hidden, scores.dtype)), axis=-1)
    if fill is not enums.MaskFill.EXCLUDED:
        return weights
    return jnp.where(mask, weights, jnp.zeros((), weights.dtype))


def score_scale(config: TransformerConfig, stack: StackConfig) -> float:
    """Return the factor of the attention scores."""
    width = {
        enums.ScoreScale.HEAD_DIM: config.head_width_of(stack),
        enums.ScoreScale.D_MODEL: config.d_model,
        enums.ScoreScale.NONE: 1,
    }[config.score_scale]
    return 1.0 / math.sqrt(width)


def visible_keys(
    kinds: Collection[enums.Mask],
    *,
    source_valid: Bool[Array, "b s"] | None,
    target_valid: Bool[Array, "b t"] | None,
    query_positions: Int[Array, " q"],
    key_positions: Int[Array, " k"],
    query_valid: Bool[Array, "b q"] | None,
) -> Bool[Array, "#b 1 #q k"] | None:
    """Return the mask of ``kinds``: True at the keys a query may see; None if nothing is masked.

    Those named ``valid`` are False at padding; None if there are no ids to tell by.
    """
    masks = []
    if enums.Mask.SOURCE_PADDING in kinds and source_valid is not None:
        masks.append(source_valid[:, None, None, :])
    if enums.Mask.TARGET_PADDING in kinds and target_valid is not None:
        masks.append(target_valid[:, None, None, :])
    if enums.Mask.CAUSAL in kinds:
        masks.append((key_positions[None, :] <= query_positions[:, None])[None, None])
    if enums.Mask.QUERY_PADDING in kinds and query_valid is not None:
        masks.append(jnp.repeat(query_valid[:, None, :, None], len(key_positions), axis=3))
    return reduce(jnp.logical_and, masks) if masks else None


def within_segments(
    mask: Bool[Array, "#b 1 #q k"] | None,
    query_segments: Int[Array, "b q"],
    key_segments: Int[Array, "b k"],
) -> Bool[Array, "b 1 q k"]:
    """Return the mask without the keys of other segments. Padding, segment 0, sees them all."""
    queries, keys = query_segments[:, None, :, None], key_segments[:, None, None, :]
    same = (queries == keys) | (queries == 0)
    return same if mask is None else mask & same


def segment_positions(segments: Int[Array, "b n"]) -> Int[Array, "b n"]:
    """Return the position of each token in its segment, a run of equal numbers."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    begins = jnp.diff(segments, axis=1, prepend=-1) != 0
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


class HeadProjections(nnx.Module):
    """Query, key, value and output projections: all kernels are matrices, (d, h·e) and (h·e, d)."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, rngs: nnx.Rngs):
        self.heads, self.width = config.heads(stack), config.head_width_of(stack)
        self.rate = config.attention_rate(stack)
        self.scale = score_scale(config, stack)
        self.backend, self.fill = config.attention_backend, config.mask_fill
        self.mixing, self.merge = stack.mixing, stack.head_merge
        d, inner = config.d_model, self.heads * self.width
        bias = config.bias if config.attention_bias is None else config.attention_bias
        new = partial(linear, config, stack.init or config.init, attention=True, rngs=rngs)
        self.query = new(d, inner, bias=bias, fused=3)
        self.key = new(d, inner, bias=bias and config.key_bias, fused=3)
        self.value = new(d, inner, bias=bias, fused=3)
        self.out = new(inner, d, bias=bias)

    def keys_values(self, x: Float[Array, "b k d"]) -> tuple[Heads, Heads]:
        """Return the projected keys and values of ``x``, which a decoder caches."""
        return self._heads(self.key(x)), self._heads(self.value(x))

    def _heads(self, x: Float[Array, "b n i"]) -> Heads:
        heads = x.reshape(*x.shape[:2], self.heads, self.width)
        return sharding.constrain(heads, ROWS, None, TENSOR, None)


class MultiHeadAttention(HeadProjections):
    """:func:`attend` over all keys, between its projections."""

    def __call__(
        self,
        x: Float[Array, "b q d"],
        keys_values: tuple[Keys, Keys],
        mask: Bool[Array, "#b #h #q k"] | None,
        dropout: Dropout,
        bias: Float[Array, "#b h q k"] | None = None,
        *,
        causal: bool = False,
        cache_layout: bool = False,
    ) -> tuple[Float[Array, "b q d"], Float[Array, "b h q k"] | None]:
        """Return the attended values of each query, and the attention weights (after dropout).

        The weights are None with another backend than :func:`attend`, which only the cache has.
        ``causal`` says that the mask hides later keys; ``cache_layout`` is as for :func:`attend`.
        """
        keys, values = keys_values
        queries = self._heads(self.query(x))
        weights: Float[Array, "b h q k"] | None = None
        if cache_layout or self.backend is enums.AttentionBackend.XLA:
            mixed, weights = attend(
                queries,
                keys,
                values,
                mask,
                bias,
                scale=self.scale,
                rate=self.rate,
                dropout=dropout.scope("weights"),
                cache_layout=cache_layout,
                fill=self.fill,
                mixing=self.mixing,
            )
        elif self.backend is enums.AttentionBackend.CUDNN:
            mixed = cudnn_attend(queries, keys, values, mask, scale=self.scale, causal=causal)
        elif self.backend is enums.AttentionBackend.TOKAMAX:
            mixed = tokamax_attend(
                queries, keys, values, mask, bias, scale=self.scale, causal=causal
            )
        else:
            mixed = fused_attend(queries, keys, values, mask, scale=self.scale)
        if self.merge is enums.HeadMerge.RAW:
            mixed = mixed.transpose(0, 2, 1, 3)
        return self.out(mixed.reshape(*x.shape[:2], -1)), weights


class BlockCache(NamedTuple):
    """Keys and values of one block: the target's up to ``Cache.length``, the memory's once."""

    self_keys: Float[Array, "b h e m"]
    self_values: Float[Array, "b h e m"]
    cross_keys: Float[Array, "b h e s"]
    cross_values: Float[Array, "b h e s"]

    def append(
        self, keys: Float[Array, "b k h e"], values: Float[Array, "b k h e"], length: Int[Array, ""]
    ) -> "BlockCache":
        """Return the cache with the keys and values of the new tokens at position ``length``."""
        update = partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=length * keys.shape[1], axis=3
        )
        return self._replace(
            self_keys=update(self.self_keys, cache_layout(keys)),
            self_values=update(self.self_values, cache_layout(values)),
        )


class Cache(NamedTuple):
    """All blocks' caches, the entries that hold a token, and the number of positions filled."""

    blocks: tuple[BlockCache, ...]
    target_valid: Bool[Array, "b m"]
    source_valid: Bool[Array, "b s"]
    length: Int[Array, ""]
    beam_indices: Int[Array, "b k n"]
    """The beam in whose entry a hypothesis has its token, by position; later its own."""

    def follow(self, parents: Int[Array, "b k"]) -> "Cache":
        """Return the cache in which beam j continues the hypothesis of beam ``parents[j]``."""
        positions = jnp.arange(self.beam_indices.shape[2], dtype=jnp.int32)[None, None]
        past = jnp.take_along_axis(self.beam_indices, parents[:, :, None], axis=1)
        past = jnp.where(positions < self.length, past, self.beam_indices)
        return self._replace(beam_indices=past)

    def beam_mask(self) -> Bool[Array, "b 1 k m"]:
        """Return True at entries of each beam's own past; positions to come are not masked."""
        batch, beams, length = self.beam_indices.shape
        own = self.beam_indices[..., None] == jnp.arange(beams, dtype=jnp.int32)[None, None, None]
        return own.reshape(batch, 1, beams, length * beams)


class Prefix(NamedTuple):
    """The tokens so far of every hypothesis, which a decoder without a cache runs over again."""

    memory: Float[Array, "b s d"]
    source_valid: Bool[Array, "b s"]
    tokens: Int[Array, "b k n"]
    """The start token and the tokens after it; padding at positions to come."""
    length: Int[Array, ""]

    def follow(self, parents: Int[Array, "b k"]) -> "Prefix":
        """Return the prefixes in which beam j continues the hypothesis of beam ``parents[j]``."""
        return self._replace(tokens=jnp.take_along_axis(self.tokens, parents[:, :, None], axis=1))


def cache_layout(heads: Float[Array, "b n h e"]) -> Float[Array, "b h e n"]:
    """Return keys or values with the token axis last, as the cache keeps them."""
    return heads.transpose(0, 2, 3, 1)
