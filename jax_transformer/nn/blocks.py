"""A block: attention and feed-forward, composed as the configuration's branches say.

:class:`ResidualBranch` is the one place that knows the order of norm, sum and dropout.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import Branch, StackConfig, TransformerConfig, enums
from jax_transformer.nn import sharding
from jax_transformer.nn.attention import BlockCache, MultiHeadAttention
from jax_transformer.nn.dropout import Dropout
from jax_transformer.nn.embeddings import Frozen, PositionTable, RelativeBias
from jax_transformer.nn.layers import Normalization, linear
from jax_transformer.nn.local_attention import LocalAttention, Window
from jax_transformer.nn.sharding import ROWS, TENSOR

Hidden = Float[Array, "b n d"]
Weights = Float[Array, "b h q k"]


ACTIVATIONS: dict[enums.Activation, Callable[[Array], Array]] = {
    enums.Activation.RELU: jax.nn.relu,
    enums.Activation.GELU: partial(jax.nn.gelu, approximate=False),
    enums.Activation.GELU_TANH: partial(jax.nn.gelu, approximate=True),
    enums.Activation.SILU: jax.nn.silu,
}


class FeedForward(nnx.Module):
    """The position-wise feed-forward network, Vaswani et al. 2017, section 3.3.

    ``down(dropout(activation(up(x))))``; gated, ``down(dropout(activation(up(x)) * gate(x)))``.
    Positions are added to ``x`` first if the configuration says so.
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, rngs: nnx.Rngs):
        self.activation, self.rate = stack.activation, config.activation_dropout
        here = stack.positions_at is enums.PositionsAt.FEED_FORWARD
        self.positions = PositionTable(config, stack, rngs=rngs) if here else None
        d, d_ff = config.d_model, stack.d_ff or config.d_ff
        new = partial(linear, config, stack.init or config.init, bias=config.bias, rngs=rngs)
        self.up = new(d, d_ff)
        self.gate = new(d, d_ff) if stack.gated else None
        self.down = new(d_ff, d)

    def __call__(
        self, x: Float[Array, "b n d"], positions: Int[Array, "#b n"], dropout: Dropout
    ) -> Float[Array, "b n d"]:
        """Return the output for ``x`` at these ``positions`` of its sequence."""
        if self.positions is not None:
            x = self.positions(x, positions)
        y = ACTIVATIONS[self.activation](self.up(x))
        if self.gate is not None:
            y = y * self.gate(x)
        y = sharding.constrain(y, ROWS, None, TENSOR)
        return self.down(dropout.scope("activation")(y, self.rate))


class ResidualBranch(nnx.Module):
    """A residual connection with its norm around what a branch computes."""

    def __init__(self, config: TransformerConfig, branch: Branch):
        self.placement, self.site = config.norm_placement, config.dropout_site
        self.source = branch.residual
        self.rate = config.dropout if branch.dropout is None else branch.dropout
        self.norm = Normalization(config)

    def __call__(
        self,
        x: Hidden,
        branch: Callable[[Hidden], Hidden],
        memory: Float[Array, "b s d"] | None,
        dropout: Dropout,
    ) -> Hidden:
        """Return ``norm(x + f(x))`` (post-norm) or ``x + f(norm(x))`` (pre-norm)."""
        residual = memory if self.source is enums.Residual.MEMORY else x
        assert residual is not None, "the configuration lets only decoders add the memory"
        y = branch(self.norm(x) if self.placement is enums.NormPlacement.PRE else x)
        drop = dropout.scope("output")
        if self.site is enums.DropoutSite.BEFORE_ADD:
            y = drop(y, self.rate)
        y = residual + y
        if self.placement is enums.NormPlacement.POST:
            y = self.norm(y)
        return drop(y, self.rate) if self.site is enums.DropoutSite.AFTER_NORM else y


class Context(NamedTuple):
    """The inputs that all blocks of a stack share."""

    memory: Float[Array, "b s d"] | None
    self_mask: Bool[Array, "#b 1 #q k"] | None
    cross_mask: Bool[Array, "#b 1 #q s"] | None
    positions: Int[Array, " n"]
    length: Int[Array, ""] | None = None
    valid: Bool[Array, "b n"] | None = None
    """False at padding; None if there are no ids to tell by."""
    key_positions: Int[Array, " k"] | None = None
    """Positions of self-attention's keys; the input's if None."""
    self_bias: Float[Array, "1 h q k"] | None = None
    """Bias that the stack adds to self-attention's scores."""
    window: Window | None = None
    """The keys of local self-attention, with their bias; None if all tokens are keys."""
    segment_positions: Int[Array, "b n"] | None = None
    """Positions within the segments of packed rows; None if a row is one segment."""

    @property
    def keys_at(self) -> Int[Array, " k"]:
        """The positions of self-attention's keys."""
        return self.positions if self.key_positions is None else self.key_positions

    @property
    def table_positions(self) -> Int[Array, "#b n"]:
        """The rows of a table of positions that the tokens take."""
        return self.positions[None] if self.segment_positions is None else self.segment_positions


