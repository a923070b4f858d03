"""The parity ladder, bottom up: each level runs the same part of both models on the same input and
returns both results.

An error is judged relative to the largest value of the reference, so that it means the same at
every level.
"""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.config import Mask, Part, TransformerConfig
from jax_transformer.nn.blocks import Context
from jax_transformer.nn.dropout import Dropout
from jax_transformer.training.loss import cross_entropy
from jax_transformer.weights import torch_bridge
from parity_tests.twins import Pair, as_torch

Both = tuple[np.ndarray, np.ndarray]


class Inputs:
    """Random hidden states, and the configured masks of a pair's batch, for both frameworks."""

    def __init__(self, pair: Pair):
        random = np.random.default_rng(7)
        config, dtype = pair.config, torch_bridge.to_numpy(next(pair.torch.parameters())).dtype
        self.x = _drawn(random, (*pair.target.shape, config.d_model)).astype(dtype)
        self.memory = _drawn(random, (*pair.source.shape, config.d_model)).astype(dtype)
        length = pair.target.shape[1]
        padding = pair.target == config.target_pad_id
        source_padding = pair.source == config.source_pad_id
        self.padding = padding if Mask.TARGET_PADDING in config.decoder.self_mask else None
        future = np.triu(np.ones((length, length), bool), 1)
        self.future = future if Mask.CAUSAL in config.decoder.self_mask else None
        self.source_padding = source_padding if config.encoder.self_mask else None
        self.memory_padding = source_padding if config.decoder.cross_mask else None
        self.positions, self.source_positions = (
            jnp.arange(n, dtype=jnp.int32) for n in (length, pair.source.shape[1])
        )

    def self_mask(self) -> jnp.ndarray | None:
        return _visible(self.padding, self.future)

    def context(self) -> Context:
        masks = self.self_mask(), _visible(self.memory_padding)
        return Context(jnp.asarray(self.memory), *masks, self.positions)

    def source_context(self) -> Context:
        return Context(None, _visible(self.source_padding), None, self.source_positions)


