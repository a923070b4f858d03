"""Local attention against attention to all tokens with the mask and the sums written out."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer.config import TransformerConfig
from jax_transformer.nn.attention import attend
from jax_transformer.nn.dropout import Dropout
from jax_transformer.nn.local_attention import global_blocks, window
from parity_tests.unit.helpers import batch, furthest, random_model, tiny

RADIUS, SIZE = 2, 3
FEW = {"encoder.local_radius": RADIUS, "encoder.global_block_size": SIZE, "num_layers": 1}
SPANS = ("local", "transient_global")


def config_of(span: str) -> TransformerConfig:
    buckets = {"encoder.relative_buckets": 6, "encoder.relative_max_distance": 4}
    return tiny("longt5", **FEW, **buckets, **{"encoder.attention_span": span})


def members_of(valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's global block or -1, and the row's number of blocks."""
    last = -1 + sum(bool(valid[end]) for end in range(SIZE - 1, len(valid), SIZE))
    blocks = [min(i // SIZE, last) if ok else -1 for i, ok in enumerate(valid)]
    return np.array(blocks), np.arange(last + 1)


def over_all_tokens(model: jt.Transformer, x: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return what local attention computes for one row, by scores of every pair of tokens."""
    part, length = model.encoder.blocks[0].self_attention, x.shape[1]
    positions = np.arange(length)
    near = np.abs(positions[None] - positions[:, None]) <= RADIUS
    mask, keys = near & valid[None], jnp.asarray(x)
    bias = model.encoder.relative(jnp.asarray(positions), jnp.asarray(positions))
    if part.global_norm is not None:
        blocks, sums = members_of(valid)
        summed = np.stack([x[0][blocks == i].sum(axis=0) for i in sums] or [np.zeros((0, 1))])
        if len(sums):
            keys = jnp.concatenate([keys, part.global_norm(jnp.asarray(summed[None]))], axis=1)
        distances = jnp.asarray(sums[None, None] - blocks[None, :, None])
        bias = jnp.concatenate([bias, model.encoder.global_relative.of_distances(distances)], -1)
        mask = np.concatenate([mask, np.ones((length, len(sums)), bool)], axis=1)
    queries = part._heads(part.query(jnp.asarray(x)))
    seen = jnp.asarray(mask[None, None])
    mixed, _ = attend(queries, *part.keys_values(keys), seen, bias, scale=part.scale)
    return np.asarray(part.out(mixed.reshape(*x.shape[:2], -1)))


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("length", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_local_attention_is_full_attention_under_its_mask(span, length):
    config = config_of(span)
    model = random_model(config)
    x = np.random.default_rng(0).normal(size=(2, length, config.d_model))
    valid = np.arange(length)[None] < np.array([length, max(1, length - 2)])[:, None]
    part, encoder = model.encoder.blocks[0].self_attention, model.encoder
    seen = window(config.encoder, jnp.asarray(valid), encoder.relative, encoder.global_relative)
    actual, weights = part(jnp.asarray(x), seen, Dropout())
    for row in range(2):
        expected = over_all_tokens(model, x[row : row + 1], valid[row])
        assert furthest(np.asarray(actual)[row][valid[row]], expected[0][valid[row]]) < 1e-12
    sums = length // SIZE if span == "transient_global" else 0
    assert weights.shape == (2, config.num_heads, length, 3 * (RADIUS + 1) + sums)
    np.testing.assert_allclose(np.asarray(weights)[0].sum(axis=-1), 1.0, rtol=1e-12)


def test_weights_are_over_the_tokens_of_the_documented_columns():
    config = config_of("local")
    source, target = batch(config, source=7)
    _, attention = random_model(config)(source, target, return_attention=True)
    for query in range(7):
        columns = np.flatnonzero(np.asarray(attention.encoder[0])[0, 0, query])
        tokens = (query // (RADIUS + 1) - 1) * (RADIUS + 1) + columns
        near = range(max(0, query - RADIUS), min(7, query + RADIUS + 1))
        assert tokens.tolist() == [i for i in near if source[0, i] != config.source_pad_id]


def test_dropped_weights_are_zero_and_the_others_larger():
    config = config_of("transient_global").with_sizes(
        dropout=0.0, activation_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.5
    )
    (source, target), model = batch(config), random_model(config)
    full, dropped = (
        np.asarray(model(source, target, rngs=rngs, return_attention=True)[1].encoder[0])
        for rngs in (None, jax.random.key(0))
    )
    gone = (dropped == 0) & (full > 0)
    assert 0.3 < gone.sum() / (full > 0).sum() < 0.7
    np.testing.assert_allclose(dropped[~gone], 2 * full[~gone], rtol=1e-12)
    assert furthest(model.encode(source), model.encode(source, rngs=jax.random.key(0))) > 1e-3


def test_padding_changes_no_token():
    """It adds blocks, and global blocks without tokens."""
    config = config_of("transient_global")
    source, _ = batch(config, source=7)
    source[source == config.source_pad_id] = 3
    longer = np.pad(source, [(0, 0), (0, 5)], constant_values=config.source_pad_id)
    model = random_model(config)
    assert furthest(model.encode(longer)[:, :7], model.encode(source)) < 1e-12


def test_far_tokens_reach_a_query_only_by_sums():
    """Negative control of the two kinds: one layer, and a token out of the query's radius."""
    for span, reaches in zip(SPANS, (False, True), strict=True):
        config = config_of(span)
        model = random_model(config)
        source = np.full((1, 7), 4, np.int32)
        other = source.copy()
        other[0, 6] = 5
        first, second = (np.asarray(model.encode(ids))[0, 0] for ids in (source, other))
        assert (furthest(first, second) > 1e-6) == reaches


@pytest.mark.parametrize("span", SPANS)
def test_no_array_has_a_number_for_each_pair_of_tokens(span):
    config, length = config_of(span).with_sizes(max_length=120), 120
    program = str(jax.make_jaxpr(random_model(config).encode)(np.full((1, length), 4, np.int32)))
    shapes = [tuple(map(int, sizes.split(","))) for sizes in re.findall(r"\[([\d,]+)\]", program)]
    assert max(map(math.prod, shapes)) >= length * config.d_model
    assert not [shape for shape in shapes if sum(size >= length for size in shape) > 1]


def test_tokens_after_the_last_whole_block_belong_to_it():
    valid = np.arange(8)[None] < np.array([8, 5, 2])[:, None]
    blocks = np.asarray(global_blocks(jnp.asarray(valid), SIZE))
    assert blocks.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1, -1], [-1] * 8]


def test_sums_have_arrays_of_their_own():
    names = {span: set(jt.transformer.shapes(config_of(span))) for span in SPANS}
    assert names["transient_global"] - names["local"] == {
        "encoder.global_relative.embedding",
        "encoder.blocks.0.self_attention.global_norm.scale",
    }
