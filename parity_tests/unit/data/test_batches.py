"""Batches: few shapes, every pair once per epoch, and the same batch at the same step."""

import dataclasses
import itertools
import threading

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_transformer import errors
from jax_transformer.data import batches, encoding, packing, shuffle
from parity_tests.unit import runs

NO_DEADLINE = hypothesis.settings(deadline=None)  # the machine may be busy
IDS = encoding.SpecialIds(source_pad=1, source_eos=3, target_pad=0, target_bos=2, target_eos=4)


def corpus(count: int, longest: int, seed: int = 0) -> encoding.EncodedPairs:
    """Return pairs of random lengths, in a plan's order; the first source token is the number."""
    random = np.random.default_rng(seed)
    sources, targets = (
        [random.integers(5, 1000, random.integers(1, longest), np.int32) for _ in range(count)]
        for _ in range(2)
    )
    encoded = encoding.EncodedPairs(sources, targets, IDS, np.arange(count), dropped_long=0)
    encoded = encoded.take(batches.LengthTable.of(encoded.lengths)[1])
    for i, source in enumerate(encoded.sources):
        source[0] = 1000 + i
    return encoded


def table(lengths, parts=None) -> batches.LengthTable:
    lengths = np.array(lengths)
    counted, order = batches.LengthTable.of(lengths, None if parts is None else np.array(parts))
    assert (order == np.arange(len(lengths))).all(), "not in the table's order"
    return counted


def epoch_batches(plan: batches.BatchPlan, epoch: int) -> list[tuple[int, np.ndarray]]:
    steps = range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch)
    return list(map(plan.batch_indices, steps))


def plan_for(encoded: encoding.EncodedPairs, *, buckets=4, tokens=256, seed=7) -> batches.BatchPlan:
    counted = table(encoded.lengths)
    widths = batches.choose_widths(counted, buckets, 64)
    rows = batches.rows_per_batch(widths, tokens)
    return batches.BatchPlan(counted, widths, rows, seed)


ENCODED = corpus(503, 60)
PLAN = plan_for(ENCODED)


def pairs_in(batch: batches.Batch) -> list[int]:
    return [int(i) - 1000 for i in batch.source[:, 0] if i != IDS.source_eos]


def same(a: batches.Batch, b: batches.Batch) -> bool:
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def taken(count: int, *arguments, **options) -> list[batches.Batch]:
    stream = batches.train_stream(*arguments, **options)
    try:
        return list(itertools.islice(stream, count))
    finally:
        stream.close()


# Widths and rows


def positions(lengths, widths) -> int:
    return sum(min(width for width in widths if width >= length) for length in lengths)


@NO_DEADLINE
@hypothesis.given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.integers(1, 4),
    st.sampled_from([30, 32, 33]),
)
def test_bucket_widths_are_optimal(lengths, count, max_length):
    both = np.array([lengths, [1] * len(lengths)]).T
    widths = batches.choose_widths(batches.LengthTable.of(both)[0], count, max_length)
    assert list(widths) == sorted(set(widths)) and len(widths) <= count
    allowed = sorted({min(width, max_length) for width in range(4, max_length + 4, 4)})
    assert set(widths) <= set(allowed)
    assert widths[-1] == min(width for width in allowed if width >= max(lengths))
    sizes = range(1, min(count, len(allowed)) + 1)
    choices = itertools.chain(*(itertools.combinations(allowed, size) for size in sizes))
    fewest = min(positions(lengths, each) for each in choices if each[-1] >= max(lengths))
    assert positions(lengths, widths) == fewest


def test_widths_never_pass_the_limit():
    assert batches.choose_widths(table([[3, 1], [18, 18], [19, 2], [2, 20]]), 4, 18 + 2) == (4, 20)


@pytest.mark.parametrize(
    "arguments", [([], 1, 8), ([[9, 1]], 1, 8), ([[1, 1]], 0, 8), ([[1, 1]], 1, 0)]
)
def test_invalid_widths_are_refused(arguments):
    lengths = np.array(arguments[0], int).reshape(-1, 2)
    with pytest.raises(errors.ConfigError):
        batches.choose_widths(table(lengths), *arguments[1:])


def test_rows_fill_the_budget():
    assert batches.rows_per_batch((8, 24, 64, 300), 256) == (32, 10, 4, 1)
    assert batches.rows_per_batch((8, 24, 64, 300), 256, rows_multiple=4) == (32, 8, 4, 4)
    for arguments in ((0,), (8, 0)):
        with pytest.raises(errors.ConfigError, match="positive"):
            batches.rows_per_batch((8,), *arguments)


