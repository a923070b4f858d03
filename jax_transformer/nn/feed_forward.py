"""The position-wise feed-forward network, Vaswani et al. 2017, section 3.3."""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from jax_transformer.config import Activation, TransformerConfig
from jax_transformer.nn.dropout import Dropout
from jax_transformer.nn.linear import linear


def activation(kind: Activation) -> Callable[[Float[Array, "..."]], Float[Array, "..."]]:
    """The function that ``kind`` names."""
    return {
        Activation.RELU: jax.nn.relu,
        Activation.GELU: lambda x: jax.nn.gelu(x, approximate=False),
        Activation.GELU_TANH: lambda x: jax.nn.gelu(x, approximate=True),
    }[kind]


class FeedForward(nnx.Module):
    """``down(dropout(activation(up(x))))``."""

    def __init__(self, config: TransformerConfig, kind: Activation, *, rngs: nnx.Rngs):
        self.activation, self.rate = kind, config.activation_dropout
        self.up = linear(config, config.d_model, config.d_ff, bias=config.bias, rngs=rngs)
        self.down = linear(config, config.d_ff, config.d_model, bias=config.bias, rngs=rngs)

    def __call__(self, x: Float[Array, "b n d"], dropout: Dropout) -> Float[Array, "b n d"]:
        return self.down(dropout.scope("activation")(activation(self.activation)(self.up(x)), self.rate))
