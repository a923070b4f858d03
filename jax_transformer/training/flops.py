"""The floating-point operations of a training step, by formula: the products of matrices.

XLA counts a loop's body once, and has no count at all for a GPU that is not there. A product of
(m, k) and (k, n) is 2·m·k·n operations. Elementwise work and look-ups are not counted: for models
of any size they are below two percent.
"""

from jax_transformer.config import Mixing, Part, StackConfig, TransformerConfig

BACKWARD = 2
"""Products of the backward pass for each of the forward pass: one for each factor's gradient."""


def training(config: TransformerConfig, rows: int, source: int, target: int) -> float:
    """The operations of a step on ``rows`` pairs of these lengths, padding included."""
    return (1 + BACKWARD) * forward(config, rows, source, target)


def recomputed(config: TransformerConfig, rows: int, source: int, target: int) -> float:
    """The operations that a step adds if the backward pass computes all blocks again."""
    return 2.0 * rows * (_encoder(config, source) + _decoder(config, source, target))


def forward(config: TransformerConfig, rows: int, source: int, target: int) -> float:
    """The operations of the logits of ``rows`` pairs."""
    logits = config.d_model * config.target_vocab_size * target
    return 2.0 * rows * (_encoder(config, source) + _decoder(config, source, target) + logits)


def _encoder(config: TransformerConfig, source: int) -> int:
    """Multiply-adds of the encoder's blocks for one source."""
    return config.encoder.layers * sum(
        _part(config, config.encoder, part, source, source)
        for branch in config.encoder.branches
        for part in branch.parts
    )


def _decoder(config: TransformerConfig, source: int, target: int) -> int:
    """Multiply-adds of the decoder's blocks for one pair."""
    return config.decoder.layers * sum(
        _part(config, config.decoder, part, target, source if part is Part.CROSS else target)
        for branch in config.decoder.branches
        for part in branch.parts
    )


def _part(
    config: TransformerConfig, stack: StackConfig, part: Part, queries: int, keys: int
) -> int:
    """Multiply-adds of one part of a block for ``queries`` tokens that see ``keys``."""
    d = config.d_model
    if part is Part.FFN:
        return (3 if stack.gated else 2) * d * (stack.d_ff or config.d_ff) * queries
    inner = config.heads(stack) * config.head_width_of(stack)
    products = 1 if stack.mixing is Mixing.SUMMED else 2  # scores, and the mixing of the values
    return 2 * d * inner * (queries + keys) + products * queries * keys * inner
