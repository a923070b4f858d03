"""Calls of the parts of each PyTorch twin with batch-first arrays: one class per architecture.

Masks are True where hidden, or None: ``padding`` and ``memory_padding`` (b, k), ``future`` (q, k).

    norm(twin)                                  the last norm of decoder layer 0
    self_attention(twin, x, padding, future) -> (out, weights)          decoder layer 1
    cross_attention(twin, x, memory, padding) -> (out, weights)         decoder layer 0
    feed_forward(twin, stack, x)                layer 0 of "encoder" or "decoder"
    encoder_block(twin, x, padding)             layer 0
    decoder_block(twin, x, memory, padding, future, memory_padding)     layer 1
    memory(twin, source) -> (b, s, d)
    dropout_sites(config)                       each dropout module's Flax sites, in call order
    sequence_first(module)                      True if the dropout module is sequence first
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from jax_transformer.config import Part, TransformerConfig

Mask = Tensor | None
Attended = tuple[Tensor, Tensor]
"""Output and weights."""
Sites = dict[str, list[str]]


def hidden(padding: Mask, future: Mask = None) -> Mask:
    """Join hidden keys (b, k) and pairs (q, k) in a mask (b, 1, q, k), axes of 1 allowed."""
    masks = [None if padding is None else padding[:, None, None], future]
    parts = [mask for mask in masks if mask is not None]
    return functools.reduce(torch.logical_or, parts) if parts else None


def visible(padding: Mask, future: Mask = None) -> Mask:
    mask = hidden(padding, future)
    return None if mask is None else ~mask


class BatchFirst:
    """The calls that most twins have in common."""

    def sequence_first(self, module: str) -> bool:
        return False

    def memory(self, twin, source: Tensor) -> Tensor:
        return twin.encode(source)


class Blog2023(BatchFirst):
    """torch_reference.blog2023."""

    def norm(self, twin) -> nn.Module:
        return twin.decoder.decoder_layer[0].encoder_block.layer_norm2

    def self_attention(self, twin, x: Tensor, padding: Mask, future: Mask) -> Attended:
        return twin.decoder.decoder_layer[1].attention(x, x, x, hidden(padding, future))

    def cross_attention(self, twin, x: Tensor, memory: Tensor, padding: Mask) -> Attended:
        attention = twin.decoder.decoder_layer[0].encoder_block.attention
        return attention(memory, x, memory, hidden(padding))

    def feed_forward(self, twin, stack: str, x: Tensor) -> Tensor:
        if stack == "encoder":
            return twin.encoder.encoder_layers[0].feed_forward(x)
        return twin.decoder.decoder_layer[0].encoder_block.feed_forward(x)

    def encoder_block(self, twin, x: Tensor, padding: Mask) -> Tensor:
        return twin.encoder.encoder_layers[0](x, x, x, hidden(padding))

    def decoder_block(self, twin, x, memory, padding, future, memory_padding) -> Tensor:
        block = twin.decoder.decoder_layer[1]
        return block(x, memory, hidden(padding, future), hidden(memory_padding))

    def dropout_sites(self, config: TransformerConfig) -> Sites:
        """The two dropouts on each stack's embeddings, and the one in each decoder block."""
        sites = {
            f"{stack}.{name}": [f"{stack}.{site}"]
            for stack in ("encoder", "decoder")
            for name, site in (("position_embed.dropout", "embedding"), ("dropout", "embedding.1"))
        }
        for i in range(config.decoder.layers):
            site = f"decoder.blocks.{i}.branches.0.output"
            sites[f"decoder.decoder_layer.{i}.dropout"] = [site]
        return sites


class DeepDive(BatchFirst):
    """The deep_dive twin, whose masks are True where visible."""

    def norm(self, twin) -> nn.Module:
        """Return the output of the last norm that the block computes."""
        block = twin.decoder.DecoderBlocklayers[0]
        return block.transformer_block.normalization2 if twin.repaired else block.normalization2

    def self_attention(self, twin, x: Tensor, padding: Mask, future: Mask) -> Attended:
        return twin.decoder.DecoderBlocklayers[1].attention_layer(x, visible(padding, future))

    def cross_attention(self, twin, x: Tensor, memory: Tensor, padding: Mask) -> Attended:
        attention = twin.decoder.DecoderBlocklayers[0].EncoderDecoderAttention
        return attention(x, memory, visible(padding))

    def feed_forward(self, twin, stack: str, x: Tensor) -> Tensor:
        if stack == "encoder":
            return twin.encoder.EncoderBlocklayers[0].feed_forward_layers(x)
        return twin.decoder.DecoderBlocklayers[0].transformer_block.feed_forward_layers(x)

    def encoder_block(self, twin, x: Tensor, padding: Mask) -> Tensor:
        return twin.encoder.EncoderBlocklayers[0](x, visible(padding))

    def decoder_block(self, twin, x, memory, padding, future, memory_padding) -> Tensor:
        block = twin.decoder.DecoderBlocklayers[1]
        return block(x, memory, visible(padding, future), visible(memory_padding))

    def dropout_sites(self, config: TransformerConfig) -> Sites:
        """An encoder block's dropout module is called twice; one inside an unused block never."""
        sites = {f"{stack}.dropout": [f"{stack}.embedding"] for stack in ("encoder", "decoder")}
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


