"""Calls of "Transformers from scratch part - 2": lesson10's decoder, a batch-first encoder."""

from torch import Tensor, nn

from jax_transformer.config import Part, TransformerConfig
from parity_tests.adapters import Mask
from parity_tests.adapters.lesson10 import cross_attention, decoder_block, norm, self_attention

__all__ = ["cross_attention", "decoder_block", "norm", "self_attention"]


def sequence_first(module: str) -> bool:
    """True for modules that see (length, batch, ...); attention weights are (b, h, q, k)."""
    return module.startswith(("decoder.", "pos_enc.")) and not module.endswith("attn.dropout")


def feed_forward(twin: nn.Module, stack: str, x: Tensor) -> Tensor:
    if stack == "encoder":
        return twin.encoder.layers[0].fnn(x)
    return twin.decoder.layers[0].feed_forward(x)


def encoder_block(twin: nn.Module, x: Tensor, padding: Mask) -> Tensor:
    return twin.encoder.layers[0](x, padding)


def memory(twin: nn.Module, source: Tensor) -> Tensor:
    return twin.encode(source)


def dropout_sites(config: TransformerConfig) -> dict[str, list[str]]:
    """An encoder layer's feed-forward has one dropout module for all of its calls."""
    sites = {"src_dropout": ["encoder.embedding"], "pos_enc.dropout": ["decoder.embedding"]}
    for i in range(config.encoder.layers):
        torch, flax = f"encoder.layers.{i}", f"encoder.blocks.{i}.branches"
        calls = [k for k, branch in enumerate(config.encoder.branches) if Part.FFN in branch.parts]
        sites[f"{torch}.fnn.dropout"] = [f"{flax}.{k}.feed_forward.activation" for k in calls]
        sites |= {f"{torch}.dropout{k + 1}": [f"{flax}.{k}.output"] for k in range(2)}
    for i in range(config.decoder.layers):
        torch, flax = f"decoder.layers.{i}", f"decoder.blocks.{i}.branches"
        sites |= {
            f"{torch}.self_attn.dropout": [f"{flax}.0.self_attention.weights"],
            f"{torch}.multihead_attn.dropout": [f"{flax}.1.cross_attention.weights"],
            f"{torch}.dropout": [f"{flax}.2.feed_forward.activation"],
        }
        sites |= {f"{torch}.dropout{k + 1}": [f"{flax}.{k}.output"] for k in range(3)}
    return sites
