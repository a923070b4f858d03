"""Batches: length buckets, the pairs of each step, and their arrays.

Bucket k holds the pairs that fit its width, and each of its batches has the shape (rows[k],
widths[k]) on both sides, so a run compiles one program per bucket and never again. The pairs of
batch n are a pure function of (seed, n): a run can resume at any step.

Axes: b batch, s source, t target, n all pairs. A side's length counts the special tokens around it.
"""

import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, Int32

from jax_transformer import errors
from jax_transformer.data.encoding import EncodedPairs
from jax_transformer.data.tokenizer import SpecialTokens

_ROWS_GROWTH = 4
"""Each number of rows in :func:`row_counts` is this many times the one before."""


def choose_widths(
    lengths: Int[np.ndarray, " n"], count: int, max_length: int, multiple: int = 4
) -> tuple[int, ...]:
    """Return at most ``count`` bucket widths, ascending, that pad ``lengths`` the least.

    The optimum is exact, by dynamic programming over the histogram of lengths.

    Widths are multiples of ``multiple``, at most ``max_length``; the last covers the longest pair.
    """
    if min(count, max_length, multiple) < 1:
        raise errors.ConfigError(
            f"count={count}, max_length={max_length} and multiple={multiple} must be positive"
        )
    if len(lengths) == 0 or lengths.max() > max_length:
        raise errors.ConfigError(
            f"{len(lengths)} lengths up to {lengths.max(initial=0)} "
            f"do not fit max_length={max_length}"
        )
    # An optimal width is always some pair's: only these are candidates.
    rounded = np.minimum(-(-lengths // multiple) * multiple, max_length)
    widths, pairs = np.unique(rounded, return_counts=True)
    below = np.concatenate([[0], np.cumsum(pairs)])
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


def target_widths(
    lengths: Int[np.ndarray, "n 2"], widths: tuple[int, ...], multiple: int = 4
) -> tuple[int, ...]:
    """Return the widths that hold the targets of each bucket and of those before it."""
    longest = np.zeros(len(widths), int)
    np.maximum.at(longest, narrowest(lengths.max(axis=1), widths), lengths[:, 1])
    rounded = -(-np.maximum.accumulate(longest) // multiple) * multiple
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
    """The pairs of batch n, for every n from 0 on.

    Each epoch holds every pair once, or as often as ``weights`` say, in another order.
    """

    lengths: Int[np.ndarray, "n 2"]
    """Lengths of source and target, see ``EncodedPairs.lengths``."""
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    seed: int
    weights: Float[np.ndarray, " n"] | None = None
    """Number of times that each pair comes in an epoch, on average. None: once."""
    target_widths: tuple[int, ...] | None = None
    """The widths of targets, if they differ from those of sources."""
    packed: Sequence[Int[np.ndarray, " _"]] | None = None
    """The pairs of each row, if rows are packed: ``lengths`` and ``weights`` are those of rows."""
    _epochs: dict[int, list[tuple[int, np.ndarray]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @functools.cached_property
    def _buckets(self) -> Int[np.ndarray, " n"]:
        """The narrowest bucket of each pair."""
        return narrowest(self.lengths.max(axis=1), self.widths)

    @functools.cached_property
    def _groups(self) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " g"]]:
        """Each pair's group, by bucket and weight, and each group's number of pairs in an epoch."""
        assert self.weights is not None
        keys = np.stack([self._buckets, self.weights], axis=1)
        unique, group, sizes = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        return group.reshape(-1), np.maximum(1, np.rint(sizes * unique[:, 1])).astype(np.int64)

    def _drawn(self, order: Int[np.ndarray, " n"]) -> Int[np.ndarray, " m"]:
        """Return every pair as often as its weight says; the first in ``order`` come once more if a
        weight is not a whole number.
        """
        group = self._groups[0][order]
        return np.concatenate(
            [np.resize(order[group == i], count) for i, count in enumerate(self._groups[1])]
        )

    @functools.cached_property
    def _batches_per_bucket(self) -> tuple[int, ...]:
        """The number of batches of each bucket.

        It is the same in every epoch: it depends on the number of pairs in a bucket, not on which.
        """
        buckets = self._buckets
        if self.weights is not None:
            buckets = buckets[self._drawn(np.arange(len(buckets)))]
        counts, left = [], 0
        sizes = np.bincount(buckets, minlength=len(self.rows))
        for pairs, rows in zip(sizes, self.rows, strict=True):
            full, left = divmod(int(pairs) + left, rows)
            counts.append(full)
        counts[-1] += left > 0
        return tuple(counts)

    @property
    def batches_per_epoch(self) -> int:
        return sum(self._batches_per_bucket)

    def fill(self) -> float:
        """Return the share of positions that hold a token and not padding."""
        both = np.array(self.widths) + np.array(self.target_widths or self.widths)
        cells = int(np.prod([self._batches_per_bucket, self.rows, both], axis=0).sum())
        weights = 1 if self.weights is None else self.weights
        return float((self.lengths.sum(axis=1) * weights).sum()) / cells

    def epoch_batches(self, epoch: int) -> list[tuple[int, Int[np.ndarray, " b"]]]:
        """Return an epoch's batches in order, each a bucket and the pairs in it.

        They are a pure function of seed and epoch. Pairs left over in a bucket move on to the next
        wider one, so only one batch of an epoch, of the widest, is partly filled.
        """
        random = np.random.Philox(key=np.array([self.seed % 2**64, epoch], np.uint64))
        order = permutation(random, len(self.lengths))
        if self.weights is not None:
            order = self._drawn(order)
            order = order[permutation(random, len(order))]
        buckets = self._buckets[order]
        batches, left = [], order[:0]
        for bucket, rows in enumerate(self.rows):
            pool = np.concatenate([left, order[buckets == bucket]])
            full = len(pool) // rows * rows
            batches += [(bucket, pool[i : i + rows]) for i in range(0, full, rows)]
            left = pool[full:]
        if len(left):
            batches.append((len(self.rows) - 1, left))
        return [batches[i] for i in permutation(random, len(batches))]

    def batch_indices(self, step: int) -> tuple[int, Int[np.ndarray, " b"]]:
        """Return the bucket and pairs of the batch of a step, counted from 0 over all epochs."""
        if step < 0:
            raise errors.ConfigError(f"step={step} is negative")
        epoch, position = divmod(step, self.batches_per_epoch)
        # prefetch threads ask for both sides of an epoch's end at the same time: two epochs are
        # kept, each made once
        with self._lock:
            if epoch not in self._epochs:
                if len(self._epochs) > 1:
                    del self._epochs[min(self._epochs)]
                self._epochs[epoch] = self.epoch_batches(epoch)
            return self._epochs[epoch][position]


def narrowest(lengths: np.ndarray, widths: tuple[int, ...]) -> np.ndarray:
    """Return the first bucket that holds each length, as int16, which NumPy sorts by radix."""
    if lengths.max(initial=0) > widths[-1]:
        raise errors.ConfigError(
            f"a length of {lengths.max()} tokens is over the widest bucket, {widths[-1]}"
        )
    return np.searchsorted(widths, lengths).astype(np.int16)


def permutation(random: np.random.Philox, count: int) -> np.ndarray:
    """Return a permutation from the generator's raw words.

    NumPy never changes these, but may change ``Generator.permutation`` (NEP 19).
    """
    return np.argsort(random.random_raw(count), kind="stable")


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
    """The pair of each token, from 1 on in each row; 0 at padding."""


def make_batch(
    encoded: EncodedPairs,
    indices: Int[np.ndarray, " b"],
    width: int,
    rows: int,
    target_width: int | None = None,
) -> Batch:
    """Return the arrays of a batch, of one width unless ``target_width`` is another.

    They are new each time: JAX may still read a batch's memory while the next is made.
    """
    ids, (around_source, around_target) = encoded.ids, encoded.special_tokens
    sources, targets = [], []
    for i in indices.tolist():
        sources.append(encoded.sources[i])
        targets.append(encoded.targets[i])
    source = pad_rows(sources, width, rows, ids.source_pad, around_source)
    target_width = target_width or width
    target_out = pad_rows(targets, target_width, rows, ids.target_pad, around_target)
    lengths = np.ones(rows, np.int64)
    lengths[: len(indices)] = encoded.lengths[indices, 1]
    target_in = np.empty_like(target_out)
    target_in[:, 0] = ids.target_bos
    target_in[:, 1:] = np.where(
        np.arange(1, target_width) < lengths[:, None], target_out[:, :-1], ids.target_pad
    )
    target_out[len(indices) :] = ids.target_pad
    return Batch(source, target_in, target_out)


def packed_batch(
    encoded: EncodedPairs,
    rows: Sequence[Int[np.ndarray, " _"]],
    widths: tuple[int, int],
    count: int,
) -> PackedBatch:
    """Return the arrays of ``count`` packed rows of these widths, of sources and of targets.

    Those beyond ``rows`` are filler, as in :func:`make_batch`.
    """
    pairs, filler = np.concatenate(rows), count - len(rows)
    sizes = np.array([*map(len, rows), *[1] * filler])
    added = encoded.special_tokens[0].size
    lengths = np.concatenate([encoded.lengths[pairs], np.full((filler, 2), (added, 1))])
    longest, longest_target = lengths.max(axis=0).tolist()
    flat = make_batch(encoded, pairs, longest, len(lengths), longest_target)
    first = np.cumsum(sizes) - sizes
    numbers = np.arange(len(lengths)) - np.repeat(first, sizes) + 1

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
        sources, dtype=np.int32, casting="unsafe"
    )
    padded[:, : len(prefix)] = prefix
    for offset, token in enumerate(suffix, len(prefix)):
        padded[np.arange(rows), lengths + offset] = token
    return padded


@runtime_checkable
class Drawn(Protocol):
    """Pairs that have other tokens at every step."""

    def at(self, step: int, indices: Int[np.ndarray, " b"], width: int) -> EncodedPairs:
        """Return the pairs ``indices`` with the tokens of a step, within ``width``."""


def train_stream(
    encoded: EncodedPairs,
    plan: BatchPlan,
    start_step: int = 0,
    stop_step: int | None = None,
    *,
    drawn: Drawn | None = None,
    num_threads: int = 1,
    prefetch_buffer_size: int = 16,
) -> Iterator[Batch | PackedBatch]:
    """Yield the batches of steps ``start_step`` up to ``stop_step`` (endless without one), made
    ahead by Grain's threads.

    With ``drawn``, the pairs have its tokens of each step. Closing the stream, or dropping it, ends
    the threads.
    """
    import grain  # takes a second, and only training needs it

    steps = grain.MapDataset.source(_Steps(encoded, plan, drawn))[start_step:stop_step]
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch_buffer_size)
    iterator = iter(steps.to_iter_dataset(options))
    try:
        yield from iterator
    finally:
        iterator.close()


@dataclass(frozen=True)
class _Steps:
    """The batches of all steps, as the random-access source that Grain reads."""

    encoded: EncodedPairs
    plan: BatchPlan
    drawn: Drawn | None

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, step: int) -> Batch | PackedBatch:
        bucket, indices = self.plan.batch_indices(step)
        width, rows = self.plan.widths[bucket], self.plan.rows[bucket]
        target_width = (self.plan.target_widths or self.plan.widths)[bucket]
        encoded, packed = self.encoded, self.plan.packed
        groups = [indices] if packed is None else [packed[i] for i in indices.tolist()]
        if self.drawn is not None:
            encoded = self.drawn.at(step, np.concatenate(groups), width)
            ends = np.cumsum(list(map(len, groups)))
            groups = np.split(np.arange(ends[-1]), ends[:-1])
        if packed is None:
            return make_batch(encoded, groups[0], width, rows, target_width)
        return packed_batch(encoded, groups, (width, target_width), rows)


def eval_batches(
    encoded: EncodedPairs, widths: tuple[int, ...], rows: tuple[int, ...]
) -> list[tuple[np.ndarray, Batch]]:
    """Return every pair once, in order of length, with the indices that put results back in place:
    result[indices] = outputs[: len(indices)].
    """
    return [
        (indices, make_batch(encoded, indices, widths[bucket], rows[bucket]))
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