class BlockResult(NamedTuple):
    """A block's output, its last attention weights of either kind, and its updated cache."""

    x: Hidden
    self_weights: Weights | None
    cross_weights: Weights | None
    cache: BlockCache | None


class UnusedBranch(nnx.Module):
    """A part and a norm of the checkpoint that a block never computes and no optimizer sees."""

    def __init__(
        self, config: TransformerConfig, stack: StackConfig, branch: Branch, *, rngs: nnx.Rngs
    ):
        self.part = _part(config, stack, branch.parts[0], rngs=rngs)
        self.norm = Normalization(config)
        for _, owner in list(nnx.iter_modules(self)):
            for name, value in list(vars(owner).items()):
                if isinstance(value, nnx.Param):
                    setattr(owner, name, Frozen(value.get_value()))


class Block(nnx.Module):
    """One layer of a stack. A part that two branches name is one module."""

    self_attention: MultiHeadAttention | LocalAttention
    cross_attention: MultiHeadAttention
    feed_forward: FeedForward

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, rngs: nnx.Rngs):
        self.branches, self.causal = stack.branches, enums.Mask.CAUSAL in stack.self_mask
        for part in stack.parts:
            setattr(self, part.value, _part(config, stack, part, rngs=rngs))
        self.residuals = nnx.List(map(partial(ResidualBranch, config), stack.branches))
        relative = stack.positions is enums.Positions.RELATIVE_PER_BLOCK
        self.relative = RelativeBias(config, stack, rngs=rngs) if relative else None
        if stack.unused:
            new = partial(UnusedBranch, config, stack, rngs=rngs)
            self.unused = nnx.List(map(new, stack.unused))

    def __call__(
        self, x: Hidden, context: Context, dropout: Dropout, cache: BlockCache | None = None
    ) -> BlockResult:
        weights: dict[enums.Part, Weights | None] = {}

        def compute(parts: tuple[enums.Part, ...], drop: Dropout, y: Hidden) -> Hidden:
            nonlocal cache
            for part in parts:
                module, inside = getattr(self, part.value), drop.scope(part)
                if part is enums.Part.FFN:
                    y = module(y, context.table_positions, inside)
                    continue
                if isinstance(module, LocalAttention):
                    assert context.window is not None, "local attention needs its window"
                    y, weights[part] = module(y, context.window, inside)
                    continue
                keys_values: tuple[Array, Array]
                mask, bias = context.cross_mask, None
                if part is enums.Part.SELF:
                    mask, bias = context.self_mask, context.self_bias
                    keys_values = module.keys_values(y)
                    if cache is not None:
                        assert context.length is not None, "a cache needs its number of tokens"
                        cache = cache.append(*keys_values, context.length)
                        keys_values = (cache.self_keys, cache.self_values)
                    if self.relative is not None:
                        bias = self.relative(context.positions, context.keys_at)
                elif cache is not None:
                    keys_values = (cache.cross_keys, cache.cross_values)
                else:
                    assert context.memory is not None, "a decoder block needs the memory"
                    keys_values = module.keys_values(context.memory)
                y, weights[part] = module(
                    y,
                    keys_values,
                    mask,
                    inside,
                    bias,
                    causal=part is enums.Part.SELF and self.causal,
                    cache_layout=cache is not None,
                )
            return y

        for i, (branch, residual) in enumerate(zip(self.branches, self.residuals, strict=True)):
            drop = dropout.scope(f"branches.{i}")
            x = residual(x, partial(compute, branch.parts, drop), context.memory, drop)
        x = sharding.constrain(x, ROWS, None, None)
        return BlockResult(x, weights.get(enums.Part.SELF), weights.get(enums.Part.CROSS), cache)


def _part(
    config: TransformerConfig, stack: StackConfig, part: enums.Part, *, rngs: nnx.Rngs
) -> nnx.Module:
    if part is enums.Part.FFN:
        return FeedForward(config, stack, rngs=rngs)
    local = part is enums.Part.SELF and stack.attention_span is not enums.AttentionSpan.FULL
    return (LocalAttention if local else MultiHeadAttention)(config, stack, rngs=rngs)
