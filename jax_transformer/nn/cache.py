"""What a decoder remembers between tokens: a pytree that goes into a step and comes out of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class BlockCache(NamedTuple):
    """Keys and values of one block: ``n`` places for the target of which the first ``Cache.length`` are filled, and the whole memory's."""

    self_keys: Float[Array, "b n h e"]
    self_values: Float[Array, "b n h e"]
    cross_keys: Float[Array, "b s h e"]
    cross_values: Float[Array, "b s h e"]

    def append(self, keys: Float[Array, "b q h e"], values: Float[Array, "b q h e"], length: Int[Array, ""]) -> "BlockCache":
        """The cache with the new tokens' keys and values behind the first ``length``."""
        return self._replace(
            self_keys=jax.lax.dynamic_update_slice_in_dim(self.self_keys, keys, length, axis=1),
            self_values=jax.lax.dynamic_update_slice_in_dim(self.self_values, values, length, axis=1),
        )


class Cache(NamedTuple):
    """All blocks' caches, which of the target's places hold a token that is not padding, and how many are filled."""

    blocks: tuple[BlockCache, ...]
    target_valid: Bool[Array, "b n"]
    source_valid: Bool[Array, "b s"]
    length: Int[Array, ""]


def empty_places(batch: int, places: int, heads: int, width: int, dtype: jnp.dtype) -> Float[Array, "b n h e"]:
    """Zeros for ``places`` tokens to come."""
    return jnp.zeros((batch, places, heads, width), dtype)
