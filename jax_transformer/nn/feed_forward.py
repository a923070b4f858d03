"""The position-wise feed-forward network, Vaswani et al. 2017, section 3.3."""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_transformer.config import Activation, PositionsAt, StackConfig, TransformerConfig
from jax_transformer.nn.dropout import Dropout
from jax_transformer.nn.linear import linear
from jax_transformer.nn.positions import PositionTable


def activation(kind: Activation) -> Callable[[Float[Array, "..."]], Float[Array, "..."]]:
    """The function that ``kind`` names."""
    return {
        Activation.RELU: jax.nn.relu,
        Activation.GELU: lambda x: jax.nn.gelu(x, approximate=False),
        Activation.GELU_TANH: lambda x: jax.nn.gelu(x, approximate=True),
        Activation.SILU: jax.nn.silu,
    }[kind]


class FeedForward(nnx.Module):
    """``down(dropout(activation(up(x))))``; gated, ``down(dropout(activation(up(x)) * gate(x)))``.

    Positions are added to ``x`` first if the configuration says so.
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, rngs: nnx.Rngs):
        self.activation, self.rate = stack.activation, config.activation_dropout
        init = stack.init or config.init
        self.positions = (
            PositionTable(config, stack, rngs=rngs)
            if stack.positions_at is PositionsAt.FEED_FORWARD
            else None
        )
        d_ff = stack.d_ff or config.d_ff
        self.up = linear(config, init, config.d_model, d_ff, bias=config.bias, rngs=rngs)
        self.gate = (
            linear(config, init, config.d_model, d_ff, bias=config.bias, rngs=rngs)
            if stack.gated
            else None
        )
        self.down = linear(config, init, d_ff, config.d_model, bias=config.bias, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b n d"], positions: Int[Array, " n"], dropout: Dropout
    ) -> Float[Array, "b n d"]:
        """The output for ``x`` at these ``positions`` of its sequence."""
        if self.positions is not None:
            x = self.positions(x, positions)
        y = activation(self.activation)(self.up(x))
        if self.gate is not None:
            y = y * self.gate(x)
        return self.down(dropout.scope("activation")(y, self.rate))