class FromScratch(BatchFirst):
    """ "Transformer from scratch", whose masks are True where visible."""

    def norm(self, twin) -> nn.Module:
        return twin.decoder.layers[0].transformer_block.norm2

    def self_attention(self, twin, x: Tensor, padding: Mask, future: Mask) -> Attended:
        return twin.decoder.layers[1].self_attention(x, x, x, visible(padding, future))

    def cross_attention(self, twin, x: Tensor, memory: Tensor, padding: Mask) -> Attended:
        attention = twin.decoder.layers[0].transformer_block.self_attention
        return attention(memory, memory, x, visible(padding))

    def feed_forward(self, twin, stack: str, x: Tensor) -> Tensor:
        if stack == "encoder":
            return twin.encoder.layers[0].feed_forward(x)
        return twin.decoder.layers[0].transformer_block.feed_forward(x)

    def encoder_block(self, twin, x: Tensor, padding: Mask) -> Tensor:
        return twin.encoder.layers[0](x, x, x, visible(padding))

    def decoder_block(self, twin, x, memory, padding, future, memory_padding) -> Tensor:
        block = twin.decoder.layers[1]
        return block(x, memory, memory, visible(memory_padding), visible(padding, future))

    def dropout_sites(self, config: TransformerConfig) -> Sites:
        """A transformer block calls its one module twice."""
        sites = {f"{stack}.dropout": [f"{stack}.embedding"] for stack in ("encoder", "decoder")}
        for i in range(config.encoder.layers):
            outputs = [f"encoder.blocks.{i}.branches.{k}.output" for k in (0, 1)]
            sites[f"encoder.layers.{i}.dropout"] = outputs
        for i in range(config.decoder.layers):
            outputs = [f"decoder.blocks.{i}.branches.{k}.output" for k in (0, 1, 2)]
            sites[f"decoder.layers.{i}.dropout"] = outputs[:1]
            sites[f"decoder.layers.{i}.transformer_block.dropout"] = outputs[1:]
        return sites


class TorchNN(BatchFirst):
    """torch.nn.Transformer, whose functional dropouts take no masks."""

    def norm(self, twin) -> nn.Module:
        return twin.decoder.layers[0].norm3

    def self_attention(self, twin, x: Tensor, padding: Mask, future: Mask) -> Attended:
        return self._attend(twin.decoder.layers[1].self_attn, x, x, padding, future)

    def cross_attention(self, twin, x: Tensor, memory: Tensor, padding: Mask) -> Attended:
        return self._attend(twin.decoder.layers[0].multihead_attn, x, memory, padding, None)

    def _attend(self, module, x: Tensor, memory: Tensor, padding: Mask, future: Mask) -> Attended:
        masks = dict(key_padding_mask=padding, attn_mask=future)
        return module(x, memory, memory, **masks, need_weights=True, average_attn_weights=False)

    def feed_forward(self, twin, stack: str, x: Tensor) -> Tensor:
        layer = getattr(twin, stack).layers[0]
        return layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))

    def encoder_block(self, twin, x: Tensor, padding: Mask) -> Tensor:
        return twin.encoder.layers[0](x, src_key_padding_mask=padding)

    def decoder_block(self, twin, x, memory, padding, future, memory_padding) -> Tensor:
        masks = dict(tgt_key_padding_mask=padding, memory_key_padding_mask=memory_padding)
        return twin.decoder.layers[1](x, memory, tgt_mask=future, **masks)


