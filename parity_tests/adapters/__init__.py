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

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

Mask = Tensor | None
Attended = tuple[Tensor, Tensor]
"""Output and weights."""


def of(architecture: str) -> ModuleType:
    """Return the adapter of the twin of that architecture."""
    return importlib.import_module(f"{__name__}.{architecture}")


def hidden(padding: Mask, future: Mask = None) -> Mask:
    """Join hidden keys (b, k) and pairs (q, k) in a mask (b, 1, q, k), axes of 1 allowed."""
    masks = [None if padding is None else padding[:, None, None], future]
    parts = [mask for mask in masks if mask is not None]
    return functools.reduce(torch.logical_or, parts) if parts else None


def visible(padding: Mask, future: Mask = None) -> Mask:
    mask = hidden(padding, future)
    return None if mask is None else ~mask
