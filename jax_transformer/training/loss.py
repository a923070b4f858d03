"""The loss: cross entropy with label smoothing, of all logits at once or in chunks."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

Weights = dict[str, jax.Array]


class LossSums(NamedTuple):
    """Sums over the tokens that are not padding, in nats."""

    loss: Float[Array, ""]
    nll_loss: Float[Array, ""]
    """The loss without label smoothing. It has no gradient."""
    tokens: Int[Array, ""]


def loss_sums(
    logits: Float[Array, "b t v"],
    targets: Int[Array, "b t"],
    *,
    pad_id: int,
    label_smoothing: float = 0.0,
) -> LossSums:
    """Return the loss of these logits.

    Equal to torch.nn.functional.cross_entropy(ignore_index=pad_id, label_smoothing=...): the target
    distribution is (1 - smoothing) on the token plus smoothing / v on every token, itself included.
    Computed in float32 or float64.
    """
    if logits.dtype.itemsize < 4:
        logits = logits.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    target = target_logits(logits, targets, logits.shape[-1])
    loss = normalizer - (1 - label_smoothing) * target
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(axis=-1)
    counted, zero = targets != pad_id, jnp.zeros((), loss.dtype)
    summed = jnp.where(counted, loss, zero).sum()
    nll_loss = jnp.where(counted, normalizer - target, zero).sum()
    return LossSums(summed, lax.stop_gradient(nll_loss), counted.sum())


def cross_entropy(
    logits: Float[Array, "b t v"],
    targets: Int[Array, "b t"],
    *,
    pad_id: int,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the sum of the loss in nats over the tokens that are not padding, and their number.

    See :func:`loss_sums`.
    """
    sums = loss_sums(logits, targets, pad_id=pad_id, label_smoothing=label_smoothing)
    return sums.loss, sums.tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def target_logits(
    logits: Float[Array, "b t v"], targets: Int[Array, "b t"], size: int
) -> Float[Array, "b t"]:
    """Return the logit of each target token; ``size`` is the vocabulary's.

    Its gradient compares every id with the target, and becomes part of the gradient of the
    normalizer. The gradient of ``take_along_axis`` would be a scatter-add into another (b, t, v).
    """
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


def _forward(
    logits: Float[Array, "b t v"], targets: Int[Array, "b t"], size: int
) -> tuple[Float[Array, "b t"], Int[Array, "b t"]]:
    return target_logits(logits, targets, size), targets


def _backward(
    size: int, targets: Int[Array, "b t"], gradient: Float[Array, "b t"]
) -> tuple[Float[Array, "b t v"], None]:
    ids = jnp.arange(size, dtype=targets.dtype)[None, None]
    chosen = targets[..., None] == ids
    return jnp.where(chosen, gradient[..., None], jnp.zeros((), gradient.dtype)), None


target_logits.defvjp(_forward, _backward)


def chunked_loss_sums(
    head: Callable[[Weights, Float[Array, "b n d"]], Float[Array, "b n v"]],
    weights: Weights,
    x: Float[Array, "b t d"],
    targets: Int[Array, "b t"],
    *,
    chunks: int,
    pad_id: int,
    label_smoothing: float = 0.0,
) -> LossSums:
    """Return the loss of the logits ``head(weights, x)``, by chunks of positions.

    The gradients of a chunk are made together with its loss, and its logits are gone before those
    of the next one: no array of shape (b, t, v) exists. The gradients of ``weights`` are summed
    over the chunks, the gradient of ``x`` is (b, t, d).
    """
    chunks = min(chunks, targets.shape[1])
    parts = _split(x, chunks, 0), _split(targets, chunks, pad_id)

    def sums(weights: Weights, x: jax.Array, y: jax.Array) -> LossSums:
        return loss_sums(head(weights, x), y, pad_id=pad_id, label_smoothing=label_smoothing)

    zeros = jax.tree.map(
        lambda part: jnp.zeros(part.shape, part.dtype),
        jax.eval_shape(sums, weights, *(part[0] for part in parts)),
    )

    @jax.custom_vjp
    def total(weights: Weights, xs: jax.Array, ys: jax.Array) -> LossSums:
        def add(summed: LossSums, part: tuple[jax.Array, jax.Array]) -> tuple[LossSums, None]:
            return jax.tree.map(jnp.add, summed, sums(weights, *part)), None

        return lax.scan(add, zeros, (xs, ys))[0]

    def forward(weights: Weights, xs: jax.Array, ys: jax.Array) -> tuple[LossSums, Any]:
        def add(
            summed: tuple[LossSums, Weights], part: tuple[jax.Array, jax.Array]
        ) -> tuple[tuple[LossSums, Weights], jax.Array]:
            def loss(weights: Weights, x: jax.Array) -> tuple[jax.Array, LossSums]:
                result = sums(weights, x, part[1])
                return result.loss, result

            gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            (_, result), (of_weights, of_x) = gradient(weights, part[0])
            return jax.tree.map(jnp.add, summed, (result, of_weights)), of_x

        nothing = jax.tree.map(jnp.zeros_like, weights)
        (summed, of_weights), of_xs = lax.scan(add, (zeros, nothing), (xs, ys))
        return summed, (of_weights, of_xs)

    def backward(gradients: tuple[Weights, jax.Array], of_sums: LossSums) -> tuple[Any, Any, None]:
        scaled = jax.tree.map(lambda g: g * of_sums.loss.astype(g.dtype), gradients)
        return *scaled, None

    total.defvjp(forward, backward)
    return total(weights, *parts)


def _split(x: Shaped[Array, "b t *n"], chunks: int, fill: int) -> Shaped[Array, "c b _ *n"]:
    """Return chunks of positions, of which the last ones are filled up."""
    width = -(-x.shape[1] // chunks)
    missing = [(0, 0), (0, chunks * width - x.shape[1]), *((0, 0) for _ in x.shape[2:])]
    filled = jnp.pad(x, missing, constant_values=fill)
    return filled.reshape(len(x), chunks, width, *x.shape[2:]).swapaxes(0, 1)