# The plan


@NO_DEADLINE
@hypothesis.given(
    st.integers(1, 200),
    st.integers(2, 60),
    st.integers(1, 5),
    st.integers(1, 400),
    st.integers(0, 3),
    st.integers(-5, 2**70),
)
def test_every_epoch_has_every_pair_exactly_once(count, longest, buckets, tokens, epoch, seed):
    encoded = corpus(count, longest)
    plan = plan_for(encoded, buckets=buckets, tokens=tokens, seed=seed)
    planned = epoch_batches(plan, epoch)
    drawn = np.concatenate([indices for _, indices in planned])
    assert sorted(drawn.tolist()) == list(range(count))
    for bucket, indices in planned:
        assert 0 < len(indices) <= plan.rows[bucket]
        assert encoded.lengths[indices].max() <= plan.widths[bucket]
    partly = [bucket for bucket, indices in planned if len(indices) < plan.rows[bucket]]
    assert partly in ([], [len(plan.widths) - 1])


def test_a_pair_goes_to_its_narrowest_bucket_and_left_overs_to_the_next():
    lengths = np.array([[8, 3]] * 7 + [[9, 2]] * 4 + [[5, 17]] * 2)
    plan = batches.BatchPlan(table(lengths), (8, 16, 24), (3, 2, 4), seed=0)
    planned = []
    for bucket, indices in epoch_batches(plan, 0):
        planned.append((bucket, tuple(sorted(lengths[indices].max(axis=1).tolist()))))
    planned.sort()
    assert [bucket for bucket, _ in planned] == [0, 0, 1, 1, 2]
    assert planned[:2] == [(0, (8, 8, 8))] * 2  # 7 = 2 x 3 + 1
    assert sum((widths for _, widths in planned[2:4]), ()).count(8) == 1  # 1 + 4 = 2 x 2 + 1
    assert planned[4] == (2, (9, 17, 17))


