"""Linear layers as Flax has them, with the initialisations of the configuration."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import initializers

from jax_transformer.config import Init, TransformerConfig


def uniform(bound: float) -> initializers.Initializer:
    """Uniform between ``-bound`` and ``bound``."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def flat_dot_general(x, kernel, dimension_numbers, precision=None, preferred_element_type=None, **_):
    """``jax.lax.dot_general`` of (..., i) and (i, o), with all leading axes as one.

    XLA on CPU turns a matrix product into its fast kernel only where each side has one free and one contracted axis; the gradient of a kernel
    under two leading axes contracts both, and took twice as long.
    """
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ())), "a product of the last axis with the first"
    flat = x.reshape(-1, x.shape[-1])
    product = jax.lax.dot_general(flat, kernel, (((1,), (0,)), ((), ())), precision, preferred_element_type)
    return product.reshape(*x.shape[:-1], kernel.shape[-1])


def linear(
    config: TransformerConfig, inputs: int, outputs: int, *, bias: bool, fused: int = 1, attention: bool = False, rngs: nnx.Rngs
) -> nnx.Linear:
    """A linear layer with kernel (inputs, outputs).

    ``fused`` tells of how many equal matrices the layer's Xavier bound is taken together (three for query, key and value where PyTorch has
    them as one); ``attention`` that its bias starts at zero in every scheme that gives the stacks their own initialisation.
    """
    torch_bound = 1.0 / math.sqrt(inputs)  # torch.nn.Linear: Kaiming-uniform with a = sqrt(5)
    xavier_bound = math.sqrt(6.0 / (inputs + fused * outputs))
    kernel_init = uniform(torch_bound if config.init is Init.TORCH else xavier_bound)
    zero_bias = config.init is Init.XAVIER or (config.init is Init.TORCH_TRANSFORMER and attention)
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        dtype=config.compute_dtype and jnp.dtype(config.compute_dtype),
        kernel_init=kernel_init,
        bias_init=initializers.zeros_init() if zero_bias else uniform(torch_bound),
        dot_general=flat_dot_general,
        rngs=rngs,
    )


def output(config: TransformerConfig, *, rngs: nnx.Rngs) -> nnx.Linear:
    """The layer from the decoder to the logits. It stands outside the stacks, so TORCH_TRANSFORMER leaves it as torch.nn.Linear draws it."""
    bound = 1.0 / math.sqrt(config.d_model)
    if config.init is Init.XAVIER:
        bound = math.sqrt(6.0 / (config.d_model + config.target_vocab_size))
    return nnx.Linear(
        config.d_model,
        config.target_vocab_size,
        use_bias=config.output_bias,
        dtype=config.compute_dtype and jnp.dtype(config.compute_dtype),
        kernel_init=uniform(bound),
        bias_init=initializers.zeros_init() if config.init is Init.XAVIER else uniform(bound),
        dot_general=flat_dot_general,
        rngs=rngs,
    )
