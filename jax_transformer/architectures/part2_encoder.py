"""The names of "Transformers from scratch part - 2": its encoder under ``encoder.``, and around it what "Lesson 10" names.

Source: the document's classes MultiHeadAttention (``qkv`` holds head after head, each with its query, key and value), LayerNormalization
(``gamma``, ``beta``), PoisitionwiseFeedForward (``fnn``) and EncoderLayer. Its encoding of positions is computed, so no tensor holds it.
"""

from jax_transformer.architectures import torch_nn
from jax_transformer.config import Part, TransformerConfig
from jax_transformer.weights.rules import Table, fused_attention, layer_norm, linear, repeat


def _encoder(config: TransformerConfig) -> Table:
    torch, flax = "encoder.layers.{i}", "encoder.blocks.{i}"
    attention_bias = config.bias if config.attention_bias is None else config.attention_bias
    layer: Table = []
    for part in config.encoder.parts:
        if part is Part.FFN:
            for number, name in ((1, "up"), (2, "down")):
                layer += linear(
                    f"{torch}.fnn.linear{number}", f"{flax}.feed_forward.{name}", bias=config.bias
                )
        else:
            layer += fused_attention(
                f"{torch}.attention", f"{flax}.{part.value}", config.num_heads, bias=attention_bias
            )
    for k in range(len(config.encoder.branches)):
        layer += layer_norm(
            f"{torch}.norm{k + 1}",
            f"{flax}.residuals.{k}.norm",
            bias=config.bias,
            names=("gamma", "beta"),
        )
    return repeat(config.encoder.layers, layer)


def table(config: TransformerConfig) -> Table:
    """The rules for a model of ``config``: those of "Lesson 10" but for the encoder's layers."""
    around = [
        rule for rule in torch_nn.table(config) if not rule.torch.startswith("encoder.layers.")
    ]
    return [*_encoder(config), *around]
