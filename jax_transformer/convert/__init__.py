"""Convert weights between PyTorch and Flax.

Importing this package loads no jax, so that commands which only read files start quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_transformer.architectures.model_weights import (
        from_torch,
        into_torch,
        to_torch,
        weight_table,
    )
    from jax_transformer.convert.models import load, save
    from jax_transformer.convert.planning import plan
    from jax_transformer.convert.training_state.torch_optimizer import (
        from_torch as optimizer_from_torch,
    )
    from jax_transformer.convert.training_state.torch_optimizer import (
        to_torch as optimizer_to_torch,
    )

_ARRAYS = ("from_torch", "into_torch", "to_torch", "weight_table")
_FILES = {"load": "models", "save": "models", "plan": "planning"}
_OPTIMIZER = ("optimizer_from_torch", "optimizer_to_torch")

__all__ = [
    "from_torch",
    "into_torch",
    "load",
    "optimizer_from_torch",
    "optimizer_to_torch",
    "plan",
    "save",
    "to_torch",
    "weight_table",
]


def __getattr__(name: str) -> Any:
    if name in _ARRAYS:
        return getattr(importlib.import_module("jax_transformer.architectures.model_weights"), name)
    if name in _OPTIMIZER:
        return getattr(
            importlib.import_module("jax_transformer.convert.training_state.torch_optimizer"),
            name.removeprefix("optimizer_"),
        )
    if name in _FILES:
        return getattr(importlib.import_module(f"jax_transformer.convert.{_FILES[name]}"), name)
    raise AttributeError(f"module 'jax_transformer.convert' has no attribute {name!r}")
