"""Norms, and residual connections: the one file that knows the order of norm, sum and dropout."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_transformer.config import (
    Branch,
    DropoutSite,
    Norm,
    NormPlacement,
    Residual,
    TransformerConfig,
)
from jax_transformer.nn.dropout import Dropout

Hidden = Float[Array, "b n d"]


def standardize(x: Float[Array, "b n d"], epsilon: float) -> Float[Array, "b n d"]:
    """Return ``x`` with mean 0 and variance 1 along the last axis: Ba et al. 2016,
    torch.nn.LayerNorm.

    The variance is the biased one, with ``epsilon`` inside the root. Two passes: the mean of
    squares minus the square of the mean loses every digit if the mean is large.
    """
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(centered).mean(axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + jnp.asarray(epsilon, x.dtype))


def root_mean_square(x: Float[Array, "b n d"], epsilon: float) -> Float[Array, "b n d"]:
    """Return ``x`` with mean square 1 along the last axis: Zhang and Sennrich 2019.

    ``epsilon`` is added inside the root.
    """
    return x * jax.lax.rsqrt(
        jnp.square(x).mean(axis=-1, keepdims=True) + jnp.asarray(epsilon, x.dtype)
    )


def norm(config: TransformerConfig) -> "LayerNorm | RMSNorm":
    """Return a new norm of the kind that the configuration names."""
    return RMSNorm(config) if config.norm is Norm.RMS else LayerNorm(config)


class RMSNorm(nnx.Module):
    """:func:`root_mean_square`, then a learned scale.

    16-bit input is computed in float32 and rounded once.
    """

    def __init__(self, config: TransformerConfig):
        self.epsilon, self.compute_dtype = config.norm_epsilon, config.compute_dtype
        self.scale = nnx.Param(jnp.ones(config.d_model, jnp.float32))

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        result_dtype = jnp.dtype(self.compute_dtype or x.dtype)
        dtype = jnp.dtype(jnp.float32) if result_dtype.itemsize < 4 else result_dtype
        return (
            root_mean_square(x.astype(dtype), self.epsilon)
            * self.scale[...].astype(dtype)[None, None]
        ).astype(result_dtype)


class LayerNorm(nnx.Module):
    """:func:`standardize`, then a learned scale and bias.

    16-bit input is computed in float32 and rounded once.
    flax.nnx.LayerNorm has no strict promotion in float64 (it promotes to float32 first).
    """

    def __init__(self, config: TransformerConfig):
        self.epsilon, self.compute_dtype = config.norm_epsilon, config.compute_dtype
        self.scale = nnx.Param(jnp.ones(config.d_model, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(config.d_model, jnp.float32)) if config.bias else None

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        result_dtype = jnp.dtype(self.compute_dtype or x.dtype)
        dtype = jnp.dtype(jnp.float32) if result_dtype.itemsize < 4 else result_dtype
        y = standardize(x.astype(dtype), self.epsilon) * self.scale[...].astype(dtype)[None, None]
        if self.bias is not None:
            y = y + self.bias[...].astype(dtype)[None, None]
        return y.astype(result_dtype)


class ResidualBranch(nnx.Module):
    """A residual connection with its norm around what a branch computes."""

    def __init__(self, config: TransformerConfig, branch: Branch):
        self.placement, self.site, self.source = (
            config.norm_placement,
            config.dropout_site,
            branch.residual,
        )
        self.rate = config.dropout if branch.dropout is None else branch.dropout
        self.norm = norm(config)

    def __call__(
        self,
        x: Hidden,
        branch: Callable[[Hidden], Hidden],
        memory: Float[Array, "b s d"] | None,
        dropout: Dropout,
    ) -> Hidden:
        """Post-norm ``norm(x + f(x))`` or pre-norm ``x + f(norm(x))``.

        Dropout acts on the output of f or, after the norm, on the result.
        """
        residual = memory if self.source is Residual.MEMORY else x
        assert residual is not None, "the configuration lets only decoders add the memory"
        y = branch(self.norm(x) if self.placement is NormPlacement.PRE else x)
        drop = dropout.scope("output")
        if self.site is DropoutSite.BEFORE_ADD:
            y = drop(y, self.rate)
        y = residual + y
        if self.placement is NormPlacement.POST:
            y = self.norm(y)
        return drop(y, self.rate) if self.site is DropoutSite.AFTER_NORM else y
