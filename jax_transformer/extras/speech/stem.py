"""The convolutional stem: a spectrogram to the encoder's input (Radford et al. 2022, Whisper)."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_transformer.config import TransformerConfig
from jax_transformer.nn.initializers import uniform

_WIDTH = 3
"""Frames that each convolution sees."""


class ConvolutionalStem(nnx.Module):
    """Two convolutions over the frames, each followed by an exact GELU.

    The second one moves by two frames, so that a position stands for two of them. Both see a zero
    on either side of the window.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        assert config.mel_bins is not None, "a model that reads text has no stem"
        self.first = _convolution(config, config.mel_bins, 1, rngs)
        self.second = _convolution(config, config.d_model, 2, rngs)

    def __call__(self, features: Float[Array, "b c w"]) -> Float[Array, "b s d"]:
        """The positions of a spectrogram, without their encoding, in the dtype of the weights."""
        x = features.transpose(0, 2, 1).astype(self.first.dtype or self.first.kernel[...].dtype)
        for convolution in (self.first, self.second):
            x = jax.nn.gelu(convolution(x), approximate=False)
        return x


def _convolution(config: TransformerConfig, inputs: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    """A convolution with kernel (width, inputs, d), drawn as ``torch.nn.Conv1d`` draws it."""
    bound = 1.0 / math.sqrt(_WIDTH * inputs)
    return nnx.Conv(
        inputs,
        config.d_model,
        kernel_size=(_WIDTH,),
        strides=(stride,),
        padding=1,
        dtype=config.compute_dtype and jnp.dtype(config.compute_dtype),
        kernel_init=uniform(bound),
        bias_init=uniform(bound),
        rngs=rngs,
    )
