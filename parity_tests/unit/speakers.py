"""Random models whose decoding is varied."""

import jax.numpy as jnp

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.config import Mixing
from parity_tests.unit.helpers import random_arrays

LOUD = ("positions.table", "cross_attention.query.kernel", "cross_attention.out.kernel")
LOUD += ("output.kernel",)


def loud(config: jt.TransformerConfig, seed: int, *, eos: float = 1.5) -> transformer.Transformer:
    """Return a random model with varied tokens; ``eos`` is added to the end token's logit."""
    arrays = random_arrays(config, seed=seed)
    for name, array in arrays.items():
        if name.endswith(("bias", "scale")):
            # unscaled, they dominate the rest
            array[...] = 0.2 * array + (0.8 if name.endswith("scale") else 0)
        if name.endswith(LOUD):
            array *= 3
        stack = getattr(config, name.split(".")[0], None)
        if name.endswith("attention.value.kernel") and stack.mixing is Mixing.SUMMED:
            array /= 30  # the sum of all values is the same for every query
    arrays["output.bias"][config.target_pad_id] += 1
    arrays["output.bias"][config.eos_id] += eos
    return transformer.unflatten(
        config, {name: jnp.asarray(array) for name, array in arrays.items()}
    )
