"""Packed rows: each pair gets the numbers that it gets alone, and pairs that fit share rows."""

import itertools
from dataclasses import replace

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_transformer as jt
from jax_transformer.config import TransformerConfig
from jax_transformer.data import batches, encoding, packing
from jax_transformer.errors import ConfigError
from jax_transformer.training import step
from parity_tests.marks import quick_if
from parity_tests.unit.helpers import random_arrays, tiny

PLACES = ("encoder.positions_at", "decoder.positions_at")
POSITIONS = ("encoder.positions", "decoder.positions")
MODELS = {
    "post-norm, learned positions": dict(name="lesson10_repaired"),
    "a fill that is not excluded": dict(name="from_scratch"),
    "positions in the feed-forward, scan, remat": dict(
        {"name": "part2_encoder_repaired", "num_layers": 2, "scan_layers": True, "remat": "full"}
        | dict.fromkeys(PLACES, "feed_forward")
    ),
    "relative positions, -inf": dict(name="t5", mask_fill="minus_infinity"),
    "a table a block": {"name": "t5"} | dict.fromkeys(POSITIONS, "relative_per_block"),
    "positions that count no padding": dict(name="m2m_100"),
    "sinusoids": dict(name="vaswani2017_base"),
}
QUICK = ("relative positions, -inf", "positions that count no padding")
QUICK += ("positions in the feed-forward, scan, remat",)
LENGTHS = np.array([(4, 3), (2, 6), (5, 2), (3, 3), (1, 1), (6, 4), (2, 2)])
"""Tokens of a few pairs, without the special ones."""
WIDTHS, ROWS = (16, 15), 4


def encoded(config: TransformerConfig, lengths: np.ndarray = LENGTHS) -> encoding.EncodedPairs:
    random = np.random.default_rng(0)
    sides = zip((config.source_vocab_size, config.target_vocab_size), lengths.T, strict=True)
    special = {config.source_pad_id, config.target_pad_id, config.bos_id, config.eos_id}
    sources, targets = (
        [random.choice([*set(range(size)) - special], n).astype(np.int32) for n in side]
        for size, side in sides
    )
    eos, bos = config.eos_id, config.bos_id
    ids = encoding.SpecialIds(config.source_pad_id, eos, config.target_pad_id, bos, eos)
    return encoding.EncodedPairs(sources, targets, ids, np.arange(len(lengths)), dropped_long=0)


def both(pairs: encoding.EncodedPairs) -> tuple[batches.PackedBatch, batches.Batch]:
    """The same pairs, packed in rows of which one is filler, and one a row."""
    rows = packing.pack(pairs.lengths, WIDTHS, np.arange(len(pairs.sources)))
    assert max(map(len, rows)) > 1 and len(rows) < ROWS
    in_rows = pairs.take(np.concatenate(rows))
    return (
        batches.packed_batch(in_rows, list(map(len, rows)), WIDTHS, ROWS),
        batches.make_batch(pairs, 9, len(pairs.sources)),
    )


def model_of(changes: dict) -> TransformerConfig:
    return tiny(
        **(dict(num_layers=1) | changes | dict(d_model=6, num_heads=3, d_ff=5, max_length=16))
    )


@pytest.mark.parametrize("name", [quick_if(name in QUICK, name) for name in MODELS])
def test_packed_pairs_have_the_loss_and_the_gradients_of_pairs_alone(name):
    config = model_of(MODELS[name])
    arrays = {k: jnp.asarray(v, jnp.float64) for k, v in random_arrays(config).items()}

    def loss(arrays, batch):
        return step.loss_sum(arrays, {}, batch, config, 0.1)

    results = [
        jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays, batch)
        for batch in both(encoded(config))
    ]
    ((packed, tokens), packed_grads), ((alone, same_tokens), grads) = results
    assert tokens == same_tokens == (LENGTHS[:, 1] + 1).sum()
    np.testing.assert_allclose(packed, alone, rtol=1e-13)
    for key, gradient in grads.items():
        largest = np.abs(gradient).max()
        assert np.abs(packed_grads[key] - gradient).max() <= 1e-12 * largest + 1e-13, key


