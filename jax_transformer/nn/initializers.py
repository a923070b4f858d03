"""Random initial values of parameters, which several devices make each its own part of.

A parameter has the same values on any mesh. It is divided as its layer can know; the training
state's own layout is :mod:`jax_transformer.training.devices`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx import initializers
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, PRNGKeyArray

from jax_transformer.nn import sharding
from jax_transformer.nn.sharding import FSDP, TENSOR, Axes


def uniform(bound: float) -> initializers.Initializer:
    """Return an initializer: uniform between ``-bound`` and ``bound``; zeros if ``bound`` is 0."""
    return functools.partial(_uniform, bound)


def _uniform(bound, key, shape, dtype=jnp.float32, out_sharding=None):
    axes = (FSDP, TENSOR) if len(shape) == 2 else (None,) * len(shape)
    return _draw(jax.random.uniform, axes, key, shape, dtype, -bound, bound)


def normal(
    deviation: float, key: PRNGKeyArray, shape: tuple[int, ...], *axes: Axes
) -> Float[Array, "..."]:
    """Return normally distributed float32 values with mean 0, divided over ``axes`` of the mesh."""
    values = _draw(jax.random.normal, axes, key, shape, jnp.float32)
    return values * jnp.array(deviation, jnp.float32)


def _draw(
    sampler: Callable[..., Array],
    axes: tuple[Axes, ...],
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    dtype: Any,
    *bounds: float,
) -> Array:
    """Return the sampler's values; without a mesh, or inside a jitted function, as it makes
    them.
    """
    if isinstance(key, jax.core.Tracer) or (mesh := jax.sharding.get_mesh()).empty:
        return sampler(key, shape, dtype, *bounds)
    laid = NamedSharding(mesh, sharding.even_spec(shape, axes, mesh.shape))
    divided = jax.jit(sampler, static_argnums=(1, 2), out_shardings=laid)
    return divided(key, shape, dtype, *bounds)
