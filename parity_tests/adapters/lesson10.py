"""Calls of the parts of the lesson10 twin, which is sequence first."""

from torch import Tensor, nn

from jax_transformer.config import TransformerConfig
from parity_tests.adapters import Attended, Mask

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


def sequence_first(module: str) -> bool:
    """True for every module but those on attention weights (b, h, q, k)."""
    return not module.endswith("attn.dropout")


def norm(twin: nn.Module) -> nn.Module:
    return twin.decoder.layers[0].norm3


def self_attention(twin: nn.Module, x: Tensor, padding: Mask, future: Mask) -> Attended:
    out, weights = twin.decoder.layers[1].self_attn(_swap(x), _swap(x), padding, future)
    return _swap(out), weights


def cross_attention(twin: nn.Module, x: Tensor, memory: Tensor, padding: Mask) -> Attended:
    out, weights = twin.decoder.layers[0].multihead_attn(_swap(x), _swap(memory), padding, None)
    return _swap(out), weights


def feed_forward(twin: nn.Module, stack: str, x: Tensor) -> Tensor:
    return getattr(twin, stack).layers[0].feed_forward(x)


def encoder_block(twin: nn.Module, x: Tensor, padding: Mask) -> Tensor:
    return _swap(twin.encoder.layers[0](_swap(x), padding))


def decoder_block(
    twin: nn.Module, x: Tensor, memory: Tensor, padding: Mask, future: Mask, memory_padding: Mask
) -> Tensor:
    return _swap(
        twin.decoder.layers[1](_swap(x), _swap(memory), padding, future, memory_padding)[0]
    )


def memory(twin: nn.Module, source: Tensor) -> Tensor:
    return _swap(twin.encode(source))


def dropout_sites(config: TransformerConfig) -> dict[str, list[str]]:
    """The one module on embeddings is called for each stack."""
    sites = {"pos_enc.dropout": ["encoder.embedding", "decoder.embedding"]}
    for stack, names, layers in (
        ("encoder", _ENCODER_LAYER, config.encoder.layers),
        ("decoder", _DECODER_LAYER, config.decoder.layers),
    ):
        for i in range(layers):
            sites |= {
                f"{stack}.layers.{i}.{name}": [f"{stack}.blocks.{i}.{site}"]
                for name, site in names.items()
            }
    return sites


def _swap(x: Tensor) -> Tensor:
    return x.transpose(0, 1)
