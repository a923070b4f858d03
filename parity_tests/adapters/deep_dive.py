"""Calls of the parts of the deep_dive twin.

Masks come in True where hidden; the twin's own are True where visible.
"""

from torch import Tensor, nn

from jax_transformer.config import Part, TransformerConfig


def sequence_first(module: str) -> bool:
    """Return False: the twin is batch first."""
    return False


def _visible(padding: Tensor | None, future: Tensor | None = None) -> Tensor | None:
    """The twin's mask (b, 1, q, k) of hidden keys (b, k) and hidden pairs (q, k)."""
    hidden = [
        mask
        for mask in (None if padding is None else padding[:, None, None], future)
        if mask is not None
    ]
    if not hidden:
        return None
    return ~hidden[0] if len(hidden) == 1 else ~(hidden[0] | hidden[1])


def norm(twin: nn.Module) -> nn.Module:
    """Return the output of the last norm that the block computes."""
    block = twin.decoder.DecoderBlocklayers[0]
    return block.transformer_block.normalization2 if twin.repaired else block.normalization2


def self_attention(
    twin: nn.Module, x: Tensor, padding: Tensor | None, future: Tensor | None
) -> tuple[Tensor, Tensor]:
    return twin.decoder.DecoderBlocklayers[1].attention_layer(x, _visible(padding, future))


def cross_attention(
    twin: nn.Module, x: Tensor, memory: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    return twin.decoder.DecoderBlocklayers[0].EncoderDecoderAttention(x, memory, _visible(padding))


def feed_forward(twin: nn.Module, stack: str, x: Tensor) -> Tensor:
    block = (
        twin.encoder.EncoderBlocklayers[0]
        if stack == "encoder"
        else twin.decoder.DecoderBlocklayers[0].transformer_block
    )
    return block.feed_forward_layers(x)


def encoder_block(twin: nn.Module, x: Tensor, padding: Tensor | None) -> Tensor:
    return twin.encoder.EncoderBlocklayers[0](x, _visible(padding))


def decoder_block(
    twin: nn.Module,
    x: Tensor,
    memory: Tensor,
    padding: Tensor | None,
    future: Tensor | None,
    memory_padding: Tensor | None,
) -> Tensor:
    return twin.decoder.DecoderBlocklayers[1](
        x, memory, _visible(padding, future), _visible(memory_padding)
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