def test_the_segments_count_a_row_and_say_where_padding_is():
    config = model_of({"source_pad_id": 1, "target_pad_id": 0})
    pairs = encoded(config, np.array([(2, 1), (3, 4)]))
    batch = batches.packed_batch(pairs.take(np.array([1, 0])), [2], (9, 8), 2)
    a, b = (pairs.sources[i].tolist() for i in (0, 1))
    x, y = (pairs.targets[i].tolist() for i in (0, 1))
    eos, bos, source_pad, pad = config.eos_id, config.bos_id, 1, 0
    assert batch.source.tolist() == [
        [*b, eos, *a, eos, source_pad, source_pad],
        [eos] + 8 * [source_pad],
    ]
    assert batch.target_in.tolist() == [[bos, *y, bos, *x, pad], [bos] + 7 * [pad]]
    assert batch.target_out.tolist() == [[*y, eos, *x, eos, pad], 8 * [pad]]
    source, target = batch.segments
    assert source.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] + 8 * [0]]
    assert target.tolist() == [[1, 1, 1, 1, 1, 2, 2, 0], [1] + 7 * [0]]


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=60),
    st.integers(12, 40),
    st.lists(st.integers(0, 2), min_size=60, max_size=60),
)
def test_every_pair_is_in_one_row_that_has_room(lengths, width, parts):
    array, of_pairs = np.array(lengths), np.array(parts[: len(lengths)])
    for each in (None, of_pairs):
        rows = packing.pack_all(array, width, 3, each)
        assert sorted(itertools.chain.from_iterable(rows.pairs)) == list(range(len(lengths)))
        assert rows.lengths.tolist() == [array[row].sum(axis=0).tolist() for row in rows.pairs]
        assert (rows.lengths.max(axis=0) <= rows.widths).all() and max(rows.widths) == width
        if each is not None:
            assert [set(each[row]) for row in rows.pairs] == [{part} for part in rows.parts]


def test_rows_are_full_and_depend_on_the_seed():
    """Also if one side is shorter, which has narrower rows."""
    random = np.random.default_rng(0)
    sources = np.clip(random.normal(13, 4, 3000).round(), 1, 40).astype(int)
    lengths = np.stack([sources, np.maximum(sources // 3 + random.integers(-1, 2, 3000), 1)], 1)
    rows = packing.pack_all(lengths, 128, 0)
    assert rows.widths == (128, 40)
    assert lengths.sum() / (sum(rows.widths) * len(rows.pairs)) > 0.97
    again, other = (packing.pack_all(lengths, 128, seed).pairs for seed in (0, 1))
    assert all(map(np.array_equal, rows.pairs, again))
    assert not all(map(np.array_equal, rows.pairs, other))


@pytest.mark.parametrize(
    "name, changes, reason",
    [
        ("lesson10", {}, "its attention sees padding (decoder.cross_mask)"),
        ("deep_dive", {}, "its attention sees padding (encoder.self_mask, decoder.cross_mask)"),
        ("longt5", {}, "its attention is local (transient_global)"),
        ("whisper_tiny", {}, "its source is sound"),
        ("small", {"mask_fill": -100.0}, "a hidden key keeps some weight (mask_fill=-100.0)"),
        ("small", {"encoder.head_merge": "raw"}, "its attention merges heads across positions"),
        ("small", {"decoder.mixing": "summed"}, "its attention sums the values of all tokens"),
    ],
)
def test_a_model_that_cannot_be_packed_says_why(name, changes, reason):
    config = jt.preset(name, **changes)
    assert config.unpackable == reason
    with pytest.raises(ConfigError, match="packing=64"):
        packing.check(64, config)


def test_a_row_wider_than_the_model_or_under_a_pair_is_refused():
    config = replace(jt.preset("small"), max_length=63)
    with pytest.raises(ConfigError, match=r"data\.packing=64 is over the model's max_length=63"):
        packing.check(64, config)
    packing.check(63, config)
    with pytest.raises(ConfigError, match=r"data\.packing=4 is under the longest pair, 5 tokens"):
        packing.pack_all(np.array([[5, 1]]), 4, 0)
    assert packing.pack_all(np.array([[5, 1]]), 5, 0).widths == (5, 4)