def test_the_order_is_a_pure_function_of_seed_and_epoch():
    def order(seed, epoch):
        planned = epoch_batches(plan_for(ENCODED, seed=seed), epoch)
        return [(bucket, *indices.tolist()) for bucket, indices in planned]

    assert order(7, 0) == order(7, 0)
    orders = [order(seed, epoch) for seed in (0, 1, 7, -1, 2**70 + 3) for epoch in (0, 1, 2)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    # The pairs that share a batch change as well, and so do the positions of all widths.
    first, second = ({frozenset(batch[1:]) for batch in each} for each in orders[:2])
    assert not {batch for batch in first if len(batch) > 1} & second
    assert [batch[0] for batch in orders[0]] != sorted(batch[0] for batch in orders[0])
    with pytest.raises(errors.ConfigError, match="step=-1"):
        PLAN.batch_indices(-1)


def test_the_order_is_the_same_in_every_version():
    # A changed order would make every unfinished run continue on other data.
    plan = batches.BatchPlan(table(np.full((10, 2), 5)), (8,), (4,), seed=3)
    expected = [[6, 3, 0, 7], [4, 5], [9, 8, 2, 1]]
    assert [indices.tolist() for _, indices in epoch_batches(plan, 1)] == expected


@NO_DEADLINE
@hypothesis.given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_a_computed_permutation_has_every_element_once(count, seed):
    (keys,), everything = shuffle.keys(seed, 3, 1), np.arange(count)
    order = shuffle.shuffled(everything, count, keys)
    assert sorted(order.tolist()) == everything.tolist()
    some = everything[::3]
    assert np.array_equal(shuffle.shuffled(some, count, keys), order[::3])


def test_each_position_may_have_a_permutation_of_its_own():
    keys, counts = shuffle.keys(1, 2, 40), np.arange(1, 41)
    of_each = np.repeat(np.arange(40), counts)
    positions = np.concatenate([np.arange(count) for count in counts])
    elements = shuffle.shuffled(positions, counts[of_each], keys[of_each])
    expected = [shuffle.shuffled(np.arange(n), n, keys[n - 1]) for n in counts.tolist()]
    assert np.array_equal(elements, np.concatenate(expected))


def test_a_computed_permutation_is_as_random_as_one_that_is_drawn():
    at, after = np.zeros((12, 12)), np.zeros((12, 12))
    for epoch in range(4000):
        order = shuffle.shuffled(np.arange(12), 12, shuffle.keys(5, epoch, 1)[0])
        at[np.arange(12), order] += 1
        after[order[:-1], order[1:]] += 1
    apart = after[~np.eye(12, dtype=bool)]
    expected = 4000 / 12  # of both, with a standard deviation of 17
    assert np.abs(at - expected).max() < 80 and np.abs(apart - expected).max() < 80


def test_pairs_come_as_often_as_their_weights_say():
    parts = np.repeat([0, 1, 2], [100, 203, 200])
    counted, order = batches.LengthTable.of(ENCODED.lengths, parts)
    encoded, parts = ENCODED.take(order), parts[order]
    weights = (2.0, 1.0, 0.4)
    plan = dataclasses.replace(PLAN, table=counted, weights=weights)
    counts = np.zeros((30, 503), np.int64)
    for epoch in range(30):
        for bucket, indices in epoch_batches(plan, epoch):
            assert len(indices) <= plan.rows[bucket]
            assert encoded.lengths[indices].max() <= plan.widths[bucket]
            np.add.at(counts[epoch], indices, 1)
    assert (counts[:, parts == 0] == 2).all() and (counts[:, parts == 1] == 1).all()
    rare = counts[:, parts == 2]
    assert rare.max() == 1 and 74 <= rare.sum(axis=1).min() == rare.sum(axis=1).max() <= 86
    assert rare.sum(axis=0).min() > 0, "every epoch draws others"
    tokens = (encoded.lengths.sum(axis=1) * np.array(weights)[parts]).sum()
    cells = sum(2 * plan.rows[b] * plan.widths[b] for b, _ in epoch_batches(plan, 0))
    assert plan.fill() == pytest.approx(tokens / cells)


def test_the_number_of_pairs_of_a_part_is_rounded_and_never_0():
    """Three pairs with weight 0.6 come 1.8 times, seven with 0.01 come 0.07 times."""
    counted = table(np.full((10, 2), 5), np.repeat([0, 1], [3, 7]))
    plan = batches.BatchPlan(counted, (8,), (4,), seed=3, weights=(0.6, 0.01))
    drawn = np.concatenate([indices for _, indices in epoch_batches(plan, 0)])
    assert [(drawn < 3).sum(), (drawn >= 3).sum()] == [2, 1]


def test_a_batch_of_weighted_pairs_is_shuffled_like_any_other():
    plan = batches.BatchPlan(table(np.full((8, 2), 5)), (8,), (8,), seed=3, weights=(2.0,))
    drawn = np.concatenate([indices for _, indices in epoch_batches(plan, 0)]).tolist()
    assert len(drawn) == 16 and sorted(drawn) == sorted([*range(8)] * 2)
    assert sorted(drawn[:8]) != [*range(8)], "not each pair once and then once more"


def test_the_plan_of_billions_of_pairs_is_as_small():
    counts = np.array([[3 * 10**9, 10**9]])
    both = np.stack([counts, counts], axis=-1)
    counted = batches.LengthTable(counts, 5 * both, np.array([[[4, 4], [8, 8]]]))
    plan = batches.BatchPlan(counted, (4, 8), (64, 32), seed=1)
    first = [plan.batch_indices(step) for step in (0, 10**7, plan.batches_per_epoch - 1)]
    for bucket, indices in first:
        assert len(set(indices.tolist())) == plan.rows[bucket]
        assert (indices >= 3 * 10**9).all() == bucket
        assert np.abs(np.diff(indices)).min() > 1000


def test_fill_is_the_share_of_tokens():
    stream = taken(PLAN.batches_per_epoch, ENCODED, PLAN)
    sources, targets = zip(*((each.source, each.target_out) for each in stream), strict=True)
    tokens = sum((ids != IDS.source_pad).sum() for ids in sources)
    tokens += sum((ids != IDS.target_pad).sum() for ids in targets)
    filler = sum(PLAN.rows[bucket] - len(indices) for bucket, indices in epoch_batches(PLAN, 0))
    size = sum(ids.size for ids in (*sources, *targets))
    assert PLAN.fill() == pytest.approx((tokens - filler) / size, abs=1e-12)
    assert batches.BatchPlan(table([[2, 6]] * 3), (8,), (2,), seed=0).fill() == 24 / 64
    narrow = batches.BatchPlan(table([[2, 6]] * 3), (8,), (2,), 0, target_widths=(6,))
    assert narrow.fill() == 24 / 56


def test_the_targets_of_a_bucket_fit_with_those_left_over_in_others():
    assert batches.target_widths(table([[3, 11], [14, 2]]), (12, 16)) == (12, 12)
    assert batches.target_widths(table([[2, 3], [14, 13]]), (12, 16, 20)) == (4, 16, 16)
    assert batches.target_widths(table([[2, 13]]), (14,)) == (14,)


def test_a_pair_wider_than_all_buckets_is_refused():
    with pytest.raises(errors.ConfigError, match=r"length of 9 .* widest bucket, 8"):
        batches.BatchPlan(table([[2, 9]]), (8,), (2,), seed=0).batch_indices(0)
    with pytest.raises(errors.ConfigError, match="widest bucket, 8"):
        list(batches.by_length(np.array([9]), (8,), (2,)))


# Arrays


def test_a_batch_has_tokens_special_tokens_and_padding():
    encoded = encoding.EncodedPairs(
        [np.array([10, 11], np.int32), np.array([], np.int32)],
        [np.array([20], np.int32), np.array([21, 22, 23], np.int32)],
        IDS,
        np.arange(2),
        dropped_long=0,
    )
    batch = batches.make_batch(encoded.take(np.array([1, 0])), width=4, rows=3)
    assert batch.source.tolist() == [[3, 1, 1, 1], [10, 11, 3, 1], [3, 1, 1, 1]]
    assert batch.target_in.tolist() == [[2, 21, 22, 23], [2, 20, 0, 0], [2, 0, 0, 0]]
    assert batch.target_out.tolist() == [[21, 22, 23, 4], [20, 4, 0, 0], [0, 0, 0, 0]]
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in batch)
    assert isinstance(batch, tuple)  # already a pytree


