""" "Transformer from scratch": documented names and shapes, and the same from torch's layers."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.weights import rules
from parity_tests.cases import ODD, shapes_of, under
from parity_tests.levels import assert_close, error
from parity_tests.twins import Pair, as_torch, pair
from torch_reference import from_scratch as reference
from torch_reference.torch_nn import sinusoids

NAMES = ["from_scratch", "from_scratch_repaired"]
SMALL: dict[str, Any] = ODD | dict(d_ff=24)  # the twin takes a factor


def test_documented_size_in_both_frameworks():
    """Keys and shapes written out from the document: 44 million parameters each."""
    linears = ("queries_transform", "keys_transform", "values_transform", "linear_out")
    attention = shapes_of(*((f"self_attention.{linear}", 512, 512) for linear in linears))
    block = attention | shapes_of(("feed_forward.0", 512, 2048), ("feed_forward.2", 2048, 512))
    block |= shapes_of(("norm1", 0, 512), ("norm2", 0, 512))
    decoder_block = attention | shapes_of(("norm", 0, 512)) | under("transformer_block", block)
    expected = shapes_of(("decoder.fc_out", 512, 10))
    for stack, layer in (("encoder", block), ("decoder", decoder_block)):
        expected |= {f"{stack}.word_embedding.weight": (10, 512)}
        expected |= {f"{stack}.position_embedding.weight": (100, 512)}
        for i in range(6):
            expected |= under(f"{stack}.layers.{i}", layer)

    with torch.device("meta"):
        twin = reference.Transformer(10, 10, 0, 0)
    assert {key: tuple(value.shape) for key, value in twin.state_dict().items()} == expected
    config = jt.preset("from_scratch", source_vocab_size=10, target_vocab_size=10)
    shapes = transformer.shapes(config)
    assert rules.torch_shapes(jt.convert.weight_table(config), shapes) == expected
    assert sum(math.prod(shape) for shape in shapes.values()) == 44_256_266
    assert config.head_width == 64


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="embedding_size=10 is not divisible by num_heads=3"):
        reference.MultiHeadSelfAttentionBlock(10, 3)


# The same numbers from torch's own layers: post-norm, no final norm, the query as residual, no mask
# of the target's padding. Only the scale differs, and the queries' weights can absorb it.


def packed(
    attention: reference.MultiHeadSelfAttentionBlock, name: str, factor: float
) -> dict[str, torch.Tensor]:
    parts = attention.queries_transform, attention.keys_transform, attention.values_transform
    state = {
        f"in_proj_{kind}": torch.cat([getattr(part, kind) for part in parts])
        for kind in ("weight", "bias")
    }
    for value in state.values():
        value.data[: len(value) // 3] *= factor
    return under(name, state | under("out_proj", attention.linear_out.state_dict()))


def stock_layer(block: nn.Module, config: TransformerConfig, factor: float) -> nn.Module:
    """torch's encoder or decoder layer with a block's weights."""
    sizes = dict(d_model=config.d_model, nhead=config.num_heads, dim_feedforward=config.d_ff)
    sizes |= dict(dropout=0.0, batch_first=True)
    inner, state = block, packed(block.self_attention, "self_attn", factor)
    names = {"norm1": "norm1", "norm2": "norm2"}
    names |= {"feed_forward.0": "linear1", "feed_forward.2": "linear2"}
    layer: nn.Module = nn.TransformerEncoderLayer(**sizes)
    if isinstance(block, reference.DecoderBlock):
        inner, layer = block.transformer_block, nn.TransformerDecoderLayer(**sizes)
        state |= packed(inner.self_attention, "multihead_attn", factor)
        state |= under("norm1", block.norm.state_dict())
        names |= {"norm1": "norm2", "norm2": "norm3"}
    for ours, theirs in names.items():
        state |= under(theirs, inner.get_submodule(ours).state_dict())
    layer.double().load_state_dict(state, strict=True)
    return layer


def stock(both: Pair, factor: float) -> torch.Tensor:
    """Return the logits of torch's layers."""
    encoder, decoder = both.torch.encoder, both.torch.decoder
    source, target = as_torch(both.source), as_torch(both.target)
    padding = source == both.config.source_pad_id
    future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    memory, x = encoder.embed(source), decoder.embed(target)
    for block in encoder.layers:
        memory = stock_layer(block, both.config, factor)(memory, src_key_padding_mask=padding)
    for block in decoder.layers:
        x = stock_layer(block, both.config, factor)(
            x, memory, tgt_mask=future, memory_key_padding_mask=padding
        )
    return decoder.fc_out(x)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_stock_transformer_except_for_the_scale(name: str):
    both = pair(jt.preset(name, **SMALL))
    # sqrt(d_k) / sqrt(d_model)
    factor = both.config.num_heads**-0.5 if name == "from_scratch" else 1.0
    expected = stock(both, factor)
    ours, twin = both.logits()
    assert_close((twin, expected), 1e-12, "twin")
    assert_close((ours, expected), 1e-12, "flax")
    other = stock(both, 1.0 / factor if factor != 1.0 else 0.5)
    assert error((twin, other)) > 1e-4, "the scale matters"


def test_the_sinusoids_of_a_later_version_are_one_field_per_side():
    """The state_dict then has no table; learned tables of sinusoids give the same."""
    both = pair(jt.preset("from_scratch", **SMALL))
    with torch.no_grad():
        for stack in (both.torch.encoder, both.torch.decoder):
            table = sinusoids(both.config.max_length, both.config.d_model)
            stack.position_embedding.weight.copy_(table)
    fields = dict.fromkeys(("encoder.positions", "decoder.positions"), "sinusoidal")
    config, state = both.config.with_sizes(**fields), both.torch.state_dict()
    state = {name: value for name, value in state.items() if "position_embedding" not in name}
    later = jt.convert.from_torch(state, config)
    assert_close((later(both.source, both.target), both.logits()[1]), 1e-12)
    assert jt.convert.to_torch(later).keys() == state.keys()
