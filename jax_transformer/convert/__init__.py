"""Convert weights between PyTorch and Flax. Importing this package loads no jax."""

from typing import TYPE_CHECKING

from jax_transformer import lazy

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

__all__ = ["from_torch", "into_torch", "load", "plan", "save", "to_torch", "weight_table"]
__all__ += ["optimizer_from_torch", "optimizer_to_torch"]
_NAMES = {
    "architectures.registry": ["weight_table"],
    "architectures.twins": ["from_torch", "into_torch", "to_torch"],
    "convert.models": ["load", "save"],
    "convert.planning": ["plan"],
    "convert.training_state.torch_optimizer": ["optimizer_from_torch", "optimizer_to_torch"],
}
__getattr__ = lazy.attributes(__name__, _NAMES)
