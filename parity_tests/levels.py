"""The parity ladder, bottom up: each level runs the same part of both models on the same input and returns both results.

An error is judged relative to the largest value of the reference, so that it means the same at every level.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import torch

from jax_transformer.config import Mask
from jax_transformer.nn.blocks import Context
from jax_transformer.nn.dropout import Dropout
from jax_transformer.training.loss import cross_entropy
from parity_tests.twins import Pair, as_torch

Both = tuple[np.ndarray, np.ndarray]


class Inputs:
    """Random hidden states and the masks that fit a pair's batch, for both frameworks."""

    def __init__(self, pair: Pair):
        random = np.random.default_rng(7)
        config, dtype = pair.config, next(pair.torch.parameters()).detach().numpy().dtype
        self.x = random.normal(size=(*pair.target.shape, config.d_model)).astype(dtype)
        self.memory = random.normal(size=(*pair.source.shape, config.d_model)).astype(dtype)
        self.padding, self.memory_padding = pair.target == config.target_pad_id, pair.source == config.source_pad_id
        self.future = np.triu(np.ones((pair.target.shape[1],) * 2, bool), 1)
        self.self_mask = ~(self.padding[:, None, None, :] | self.future)
        self.masks_memory = Mask.SOURCE_PADDING in config.decoder.cross_mask

    def context(self) -> Context:
        cross = jnp.asarray(~self.memory_padding[:, None, None, :]) if self.masks_memory else None
        return Context(jnp.asarray(self.memory), jnp.asarray(self.self_mask), cross)


def norm(pair: Pair) -> Both:
    given = Inputs(pair).x * 3 + 2
    return pair.flax.decoder.blocks[0].residuals[2].norm(jnp.asarray(given)), pair.torch.decoder.layers[0].norm3(as_torch(given))


def _attention(pair: Pair) -> tuple[tuple, tuple]:
    given, module = Inputs(pair), pair.flax.decoder.blocks[1].self_attention
    x = jnp.asarray(given.x)
    ours = module(x, module.keys_values(x), jnp.asarray(given.self_mask), Dropout())
    theirs = pair.calls.attention(
        pair.torch.decoder.layers[1].self_attn, as_torch(given.x), as_torch(given.x), as_torch(given.padding), as_torch(given.future)
    )
    return ours, theirs


def attention(pair: Pair) -> Both:
    ours, theirs = _attention(pair)
    return ours[0], theirs[0]


def attention_weights(pair: Pair) -> Both:
    ours, theirs = _attention(pair)
    return ours[1], theirs[1]


def cross_attention(pair: Pair) -> Both:
    given, module = Inputs(pair), pair.flax.decoder.blocks[0].cross_attention
    mask = jnp.asarray(~given.memory_padding[:, None, None, :])
    ours = module(jnp.asarray(given.x), module.keys_values(jnp.asarray(given.memory)), mask, Dropout())[0]
    twin = pair.torch.decoder.layers[0].multihead_attn
    return ours, pair.calls.attention(twin, as_torch(given.x), as_torch(given.memory), as_torch(given.memory_padding), None)[0]


def feed_forward(pair: Pair) -> Both:
    given = Inputs(pair).x
    ours = pair.flax.decoder.blocks[0].feed_forward(jnp.asarray(given), Dropout())
    return ours, pair.calls.feed_forward(pair.torch.decoder.layers[0], as_torch(given))


def encoder_block(pair: Pair) -> Both:
    given = Inputs(pair)
    mask = jnp.asarray(~given.memory_padding[:, None, None, :])
    ours = pair.flax.encoder.blocks[0](jnp.asarray(given.memory), Context(None, mask, None), Dropout()).x
    return ours, pair.calls.encoder_block(pair.torch.encoder.layers[0], as_torch(given.memory), as_torch(given.memory_padding))


def decoder_block(pair: Pair) -> Both:
    given = Inputs(pair)
    ours = pair.flax.decoder.blocks[1](jnp.asarray(given.x), given.context(), Dropout()).x
    masks = as_torch(given.padding), as_torch(given.future), as_torch(given.memory_padding) if given.masks_memory else None
    return ours, pair.calls.decoder_block(pair.torch.decoder.layers[1], as_torch(given.x), as_torch(given.memory), *masks)


def encoder(pair: Pair) -> Both:
    return pair.flax.encode(pair.source), pair.calls.memory(pair.torch, as_torch(pair.source))


def logits(pair: Pair) -> Both:
    return pair.flax(pair.source, pair.target), pair.torch(as_torch(pair.source), as_torch(pair.target))


def loss(pair: Pair) -> Both:
    """Smoothed, over the tokens that are not padding."""
    pad, gold = pair.config.target_pad_id, np.roll(pair.target, -1, axis=1)
    ours, theirs = logits(pair)
    total, tokens = cross_entropy(jnp.asarray(ours), jnp.asarray(gold), pad_id=pad, label_smoothing=0.1)
    function = torch.nn.functional.cross_entropy
    return total / tokens.astype(total.dtype), function(theirs.transpose(1, 2), as_torch(gold), ignore_index=pad, label_smoothing=0.1)


LEVELS: dict[str, Callable[[Pair], Both]] = {
    level.__name__: level
    for level in (
        norm,
        attention,
        attention_weights,
        cross_attention,
        feed_forward,
        encoder_block,
        decoder_block,
        encoder,
        logits,
        loss,
    )
}


def arrays(both: Both) -> Both:
    ours, theirs = both
    return np.asarray(ours), theirs.detach().numpy() if isinstance(theirs, torch.Tensor) else np.asarray(theirs)


def error(both: Both, *, relative_to: float | None = None) -> float:
    """The largest absolute difference over the largest absolute value of the reference. Shapes must agree, and nothing may be NaN."""
    ours, theirs = arrays(both)
    assert ours.shape == theirs.shape, f"shapes {ours.shape} and {theirs.shape}"
    assert np.isfinite(ours).all() and np.isfinite(theirs).all(), "not finite"
    return float(np.abs(ours - theirs).max() / (np.abs(theirs).max() if relative_to is None else relative_to))


def assert_close(both: Both, bound: float, what: str = "", *, relative_to: float | None = None) -> None:
    """Fails naming the element that is furthest off."""
    found = error(both, relative_to=relative_to)
    ours, theirs = arrays(both)
    where = tuple(map(int, np.unravel_index(np.abs(ours - theirs).argmax(), ours.shape)))
    assert found <= bound, f"{what}: relative error {found:.2e} over {bound:.0e} at {where}: {ours[where]!r}, reference {theirs[where]!r}"