# A layer's dropout modules and the site of each in the Flax model. Branch k of a block ends in
# ``output``.
_ENCODER_LAYER = {
    "self_attn.dropout": "branches.0.self_attention.weights",
    "dropout1": "branches.0.output",
    "dropout": "branches.1.feed_forward.activation",
    "dropout2": "branches.1.output",
}
_DECODER_LAYER = {
    "self_attn.dropout": "branches.0.self_attention.weights",
    "dropout1": "branches.0.output",
    "multihead_attn.dropout": "branches.1.cross_attention.weights",
    "dropout2": "branches.1.output",
    "dropout": "branches.2.feed_forward.activation",
    "dropout3": "branches.2.output",
}


def _swap(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def _sites_of(stack: str, names: dict[str, str], layers: int) -> Sites:
    return {
        f"{stack}.layers.{i}.{name}": [f"{stack}.blocks.{i}.{site}"]
        for i in range(layers)
        for name, site in names.items()
    }


class Lesson10:
    """The lesson10 twin, which is sequence first."""

    def sequence_first(self, module: str) -> bool:
        """True for every module but those on attention weights (b, h, q, k)."""
        return not module.endswith("attn.dropout")

    def norm(self, twin) -> nn.Module:
        return twin.decoder.layers[0].norm3

    def self_attention(self, twin, x: Tensor, padding: Mask, future: Mask) -> Attended:
        out, weights = twin.decoder.layers[1].self_attn(_swap(x), _swap(x), padding, future)
        return _swap(out), weights

    def cross_attention(self, twin, x: Tensor, memory: Tensor, padding: Mask) -> Attended:
        attention = twin.decoder.layers[0].multihead_attn
        out, weights = attention(_swap(x), _swap(memory), padding, None)
        return _swap(out), weights

    def feed_forward(self, twin, stack: str, x: Tensor) -> Tensor:
        return getattr(twin, stack).layers[0].feed_forward(x)

    def encoder_block(self, twin, x: Tensor, padding: Mask) -> Tensor:
        return _swap(twin.encoder.layers[0](_swap(x), padding))

    def decoder_block(self, twin, x, memory, padding, future, memory_padding) -> Tensor:
        block = twin.decoder.layers[1]
        return _swap(block(_swap(x), _swap(memory), padding, future, memory_padding)[0])

    def memory(self, twin, source: Tensor) -> Tensor:
        return _swap(twin.encode(source))

    def dropout_sites(self, config: TransformerConfig) -> Sites:
        """The one module on embeddings is called for each stack."""
        sites = {"pos_enc.dropout": ["encoder.embedding", "decoder.embedding"]}
        sites |= _sites_of("encoder", _ENCODER_LAYER, config.encoder.layers)
        return sites | _sites_of("decoder", _DECODER_LAYER, config.decoder.layers)


class Part2Encoder(Lesson10):
    """ "Transformers from scratch part - 2": lesson10's decoder, a batch-first encoder."""

    def sequence_first(self, module: str) -> bool:
        """True for modules that see (length, batch, ...); attention weights are (b, h, q, k)."""
        return module.startswith(("decoder.", "pos_enc.")) and super().sequence_first(module)

    def feed_forward(self, twin, stack: str, x: Tensor) -> Tensor:
        if stack == "encoder":
            return twin.encoder.layers[0].fnn(x)
        return super().feed_forward(twin, stack, x)

    def encoder_block(self, twin, x: Tensor, padding: Mask) -> Tensor:
        return twin.encoder.layers[0](x, padding)

    def memory(self, twin, source: Tensor) -> Tensor:
        return twin.encode(source)

    def dropout_sites(self, config: TransformerConfig) -> Sites:
        """An encoder layer's feed-forward has one dropout module for all of its calls."""
        sites = {"src_dropout": ["encoder.embedding"], "pos_enc.dropout": ["decoder.embedding"]}
        branches = config.encoder.branches
        calls = [k for k, branch in enumerate(branches) if Part.FFN in branch.parts]
        for i in range(config.encoder.layers):
            torch, flax = f"encoder.layers.{i}", f"encoder.blocks.{i}.branches"
            sites[f"{torch}.fnn.dropout"] = [f"{flax}.{k}.feed_forward.activation" for k in calls]
            sites |= {f"{torch}.dropout{k + 1}": [f"{flax}.{k}.output"] for k in range(2)}
        return sites | _sites_of("decoder", _DECODER_LAYER, config.decoder.layers)


OF: dict[str, Any] = {
    "blog2023": Blog2023(),
    "deep_dive": DeepDive(),
    "from_scratch": FromScratch(),
    "lesson10": Lesson10(),
    "part2_encoder": Part2Encoder(),
    "torch_nn": TorchNN(),
}
"""The calls by the name of the architecture."""
