"""Weight tables: rules that carry weights between PyTorch and JAX, for any model."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_transformer.weights.any_model import Stacked, Unused, from_torch, to_torch
    from jax_transformer.weights.rules import (
        Alias,
        Rule,
        attention,
        convolution,
        embedding,
        fused_attention,
        layer_norm,
        linear,
        packed_attention,
        repeat,
    )

_ANY_MODEL = ("Stacked", "Unused", "from_torch", "to_torch")

__all__ = [
    "Alias",
    "Rule",
    "Stacked",
    "Unused",
    "attention",
    "convolution",
    "embedding",
    "from_torch",
    "fused_attention",
    "layer_norm",
    "linear",
    "packed_attention",
    "repeat",
    "to_torch",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jax_transformer.weights' has no attribute {name!r}")
    file = "any_model" if name in _ANY_MODEL else "rules"
    return getattr(importlib.import_module(f"jax_transformer.weights.{file}"), name)
