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
from jax_transformer.config import Branch, Part, Residual, TransformerConfig
from jax_transformer.data import batches, encoding, packing, shuffle
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
MEMORY = Branch((Part.CROSS,), Residual.MEMORY)


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
    kinds, order = packing.Kinds.of(pairs.lengths)
    chosen = packing.patterns(kinds.lengths, kinds.counts, WIDTHS)
    packed = packing.PackedRows(kinds, chosen, np.array([len(chosen)]), WIDTHS)
    rows = [order[row] for row in packed.pairs(np.arange(len(packed)), 0, 0)]
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


def packed_rows(
    lengths: np.ndarray, width: int, parts: np.ndarray | None = None
) -> tuple[packing.PackedRows, np.ndarray]:
    """Return the rows of pairs of these lengths, and the pairs in their order."""
    kinds, order = packing.Kinds.of(lengths, parts)
    totals = lengths.max(axis=0), lengths.sum(axis=0)
    return packing.pack_all(kinds, width, *totals), order


TOKENS = st.integers(1, 4) | st.integers(1, 99)
"""Few lengths, which are repeated, and some of all."""


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=60),
    st.integers(0, 40),
    st.lists(st.integers(0, 2), min_size=60, max_size=60),
    st.integers(0, 3),
)
@hypothesis.example([(2, 2)] * 7, 2, [0] * 60, 0)  # two patterns of one kind, one has three rows
def test_every_pair_is_in_one_row_that_has_room(lengths, room, parts, epoch):
    """The widest row is as long as the longest pair, or longer."""
    array, of_pairs = np.array(lengths), np.array(parts[: len(lengths)])
    for each in (None, of_pairs):
        width = int(array.max()) + room
        rows, order = packed_rows(array, width, each)
        assert max(rows.widths) == width
        pairs = [order[row] for row in rows.pairs(np.arange(len(rows)), 3, epoch)]
        assert sorted(itertools.chain.from_iterable(pairs)) == list(range(len(lengths)))
        assert all((array[row].sum(axis=0) <= rows.widths).all() for row in pairs)
        some = rows.pairs(np.arange(len(rows))[::-2], 3, epoch)
        assert all(map(np.array_equal, (order[row] for row in some), pairs[::-2]))
        assert rows.pairs(np.arange(0), 3, epoch) == []
        if each is not None:
            of_rows = np.repeat(np.arange(len(rows.parts)), rows.parts)
            assert [set(each[row]) for row in pairs] == [{part} for part in of_rows]


def test_rows_are_full_and_depend_on_seed_and_epoch():
    """Also if one side is shorter, which has narrower rows."""
    random = np.random.default_rng(0)
    sources = np.clip(random.normal(13, 4, 3000).round(), 1, 40).astype(int)
    lengths = np.stack([sources, np.maximum(sources // 3 + random.integers(-1, 2, 3000), 1)], 1)
    rows, _ = packed_rows(lengths, 128)
    assert rows.widths == (128, 40)
    assert lengths.sum() / (sum(rows.widths) * len(rows)) > 0.97
    everything = np.arange(len(rows))
    first, again, *others = (
        np.concatenate(rows.pairs(everything, *each)) for each in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert np.array_equal(first, again)
    assert all(np.mean(first == other) < 0.5 for other in others)


def test_the_pairs_of_a_row_have_keys_of_their_own(monkeypatch):
    """The order of an epoch's batches has those of the epoch's number."""
    rows, _ = packed_rows(np.full((9, 2), 3), 6)
    keys, epochs = shuffle.keys, []
    monkeypatch.setattr(shuffle, "keys", lambda *each: epochs.append(each[1]) or keys(*each))
    rows.pairs(np.arange(2), 0, 5)
    assert len(epochs) == 1 and epochs[0] >= 2**62


@pytest.mark.parametrize("longest, width, least", [(60, 64, 0.95), (250, 256, 0.94)])
def test_the_plan_of_a_large_text_is_small(longest, width, least):
    """Its size and time depend on the lengths that there are; rows are full nevertheless."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(3, 0.7, (300_000, 1)) * random.lognormal(0, 0.2, (300_000, 2))
    lengths = np.clip(lengths, 1, longest).astype(int)
    rows, _ = packed_rows(lengths, width)
    assert len(rows) > 10_000 and len(rows.patterns) < 1.2 * len(rows.kinds.counts) < 4000
    assert lengths.sum() / (sum(rows.widths) * len(rows)) > least


def test_a_kind_has_lengths_of_one_step():
    """So the records of a kind are in the order of the text in every shard."""
    lengths = np.arange(1, 600)
    rounded = packing.rounded(np.stack([lengths, lengths[::-1]], 1))[:, 0]
    assert np.array_equal(-(-rounded // batches.STEP), -(-lengths // batches.STEP))
    assert (rounded[:32] == lengths[:32]).all() and (rounded >= lengths).all()


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
        ("small", {"decoder.branches": (MEMORY,)}, "it adds the memory position by position"),
    ],
)
def test_a_model_that_cannot_be_packed_says_why(name, changes, reason):
    config = jt.preset(name, **changes)
    assert config.unpackable == reason
    with pytest.raises(ConfigError, match="packing=64"):
        packing.check(64, config)


def test_a_row_wider_than_the_model_or_under_a_pair_is_refused():
    config = replace(jt.preset("small"), max_length=63, mask_fill=-1e4)
    with pytest.raises(ConfigError, match=r"data\.packing=64 is over the model's max_length=63"):
        packing.check(64, config)
    packing.check(63, config)
    with pytest.raises(ConfigError, match=r"data\.packing=4 is under the longest pair, 5 tokens"):
        packed_rows(np.array([[5, 1]]), 4)
    assert packed_rows(np.array([[5, 1]]), 5)[0].widths == (5, 4)
