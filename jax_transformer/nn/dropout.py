"""Dropout whose randomness comes through the call: modules hold no generator.

A Dropout is handed down the model, each module narrowing it with :meth:`Dropout.scope`, so every
site has a path such as ``encoder.blocks.0.branches.1.output``. The mask of a site depends only on
the key and its path, never on the order of calls.
"""

import abc
import math
import zlib
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from jax_transformer.config import DropoutMasks
from jax_transformer.errors import ConfigError

Self = TypeVar("Self", bound="Dropout")
_LAYER = "*"
"""The number of the layer in the paths of a loop over layers."""


class Dropout:
    """No dropout: used by deterministic calls, and the base of the others."""

    def scope(self: Self, name: str) -> Self:
        """Return the same source of masks for a part of the model called ``name``."""
        return self

    def layer(self: Self, name: str, index: Int[Array, ""], count: int) -> Self:
        """Return the same as ``scope(f"{name}.{index}")``, for a traced index below ``count``."""
        return self

    def __call__(self, x: Float[Array, "..."], rate: float) -> Float[Array, "..."]:
        """Return ``x``, elements zeroed with probability ``rate``, the others over ``1 - rate``."""
        return x


class MaskedDropout(Dropout, abc.ABC):
    """Dropout with masks that a subclass makes in :meth:`keep` from the path of the site."""

    path = ""

    def scope(self: Self, name: str) -> Self:
        child = object.__new__(type(self))
        path = f"{self.path}.{name}" if self.path else name  # type: ignore[attr-defined]
        child.__dict__.update(self.__dict__, path=path)
        return child

    def layer(self: Self, name: str, index: Int[Array, ""], count: int) -> Self:
        raise ConfigError(
            f"scan_layers=True: the masks of {type(self).__name__} are chosen by the number of the "
            "layer; compute with scan_layers=False"
        )

    @abc.abstractmethod
    def keep(self, shape: Sequence[int], rate: float) -> Bool[Array, "..."]:
        """Return the elements that survive at this site: bool, of ``shape``."""

    def __call__(self, x: Float[Array, "..."], rate: float) -> Float[Array, "..."]:
        if rate == 0.0:
            return x
        return jnp.where(self.keep(x.shape, rate), x * (1.0 / (1.0 - rate)), jnp.zeros((), x.dtype))


class KeyedDropout(MaskedDropout):
    """Dropout with masks drawn from a key, by the generator that the configuration names."""

    def __init__(self, key: PRNGKeyArray, masks: DropoutMasks):
        self.key, self.masks = key, masks
        self._index: Int[Array, ""] | None = None
        self._count = 0

    def layer(self: Self, name: str, index: Int[Array, ""], count: int) -> Self:
        child = self.scope(f"{name}.{_LAYER}")
        child.__dict__.update(_index=index, _count=count)
        return child

    def keep(self, shape: Sequence[int], rate: float) -> Bool[Array, "..."]:
        site: int | UInt32[Array, ""] = zlib.crc32(self.path.encode())
        if self._index is not None:  # in a loop over layers, from a table by layer
            paths = (self.path.replace(_LAYER, str(i)) for i in range(self._count))
            table = [zlib.crc32(path.encode()) for path in paths]
            site = jnp.asarray(table, jnp.uint32)[self._index]
        key = jax.random.fold_in(self.key, site)
        if self.masks is DropoutMasks.THREEFRY:
            return jax.random.bernoulli(key, 1.0 - rate, tuple(shape))
        return hash_bits(key, shape) >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def hash_bits(key: PRNGKeyArray, shape: Sequence[int]) -> UInt32[Array, "..."]:
    """Return 32 well mixed bits per element, from its index and a key.

    Wellons' ``lowbias32`` with the key's two words mixed in before and between. Good enough for
    dropout (unbiased bits, no visible correlation between neighbours, sites or steps; see the
    tests) and no more: it is neither a cryptographic generator nor a replacement for
    ``jax.random``, and it needs keys that are mixed already, as ``fold_in`` leaves them. It costs
    three multiplications; threefry costs about a hundred operations.
    """
    first, second = jax.random.key_data(key).astype(jnp.uint32)[:2]
    x = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) * jnp.uint32(0x9E3779B1) + first
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = x ^ second
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def from_rngs(rngs: "nnx.Rngs | PRNGKeyArray | Dropout | None", masks: DropoutMasks) -> Dropout:
    """Return the dropout of a call: none for None, masks drawn from a key or ``nnx.Rngs``."""
    if rngs is None:
        return Dropout()
    if isinstance(rngs, Dropout):
        return rngs
    return KeyedDropout(rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs, masks)
