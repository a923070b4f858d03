"""Residual connections: the one file that knows the order of norm, sum and dropout."""

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array, Float

from jax_transformer.config import Branch, DropoutSite, NormPlacement, Residual, TransformerConfig
from jax_transformer.nn.dropout import Dropout
from jax_transformer.nn.norm import norm

Hidden = Float[Array, "b n d"]


class ResidualBranch(nnx.Module):
    """A residual connection with its norm around what a branch computes."""

    def __init__(self, config: TransformerConfig, branch: Branch):
        self.placement, self.site, self.source = (
            config.norm_placement,
            config.dropout_site,
            branch.residual,
        )
        self.rate = config.dropout if branch.dropout is None else branch.dropout
        self.norm = norm(config)

    def __call__(
        self,
        x: Hidden,
        branch: Callable[[Hidden], Hidden],
        memory: Float[Array, "b s d"] | None,
        dropout: Dropout,
    ) -> Hidden:
        """Post-norm ``norm(x + f(x))`` or pre-norm ``x + f(norm(x))``.

        Dropout acts on the output of f or, after the norm, on the result.
        """
        residual = memory if self.source is Residual.MEMORY else x
        assert residual is not None, "the configuration lets only decoders add the memory"
        y = branch(self.norm(x) if self.placement is NormPlacement.PRE else x)
        drop = dropout.scope("output")
        if self.site is DropoutSite.BEFORE_ADD:
            y = drop(y, self.rate)
        y = residual + y
        if self.placement is NormPlacement.POST:
            y = self.norm(y)
        return drop(y, self.rate) if self.site is DropoutSite.AFTER_NORM else y
