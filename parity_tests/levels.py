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
        self.future = (
            np.triu(np.ones((length, length), bool), 1)
            if Mask.CAUSAL in config.decoder.self_mask
            else None
        )
        self.source_padding = source_padding if config.encoder.self_mask else None
        self.memory_padding = source_padding if config.decoder.cross_mask else None
        self.positions, self.source_positions = (
            jnp.arange(n, dtype=jnp.int32) for n in (length, pair.source.shape[1])
        )

    def self_mask(self) -> jnp.ndarray | None:
        return _visible(self.padding, self.future)

    def context(self) -> Context:
        return Context(
            jnp.asarray(self.memory),
            self.self_mask(),
            _visible(self.memory_padding),
            self.positions,
        )

    def source_context(self) -> Context:
        return Context(None, _visible(self.source_padding), None, self.source_positions)


def _drawn(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers rounded to sixteenths, which bfloat16 holds exactly."""
    return np.round(random.normal(size=shape) * 16) / 16


def _visible(padding: np.ndarray | None, future: np.ndarray | None = None) -> jnp.ndarray | None:
    """The model's mask (b, 1, q, k) of hidden keys (b, k) and hidden pairs (q, k)."""
    hidden = [
        mask
        for mask in (
            None if padding is None else padding[:, None, None],
            None if future is None else future[None, None],
        )
        if mask is not None
    ]
    return jnp.asarray(~functools.reduce(np.logical_or, hidden)) if hidden else None


def _torch(*arrays: np.ndarray | None) -> list[torch.Tensor | None]:
    return [None if array is None else as_torch(array) for array in arrays]


def norm(pair: Pair) -> Both:
    inputs = Inputs(pair).x * 3 + 2
    return pair.flax.decoder.blocks[0].residuals[-1].norm(jnp.asarray(inputs)), pair.calls.norm(
        pair.torch
    )(as_torch(inputs))


def _attention(pair: Pair) -> tuple[tuple, tuple]:
    inputs, module = Inputs(pair), pair.flax.decoder.blocks[1].self_attention
    x = jnp.asarray(inputs.x)
    ours = module(x, module.keys_values(x), inputs.self_mask(), Dropout())
    return ours, pair.calls.self_attention(
        pair.torch, *_torch(inputs.x, inputs.padding, inputs.future)
    )


def attention(pair: Pair) -> Both:
    ours, theirs = _attention(pair)
    return ours[0], theirs[0]


def attention_weights(pair: Pair) -> Both:
    ours, theirs = _attention(pair)
    return ours[1], theirs[1]


def cross_attention(pair: Pair) -> Both:
    inputs, module = Inputs(pair), pair.flax.decoder.blocks[0].cross_attention
    ours = module(
        jnp.asarray(inputs.x),
        module.keys_values(jnp.asarray(inputs.memory)),
        _visible(inputs.memory_padding),
        Dropout(),
    )[0]
    return ours, pair.calls.cross_attention(
        pair.torch, *_torch(inputs.x, inputs.memory, inputs.memory_padding)
    )[0]


def encoder_feed_forward(pair: Pair) -> Both:
    inputs = Inputs(pair)
    ours = pair.flax.encoder.blocks[0].feed_forward(
        jnp.asarray(inputs.memory), inputs.source_positions, Dropout()
    )
    return ours, pair.calls.feed_forward(pair.torch, "encoder", as_torch(inputs.memory))


def feed_forward(pair: Pair) -> Both:
    inputs = Inputs(pair)
    ours = pair.flax.decoder.blocks[0].feed_forward(
        jnp.asarray(inputs.x), inputs.positions, Dropout()
    )
    return ours, pair.calls.feed_forward(pair.torch, "decoder", as_torch(inputs.x))


def encoder_block(pair: Pair) -> Both:
    inputs = Inputs(pair)
    ours = pair.flax.encoder.blocks[0](
        jnp.asarray(inputs.memory), inputs.source_context(), Dropout()
    ).x
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
    total, tokens = cross_entropy(
        jnp.asarray(ours), jnp.asarray(gold), pad_id=pad, label_smoothing=0.1
    )
    function = torch.nn.functional.cross_entropy
    return total / tokens.astype(total.dtype), function(
        as_torch(theirs).transpose(1, 2), as_torch(gold), ignore_index=pad, label_smoothing=0.1
    )


LEVELS: dict[str, Callable[[Pair], Both]] = {
    level.__name__: level
    for level in (
        norm,
        attention,
        attention_weights,
        cross_attention,
        encoder_feed_forward,
        feed_forward,
        encoder_block,
        decoder_block,
        encoder,
        logits,
        loss,
    )
}


def levels(config: TransformerConfig) -> list[str]:
    """Return the levels of a configuration: a decoder without a feed-forward has no such level."""
    return [name for name in LEVELS if name != "feed_forward" or Part.FFN in config.decoder.parts]


def arrays(both: Both) -> Both:
    ours, theirs = both
    return np.asarray(ours), torch_bridge.to_numpy(theirs) if isinstance(
        theirs, torch.Tensor
    ) else np.asarray(theirs)


def error(both: Both, *, relative_to: float | None = None) -> float:
    """The largest error relative to the largest reference value; nothing may be NaN."""
    ours, theirs = arrays(both)
    assert ours.shape == theirs.shape, f"shapes {ours.shape} and {theirs.shape}"
    assert np.isfinite(ours).all() and np.isfinite(theirs).all(), "not finite"
    return float(
        np.abs(ours - theirs).max() / (np.abs(theirs).max() if relative_to is None else relative_to)
    )


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
