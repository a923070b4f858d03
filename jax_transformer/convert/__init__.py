"""Weights between PyTorch and Flax. Importing this loads no jax: what only reads files does not wait for it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_transformer.convert.state_dict import from_torch, into_torch, to_torch, weight_table

__all__ = ["from_torch", "into_torch", "to_torch", "weight_table"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from jax_transformer.convert import state_dict

        return getattr(state_dict, name)
    raise AttributeError(f"module 'jax_transformer.convert' has no attribute {name!r}")
