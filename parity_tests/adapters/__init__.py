"""Calls of the parts of each PyTorch twin with batch-first arrays: one module per architecture.

Each module has its architecture's name and these functions. Masks are True where hidden, or None:
``padding`` and ``memory_padding`` (b, k), ``future`` (q, k).

    norm(twin)                                  the last norm of decoder layer 0
    self_attention(twin, x, padding, future) -> (out, weights)          decoder layer 1
    cross_attention(twin, x, memory, padding) -> (out, weights)         decoder layer 0
    feed_forward(twin, stack, x)                layer 0 of "encoder" or "decoder"
    encoder_block(twin, x, padding)             layer 0
    decoder_block(twin, x, memory, padding, future, memory_padding)     layer 1
    memory(twin, source) -> (b, s, d)
    dropout_sites(config)                       each dropout module's Flax sites, in call order
                                                sequence_first(module)                      True if
                                                the dropout module is sequence first
"""

import importlib
from types import ModuleType


def of(architecture: str) -> ModuleType:
    """Return the adapter of the twin of that architecture."""
    return importlib.import_module(f"{__name__}.{architecture}")
