"""Calls of the parts of torch_reference.blog2023, batch first."""

from torch import Tensor, nn

from jax_transformer.config import TransformerConfig
from parity_tests.adapters import Attended, Mask, hidden


def sequence_first(module: str) -> bool:
    """Return False: the twin is batch first."""
    return False


def norm(twin: nn.Module) -> nn.Module:
    return twin.decoder.decoder_layer[0].encoder_block.layer_norm2


def self_attention(twin: nn.Module, x: Tensor, padding: Mask, future: Mask) -> Attended:
    return twin.decoder.decoder_layer[1].attention(x, x, x, hidden(padding, future))


def cross_attention(twin: nn.Module, x: Tensor, memory: Tensor, padding: Mask) -> Attended:
    return twin.decoder.decoder_layer[0].encoder_block.attention(
        memory, x, memory, hidden(padding, None)
    )


def feed_forward(twin: nn.Module, stack: str, x: Tensor) -> Tensor:
    block = (
        twin.encoder.encoder_layers[0]
        if stack == "encoder"
        else twin.decoder.decoder_layer[0].encoder_block
    )
    return block.feed_forward(x)


def encoder_block(twin: nn.Module, x: Tensor, padding: Mask) -> Tensor:
    return twin.encoder.encoder_layers[0](x, x, x, hidden(padding, None))


def decoder_block(
    twin: nn.Module, x: Tensor, memory: Tensor, padding: Mask, future: Mask, memory_padding: Mask
) -> Tensor:
    return twin.decoder.decoder_layer[1](
        x, memory, hidden(padding, future), hidden(memory_padding, None)
    )


def memory(twin: nn.Module, source: Tensor) -> Tensor:
    return twin.encode(source)


def dropout_sites(config: TransformerConfig) -> dict[str, list[str]]:
    """The two dropouts on each stack's embeddings, and the one in each decoder block."""
    embeddings = {
        f"{stack}.{name}": [f"{stack}.{site}"]
        for stack in ("encoder", "decoder")
        for name, site in (("position_embed.dropout", "embedding"), ("dropout", "embedding.1"))
    }
    layers = range(config.decoder.layers)
    return embeddings | {
        f"decoder.decoder_layer.{i}.dropout": [f"decoder.blocks.{i}.branches.0.output"]
        for i in layers
    }
