"""Calls of the parts of torch.nn.Transformer, whose functional dropouts take no masks."""

from torch import Tensor, nn

from parity_tests.adapters import Attended, Mask


def norm(twin: nn.Module) -> nn.Module:
    return twin.decoder.layers[0].norm3


def self_attention(twin: nn.Module, x: Tensor, padding: Mask, future: Mask) -> Attended:
    return _attend(twin.decoder.layers[1].self_attn, x, x, padding, future)


def cross_attention(twin: nn.Module, x: Tensor, memory: Tensor, padding: Mask) -> Attended:
    return _attend(twin.decoder.layers[0].multihead_attn, x, memory, padding, None)


def _attend(module: nn.Module, x: Tensor, memory: Tensor, padding: Mask, future: Mask) -> Attended:
    return module(
        x,
        memory,
        memory,
        key_padding_mask=padding,
        attn_mask=future,
        need_weights=True,
        average_attn_weights=False,
    )


def feed_forward(twin: nn.Module, stack: str, x: Tensor) -> Tensor:
    layer = getattr(twin, stack).layers[0]
    return layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))


def encoder_block(twin: nn.Module, x: Tensor, padding: Mask) -> Tensor:
    return twin.encoder.layers[0](x, src_key_padding_mask=padding)


def decoder_block(
    twin: nn.Module, x: Tensor, memory: Tensor, padding: Mask, future: Mask, memory_padding: Mask
) -> Tensor:
    return twin.decoder.layers[1](
        x,
        memory,
        tgt_mask=future,
        tgt_key_padding_mask=padding,
        memory_key_padding_mask=memory_padding,
    )


def memory(twin: nn.Module, source: Tensor) -> Tensor:
    return twin.encode(source)
