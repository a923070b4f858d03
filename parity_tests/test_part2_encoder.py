"""The encoder of "Transformers from scratch part - 2": merge, feed-forward and positions."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.architectures import twins
from jax_transformer.errors import InputError
from jax_transformer.nn.dropout import Dropout
from jax_transformer.nn.embeddings import sinusoids
from jax_transformer.weights import torch_bridge
from parity_tests.cases import ODD, SQUARE
from parity_tests.levels import assert_close, error
from parity_tests.test_dropout import DrawnDropout, GivenDropout
from parity_tests.twins import Pair, as_torch, pair
from torch_reference import part2_encoder

BOTH = pytest.mark.parametrize("preset", ["part2_encoder", "part2_encoder_repaired"])
SIZES: dict[str, Any] = ODD | dict(max_length=7)


def document(
    config: jt.TransformerConfig, dtype: torch.dtype = torch.float64
) -> part2_encoder.Encoder:
    """The document's encoder without a decoder, with random weights everywhere."""
    generator = torch.Generator().manual_seed(0)
    repaired = bool(config.encoder.self_mask)
    sizes = (
        config.d_model,
        config.d_ff,
        config.num_heads,
        config.dropout,
        config.max_length,
        config.encoder.layers,
    )
    encoder = part2_encoder.Encoder(*sizes, repaired=repaired).to(dtype).eval()
    with torch.no_grad():
        for name, tensor in encoder.state_dict().items():
            scale = tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.5
            tensor.copy_(
                torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * scale
                + name.endswith("gamma")
            )
    return encoder


def embeddings(config: jt.TransformerConfig, length: int, rows: int = 3) -> np.ndarray:
    return np.random.default_rng(length).normal(size=(rows, length, config.d_model))


@BOTH
@pytest.mark.parametrize(
    ("sizes", "lengths"), [(SIZES, (1, 2, 3, 7)), (SQUARE, [6])], ids=["odd", "square"]
)
def test_the_documents_encoder_at_any_length(preset: str, sizes: dict, lengths: Iterable[int]):
    """Fewer tokens than heads, as many and more, which a raw merge mixes in other ways."""
    config = jt.preset(preset, **sizes)
    theirs = document(config)
    ours = jt.convert.from_torch(theirs.state_dict(), config, part="encoder")
    encode = jax.jit(ours.encode_embeddings)
    for length in lengths:
        x = embeddings(config, length)
        hidden = (
            np.arange(length)[None]
            >= np.array([length, max(1, length - 2), max(1, length - 4)])[:, None]
        )
        with torch.no_grad():
            assert_close((encode(x), theirs(as_torch(x))), 1e-12, f"length {length}")
            assert_close(
                (encode(x, ~hidden), theirs(as_torch(x), as_torch(hidden))),
                1e-12,
                f"length {length}, padded",
            )


@BOTH
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_encoder_keys_round_trip_bit_for_bit(preset: str, dtype: torch.dtype):
    config = jt.preset(preset, **SIZES)
    state = document(config, dtype).state_dict()
    again = jt.convert.to_torch(jt.convert.from_torch(state, config, part="encoder"))
    assert sorted(again) == sorted(state)
    for name, tensor in state.items():
        assert again[name].tobytes() == torch_bridge.to_numpy(tensor).tobytes(), name


def test_keys_of_an_encoder_and_of_a_whole_model_are_not_interchangeable():
    config = jt.preset("part2_encoder", **SIZES)
    bare = document(config).state_dict()
    with pytest.raises(InputError, match=r"unexpected encoder\.layers\.0\.attention\.qkv\.weight"):
        jt.convert.from_torch(
            {f"encoder.{name}": tensor for name, tensor in bare.items()}, config, part="encoder"
        )
    with pytest.raises(InputError, match="do not fit the model") as caught:
        jt.convert.from_torch(bare, config)
    missing = "missing encoder.layers.0.attention.qkv.weight"
    assert any(problem.startswith(missing) for problem in caught.value.details)


