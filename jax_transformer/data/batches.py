"""Batches: length buckets, the pairs of each step, and their arrays.

Bucket k holds the pairs that fit its width, and each of its batches has the shape (rows[k],
widths[k]) on both sides, so a run compiles one program per bucket and never again. The pairs of
batch n are a pure function of (seed, n): a run can resume at any step.

Axes: b batch, s source, t target, n all pairs. A side's length counts the special tokens around it.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32, UInt64

from jax_transformer import errors
from jax_transformer.data import shuffle
from jax_transformer.data.encoding import EncodedPairs
from jax_transformer.data.packing import PackedRows
from jax_transformer.data.tokenizer import SpecialTokens

STEP = 4
"""Widths are multiples of so many tokens, unless the maximum length is none."""
WINDOW = 16
"""Batches that are made at a time: text on disk is read for all of them together."""
_ROWS_GROWTH = 4
"""Each number of rows in :func:`row_counts` is this many times the one before."""


@dataclass(frozen=True, eq=False)
class LengthTable:
    """Numbers of pairs by their longer side, in steps of :data:`STEP` tokens.

    It is all that a plan of batches needs to know, if pairs are in its order: by part, and within
    one by step.

    Axes: p parts, s steps.
    """

    counts: Int[np.ndarray, "p s"]
    tokens: Int[np.ndarray, "p s 2"]
    """Sums of the lengths of sources and of targets."""
    longest: Int[np.ndarray, "p s 2"]
    """The longest source and the longest target; 0 without pairs."""

    @classmethod
    def of(
        cls, lengths: Int[np.ndarray, "n 2"], parts: Int[np.ndarray, " n"] | None = None
    ) -> "tuple[LengthTable, Int[np.ndarray, ' n']]":
        """Return the table of pairs of these lengths and parts, which count from 0, and the indices
        that put the pairs in its order; those of one step keep their own.
        """
        steps = -(-lengths.max(axis=1, initial=1) // STEP) - 1
        parts = np.zeros_like(steps) if parts is None else parts
        shape = (int(parts.max(initial=0)) + 1, int(steps.max(initial=0)) + 1)
        counts, tokens, longest = (
            np.zeros((*shape, *sides), np.int64) for sides in ((), (2,), (2,))
        )
        np.add.at(counts, (parts, steps), 1)
        np.add.at(tokens, (parts, steps), lengths)
        np.maximum.at(longest, (parts, steps), lengths)
        return cls(counts, tokens, longest), np.lexsort((steps, parts))

    @functools.cached_property
    def widest(self) -> Int[np.ndarray, " s"]:
        """The longest length of each step, of sources and targets."""
        return self.longest.max(axis=(0, 2))


def choose_widths(table: LengthTable, count: int, max_length: int) -> tuple[int, ...]:
    """Return at most ``count`` bucket widths, ascending, that pad the pairs the least.

    The optimum is exact, by dynamic programming over the lengths of the table.

    Widths are multiples of :data:`STEP`, at most ``max_length``; the last covers the longest pair.
    """
    if min(count, max_length) < 1:
        raise errors.ConfigError(f"count={count} and max_length={max_length} must be positive")
    pairs, longest = table.counts.sum(axis=0), int(table.widest.max())
    if not pairs.any() or longest > max_length:
        raise errors.ConfigError(
            f"{pairs.sum()} lengths up to {longest} do not fit max_length={max_length}"
        )
    # An optimal width is always some pair's: only these are candidates.
    widths = np.minimum((np.flatnonzero(pairs) + 1) * STEP, max_length)
    below = np.concatenate([[0], np.cumsum(pairs[pairs > 0])])
    # least[j]: the fewest positions that hold all pairs of the first j widths in the buckets so
    # far; one bucket to begin with.
    least = np.concatenate([[0], widths * below[1:]])
    begins = []  # begins[k][j]: the width at which the last of k + 2 buckets begins
    for _ in range(min(count, len(widths)) - 1):
        totals = [
            least[:j] + widths[j - 1] * (below[j] - below[:j]) for j in range(1, len(widths) + 1)
        ]
        begins.append([0] + [int(total.argmin()) for total in totals])
        least = np.array([0] + [total.min() for total in totals])
    chosen = [len(widths)]
    for begin in reversed(begins):
        chosen.append(begin[chosen[-1]])
    ends = np.array(chosen[::-1])
    return tuple(widths[ends[ends > 0] - 1].tolist())


def target_widths(table: LengthTable, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the widths that hold the targets of each bucket and of those before it."""
    longest = np.zeros(len(widths), int)
    np.maximum.at(longest, narrowest(table.widest, widths), table.longest[..., 1].max(axis=0))
    rounded = -(-np.maximum.accumulate(longest) // STEP) * STEP
    return tuple(np.minimum(rounded, widths).tolist())


def rows_per_batch(
    widths: Sequence[int], tokens_per_batch: int, rows_multiple: int = 1
) -> tuple[int, ...]:
    """Return the rows of each width that hold ``tokens_per_batch`` positions.

    They are multiples of ``rows_multiple``, the number of devices that share a batch.
    """
    if min(tokens_per_batch, rows_multiple) < 1:
        raise errors.ConfigError(
            f"tokens_per_batch={tokens_per_batch} and rows_multiple={rows_multiple} "
            "must be positive"
        )
    rows = tokens_per_batch // np.array(widths) // rows_multiple * rows_multiple
    return tuple(np.maximum(rows_multiple, rows).tolist())


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The pairs of batch n, for every n from 0 on, in memory that does not grow with the text.

    Each epoch holds every pair once, or as often as ``weights`` say, in another order.
    """

    table: LengthTable
    """Lengths of the pairs; of packed rows, if there are any."""
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    seed: int
    weights: tuple[float, ...] = ()
    """Number of times that each pair of a part comes in an epoch, on average. Empty: once."""
    target_widths: tuple[int, ...] | None = None
    """The widths of targets, if they differ from those of sources."""
    packed: PackedRows | None = None
    """Their pairs, if rows are packed."""

    @functools.cached_property
    def _sizes(self) -> Int[np.ndarray, "p k"]:
        """The number of pairs in each bucket, by part."""
        sizes = np.zeros((len(self.table.counts), len(self.widths)), np.int64)
        # The one bucket of packed rows may be wider in targets; elsewhere these are no wider
        widths = tuple(map(max, self.widths, self.target_widths or self.widths))
        np.add.at(sizes.T, narrowest(self.table.widest, widths), self.table.counts.T)
        return sizes

    @functools.cached_property
    def _begins(self) -> Int[np.ndarray, "p k"]:
        """The number of the first pair in each bucket, by part."""
        return (np.cumsum(self._sizes) - self._sizes.reshape(-1)).reshape(self._sizes.shape)

    @functools.cached_property
    def _draws(self) -> Int[np.ndarray, "p k"]:
        """The number of pairs of each part that an epoch has in a bucket."""
        if not self.weights:
            return self._sizes
        draws = np.rint(self._sizes * np.array(self.weights)[:, None]).astype(np.int64)
        return np.where(self._sizes > 0, np.maximum(1, draws), 0)

    @functools.cached_property
    def _left(self) -> Int[np.ndarray, " k"]:
        """The number of pairs each bucket gets from the narrower ones, where they fill no batch."""
        left, sizes = [0], self._draws.sum(axis=0)
        for size, rows in zip(sizes[:-1].tolist(), self.rows, strict=False):
            left.append((left[-1] + size) % rows)
        return np.array(left)

    @functools.cached_property
    def _batches(self) -> Int[np.ndarray, " k"]:
        """The number of batches of each bucket.

        It is the same in every epoch: it depends on the number of pairs in a bucket, not on which.
        """
        total = self._left + self._draws.sum(axis=0)
        batches = total // self.rows
        batches[-1] += total[-1] % self.rows[-1] > 0
        return batches

    @property
    def batches_per_epoch(self) -> int:
        return int(self._batches.sum())

    def fill(self) -> float:
        """Return the share of positions that hold a token and not padding."""
        both = np.array(self.widths) + np.array(self.target_widths or self.widths)
        cells = int((self._batches * self.rows * both).sum())
        tokens = self.table.tokens.sum(axis=(1, 2)) * np.array(self.weights or 1.0)
        return float(tokens.sum()) / cells

    def batch_indices(self, step: int) -> tuple[int, Int[np.ndarray, " b"]]:
        """Return the bucket and pairs of the batch of a step, counted from 0 over all epochs.

        They are a pure function of seed and step. Pairs left over in a bucket move on to the next
        wider one, so only one batch of an epoch, of the widest, is partly filled.
        """
        if step < 0:
            raise errors.ConfigError(f"step={step} is negative")
        epoch, position = divmod(step, self.batches_per_epoch)
        parts, buckets = self._sizes.shape
        keys = shuffle.keys(self.seed, epoch, 1 + buckets * (1 + parts))
        number = shuffle.shuffled(np.array([position]), self.batches_per_epoch, keys[0])
        ends = np.cumsum(self._batches)
        bucket = int(np.searchsorted(ends, number, side="right")[0])
        begin = int(number[0] - ends[bucket] + self._batches[bucket]) * self.rows[bucket]
        total = int(self._left[bucket] + self._draws[:, bucket].sum())
        positions = np.arange(begin, min(begin + self.rows[bucket], total))
        return bucket, self._pairs(bucket, positions, keys[1:].reshape(buckets, 1 + parts, -1))

    def _pairs(
        self, bucket: int, positions: Int[np.ndarray, " b"], keys: UInt64[np.ndarray, "k q rounds"]
    ) -> Int[np.ndarray, " b"]:
        """Return the pairs at these positions of an epoch's pairs in a bucket.

        The first are those that the bucket before has left over, its last ones.
        """
        pairs = np.empty_like(positions)
        others = positions < self._left[bucket]
        if others.any():
            used = self._batches[bucket - 1] * self.rows[bucket - 1]
            pairs[others] = self._pairs(bucket - 1, positions[others] + used, keys)
        draws, sizes = self._draws[:, bucket], self._sizes[:, bucket]
        own = shuffle.shuffled(
            positions[~others] - self._left[bucket], int(draws.sum()), keys[bucket, 0]
        )
        ends = np.cumsum(draws)
        parts = np.searchsorted(ends, own, side="right")
        within = own - (ends - draws)[parts]
        for part in np.flatnonzero(draws != sizes).tolist():  # some come again, or others stay out
            drawn, size = parts == part, int(sizes[part])
            within[drawn] = shuffle.shuffled(within[drawn] % size, size, keys[bucket, 1 + part])
        pairs[~others] = self._begins[parts, bucket] + within
        return pairs


def narrowest(lengths: np.ndarray, widths: tuple[int, ...]) -> np.ndarray:
    """Return the first bucket that holds each length, as int16, which NumPy sorts by radix."""
    if lengths.max(initial=0) > widths[-1]:
        raise errors.ConfigError(
            f"a length of {lengths.max()} tokens is over the widest bucket, {widths[-1]}"
        )
    return np.searchsorted(widths, lengths).astype(np.int16)


class Batch(NamedTuple):
    """The input of a step.

    A row beyond the last pair is filler: it has no target to predict, and no side of it is all
    padding.
    """

    source: Int32[np.ndarray, "b s"]
    """special tokens before a source, tokens, special tokens after it, pad …; filler: empty"""
    target_in: Int32[np.ndarray, "b t"]
    """bos, target_out without its last, pad …; filler: bos, pad …"""
    target_out: Int32[np.ndarray, "b t"]
    """special tokens before a target, tokens, special tokens after it, pad …; filler: pad …"""


class PackedBatch(NamedTuple):
    """A :class:`Batch` whose rows hold several pairs, one after another."""

    source: Int32[np.ndarray, "b s"]
    target_in: Int32[np.ndarray, "b t"]
    target_out: Int32[np.ndarray, "b t"]
    segments: tuple[Int32[np.ndarray, "b s"], Int32[np.ndarray, "b t"]]
    """The number of each token's pair in its row, from 1 on; 0 at padding."""


def make_batch(
    encoded: EncodedPairs, width: int, rows: int, target_width: int | None = None
) -> Batch:
    """Return the arrays of a batch, of one width unless ``target_width`` is another.

    They are new each time: JAX may still read a batch's memory while the next is made.
    """
    ids, (around_source, around_target) = encoded.ids, encoded.special_tokens
    count, target_width = len(encoded.sources), target_width or width
    source = pad_rows(encoded.sources, width, rows, ids.source_pad, around_source)
    target_out = pad_rows(encoded.targets, target_width, rows, ids.target_pad, around_target)
    lengths = np.ones(rows, np.int64)
    lengths[:count] = encoded.lengths[:, 1]
    target_in = np.empty_like(target_out)
    target_in[:, 0] = ids.target_bos
    target_in[:, 1:] = np.where(
        np.arange(1, target_width) < lengths[:, None], target_out[:, :-1], ids.target_pad
    )
    target_out[count:] = ids.target_pad
    return Batch(source, target_in, target_out)


def packed_batch(
    encoded: EncodedPairs, sizes: Sequence[int], widths: tuple[int, int], count: int
) -> PackedBatch:
    """Return the arrays of ``count`` packed rows of these widths, of sources and of targets.

    Each row has so many pairs as ``sizes`` say. Further ones are filler, as in :func:`make_batch`.
    """
    filler, added = count - len(sizes), encoded.special_tokens[0].size
    lengths = np.concatenate([encoded.lengths, np.full((filler, 2), (added, 1))])
    longest, longest_target = lengths.max(axis=0).tolist()
    flat = make_batch(encoded, longest, len(lengths), longest_target)
    pairs = np.array([*sizes, *[1] * filler])
    first = np.cumsum(pairs) - pairs
    numbers = np.arange(len(lengths)) - np.repeat(first, pairs) + 1

    def rows_of(tokens: Int32[np.ndarray, " _"], side: int, fill: int) -> Int32[np.ndarray, "b n"]:
        totals = np.add.reduceat(lengths[:, side], first)
        packed = np.full((count, widths[side]), fill, np.int32)
        packed[np.arange(widths[side]) < totals[:, None]] = tokens
        return packed

    def tokens_of(padded: Int32[np.ndarray, "_ w"], side: int) -> Int32[np.ndarray, " _"]:
        return padded[np.arange(padded.shape[1]) < lengths[:, side, None]]

    ids = encoded.ids
    source, target = (
        rows_of(np.repeat(numbers, lengths[:, side]).astype(np.int32), side, 0) for side in (0, 1)
    )
    return PackedBatch(
        rows_of(tokens_of(flat.source, 0), 0, ids.source_pad),
        rows_of(tokens_of(flat.target_in, 1), 1, ids.target_pad),
        rows_of(tokens_of(flat.target_out, 1), 1, ids.target_pad),
        (source, target),
    )


def pad_rows(
    sources: Sequence[Sequence[int] | np.ndarray],
    width: int,
    rows: int,
    pad_id: int,
    special_tokens: SpecialTokens,
) -> Int32[np.ndarray, "b s"]:
    """Source rows with ``special_tokens`` around each; rows beyond the last are empty sources."""
    prefix, suffix = special_tokens
    lengths = np.zeros(rows, np.int64)
    lengths[: len(sources)] = list(map(len, sources))
    padded = np.full((rows, width), pad_id, np.int32)
    columns = np.arange(width) - len(prefix)
    padded[(columns >= 0) & (columns < lengths[:, None])] = np.concatenate(
        [np.zeros(0, np.int32), *sources], dtype=np.int32, casting="unsafe"
    )
    padded[:, : len(prefix)] = prefix
    for offset, token in enumerate(suffix, len(prefix)):
        padded[np.arange(rows), lengths + offset] = token
    return padded


@runtime_checkable
class Drawn(Protocol):
    """A source of other tokens for pairs at every step."""

    def at(
        self, step: int, numbers: Int[np.ndarray, " b"], pairs: EncodedPairs, width: int
    ) -> EncodedPairs:
        """Return pairs, which have these numbers, with their tokens of a step, within ``width``."""

    def lengths(self, encoded: EncodedPairs, longest: int) -> Int[np.ndarray, "n 2"]:
        """Return the lengths of pairs to plan batches by, up to ``longest``."""


@runtime_checkable
class PairSource(Protocol):
    """Pairs by number, in the order of a :class:`LengthTable`."""

    def take(self, numbers: Int[np.ndarray, " b"]) -> EncodedPairs:
        """Return the pairs of these numbers."""


def train_stream(
    source: PairSource,
    plan: BatchPlan,
    start_step: int = 0,
    stop_step: int | None = None,
    *,
    drawn: Drawn | None = None,
    local_rows: Callable[[int], Int[np.ndarray, " b"]] = np.arange,
) -> Iterator[Batch | PackedBatch]:
    """Yield the batches of steps ``start_step`` up to ``stop_step`` (endless without one), made
    ahead by a thread of Grain, :data:`WINDOW` at a time.

    With ``drawn``, the pairs have its tokens of each step. ``local_rows`` are those of a batch of
    so many rows that this process needs, in ascending order: only their pairs are read, and the
    other rows are filler. Closing the stream, or dropping it, ends the thread.
    """
    import grain  # takes a second, and only training needs it

    steps = range(start_step, sys.maxsize if stop_step is None else stop_step)
    windows = grain.MapDataset.source(_Windows(source, plan, drawn, local_rows, steps))
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    iterator = iter(windows.to_iter_dataset(options))
    try:
        yield from itertools.chain.from_iterable(iterator)
    finally:
        iterator.close()


@dataclass(frozen=True)
class _Windows:
    """The batches of steps, several at a time, as the random-access source that Grain reads."""

    source: PairSource
    plan: BatchPlan
    drawn: Drawn | None
    local_rows: Callable[[int], Int[np.ndarray, " b"]]
    steps: range

    def __len__(self) -> int:
        return -(-len(self.steps) // WINDOW)

    def __getitem__(self, number: int) -> list[Batch | PackedBatch]:
        steps = self.steps[number * WINDOW : (number + 1) * WINDOW]
        planned = [self._planned(step) for step in steps]
        numbers = [np.concatenate([np.zeros(0, np.int64), *rows]) for _, _, rows in planned]
        ends = np.cumsum(list(map(len, numbers)))
        taken = self.source.take(np.concatenate(numbers))  # of all steps in one read
        of_steps = map(taken.take, np.split(np.arange(ends[-1]), ends[:-1]))
        return list(map(self._batch, steps, planned, numbers, of_steps))

    def _planned(self, step: int) -> tuple[int, Int[np.ndarray, " b"], list[Int[np.ndarray, " _"]]]:
        """Return the bucket of a step, this process's rows, and their pairs: of each packed row, or
        of all rows.
        """
        plan = self.plan
        bucket, indices = plan.batch_indices(step)
        local = self.local_rows(plan.rows[bucket])
        chosen = indices[local[local < len(indices)]]
        if plan.packed is None:
            return bucket, local, [chosen]
        return bucket, local, plan.packed.pairs(chosen, plan.seed, step // plan.batches_per_epoch)

    def _batch(
        self,
        step: int,
        planned: tuple[int, Int[np.ndarray, " b"], list[Int[np.ndarray, " _"]]],
        numbers: Int[np.ndarray, " n"],
        pairs: EncodedPairs,
    ) -> Batch | PackedBatch:
        plan, (bucket, local, rows) = self.plan, planned
        width, count = plan.widths[bucket], len(local)
        target_width = (plan.target_widths or plan.widths)[bucket]
        if self.drawn is not None:
            pairs = self.drawn.at(step, numbers, pairs, width)
        batch: Batch | PackedBatch
        if plan.packed is None:
            batch = make_batch(pairs, width, count, target_width)
        else:
            batch = packed_batch(pairs, list(map(len, rows)), (width, target_width), count)
        return batch if count == plan.rows[bucket] else _spread(batch, local, plan.rows[bucket])


def _spread(batch: Any, rows: Int[np.ndarray, " b"], count: int) -> Any:
    """Return arrays of ``count`` rows, of which these ``rows`` are those of the batch."""
    if isinstance(batch, np.ndarray):
        array = np.zeros((count, *batch.shape[1:]), batch.dtype)
        array[rows] = batch
        return array
    parts = (_spread(part, rows, count) for part in batch)
    return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)


def eval_batches(
    encoded: EncodedPairs, widths: tuple[int, ...], rows: tuple[int, ...]
) -> list[tuple[np.ndarray, Batch]]:
    """Return every pair once, in order of length, with the indices that put results back in place:
    result[indices] = outputs[: len(indices)].
    """
    return [
        (indices, make_batch(encoded.take(indices), widths[bucket], rows[bucket]))
        for bucket, indices in by_length(encoded.lengths.max(axis=1), widths, rows)
    ]


def row_counts(most: int) -> tuple[int, ...]:
    """Return the numbers of rows of a batch that is not full, ascending: 1, 4, 16 and so on, and
    ``most``.

    A program is compiled for each that occurs, so there are few.
    """
    counts = [1]
    while counts[-1] < most:
        counts.append(min(most, counts[-1] * _ROWS_GROWTH))
    return tuple(counts)


def by_length(
    lengths: Int[np.ndarray, " n"], widths: tuple[int, ...], rows: tuple[int, ...]
) -> Iterator[tuple[int, Int[np.ndarray, " b"]]]:
    """Yield each batch's bucket and indices, narrowest bucket and shortest length first."""
    order = np.argsort(lengths, kind="stable")
    buckets = narrowest(lengths, widths)[order]
    for bucket, size in enumerate(rows):
        members = order[buckets == bucket]
        for start in range(0, len(members), size):
            yield bucket, members[start : start + size]
