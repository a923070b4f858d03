"""Attention by ``jax.nn.dot_product_attention``, for calls that need no weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_transformer.errors import ConfigError


def fused_attend(
    q: Float[Array, "b q h e"],
    k: Float[Array, "b k h e"],
    v: Float[Array, "b k h e"],
    mask: Bool[Array, "#b #h #q k"] | None,
    *,
    scale: float,
) -> Float[Array, "b q h e"]:
    """The values weighted by softmax(scale · q·k); zeros for a query that may see no key.

    JAX chooses the implementation: in 0.10 that is XLA on every device.
    """
    if q.dtype.itemsize > 4:
        raise ConfigError(
            f"attention_backend='sdpa' takes softmax in float32, and the model is {q.dtype}: "
            "use attention_backend='xla'"
        )
    mixed = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale)
    if mask is None:
        return mixed
    sees = mask.any(axis=-1).swapaxes(1, 2)[..., None]
    return jnp.where(sees, mixed, jnp.zeros((), mixed.dtype))
