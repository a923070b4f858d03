""" "Transformer from scratch": each component by itself, against torch's layers, edge cases."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.architectures import twins
from jax_transformer.config import TransformerConfig
from jax_transformer.weights import rules
from parity_tests.cases import ODD
from parity_tests.levels import assert_close, error
from parity_tests.twins import Pair, as_torch, pair
from torch_reference import from_scratch as reference
from torch_reference.torch_nn import sinusoids

NAMES = ["from_scratch", "from_scratch_repaired"]
SMALL: dict[str, Any] = ODD | dict(d_ff=24)  # the twin takes a factor


# Each component at the sizes of the document: N sentences, S tokens, embeddings of size E = 512, 8
# heads. On the meta device it costs nothing.


@pytest.fixture
def meta():
    with torch.device("meta"):
        yield


def random(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


def test_shapes_of_every_component(meta):
    memory, x, words = random(4, 7, 512), random(4, 5, 512), torch.ones(4, 9, dtype=torch.long)
    masks = torch.ones(4, 1, 1, 7), torch.ones(4, 1, 5, 5)
    attention = reference.MultiHeadSelfAttentionBlock(512, 8)
    out, weights = attention(memory, memory, x, masks[0])
    assert (out.shape, weights.shape) == ((4, 5, 512), (4, 8, 5, 7))
    assert attention.head_dim == 512 // 8 == 64, "the document's d_k"
    block = reference.TransformerBlock(512, 8, 0.1, 4)
    assert block(memory, memory, x, masks[0]).shape == block.feed_forward(x).shape == (4, 5, 512)
    assert block.feed_forward[0].out_features == 2048
    encoder = reference.Encoder(1000, 512, 6, 5000, 0.1, num_heads=8, forward_expansion=4)
    assert encoder(words, torch.ones(4, 1, 1, 9)).shape == (4, 9, 512)
    decoder_block = reference.DecoderBlock(512, 8, 0.1, 4)
    assert decoder_block(x, memory, memory, *masks).shape == (4, 5, 512)
    decoder = reference.Decoder(10_000, 512, 8, 1000, 0.1, num_heads=8, forward_expansion=4)
    assert decoder(words[:, :5], memory, *masks).shape == (4, 5, 10_000)
    model = reference.Transformer(10, 10, 0, 0)
    source, target = words[:2], words[:2, :7]
    assert model.make_src_mask(source).shape == (2, 1, 1, 9)
    assert model.make_trg_mask(target).shape == (2, 1, 7, 7)
    assert model.encode(source).shape == (2, 9, 512)
    assert model(source, target).shape == (2, 7, 10)


def test_documented_size_in_both_frameworks(meta):
    """Keys and shapes written out from the document: 44 million parameters each."""
    linears = {f"{part}_transform": (512, 512) for part in ("queries", "keys", "values")} | {
        "linear_out": (512, 512)
    }
    attention = {f"self_attention.{linear}": shape for linear, shape in linears.items()}
    block = attention | {
        "feed_forward.0": (2048, 512),
        "feed_forward.2": (512, 2048),
        "norm1": (512,),
        "norm2": (512,),
    }
    decoder_block = (
        attention
        | {"norm": (512,)}
        | {f"transformer_block.{layer}": shape for layer, shape in block.items()}
    )
    layers = {
        f"encoder.layers.{i}.{layer}": shape for i in range(6) for layer, shape in block.items()
    }
    layers |= {
        f"decoder.layers.{i}.{layer}": shape
        for i in range(6)
        for layer, shape in decoder_block.items()
    }
    layers |= {"decoder.fc_out": (10, 512)}
    expected = {f"{layer}.weight": shape for layer, shape in layers.items()} | {
        f"{layer}.bias": shape[:1] for layer, shape in layers.items()
    }
    for stack in ("encoder", "decoder"):
        expected |= {
            f"{stack}.word_embedding.weight": (10, 512),
            f"{stack}.position_embedding.weight": (100, 512),
        }

    twin = reference.Transformer(10, 10, 0, 0)
    assert {key: tuple(value.shape) for key, value in twin.state_dict().items()} == expected
    config = jt.preset("from_scratch", source_vocab_size=10, target_vocab_size=10)
    shapes = {
        key: leaf.shape for key, leaf in transformer.flatten(transformer.abstract(config)).items()
    }
    assert rules.torch_shapes(jt.convert.weight_table(config), shapes) == expected
    assert sum(math.prod(shape) for shape in shapes.values()) == 44_256_266
    assert config.head_width == 64


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="embedding_size=10 is not divisible by num_heads=3"):
        reference.MultiHeadSelfAttentionBlock(10, 3)


# The same numbers from torch's own layers: post-norm, no final norm. Only the scale differs, and
# the queries' weights can absorb it.


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
    state |= {f"out_proj.{key}": value for key, value in attention.linear_out.state_dict().items()}
    return {f"{name}.{key}": value for key, value in state.items()}


def stock_layer(block: nn.Module, config: TransformerConfig, factor: float) -> nn.Module:
    """torch's encoder or decoder layer with a block's weights."""
    sizes = dict(
        d_model=config.d_model,
        nhead=config.num_heads,
        dim_feedforward=config.d_ff,
        dropout=0.0,
        batch_first=True,
    )
    inner, state = block, packed(block.self_attention, "self_attn", factor)
    names = {
        "norm1": "norm1",
        "norm2": "norm2",
        "feed_forward.0": "linear1",
        "feed_forward.2": "linear2",
    }
    layer: nn.Module = nn.TransformerEncoderLayer(**sizes)
    if isinstance(block, reference.DecoderBlock):
        inner, layer = block.transformer_block, nn.TransformerDecoderLayer(**sizes)
        state |= packed(inner.self_attention, "multihead_attn", factor) | {
            f"norm1.{k}": v for k, v in block.norm.state_dict().items()
        }
        names |= {"norm1": "norm2", "norm2": "norm3"}
    for ours, theirs in names.items():
        state |= {
            f"{theirs}.{key}": value
            for key, value in inner.get_submodule(ours).state_dict().items()
        }
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
    assert error((twin, stock(both, 1.0 / factor if factor != 1.0 else 0.5))) > 1e-4, (
        "the scale matters"
    )


def test_the_repaired_scale_sharpens_the_weights():
    """By sqrt(heads): the faithful weights to that power, normed again."""
    faithful, repaired = (pair(jt.preset(name, **SMALL)) for name in NAMES)
    weights = [
        both.flax(both.source, both.target, return_attention=True)[1].encoder[0]
        for both in (faithful, repaired)
    ]
    sharpened = np.asarray(weights[0]) ** math.sqrt(3)
    assert_close((weights[1], sharpened / sharpened.sum(-1, keepdims=True)), 1e-12)


# Edge cases.


def test_a_fully_padded_source_is_read_as_the_mean_of_all_values():
    both = pair(jt.preset("from_scratch", **SMALL))
    both.source[2] = both.config.source_pad_id
    with torch.no_grad():
        x = both.torch.encoder.embed(as_torch(both.source))
        attention = both.torch.encoder.layers[0].self_attention
        out, _ = attention(x, x, x, both.torch.make_src_mask(as_torch(both.source)))
        mean = attention.linear_out(attention.values_transform(x[2]).mean(dim=0))
    assert_close((out[2], mean.expand(7, -1)), 1e-12, "twin")
    excluded = jt.convert.from_torch(
        both.torch.state_dict(), jt.preset("from_scratch", **SMALL, mask_fill="excluded")
    )
    assert np.all(
        np.asarray(excluded(both.source, both.target, return_attention=True)[1].encoder[0][2]) == 0
    ), "what else it could be"


def test_target_padding_is_not_masked():
    """The id that pads the target is a token like another, which later tokens see."""
    both = pair(jt.preset("from_scratch", **SMALL))
    ours, theirs = both.logits()
    other = jt.preset("from_scratch", **SMALL, target_pad_id=5)
    state = both.torch.state_dict()
    twin = twins.twin(other).double().eval()
    twin.load_state_dict(state)
    again = Pair(other, both.flax, twin, both.source, both.target).again()
    assert all(map(np.array_equal, again.logits(), (ours, theirs)))
    padded, token = both.target.copy(), both.target.copy()
    padded[:, 1], token[:, 1] = both.config.target_pad_id, 7
    for with_pad, with_token in zip(
        both.logits(target=padded), both.logits(target=token), strict=True
    ):
        difference = np.abs(with_pad - with_token).max(axis=(0, 2))
        assert difference[0] == 0
        assert np.all(difference[1:] > 1e-3)


def test_the_second_residual_is_the_query():
    """With a cross-attention of zeros, the output depends only on the target."""
    both = pair(jt.preset("from_scratch", **SMALL))
    with torch.no_grad():
        for layer in both.torch.decoder.layers:
            for parameter in layer.transformer_block.self_attention.linear_out.parameters():
                parameter.zero_()
    deaf = both.again()
    others = (
        np.random.default_rng(1).integers(1, 11, (3, 7)),
        np.random.default_rng(2).integers(1, 11, (3, 5)),
    )
    ours, theirs = deaf.logits()
    assert_close((ours, theirs), 1e-12)
    for before, after in zip((ours, theirs), deaf.logits(source=others[0]), strict=True):
        assert np.array_equal(before, after)
    for before, after in zip((ours, theirs), deaf.logits(target=others[1]), strict=True):
        assert np.all(np.abs(before - after).max(axis=(1, 2)) > 1e-3)


def test_the_sinusoids_of_a_later_version_are_one_field_per_side():
    """The state_dict then has no table; learned tables of sinusoids give the same."""
    both = pair(jt.preset("from_scratch", **SMALL))
    with torch.no_grad():
        for stack in (both.torch.encoder, both.torch.decoder):
            stack.position_embedding.weight.copy_(
                sinusoids(both.config.max_length, both.config.d_model)
            )
    config = both.config.with_sizes(
        **{"encoder.positions": "sinusoidal", "decoder.positions": "sinusoidal"}
    )
    state = {
        name: value
        for name, value in both.torch.state_dict().items()
        if "position_embedding" not in name
    }
    later = jt.convert.from_torch(state, config)
    assert_close((later(both.source, both.target), both.logits()[1]), 1e-12)
    assert jt.convert.to_torch(later).keys() == state.keys()
