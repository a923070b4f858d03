"""The floating-point operations of a training step, by formula: the products of matrices.

XLA counts a loop's body once, and has no count at all for a GPU that is not there. A product of
(m, k) and (k, n) is 2·m·k·n operations. Elementwise work and look-ups are not counted: for models
of any size they are below two percent.
"""

from collections.abc import Callable
from typing import NamedTuple

from jax_transformer.config import Mixing, Part, Remat, StackConfig, TransformerConfig

BACKWARD = 2
"""Products of the backward pass for each of the forward pass: one for each factor's gradient."""


def training(config: TransformerConfig, rows: int, source: int, target: int) -> float:
    """Return the operations of a step on ``rows`` pairs of these lengths, padding included."""
    return (1 + BACKWARD) * forward(config, rows, source, target)


def recomputed(config: TransformerConfig, rows: int, source: int, target: int) -> float:
    """Return the operations that a step adds because the backward pass computes them again.

    With ``config.remat`` "full" these are all of the blocks, with "minimal" the products of two
    activations.
    """
    if config.remat is Remat.NONE:
        return 0.0
    again = _part if config.remat is Remat.FULL else _attend
    return 2.0 * rows * _blocks(config, source, target, again)


def forward(config: TransformerConfig, rows: int, source: int, target: int) -> float:
    """Return the operations of the logits of ``rows`` pairs."""
    logits = config.d_model * config.target_vocab_size * target
    return 2.0 * rows * (_blocks(config, source, target, _part) + logits)


class _Sizes(NamedTuple):
    """A part of a block for one pair."""

    config: TransformerConfig
    stack: StackConfig
    part: Part
    queries: int
    keys: int


def _blocks(
    config: TransformerConfig, source: int, target: int, of: Callable[[_Sizes], int]
) -> int:
    """Return the multiply-adds of all blocks for one pair, each part counted by ``of``."""
    total = 0
    for stack, queries in ((config.encoder, source), (config.decoder, target)):
        for part in (part for branch in stack.branches for part in branch.parts):
            keys = source if part is Part.CROSS else queries
            total += stack.layers * of(_Sizes(config, stack, part, queries, keys))
    return total


def _part(sizes: _Sizes) -> int:
    """Return the multiply-adds of a part for ``queries`` tokens that see ``keys``."""
    config, stack, part, queries, keys = sizes
    d = config.d_model
    if part is Part.FFN:
        return (3 if stack.gated else 2) * d * (stack.d_ff or config.d_ff) * queries
    projections = 2 * d * config.heads(stack) * config.head_width_of(stack) * (queries + keys)
    return projections + _attend(sizes)


def _attend(sizes: _Sizes) -> int:
    """Return the multiply-adds of a part without weights: scores, and the mixing of values."""
    config, stack, part, queries, keys = sizes
    if part is Part.FFN:
        return 0
    products = 1 if stack.mixing is Mixing.SUMMED else 2
    return products * queries * keys * config.heads(stack) * config.head_width_of(stack)
