"""How the parts of each PyTorch twin are called with batch-first arrays: one module of the same functions a layout.

Masks are True where hidden, or None: ``padding`` and ``memory_padding`` (b, k), ``future`` (q, k).

    norm(twin)                                                            the last norm of decoder layer 0
    self_attention(twin, x, padding, future) -> (out, weights)            decoder layer 1
    cross_attention(twin, x, memory, padding) -> (out, weights)           decoder layer 0
    feed_forward(twin, stack, x)                                          layer 0 of "encoder" or "decoder"
    encoder_block(twin, x, padding)                                       layer 0
    decoder_block(twin, x, memory, padding, future, memory_padding)       layer 1
    memory(twin, source) -> (b, s, d)
    dropout_sites(config)                                                 each dropout module by name: the Flax sites of its calls, in order
    sequence_first(module)                                                whether that dropout module sees (length, batch, ...)
"""

from types import ModuleType

from jax_transformer.config import Layout
from parity_tests.adapters import (
    blog2023,
    deep_dive,
    from_scratch,
    lesson10,
    part2_encoder,
    torch_nn,
)

_ADAPTERS = {
    Layout.TORCH_NN: torch_nn,
    Layout.LESSON10: lesson10,
    Layout.DEEP_DIVE: deep_dive,
    Layout.FROM_SCRATCH: from_scratch,
    Layout.PART2_ENCODER: part2_encoder,
    Layout.BLOG2023: blog2023,
}


def of(layout: Layout) -> ModuleType:
    """The adapter of a layout's twin."""
    return _ADAPTERS[layout]