def test_packed_rows_have_pairs_and_filler():
    added = encoding.SpecialTokens((8,), (3,)), encoding.SpecialTokens((), (4,))
    encoded = encoding.EncodedPairs(
        [np.array([10, 11], np.int32), np.array([12], np.int32)],
        [np.array([20], np.int32), np.array([21, 22, 23], np.int32)],
        IDS,
        np.arange(2),
        dropped_long=0,
        added=added,
    )
    batch = batches.packed_batch(encoded, [2], (9, 7), 2)
    assert batch.source.tolist() == [[8, 10, 11, 3, 8, 12, 3, 1, 1], [8, 3, *[1] * 7]]
    assert batch.target_in.tolist() == [[2, 20, 2, 21, 22, 23, 0], [2, *[0] * 6]]
    assert batch.target_out.tolist() == [[20, 4, 21, 22, 23, 4, 0], [0] * 7]
    source, target = (segments.tolist() for segments in batch.segments)
    assert source == [[1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 1, *[0] * 7]]
    assert target == [[1, 1, 2, 2, 2, 2, 0], [1, *[0] * 6]]


# The stream


def test_the_stream_gives_the_plan_in_its_shapes():
    count, shapes = PLAN.batches_per_epoch, set(zip(PLAN.rows, PLAN.widths, strict=True))
    stream = taken(2 * count, ENCODED, PLAN)
    assert {array.shape for batch in stream for array in batch} == shapes and len(shapes) == 4
    for step, batch in enumerate(stream):
        assert pairs_in(batch) == PLAN.batch_indices(step)[1].tolist()
    for of_epoch in (stream[:count], stream[count:]):
        assert sorted(itertools.chain(*map(pairs_in, of_epoch))) == list(range(503))


def test_resuming_at_any_step_gives_the_same_batches():
    encoded = corpus(37, 20)
    uninterrupted = taken(60, encoded, plan_for(encoded, tokens=64))
    assert 5 < plan_for(encoded, tokens=64).batches_per_epoch < 30
    for start in range(0, 59, 4):
        resumed = taken(3, encoded, plan_for(encoded, tokens=64), start)
        assert all(same(a, b) for a, b in zip(uninterrupted[start:], resumed, strict=False))
    assert not same(uninterrupted[0], uninterrupted[1])


def test_the_stream_stops_at_its_end_step_or_never():
    assert len(list(batches.train_stream(ENCODED, PLAN, 5, 12))) == 7
    assert len(taken(5, ENCODED, PLAN, 10**12)) == 5
    assert list(batches.train_stream(ENCODED, PLAN, 5, 5)) == []