def _drawn(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers rounded to sixteenths, which bfloat16 holds exactly."""
    return np.round(random.normal(size=shape) * 16) / 16


def _visible(padding: np.ndarray | None, future: np.ndarray | None = None) -> jnp.ndarray | None:
    """The model's mask (b, 1, q, k) of hidden keys (b, k) and hidden pairs (q, k)."""
    hidden = [] if padding is None else [padding[:, None, None]]
    hidden += [] if future is None else [future[None, None]]
    return jnp.asarray(~functools.reduce(np.logical_or, hidden)) if hidden else None


def _torch(*arrays: np.ndarray | None) -> list[torch.Tensor | None]:
    return [None if array is None else as_torch(array) for array in arrays]


def norm(pair: Pair) -> Both:
    inputs, ours = Inputs(pair).x * 3 + 2, pair.flax.decoder.blocks[0].residuals[-1].norm
    return ours(jnp.asarray(inputs)), pair.calls.norm(pair.torch)(as_torch(inputs))


def _attention(pair: Pair) -> tuple[tuple, tuple]:
    inputs, module = Inputs(pair), pair.flax.decoder.blocks[1].self_attention
    x = jnp.asarray(inputs.x)
    ours = module(x, module.keys_values(x), inputs.self_mask(), Dropout())
    arrays = _torch(inputs.x, inputs.padding, inputs.future)
    return ours, pair.calls.self_attention(pair.torch, *arrays)


def attention(pair: Pair) -> Both:
    ours, theirs = _attention(pair)
    return ours[0], theirs[0]


def attention_weights(pair: Pair) -> Both:
    ours, theirs = _attention(pair)
    return ours[1], theirs[1]


def cross_attention(pair: Pair) -> Both:
    inputs, module = Inputs(pair), pair.flax.decoder.blocks[0].cross_attention
    keys_values = module.keys_values(jnp.asarray(inputs.memory))
    mask = _visible(inputs.memory_padding)
    ours = module(jnp.asarray(inputs.x), keys_values, mask, Dropout())[0]
    arrays = _torch(inputs.x, inputs.memory, inputs.memory_padding)
    return ours, pair.calls.cross_attention(pair.torch, *arrays)[0]


def _feed_forward(pair: Pair, stack: str, x: np.ndarray, positions: jnp.ndarray) -> Both:
    module = getattr(pair.flax, stack).blocks[0].feed_forward
    ours = module(jnp.asarray(x), positions[None], Dropout())
    return ours, pair.calls.feed_forward(pair.torch, stack, as_torch(x))


def encoder_feed_forward(pair: Pair) -> Both:
    inputs = Inputs(pair)
    return _feed_forward(pair, "encoder", inputs.memory, inputs.source_positions)


def feed_forward(pair: Pair) -> Both:
    inputs = Inputs(pair)
    return _feed_forward(pair, "decoder", inputs.x, inputs.positions)


def encoder_block(pair: Pair) -> Both:
    inputs, block = Inputs(pair), pair.flax.encoder.blocks[0]
    ours = block(jnp.asarray(inputs.memory), inputs.source_context(), Dropout()).x
    return ours, pair.calls.encoder_block(pair.torch, *_torch(inputs.memory, inputs.source_padding))


def decoder_block(pair: Pair) -> Both:
    inputs = Inputs(pair)
    ours = pair.flax.decoder.blocks[1](jnp.asarray(inputs.x), inputs.context(), Dropout()).x
    masks = _torch(inputs.padding, inputs.future, inputs.memory_padding)
    return ours, pair.calls.decoder_block(pair.torch, *_torch(inputs.x, inputs.memory), *masks)


def encoder(pair: Pair) -> Both:
    return pair.flax.encode(pair.source), pair.calls.memory(pair.torch, as_torch(pair.source))


def logits(pair: Pair) -> Both:
    return pair.logits()


def loss(pair: Pair) -> Both:
    """Return the smoothed loss over the tokens that are not padding."""
    pad, gold = pair.config.target_pad_id, np.roll(pair.target, -1, axis=1)
    ours, theirs = logits(pair)
    smoothed = {"label_smoothing": 0.1}
    total, tokens = cross_entropy(jnp.asarray(ours), jnp.asarray(gold), pad_id=pad, **smoothed)
    arguments = as_torch(theirs).transpose(1, 2), as_torch(gold)
    reference = torch.nn.functional.cross_entropy(*arguments, ignore_index=pad, **smoothed)
    return total / tokens.astype(total.dtype), reference


_ATTENTIONS = (attention, attention_weights, cross_attention)
_PARTS = (norm, *_ATTENTIONS, encoder_feed_forward, feed_forward, encoder_block, decoder_block)
LEVELS: dict[str, Callable[[Pair], Both]] = {
    level.__name__: level for level in (*_PARTS, encoder, logits, loss)
}


def levels(config: TransformerConfig) -> list[str]:
    """Return the levels of a configuration: a decoder without a feed-forward has no such level."""
    return [name for name in LEVELS if name != "feed_forward" or Part.FFN in config.decoder.parts]


def arrays(both: Both) -> Both:
    ours, theirs = both
    if isinstance(theirs, torch.Tensor):
        theirs = torch_bridge.to_numpy(theirs)
    return np.asarray(ours), np.asarray(theirs)


def error(both: Both, *, relative_to: float | None = None) -> float:
    """The largest error relative to the largest reference value; nothing may be NaN."""
    ours, theirs = arrays(both)
    assert ours.shape == theirs.shape, f"shapes {ours.shape} and {theirs.shape}"
    assert np.isfinite(ours).all() and np.isfinite(theirs).all(), "not finite"
    scale = np.abs(theirs).max() if relative_to is None else relative_to
    return float(np.abs(ours - theirs).max() / scale)


def assert_close(
    both: Both, bound: float, what: str = "", *, relative_to: float | None = None
) -> None:
    """Fail with the element that has the largest error."""
    relative = error(both, relative_to=relative_to)
    ours, theirs = arrays(both)
    where = tuple(map(int, np.unravel_index(np.abs(ours - theirs).argmax(), ours.shape)))
    assert relative <= bound, (
        f"{what}: relative error {relative:.2e} over {bound:.0e} at {where}: "
        f"{ours[where]!r}, reference {theirs[where]!r}"
    )


def assert_same_distributions(
    ours: dict[str, np.ndarray],
    theirs: dict[str, torch.Tensor],
    *,
    deviations: float = 6,
    largest: Callable[[str], float] = lambda name: 0.3,
) -> None:
    """Assert for each new tensor the same mean, spread and bounds; they are not the same draws.

    ``largest`` is the relative tolerance of the largest number.
    """
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        array, reference = ours[name], tensor.numpy()
        assert (array.std() == 0) == (reference.std() == 0), name
        error = abs(array.mean() - reference.mean())
        assert error <= deviations * (array.std() + 1e-9) / math.sqrt(array.size), name
        if array.size >= 1000:
            most = np.abs(reference).max()
            assert array.std() == pytest.approx(reference.std(), rel=0.05), name
            assert np.abs(array).max() == pytest.approx(most, rel=largest(name)), name
