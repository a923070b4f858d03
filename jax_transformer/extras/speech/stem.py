"""The convolutional stem: a spectrogram to the encoder's input (Radford et al. 2022, Whisper)."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.nn.embeddings import InputLayer
from jax_transformer.nn.layers import uniform
from jax_transformer.shapes import Source

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
        """Return a position for two frames, without its encoding, in the dtype of the weights."""
        x = features.transpose(0, 2, 1).astype(self.first.dtype or self.first.kernel[...].dtype)
        for convolution in (self.first, self.second):
            x = jax.nn.gelu(convolution(x), approximate=False)
        return x


def _convolution(config: TransformerConfig, inputs: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    """Return a convolution with kernel (width, inputs, d), drawn as ``torch.nn.Conv1d`` does."""
    bound = 1.0 / math.sqrt(_WIDTH * inputs)
    return nnx.Conv(
        inputs,
        config.d_model,
        kernel_size=(_WIDTH,),
        strides=(stride,),
        padding=1,
        dtype=config.compute_dtype,
        kernel_init=partial(uniform, bound),
        bias_init=partial(uniform, bound),
        rngs=rngs,
    )


def _check(source: Source, config: TransformerConfig) -> Float[Array, "b c w"]:
    """Return the spectrograms. Raises InputError for another shape than the model's."""
    features = source if isinstance(source, jax.Array) else np.asarray(source)
    bins, frames = config.mel_bins, config.mel_frames
    if features.shape[1:] != (bins, frames) or not jnp.issubdtype(features.dtype, jnp.floating):
        raise InputError(
            "the source of a model that reads sound must be floating-point numbers of shape "
            f"(batch, {bins} mel bins, {frames} frames), "
            f"not {features.dtype} of shape {features.shape}"
        )
    if not len(features):
        raise InputError(f"source has shape {features.shape}: empty")
    return jnp.asarray(features)


def _check_length(length: int, config: TransformerConfig) -> None:
    """Raise InputError unless a spectrogram has this number of positions."""
    if length != config.rows(config.encoder):
        raise InputError(
            f"source is {length} positions long; a spectrogram of {config.mel_frames} frames "
            f"has {config.rows(config.encoder)}"
        )


INPUT_LAYER = InputLayer(ConvolutionalStem, _check, _check_length)
