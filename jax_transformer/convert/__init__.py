"""Convert weights between PyTorch and Flax.

Importing this package loads no jax, so that commands which only read files start quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_transformer.architectures.registry import weight_table
    from jax_transformer.architectures.twins import from_torch, into_torch, to_torch
    from jax_transformer.convert.models import load, save
    from jax_transformer.convert.planning import plan
    from jax_transformer.convert.training_state.torch_optimizer import (
        from_torch as optimizer_from_torch,
    )
    from jax_transformer.convert.training_state.torch_optimizer import (
        to_torch as optimizer_to_torch,
    )

_FILES = {
    **dict.fromkeys(("from_torch", "into_torch", "to_torch"), "architectures.twins"),
    "weight_table": "architectures.registry",
    **dict.fromkeys(("load", "save"), "convert.models"),
    "plan": "convert.planning",
    **dict.fromkeys(
        ("optimizer_from_torch", "optimizer_to_torch"), "convert.training_state.torch_optimizer"
    ),
}

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
    if name not in _FILES:
        raise AttributeError(f"module 'jax_transformer.convert' has no attribute {name!r}")
    module = importlib.import_module(f"jax_transformer.{_FILES[name]}")
    return getattr(module, name.removeprefix("optimizer_"))