@BOTH
def test_names_shapes_and_count_at_the_documents_sizes(preset: str):
    d, f, layers = 512, 1264, 3
    layer = {
        **{"attention.qkv.weight": (3 * d, d), "attention.qkv.bias": (3 * d,)},
        **{"attention.linear_layer.weight": (d, d), "attention.linear_layer.bias": (d,)},
        **{
            "fnn.linear1.weight": (f, d),
            "fnn.linear1.bias": (f,),
            "fnn.linear2.weight": (d, f),
            "fnn.linear2.bias": (d,),
        },
        **{f"norm{k}.{name}": (d,) for k in (1, 2) for name in ("gamma", "beta")},
    }
    expected = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    config = jt.preset(preset, source_vocab_size=1000, target_vocab_size=1200)
    with torch.device("meta"):
        bare = part2_encoder.Encoder(repaired=preset != "part2_encoder").state_dict()
        state = twins.twin(config).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in bare.items()} == expected
    assert sum(math.prod(shape) for shape in expected.values()) == 7_046_352
    around = {
        "src_emb.weight": (1000, d),
        "tgt_emb.weight": (1200, d),
        "pos_enc.pe": (40, 1, d),
        "linear.weight": (1200, d),
    }
    around |= {"linear.bias": (1200,), "decoder.norm.weight": (d,), "decoder.norm.bias": (d,)}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    decoder = {name: shape for name, shape in shapes.items() if name.startswith("decoder.layers.")}
    assert (
        shapes == {f"encoder.{name}": shape for name, shape in expected.items()} | around | decoder
    )
    stock = torch.nn.TransformerDecoderLayer(d, 8, f, device="meta").state_dict()
    assert decoder == {
        f"decoder.layers.{i}.{name}": tuple(tensor.shape)
        for i in range(layers)
        for name, tensor in stock.items()
    }
    arrays = transformer.flatten(transformer.abstract(config))
    assert (
        sum(math.prod(leaf.shape) for name, leaf in arrays.items() if name.startswith("encoder."))
        == 7_046_352
    )


# The parts, written out by hand


