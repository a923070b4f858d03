"""The decoder's KV cache: a pytree that goes into a step and comes out of it.

k hypotheses (beams) of a source row share its cache. Each step writes the keys of its k beams next
to one another, so the target axis of m = n·k entries runs through the positions and, within a
position, through the beams. Nothing that was written moves: if hypotheses are dropped or copied,
only ``beam_indices`` changes, which says in which beam's entry each hypothesis finds its own past.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class BlockCache(NamedTuple):
    """Keys and values of one block.

    Those of the target are filled up to ``Cache.length``; those of the memory are kept once for all
    beams.
    """

    self_keys: Float[Array, "b h e m"]
    self_values: Float[Array, "b h e m"]
    cross_keys: Float[Array, "b h e s"]
    cross_values: Float[Array, "b h e s"]

    def append(
        self, keys: Float[Array, "b k h e"], values: Float[Array, "b k h e"], length: Int[Array, ""]
    ) -> "BlockCache":
        """The cache with the keys and values of the beams' new tokens at position ``length``."""
        start = length * keys.shape[1]
        return self._replace(
            self_keys=jax.lax.dynamic_update_slice_in_dim(
                self.self_keys, cache_layout(keys), start, axis=3
            ),
            self_values=jax.lax.dynamic_update_slice_in_dim(
                self.self_values, cache_layout(values), start, axis=3
            ),
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
        """The cache in which beam j continues the hypothesis that was in beam ``parents[j]``."""
        positions = jnp.arange(self.beam_indices.shape[2], dtype=jnp.int32)[None, None]
        past = jnp.take_along_axis(self.beam_indices, parents[:, :, None], axis=1)
        past = jnp.where(positions < self.length, past, self.beam_indices)
        return self._replace(beam_indices=past)

    def beam_mask(self) -> Bool[Array, "b 1 k m"]:
        """True at the entries that hold each beam's own past; positions to come are not masked."""
        batch, beams, length = self.beam_indices.shape
        own = self.beam_indices[..., None] == jnp.arange(beams, dtype=jnp.int32)[None, None, None]
        return own.reshape(batch, 1, beams, length * beams)


class Prefix(NamedTuple):
    """The tokens so far of every hypothesis, for decoders whose keys and values cannot be cached.

    Each step runs the decoder over all of them again.
    """

    memory: Float[Array, "b s d"]
    source_valid: Bool[Array, "b s"]
    tokens: Int[Array, "b k n"]
    """The start token and the tokens after it; padding at positions to come."""
    length: Int[Array, ""]

    def follow(self, parents: Int[Array, "b k"]) -> "Prefix":
        """The prefixes in which beam j continues the hypothesis of beam ``parents[j]``."""
        return self._replace(tokens=jnp.take_along_axis(self.tokens, parents[:, :, None], axis=1))


def own_beam_indices(batch: int, beams: int, length: int) -> Int[Array, "b k n"]:
    """Beam indices with which every beam finds its past in its own entries."""
    return jnp.broadcast_to(
        jnp.arange(beams, dtype=jnp.int32)[None, :, None], (batch, beams, length)
    )


def cache_layout(heads: Float[Array, "b n h e"]) -> Float[Array, "b h e n"]:
    """Keys or values with the token axis last, as the cache keeps them."""
    return heads.transpose(0, 2, 3, 1)


def block_cache(
    keys: Float[Array, "b s h e"], values: Float[Array, "b s h e"], entries: int
) -> BlockCache:
    """The cache of a block over these keys and values of the memory, with room for ``entries``."""
    room = jnp.zeros((keys.shape[0], *keys.shape[2:], entries), keys.dtype)
    return BlockCache(room, room, cache_layout(keys), cache_layout(values))
