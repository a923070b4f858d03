"""Cross-entropy over the tokens that are not padding."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "b t v"],
    targets: Int[Array, "b t"],
    *,
    pad_id: int,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The sum over tokens of the loss in nats, and the number of tokens.

    Equal to torch.nn.functional.cross_entropy(ignore_index=pad_id, label_smoothing=...): the target
    distribution is (1 - smoothing) on the token plus smoothing / v on every token, itself included.
    Computed in float32 or float64.
    """
    if logits.dtype.itemsize < 4:
        logits = logits.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    loss = (
        normalizer
        - (1 - label_smoothing) * jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    )
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(axis=-1)
    counted = targets != pad_id
    return jnp.where(counted, loss, jnp.zeros((), loss.dtype)).sum(), counted.sum()