@pytest.mark.parametrize("packed", [False, True])
def test_a_process_reads_its_rows_alone(packed):
    plan, source = PLAN, ENCODED
    if packed:
        kinds, order = packing.Kinds.of(ENCODED.lengths)
        source, lengths = ENCODED.take(order), ENCODED.lengths
        rows = packing.pack_all(kinds, 64, lengths.max(axis=0), lengths.sum(axis=0))
        of_rows = table(np.full((len(rows), 2), 64))
        plan = batches.BatchPlan(of_rows, (64,), (6,), 3, packed=rows)
    read, steps = [], 2 * plan.batches_per_epoch

    class Counted:
        def take(self, numbers):
            read.extend(numbers.tolist())
            return source.take(numbers)

    complete = list(batches.train_stream(source, plan, 0, steps))
    halves = [
        list(batches.train_stream(Counted(), plan, 0, steps, local_rows=local))
        for local in (lambda n: np.arange(0, n, 2), lambda n: np.arange(1, n, 2))
    ]
    assert sorted(read) == sorted([*range(503)] * 2)
    for batch, *parts in zip(complete, *halves, strict=True):
        for i, part in enumerate(parts):
            flat, own = ([*b[:3], *b[3]] if packed else [*b] for b in (batch, part))
            assert all(map(np.array_equal, (a[i::2] for a in flat), (a[i::2] for a in own)))


def test_batches_share_no_memory():
    encoded = corpus(3, 6)
    arrays = [array for batch in taken(20, encoded, plan_for(encoded)) for array in batch]
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations(arrays, 2))
    inputs = encoded.sources + encoded.targets
    assert not any(np.shares_memory(a, b) for a in arrays for b in inputs)


def prefetch_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")}


@pytest.mark.parametrize("end", ["close", "drop", "exhaust", "raise"])
def test_no_thread_outlives_the_stream(end):
    before = prefetch_threads()
    stream = batches.train_stream(ENCODED, PLAN, 0, 50)
    next(stream)
    own = prefetch_threads() - before
    assert own
    if end == "close":
        stream.close()
    elif end == "exhaust":
        assert len(list(stream)) == 49
    elif end == "raise":
        with pytest.raises(KeyError):
            stream.throw(KeyError("stop"))
    if end == "drop":
        del stream
    for thread in own:
        thread.join(30)
    assert not any(thread.is_alive() for thread in own)


def test_an_open_stream_does_not_delay_the_exit():
    script = (
        "import numpy as np\n"
        "from jax_transformer.data import batches as b, encoding as e\n"
        "rows = [np.ones(3, np.int32)] * 9\n"
        "encoded = e.EncodedPairs(rows, rows, e.SpecialIds(0, 2, 0, 1, 2), np.arange(9), 0)\n"
        "plan = b.BatchPlan(b.LengthTable.of(encoded.lengths)[0], (8,), (2,), 0)\n"
        "stream = b.train_stream(encoded, plan)\n"
        "print(next(stream).source.shape)"
    )
    done = runs.python("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(2, 8)\n", "")


# Evaluation


@pytest.mark.parametrize("tokens", [1, 100, 10_000])
def test_evaluation_has_every_pair_once_in_order_of_length(tokens):
    widths = (16, 40, 64)
    rows = batches.rows_per_batch(widths, tokens)
    evaluated = batches.eval_batches(ENCODED, widths, rows)
    order = np.concatenate([indices for indices, _ in evaluated])
    assert sorted(order.tolist()) == list(range(503))
    assert (np.diff(ENCODED.lengths[order].max(axis=1)) >= 0).all()
    for indices, batch in evaluated:
        assert batch.source.shape[::-1] in set(zip(widths, rows, strict=True))
        assert pairs_in(batch) == indices.tolist()
        # filler comes last
        assert pairs_in(batches.Batch(batch.source[: len(indices)], *batch[1:])) == indices.tolist()
        assert (batch.target_out[len(indices) :] == IDS.target_pad).all()
    assert sum(len(indices) < len(batch.source) for indices, batch in evaluated) <= len(widths)
    restored = np.empty(503, int)
    for indices, batch in evaluated:
        restored[indices] = batch.source[: len(indices), 0]
    assert restored.tolist() == list(range(1000, 1503))


def test_source_rows_have_special_tokens_and_padding():
    rows = batches.pad_rows([[7, 8], []], 5, 3, 1, encoding.SpecialTokens((2,), (3, 4)))
    assert rows.dtype == np.int32
    assert rows.tolist() == [[2, 7, 8, 3, 4], [2, 3, 4, 1, 1], [2, 3, 4, 1, 1]]


def test_numbers_of_rows_are_few():
    counts = {1: (1,), 3: (1, 3), 16: (1, 4, 16), 100: (1, 4, 16, 64, 100)}
    assert {most: batches.row_counts(most) for most in counts} == counts
