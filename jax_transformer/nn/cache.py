"""What a decoder remembers between tokens: a pytree that goes into a step and comes out of it.

k hypotheses (beams) of a source row share its cache. Each step writes the k keys of its place side by side, so that the target's axis of m = n·k
entries runs through the places and, within a place, through the beams. Nothing that was written moves: where hypotheses are dropped and copied,
only ``lineage`` changes, which says in which beam's entry each hypothesis finds its own past.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class BlockCache(NamedTuple):
    """Keys and values of one block: the target's, filled as far as ``Cache.length`` says, and the whole memory's, once for all beams."""

    self_keys: Float[Array, "b h e m"]
    self_values: Float[Array, "b h e m"]
    cross_keys: Float[Array, "b h e s"]
    cross_values: Float[Array, "b h e s"]

    def append(
        self, keys: Float[Array, "b k h e"], values: Float[Array, "b k h e"], length: Int[Array, ""]
    ) -> "BlockCache":
        """The cache with the keys and values of the beams' new tokens behind the first ``length`` places."""
        start = length * keys.shape[1]
        return self._replace(
            self_keys=jax.lax.dynamic_update_slice_in_dim(
                self.self_keys, columns(keys), start, axis=3
            ),
            self_values=jax.lax.dynamic_update_slice_in_dim(
                self.self_values, columns(values), start, axis=3
            ),
        )


class Cache(NamedTuple):
    """All blocks' caches, which of the target's entries hold a token that is not padding, and how many places are filled."""

    blocks: tuple[BlockCache, ...]
    target_valid: Bool[Array, "b m"]
    source_valid: Bool[Array, "b s"]
    length: Int[Array, ""]
    lineage: Int[Array, "b k n"]
    """The beam in whose entry of each place a hypothesis has its token; its own beam at places to come."""

    def follow(self, parents: Int[Array, "b k"]) -> "Cache":
        """The cache where beam j goes on from the hypothesis that was in beam ``parents[j]``."""
        places = jnp.arange(self.lineage.shape[2], dtype=jnp.int32)[None, None]
        past = jnp.take_along_axis(self.lineage, parents[:, :, None], axis=1)
        return self._replace(lineage=jnp.where(places < self.length, past, self.lineage))

    def ancestors(self) -> Bool[Array, "b 1 k m"]:
        """Which entries each beam descends from; the places to come are not masked here."""
        batch, beams, places = self.lineage.shape
        found = self.lineage[..., None] == jnp.arange(beams, dtype=jnp.int32)[None, None, None]
        return found.reshape(batch, 1, beams, places * beams)


class Prefix(NamedTuple):
    """The tokens so far of every hypothesis, where keys and values cannot be kept: each step runs the decoder over all of them again."""

    memory: Float[Array, "b s d"]
    source_valid: Bool[Array, "b s"]
    tokens: Int[Array, "b k n"]
    """The start token and what followed it; padding at the places to come."""
    length: Int[Array, ""]

    def follow(self, parents: Int[Array, "b k"]) -> "Prefix":
        """As :meth:`Cache.follow`."""
        return self._replace(tokens=jnp.take_along_axis(self.tokens, parents[:, :, None], axis=1))


def own_lineage(batch: int, beams: int, places: int) -> Int[Array, "b k n"]:
    """Every beam its own ancestor."""
    return jnp.broadcast_to(
        jnp.arange(beams, dtype=jnp.int32)[None, :, None], (batch, beams, places)
    )


def columns(heads: Float[Array, "b n h e"]) -> Float[Array, "b h e n"]:
    """Keys or values with the tokens last, as they are kept."""
    return heads.transpose(0, 2, 3, 1)


def block_cache(
    keys: Float[Array, "b s h e"], values: Float[Array, "b s h e"], entries: int
) -> BlockCache:
    """The cache of a block that sees these keys and values of the memory, with room for ``entries`` of the target."""
    room = jnp.zeros((keys.shape[0], *keys.shape[2:], entries), keys.dtype)
    return BlockCache(room, room, columns(keys), columns(values))
