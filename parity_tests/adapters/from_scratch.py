"""Calls of the parts of "Transformer from scratch", whose masks are True where visible."""

from torch import Tensor, nn

from jax_transformer.config import TransformerConfig
from parity_tests.adapters import Attended, Mask, visible


def sequence_first(module: str) -> bool:
    """Return False: the twin is batch first."""
    return False


def norm(twin) -> nn.Module:
    return twin.decoder.layers[0].transformer_block.norm2


def self_attention(twin, x: Tensor, padding: Mask, future: Mask) -> Attended:
    return twin.decoder.layers[1].self_attention(x, x, x, visible(padding, future))


def cross_attention(twin, x: Tensor, memory: Tensor, padding: Mask) -> Attended:
    return twin.decoder.layers[0].transformer_block.self_attention(
        memory, memory, x, visible(padding, None)
    )


def feed_forward(twin, stack: str, x: Tensor) -> Tensor:
    return {"encoder": twin.encoder.layers[0], "decoder": twin.decoder.layers[0].transformer_block}[
        stack
    ].feed_forward(x)


def encoder_block(twin, x: Tensor, padding: Mask) -> Tensor:
    return twin.encoder.layers[0](x, x, x, visible(padding, None))


def decoder_block(
    twin, x: Tensor, memory: Tensor, padding: Mask, future: Mask, memory_padding: Mask
) -> Tensor:
    return twin.decoder.layers[1](
        x, memory, memory, visible(memory_padding, None), visible(padding, future)
    )


def memory(twin, source: Tensor) -> Tensor:
    return twin.encode(source)


def dropout_sites(config: TransformerConfig) -> dict[str, list[str]]:
    """Each module's Flax sites; a transformer block calls its one module twice."""
    sites = {"encoder.dropout": ["encoder.embedding"], "decoder.dropout": ["decoder.embedding"]}
    for i in range(config.encoder.layers):
        sites[f"encoder.layers.{i}.dropout"] = [
            f"encoder.blocks.{i}.branches.{k}.output" for k in (0, 1)
        ]
    for i in range(config.decoder.layers):
        sites[f"decoder.layers.{i}.dropout"] = [f"decoder.blocks.{i}.branches.0.output"]
        sites[f"decoder.layers.{i}.transformer_block.dropout"] = [
            f"decoder.blocks.{i}.branches.{k}.output" for k in (1, 2)
        ]
    return sites
