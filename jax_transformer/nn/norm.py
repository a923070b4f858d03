"""Normalisation."""

import jax.numpy as jnp
from flax import nnx

from jax_transformer.config import TransformerConfig


def layer_norm(config: TransformerConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Ba et al. 2016 with the biased variance and eps inside the root, as torch.nn.LayerNorm.

    ``use_fast_variance=False``: the mean of squares minus the square of the mean loses every digit where the mean is large.
    """
    return nnx.LayerNorm(
        config.d_model,
        epsilon=config.norm_epsilon,
        use_bias=config.bias,
        use_fast_variance=False,
        dtype=config.compute_dtype and jnp.dtype(config.compute_dtype),
        rngs=rngs,
    )
