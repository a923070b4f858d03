"""Self-attention over neighbouring tokens, and over sums of blocks: LongT5, Guo et al. 2022.

A sequence is cut into blocks of ``local_radius + 1`` tokens. The keys of a block's queries are a
window of three blocks, its own in the middle, of which the radius leaves some; transient-global
attention adds a key for every ``global_block_size`` tokens, made of their normed sum. As in
transformers, the tokens after the last whole global block belong to that block.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import AttentionSpan, StackConfig, TransformerConfig
from jax_transformer.nn.attention import HeadProjections, attend
from jax_transformer.nn.dropout import Dropout
from jax_transformer.nn.embeddings import RelativeBias
from jax_transformer.nn.layers import Normalization


class Window(NamedTuple):
    """The keys that the queries of every block see; all layers share it.

    n blocks of a row follow one another in the axis m = b·n; the k keys of a query are three blocks
    and then the row's g sums.
    """

    mask: Bool[Array, "m 1 q k"]
    bias: Float[Array, "#m h q k"] | None
    members: Bool[Array, "b g s"] | None
    """True at the tokens that a sum has; None without sums."""


def cut(x: Array, length: int) -> Array:
    """Return the sequence (b, s, …) as blocks (b, n, length, …), zeros after its end."""
    blocks = -(-x.shape[1] // length)
    rest = [(0, 0)] * (x.ndim - 2)
    padded = jnp.pad(x, [(0, 0), (0, blocks * length - x.shape[1]), *rest])
    return padded.reshape(x.shape[0], blocks, length, *x.shape[2:])


def windows(x: Array, length: int) -> Array:
    """Return the three blocks around each, (b, n, 3 · length, …), zeros outside the sequence."""
    blocks = cut(x, length)
    padded = jnp.pad(blocks, [(0, 0), (1, 1), *[(0, 0)] * (blocks.ndim - 2)])
    return jnp.concatenate([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]], axis=2)


def global_blocks(valid: Bool[Array, "b s"], size: int) -> Int[Array, "b s"]:
    """Return each token's global block's number; -1 at padding and in rows with no whole block."""
    positions = jnp.arange(valid.shape[1], dtype=jnp.int32)
    ends = valid & (positions % size == size - 1)[None]
    last = ends.sum(axis=1, dtype=jnp.int32)[:, None] - 1
    return jnp.where(valid, jnp.minimum((positions // size)[None], last), -1)


def window(
    stack: StackConfig,
    valid: Bool[Array, "b s"],
    relative: RelativeBias | None,
    global_relative: RelativeBias | None,
) -> Window:
    """Return the window of a stack's blocks; ``valid`` is False at padding, which is not a key."""
    length = stack.local_radius + 1
    queries = jnp.arange(length, 2 * length, dtype=jnp.int32)
    keys = jnp.arange(3 * length, dtype=jnp.int32)
    near = jnp.abs(keys[None] - queries[:, None]) <= stack.local_radius
    mask = windows(valid, length)[:, :, None, None] & near[None, None, None]
    bias = None if relative is None else relative(queries, keys)
    members = None
    if relative is not None and global_relative is not None:
        blocks = global_blocks(valid, stack.global_block_size)
        sums = jnp.arange(valid.shape[1] // stack.global_block_size, dtype=jnp.int32)
        members = blocks[:, None] == sums[None, :, None]
        seen = members.any(axis=2)[:, None, None, None]
        side = global_relative.of_distances(sums[None, None] - blocks[:, :, None])
        side = cut(side.transpose(0, 2, 1, 3), length).transpose(0, 1, 3, 2, 4)
        assert bias is not None
        bias = jnp.broadcast_to(bias[None], (*side.shape[:-1], bias.shape[-1]))
        mask = jnp.broadcast_to(mask, (*mask.shape[:3], length, mask.shape[-1]))
        seen = jnp.broadcast_to(seen, (*mask.shape[:-1], seen.shape[-1]))
        mask = jnp.concatenate([mask, seen], axis=-1)
        bias = _folded(jnp.concatenate([bias, side], axis=-1))
    return Window(_folded(mask), bias, members)


class LocalAttention(HeadProjections):
    """Self-attention of an encoder over a :class:`Window`."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, rngs: nnx.Rngs):
        super().__init__(config, stack, rngs=rngs)
        self.length = stack.local_radius + 1
        has_sums = stack.attention_span is AttentionSpan.TRANSIENT_GLOBAL
        self.global_norm = Normalization(config) if has_sums else None

    def __call__(
        self, x: Float[Array, "b s d"], window: Window, dropout: Dropout
    ) -> tuple[Float[Array, "b s d"], Float[Array, "b h s k"]]:
        """Return the attended values, and each query's weights over its window (after dropout)."""
        queries = self._heads(self.query(x))
        keys, values = (windows(part, self.length) for part in self.keys_values(x))
        if self.global_norm is not None and window.members is not None:
            sums = self.global_norm(window.members.astype(x.dtype) @ x)
            sides = (
                jnp.broadcast_to(part[:, None], (*keys.shape[:2], *part.shape[1:]))
                for part in self.keys_values(sums)
            )
            keys, values = (
                jnp.concatenate(parts, axis=2) for parts in zip((keys, values), sides, strict=True)
            )
        mixed, weights = attend(
            _folded(cut(queries, self.length)),
            _folded(keys),
            _folded(values),
            window.mask,
            window.bias,
            scale=self.scale,
            rate=self.rate,
            dropout=dropout.scope("weights"),
        )
        weights = _unfolded(weights.transpose(0, 2, 1, 3), x).transpose(0, 2, 1, 3)
        return self.out(_unfolded(mixed, x).reshape(*x.shape[:2], -1)), weights


def _folded(x: Array) -> Array:
    """Return blocks (b, n, …) as (b·n, …)."""
    return x.reshape(-1, *x.shape[2:])


def _unfolded(x: Array, like: Array) -> Array:
    """Return tokens of blocks (b·n, q, …) as sequences, (b, s, …) ``like`` another array."""
    return x.reshape(like.shape[0], -1, *x.shape[2:])[:, : like.shape[1]]
