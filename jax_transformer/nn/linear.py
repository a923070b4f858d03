"""Linear layers as Flax has them, with the initialisations of the configuration."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jax_transformer.config import Init, TransformerConfig
from jax_transformer.nn.initializers import uniform


def flat_dot_general(
    x, kernel, dimension_numbers, precision=None, preferred_element_type=None, **_
):
    """Return ``jax.lax.dot_general`` of (..., i) and (i, o), with all leading axes flattened into
    one.

    XLA on CPU uses its fast matrix product only if each side has one free and one contracted axis;
    the gradient of a kernel under two leading axes contracts both, and took twice as long.
    """
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ())), (
        "a product of the last axis with the first"
    )
    flat = x.reshape(-1, x.shape[-1])
    product = jax.lax.dot_general(
        flat, kernel, (((1,), (0,)), ((), ())), precision, preferred_element_type
    )
    return product.reshape(*x.shape[:-1], kernel.shape[-1])


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
) -> nnx.Linear:
    """Return a linear layer of a stack, with kernel (inputs, outputs).

    ``fused`` is the number of equal matrices that share the layer's Xavier bound (three for query,
    key and value, which PyTorch packs into one); with ``attention`` its bias starts at zero in
    every scheme that gives the stacks an initialisation of their own.
    """
    torch_bound = 1.0 / math.sqrt(inputs)  # torch.nn.Linear: Kaiming-uniform with a = sqrt(5)
    xavier_bound = math.sqrt(6.0 / (inputs + fused * outputs))
    zero_bias = init is Init.XAVIER or (init is Init.TORCH_TRANSFORMER and attention)
    bounds = torch_bound if init is Init.TORCH else xavier_bound, 0.0 if zero_bias else torch_bound
    return _linear(config, inputs, outputs, bias, *bounds, rngs)


def output(config: TransformerConfig, *, rngs: nnx.Rngs) -> nnx.Linear:
    """Return the layer from the decoder to the logits.

    It is not part of the stacks, so TORCH_TRANSFORMER draws it as torch.nn.Linear does.
    """
    inputs, outputs = config.d_model, config.target_vocab_size
    torch_bound, xavier_bound = 1.0 / math.sqrt(inputs), math.sqrt(6.0 / (inputs + outputs))
    bounds = (xavier_bound, 0.0) if config.init is Init.XAVIER else (torch_bound, torch_bound)
    return _linear(config, inputs, outputs, config.output_bias, *bounds, rngs)


def _linear(
    config: TransformerConfig,
    inputs: int,
    outputs: int,
    bias: bool,
    kernel_bound: float,
    bias_bound: float,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        dtype=config.compute_dtype and jnp.dtype(config.compute_dtype),
        kernel_init=uniform(kernel_bound),
        bias_init=uniform(bias_bound),
        dot_general=flat_dot_general,
        rngs=rngs,
    )