def attend(both: Pair, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Layer 0's self-attention of the Flax model and of the twin."""
    module = both.flax.encoder.blocks[0].self_attention
    ours = module(jnp.asarray(x), module.keys_values(jnp.asarray(x)), None, Dropout())[0]
    with torch.no_grad():
        return np.asarray(ours), both.torch.encoder.layers[0].attention(as_torch(x))[0].numpy()


@BOTH
@pytest.mark.parametrize("length", [2, 7])
def test_each_head_s_values_go_to_the_documented_columns(preset: str, length: int):
    """From the fused weights by hand, one value at a time: counted raw, or by position."""
    both = pair(jt.preset(preset, **SIZES))
    x, heads, width = embeddings(both.config, length, rows=1), 3, 4
    attention = both.torch.encoder.layers[0].attention
    fused = x[0] @ attention.qkv.weight.detach().numpy().T + attention.qkv.bias.detach().numpy()
    merged = np.zeros((length, heads * width))
    for h in range(heads):
        q, k, v = (
            fused[:, (3 * h + part) * width : (3 * h + part + 1) * width] for part in range(3)
        )
        weights = np.exp(q @ k.T / np.sqrt(width))
        values = weights / weights.sum(axis=1, keepdims=True) @ v
        for position in range(length):
            row, piece = (
                divmod(h * length + position, heads) if preset == "part2_encoder" else (position, h)
            )
            merged[row, piece * width : (piece + 1) * width] = values[position]
    expected = (
        merged @ attention.linear_layer.weight.detach().numpy().T
        + attention.linear_layer.bias.detach().numpy()
    )
    ours, theirs = attend(both, x)
    assert_close((ours[0], expected), 1e-12, "flax")
    assert_close((theirs[0], expected), 1e-12, "torch")


@BOTH
def test_the_feed_forward_knows_positions_only_in_the_faithful_one(preset: str):
    both = pair(jt.preset(preset, **SIZES))
    same = np.broadcast_to(embeddings(both.config, 1), (3, 7, 12)).copy()
    with torch.no_grad():
        theirs = both.torch.encoder.layers[0].fnn(as_torch(same)).numpy()
    ours = np.asarray(
        both.flax.encoder.blocks[0].feed_forward(jnp.asarray(same), jnp.arange(7), Dropout())
    )
    assert_close((ours, theirs), 1e-12)
    for out in (ours, theirs):
        spread = np.ptp(out, axis=1).max()
        assert spread > 1e-2 if preset == "part2_encoder" else spread < 1e-14


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_one_table_of_positions(exponent: float):
    """Pair j turns by 10000^-(exponent · 2j / d) per position, alike up to the last bit."""
    table = part2_encoder.sinusoids(40, 512, exponent)
    assert_close((sinusoids(40, 512, exponent=exponent), table), 1e-14)
    for position, j in ((1, 0), (39, 1), (7, 128), (39, 255)):
        angle = position * 10_000.0 ** -(exponent * 2 * j / 512)
        assert table[position, 2 * j].item() == pytest.approx(math.sin(angle), abs=1e-14)
        assert table[position, 2 * j + 1].item() == pytest.approx(math.cos(angle), abs=1e-14)


# Training


def test_one_feed_forward_two_masks():
    """Each call of the one module has its own mask; exchanging the two shows."""
    config = jt.preset(
        "part2_encoder", **SIZES, dropout=0.3, activation_dropout=0.3, embedding_dropout=0.0
    )
    theirs = document(config)
    ours = jt.convert.from_torch(theirs.state_dict(), config, part="encoder")
    masks: dict[str, np.ndarray] = {}
    rates: dict[str, float] = {}
    x = embeddings(config, 7)
    with_masks = ours.encode_embeddings(x, rngs=DrawnDropout(masks, rates))
    blocks = [f"blocks.{i}.branches" for i in range(2)]
    both_calls = ("0.feed_forward.activation", "1.feed_forward.activation")
    expected = {
        f"{block}.{site}" for block in blocks for site in (*both_calls, "0.output", "1.output")
    }
    assert {name for name, rate in rates.items() if rate} == expected and set(rates.values()) <= {
        0.0,
        0.3,
    }
    assert all(
        (masks[f"{block}.{both_calls[0]}"] != masks[f"{block}.{both_calls[1]}"]).any()
        for block in blocks
    )

    def run(*calls: str) -> torch.Tensor:
        for block, layer in zip(blocks, theirs.layers, strict=True):
            layer.fnn.dropout = GivenDropout(
                [torch.from_numpy(masks[f"{block}.{call}"]) for call in calls], 0.3
            )
            for k, name in enumerate(("dropout1", "dropout2")):
                setattr(
                    layer, name, GivenDropout([torch.from_numpy(masks[f"{block}.{k}.output"])], 0.3)
                )
        with torch.no_grad():
            return theirs.train()(as_torch(x))

    assert_close((with_masks, run(*both_calls)), 1e-12)
    assert error((with_masks, run(*reversed(both_calls)))) > 1e-2


# Edge cases


@BOTH
def test_one_position_too_many_is_refused_with_the_same_message(preset: str):
    both = pair(jt.preset(preset, **SIZES))
    x = embeddings(both.config, 8)
    ids = np.full((1, 8), 3), both.target[:1]
    calls = ((both.flax.encode_embeddings, both.torch.encoder, (x,)), (both.flax, both.torch, ids))
    for ours, theirs, arrays in calls:
        with pytest.raises(InputError, match="source is 8 tokens long, over max_length=7") as one:
            ours(*arrays)
        with pytest.raises(ValueError, match="over max_length=7") as other:
            theirs(*map(as_torch, arrays))
        assert str(one.value) == str(other.value)
