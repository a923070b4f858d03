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
from parity_tests.cases import ODD, SQUARE, shapes_of, under
from parity_tests.levels import assert_close, error
from parity_tests.test_dropout import DrawnDropout, GivenDropout
from parity_tests.twins import Pair, as_torch, pair, randomized
from torch_reference import part2_encoder

BOTH = pytest.mark.parametrize("preset", ["part2_encoder", "part2_encoder_repaired"])
SIZES: dict[str, Any] = ODD | dict(max_length=7)


def document(
    config: jt.TransformerConfig, dtype: torch.dtype = torch.float64
) -> part2_encoder.Encoder:
    """The document's encoder without a decoder, with random weights everywhere."""
    sizes = config.d_model, config.d_ff, config.num_heads, config.dropout, config.max_length
    repaired = bool(config.encoder.self_mask)
    encoder = part2_encoder.Encoder(*sizes, config.encoder.layers, repaired=repaired)
    return randomized(encoder.to(dtype).eval())


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
        lengths_of_rows = np.array([length, max(1, length - 2), max(1, length - 4)])
        hidden = np.arange(length)[None] >= lengths_of_rows[:, None]
        with torch.no_grad():
            plain, padded = theirs(as_torch(x)), theirs(as_torch(x), as_torch(hidden))
        assert_close((encode(x), plain), 1e-12, f"length {length}")
        assert_close((encode(x, ~hidden), padded), 1e-12, f"length {length}, padded")


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
        jt.convert.from_torch(under("encoder", bare), config, part="encoder")
    with pytest.raises(InputError, match="do not fit the model") as caught:
        jt.convert.from_torch(bare, config)
    missing = "missing encoder.layers.0.attention.qkv.weight"
    assert any(problem.startswith(missing) for problem in caught.value.details)


@BOTH
def test_names_shapes_and_count_at_the_documents_sizes(preset: str):
    d, f, layers = 512, 1264, 3
    layer = shapes_of(("attention.qkv", d, 3 * d), ("attention.linear_layer", d, d))
    layer |= shapes_of(("fnn.linear1", d, f), ("fnn.linear2", f, d))
    layer |= {f"norm{k}.{name}": (d,) for k in (1, 2) for name in ("gamma", "beta")}
    expected = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    config = jt.preset(preset, source_vocab_size=1000, target_vocab_size=1200)
    with torch.device("meta"):
        bare = part2_encoder.Encoder(repaired=preset != "part2_encoder").state_dict()
        state = twins.twin(config).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in bare.items()} == expected
    assert sum(math.prod(shape) for shape in expected.values()) == 7_046_352
    around = {"src_emb.weight": (1000, d), "tgt_emb.weight": (1200, d), "pos_enc.pe": (40, 1, d)}
    around |= shapes_of(("linear", d, 1200), ("decoder.norm", 0, d))
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    decoder = {name: shape for name, shape in shapes.items() if name.startswith("decoder.layers.")}
    assert shapes == under("encoder", expected) | around | decoder
    stock = torch.nn.TransformerDecoderLayer(d, 8, f, device="meta").state_dict()
    assert decoder == {
        f"decoder.layers.{i}.{name}": tuple(tensor.shape)
        for i in range(layers)
        for name, tensor in stock.items()
    }
    arrays = transformer.shapes(config)
    own = [shape for name, shape in arrays.items() if name.startswith("encoder.")]
    assert sum(map(math.prod, own)) == 7_046_352


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
        q, k, v = np.split(fused[:, 3 * h * width : 3 * (h + 1) * width], 3, axis=1)
        weights = np.exp(q @ k.T / np.sqrt(width))
        values = weights / weights.sum(axis=1, keepdims=True) @ v
        for position in range(length):
            raw = preset == "part2_encoder"
            row, piece = divmod(h * length + position, heads) if raw else (position, h)
            merged[row, piece * width : (piece + 1) * width] = values[position]
    with torch.no_grad():
        expected = attention.linear_layer(as_torch(merged)).numpy()
    ours, theirs = attend(both, x)
    assert_close((ours[0], expected), 1e-12, "flax")
    assert_close((theirs[0], expected), 1e-12, "torch")


@BOTH
def test_the_feed_forward_knows_positions_only_in_the_faithful_one(preset: str):
    both = pair(jt.preset(preset, **SIZES))
    same = np.broadcast_to(embeddings(both.config, 1), (3, 7, 12)).copy()
    with torch.no_grad():
        theirs = both.torch.encoder.layers[0].fnn(as_torch(same)).numpy()
    module = both.flax.encoder.blocks[0].feed_forward
    ours = np.asarray(module(jnp.asarray(same), jnp.arange(7)[None], Dropout()))
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
    dropouts = dict(dropout=0.3, activation_dropout=0.3, embedding_dropout=0.0)
    config = jt.preset("part2_encoder", **SIZES, **dropouts)
    theirs = document(config)
    ours = jt.convert.from_torch(theirs.state_dict(), config, part="encoder")
    masks: dict[str, np.ndarray] = {}
    rates: dict[str, float] = {}
    x = embeddings(config, 7)
    with_masks = ours.encode_embeddings(x, rngs=DrawnDropout(masks, rates))
    blocks = [f"blocks.{i}.branches" for i in range(2)]
    both_calls = ("0.feed_forward.activation", "1.feed_forward.activation")
    sites = (*both_calls, "0.output", "1.output")
    expected = {f"{block}.{site}" for block in blocks for site in sites}
    assert {name for name, rate in rates.items() if rate} == expected
    assert set(rates.values()) <= {0.0, 0.3}
    for block in blocks:
        first, second = (masks[f"{block}.{call}"] for call in both_calls)
        assert (first != second).any()

    def masked(*sites: str) -> GivenDropout:
        return GivenDropout([torch.from_numpy(masks[site]) for site in sites], 0.3)

    def run(*calls: str) -> torch.Tensor:
        for block, layer in zip(blocks, theirs.layers, strict=True):
            layer.fnn.dropout = masked(*(f"{block}.{call}" for call in calls))
            layer.dropout1, layer.dropout2 = (masked(f"{block}.{k}.output") for k in (0, 1))
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
