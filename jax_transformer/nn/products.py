"""Matrix products whose factors are rounded to bfloat16 and summed in float32.

Processors with instructions for bfloat16 compute them several times as fast as float32. XLA on CPU
reaches these instructions only for a product with a float32 result, of factors that are stored row
by row, and if the left one's last axis is summed: forward and backward products have that form.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from jax_transformer.config.enums import MatmulPrecision


def product(
    x: Float[Array, "m k"],
    kernel: Float[Array, "_ _"],
    precision: MatmulPrecision,
    bias: Float[Array, " n"] | None = None,
    *,
    transposed: bool = False,
) -> Float[Array, "m n"]:
    """Return ``x`` times a kernel (k, n), or ``transposed`` (n, k), plus a bias, in their dtype.

    With the precision ``medium``, factors in float32, and in the backward pass the gradient, are
    rounded to bfloat16 and summed in float32. So are factors in bfloat16 on CPU; elsewhere XLA sums
    these in float32 anyway.
    """
    narrow = x.dtype == jnp.bfloat16 and _on_one_cpu()
    if precision is MatmulPrecision.MEDIUM and (narrow or x.dtype == jnp.float32):
        sums = _rounded(x.astype(jnp.float32), kernel.astype(jnp.float32), transposed)
    else:
        axes = (((1,), (1 if transposed else 0,)), ((), ()))
        sums = jax.lax.dot_general(x, kernel, axes)
    if bias is not None:
        sums += bias[None].astype(sums.dtype)
    return sums.astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rounded(x, kernel, transposed):
    return _forward(x, kernel, transposed)[0]


def _forward(x, kernel, transposed):
    x, kernel = _round(x), _round(kernel)
    return _dot(x, kernel, 1 if transposed else 0), (x, kernel)


def _backward(transposed, residuals, gradient):
    (x, kernel), gradient = residuals, _round(gradient)
    left, right = (gradient, x) if transposed else (x, gradient)
    return _dot(gradient, kernel, 0 if transposed else 1), _dot(left.T, right, 0)


_rounded.defvjp(_forward, _backward)


def _round(x: Float[Array, "_ _"]) -> Float[Array, "_ _"]:
    """Return ``x`` rounded to bfloat16; on several CPU devices, still in float32."""
    if jax.default_backend() == "cpu" and not _on_one_cpu():
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(jnp.bfloat16)


def _on_one_cpu() -> bool:
    """Return True where a layout can be demanded: not of parts on several devices."""
    return jax.default_backend() == "cpu" and jax.sharding.get_abstract_mesh().empty


def _dot(a: Float[Array, "_ _"], b: Float[Array, "_ _"], summed: int) -> Float[Array, "_ _"]:
    """Return the product over the last axis of ``a`` and this axis of ``b``, in float32.

    On CPU a transposed factor becomes an array of its own: XLA would join the transpose to the
    product, which would be computed in float32, at a fraction of the speed.
    """
    stored = _by_rows if _on_one_cpu() else (lambda x: x)
    axes = (((1,), (summed,)), ((), ()))
    return stored(
        jax.lax.dot_general(stored(a), stored(b), axes, preferred_element_type=jnp.float32)
    )


def _by_rows(x: Float[Array, "_ _"]) -> Float[Array, "_ _"]:
    return with_layout_constraint(x, Layout(major_to_minor=(0, 1)))
