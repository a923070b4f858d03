"""Weight tables: rules that carry weights between PyTorch and JAX, for any model."""

from typing import TYPE_CHECKING

from jax_transformer import lazy

if TYPE_CHECKING:
    from jax_transformer.weights.any_model import Stacked, Unused, from_torch, to_torch
    from jax_transformer.weights.listing import code
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

__all__ = ["Alias", "Rule", "Stacked", "Unused", "attention", "convolution", "embedding"]
__all__ += ["from_torch", "fused_attention", "layer_norm", "linear", "packed_attention", "repeat"]
__all__ += ["code", "propose", "to_torch"]
_ANY_MODEL = ["Stacked", "Unused", "from_torch", "to_torch"]
_OTHERS = {"weights.listing": ["code"], "parity.search": ["propose"]}
_RULES = [name for name in __all__ if name not in (*_ANY_MODEL, "code", "propose")]
__getattr__ = lazy.attributes(
    __name__, {"weights.any_model": _ANY_MODEL, "weights.rules": _RULES, **_OTHERS}
)
