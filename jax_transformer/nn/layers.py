"""Linear layers, norms, and the random values that parameters begin with.

Several devices make each its own part of a parameter, which has the same values on any mesh. It is
divided as its layer can know; the training state's own layout is
:mod:`jax_transformer.training.devices`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, PRNGKeyArray

from jax_transformer.config import Init, Norm, TransformerConfig
from jax_transformer.nn import sharding
from jax_transformer.nn.products import product
from jax_transformer.nn.sharding import FSDP, TENSOR, Axes


def uniform(bound, key, shape, dtype=jnp.float32, out_sharding=None):
    """Return values uniform between ``-bound`` and ``bound``: with a bound, an initializer."""
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
    """Return the sampler's values; without a mesh, or in a jitted function, as it makes them."""
    if isinstance(key, jax.core.Tracer) or (mesh := jax.sharding.get_mesh()).empty:
        return sampler(key, shape, dtype, *bounds)
    laid = NamedSharding(mesh, sharding.even_spec(shape, axes, mesh.shape))
    divided = jax.jit(sampler, static_argnums=(1, 2), out_shardings=laid)
    return divided(key, shape, dtype, *bounds)


class Linear(nnx.Module):
    """A linear layer that adds its bias before the sums are rounded, as ``torch.nn.Linear`` does.

    All leading axes are flattened into one. XLA on CPU uses its fast matrix product only if each
    side has one free and one contracted axis; the gradient of a kernel under two leading axes
    contracts both, and took twice as long.
    """

    def __init__(self, config: TransformerConfig, kernel: Array, bias: Array | None):
        self.kernel = nnx.Param(kernel)
        self.bias = None if bias is None else nnx.Param(bias)
        self.dtype, self.precision = config.compute_dtype, config.matmul_precision

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = promote_dtype((x, kernel, bias), dtype=self.dtype)
        flat = product(x.reshape(-1, x.shape[-1]), kernel, self.precision, bias)
        return flat.reshape(*x.shape[:-1], kernel.shape[-1])


def linear(
    config: TransformerConfig,
    init: Init,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    fused: int = 1,
    attention: bool = False,
    rngs: nnx.Rngs,
) -> Linear:
    """Return a linear layer with kernel (inputs, outputs).

    ``fused`` is the number of equal matrices that share the layer's Xavier bound (three for query,
    key and value, which PyTorch packs into one); with ``attention`` its bias starts at zero in
    every scheme that gives the stacks an initialisation of their own.
    """
    torch_bound = 1.0 / math.sqrt(inputs)  # torch.nn.Linear: Kaiming-uniform with a = sqrt(5)
    xavier_bound = math.sqrt(6.0 / (inputs + fused * outputs))
    bound = torch_bound if init is Init.TORCH else xavier_bound
    kernel = uniform(bound, rngs.params(), (inputs, outputs))
    if not bias:
        return Linear(config, kernel, None)
    zero_bias = init is Init.XAVIER or (init is Init.TORCH_TRANSFORMER and attention)
    bound = 0.0 if zero_bias else torch_bound
    return Linear(config, kernel, uniform(bound, rngs.params(), (outputs,)))


def standardize(x: Float[Array, "b n d"], epsilon: float) -> Float[Array, "b n d"]:
    """Return ``x`` with mean 0, variance 1 on the last axis: Ba et al. 2016, torch.nn.LayerNorm.

    The variance is the biased one, with ``epsilon`` inside the root. Two passes: the mean of
    squares minus the square of the mean loses every digit if the mean is large.
    """
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(centered).mean(axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + jnp.asarray(epsilon, x.dtype))


def root_mean_square(x: Float[Array, "b n d"], epsilon: float) -> Float[Array, "b n d"]:
    """Return ``x`` with mean square 1 on the last axis: Zhang and Sennrich 2019."""
    mean_square = jnp.square(x).mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + jnp.asarray(epsilon, x.dtype))


def standardize_unbiased(x: Float[Array, "b n d"], epsilon: float) -> Float[Array, "b n d"]:
    """Return ``x`` less its mean, divided by ``epsilon`` more than its unbiased deviation.

    The gradient of a deviation of 0 is 0, as in ``torch.std``.
    """
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(centered).sum(axis=-1, keepdims=True) / (x.shape[-1] - 1)
    zero = variance == 0
    deviation = jnp.where(zero, variance, jnp.sqrt(jnp.where(zero, variance + 1, variance)))
    return centered / (deviation + jnp.asarray(epsilon, x.dtype))


_NORMS = {
    Norm.LAYER: standardize,
    Norm.LAYER_UNBIASED: standardize_unbiased,
    Norm.RMS: root_mean_square,
}


class Normalization(nnx.Module):
    """The norm of ``config.norm``, a learned scale, and unless it is a root mean square a bias.

    16-bit input is computed in float32 and rounded once.
    flax.nnx.LayerNorm has no strict promotion in float64 (it promotes to float32 first).
    """

    def __init__(self, config: TransformerConfig):
        self.kind, self.epsilon = config.norm, config.norm_epsilon
        self.compute_dtype = config.compute_dtype
        self.scale = nnx.Param(jnp.ones(config.d_model, jnp.float32))
        has_bias = config.bias and config.norm is not Norm.RMS
        self.bias = nnx.Param(jnp.zeros(config.d_model, jnp.float32)) if has_bias else None

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        result_dtype = jnp.dtype(self.compute_dtype or x.dtype)
        dtype = jnp.dtype(jnp.float32) if result_dtype.itemsize < 4 else result_dtype
        normed = _NORMS[self.kind]
        y = normed(x.astype(dtype), self.epsilon) * self.scale[...].astype(dtype)[None, None]
        if self.bias is not None:
            y = y + self.bias[...].astype(dtype)[None, None]
        return y.astype(result_dtype)
