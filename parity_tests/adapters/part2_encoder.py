"""Calls of the parts of the twin of "Transformers from scratch part - 2".

Its decoder is lesson10's, sequence first; its encoder is batch first.
"""

from torch import Tensor, nn

from jax_transformer.config import Part, TransformerConfig


def sequence_first(module: str) -> bool:
    """Return True if the dropout module of this name sees (length, batch, ...).

    Attention weights are (b, h, q, k) everywhere.
    """
    return module.startswith(("decoder.", "pos_enc.")) and not module.endswith("attn.dropout")


def norm(twin: nn.Module) -> nn.Module:
    return twin.decoder.layers[0].norm3


def self_attention(
    twin: nn.Module, x: Tensor, padding: Tensor | None, future: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, weights = twin.decoder.layers[1].self_attn(_swap(x), _swap(x), padding, future)
    return _swap(out), weights


def cross_attention(
    twin: nn.Module, x: Tensor, memory: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, weights = twin.decoder.layers[0].multihead_attn(_swap(x), _swap(memory), padding, None)
    return _swap(out), weights


def feed_forward(twin: nn.Module, stack: str, x: Tensor) -> Tensor:
    return (
        twin.encoder.layers[0].fnn(x)
        if stack == "encoder"
        else twin.decoder.layers[0].feed_forward(x)
    )


def encoder_block(twin: nn.Module, x: Tensor, padding: Tensor | None) -> Tensor:
    return twin.encoder.layers[0](x, padding)


def decoder_block(
    twin: nn.Module,
    x: Tensor,
    memory: Tensor,
    padding: Tensor | None,
    future: Tensor | None,
    memory_padding: Tensor | None,
) -> Tensor:
    return _swap(
        twin.decoder.layers[1](_swap(x), _swap(memory), padding, future, memory_padding)[0]
    )


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


def _swap(x: Tensor) -> Tensor:
    return x.transpose(0, 1)
