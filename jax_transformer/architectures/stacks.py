"""The encoder and decoder of Vaswani et al. 2017, which most architectures share."""

from typing import Any

from jax_transformer.config import Branch, Mask, Part, StackConfig

ENCODER_BLOCK = (Branch((Part.SELF,)), Branch((Part.FFN,)))
DECODER_BLOCK = (Branch((Part.SELF,)), Branch((Part.CROSS,)), Branch((Part.FFN,)))


def encoder(layers: int, **fields: Any) -> StackConfig:
    """Return the paper's encoder, with other fields of ``StackConfig`` as given."""
    return StackConfig(layers, ENCODER_BLOCK, self_mask=(Mask.SOURCE_PADDING,), **fields)


def decoder(
    layers: int, cross_mask: tuple[Mask, ...] = (Mask.SOURCE_PADDING,), **fields: Any
) -> StackConfig:
    """Return the paper's decoder, with other fields of ``StackConfig`` as given."""
    return StackConfig(
        layers,
        DECODER_BLOCK,
        self_mask=(Mask.TARGET_PADDING, Mask.CAUSAL),
        cross_mask=cross_mask,
        **fields,
    )
