"""Calls of the parts of the deep_dive twin, whose masks are True where visible."""

from torch import Tensor, nn

from jax_transformer.config import Part, TransformerConfig
from parity_tests.adapters import Attended, Mask, visible


def sequence_first(module: str) -> bool:
    """Return False: the twin is batch first."""
    return False


def norm(twin: nn.Module) -> nn.Module:
    """Return the output of the last norm that the block computes."""
    block = twin.decoder.DecoderBlocklayers[0]
    return block.transformer_block.normalization2 if twin.repaired else block.normalization2


def self_attention(twin: nn.Module, x: Tensor, padding: Mask, future: Mask) -> Attended:
    return twin.decoder.DecoderBlocklayers[1].attention_layer(x, visible(padding, future))


def cross_attention(twin: nn.Module, x: Tensor, memory: Tensor, padding: Mask) -> Attended:
    return twin.decoder.DecoderBlocklayers[0].EncoderDecoderAttention(x, memory, visible(padding))


def feed_forward(twin: nn.Module, stack: str, x: Tensor) -> Tensor:
    block = (
        twin.encoder.EncoderBlocklayers[0]
        if stack == "encoder"
        else twin.decoder.DecoderBlocklayers[0].transformer_block
    )
    return block.feed_forward_layers(x)


def encoder_block(twin: nn.Module, x: Tensor, padding: Mask) -> Tensor:
    return twin.encoder.EncoderBlocklayers[0](x, visible(padding))


def decoder_block(
    twin: nn.Module, x: Tensor, memory: Tensor, padding: Mask, future: Mask, memory_padding: Mask
) -> Tensor:
    return twin.decoder.DecoderBlocklayers[1](
        x, memory, visible(padding, future), visible(memory_padding)
    )


def memory(twin: nn.Module, source: Tensor) -> Tensor:
    return twin.encode(source)


def dropout_sites(config: TransformerConfig) -> dict[str, list[str]]:
    """The encoder block's dropout module is called twice; the one inside an unused block never."""
    sites = {"encoder.dropout": ["encoder.embedding"], "decoder.dropout": ["decoder.embedding"]}
    for i in range(config.encoder.layers):
        branches = f"encoder.blocks.{i}.branches"
        sites[f"encoder.EncoderBlocklayers.{i}.dropout_layer"] = [
            f"{branches}.0.output",
            f"{branches}.1.output",
        ]
    for i in range(config.decoder.layers):
        block, branches = f"decoder.DecoderBlocklayers.{i}", f"decoder.blocks.{i}.branches"
        sites[f"{block}.dropoutlayer1"] = [f"{branches}.0.output"]
        sites[f"{block}.dropoutlayer2"] = [f"{branches}.1.output"]
        sites[f"{block}.transformer_block.dropout_layer"] = (
            [f"{branches}.2.output"] if Part.FFN in config.decoder.parts else []
        )
    return sites
