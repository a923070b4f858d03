"""Batches as arrays: padded, made ahead of the step, and in order of length for evaluation.

Axes: b batch, s source, t target, n all pairs. The length of a side counts the special tokens
around it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jax_transformer.data import batch_plan
from jax_transformer.data.batch_plan import BatchPlan
from jax_transformer.data.encoding import EncodedPairs, SpecialTokens


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


def make_batch(
    encoded: EncodedPairs, indices: Int[np.ndarray, " b"], width: int, rows: int
) -> Batch:
    """The arrays of a batch.

    They are new each time: JAX may still read a batch's memory while the next is made.
    """
    ids, (source_tokens, target_tokens) = encoded.ids, encoded.special_tokens
    source = pad_rows(
        [encoded.sources[i] for i in indices.tolist()],
        width,
        rows,
        pad_id=ids.source_pad,
        special_tokens=source_tokens,
    )
    target_out = pad_rows(
        [encoded.targets[i] for i in indices.tolist()],
        width,
        rows,
        pad_id=ids.target_pad,
        special_tokens=target_tokens,
    )
    lengths = np.ones(rows, np.int64)
    lengths[: len(indices)] = encoded.lengths[indices, 1]
    target_in = np.empty_like(target_out)
    target_in[:, 0] = ids.target_bos
    target_in[:, 1:] = np.where(
        np.arange(1, width) < lengths[:, None], target_out[:, :-1], ids.target_pad
    )
    target_out[len(indices) :] = ids.target_pad
    return Batch(source, target_in, target_out)


def pad_rows(
    sources: Sequence[Sequence[int] | np.ndarray],
    width: int,
    rows: int,
    *,
    pad_id: int,
    eos_id: int | None = None,
    special_tokens: SpecialTokens | None = None,
) -> Int32[np.ndarray, "b s"]:
    """Source rows with ``special_tokens`` around each, or ``eos_id`` after it.

    Rows beyond the last are empty sources.
    """
    prefix, suffix = special_tokens or SpecialTokens((), () if eos_id is None else (eos_id,))
    lengths = np.zeros(rows, np.int64)
    lengths[: len(sources)] = [len(source) for source in sources]
    padded = np.full((rows, width), pad_id, np.int32)
    columns = np.arange(width) - len(prefix)
    padded[(columns >= 0) & (columns < lengths[:, None])] = np.concatenate(
        [np.asarray(source, np.int32) for source in sources]
    )
    padded[:, : len(prefix)] = prefix
    for offset, token in enumerate(suffix, len(prefix)):
        padded[np.arange(rows), lengths + offset] = token
    return padded


def train_stream(
    encoded: EncodedPairs,
    plan: BatchPlan,
    start_step: int = 0,
    stop_step: int | None = None,
    *,
    num_threads: int = 1,
    prefetch_buffer_size: int = 16,
) -> Iterator[Batch]:
    """The batches of steps ``start_step`` up to ``stop_step`` (endless without one), made ahead by
    Grain's threads.

    Closing the stream, or dropping it, ends the threads.
    """
    import grain  # takes a second, and only training needs it

    steps = grain.MapDataset.source(_Steps(encoded, plan))[start_step:stop_step]
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

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, step: int) -> Batch:
        bucket, indices = self.plan.batch_indices(step)
        return make_batch(self.encoded, indices, self.plan.widths[bucket], self.plan.rows[bucket])


def eval_batches(
    encoded: EncodedPairs, widths: tuple[int, ...], rows: tuple[int, ...]
) -> list[tuple[np.ndarray, Batch]]:
    """Every pair once, in order of length, with the indices that put results back in place:
    result[indices] = outputs[: len(indices)].
    """
    groups = _by_length(encoded.lengths.max(axis=1), widths, rows)
    return [(indices, make_batch(encoded, indices, widths[k], rows[k])) for k, indices in groups]


def source_batches(
    sources: Sequence[Sequence[int]],
    widths: tuple[int, ...],
    rows: tuple[int, ...],
    *,
    pad_id: int,
    eos_id: int | None = None,
    special_tokens: SpecialTokens | None = None,
) -> list[tuple[np.ndarray, Int32[np.ndarray, "b s"]]]:
    """Every source once, in order of length, with the indices of its row.

    ``sources`` are ids without special tokens; ``eos_id`` and ``special_tokens`` are those of
    :func:`pad_rows`.
    """
    special_tokens = special_tokens or SpecialTokens((), () if eos_id is None else (eos_id,))
    groups = _by_length(
        np.array([len(source) + special_tokens.size for source in sources], np.int64), widths, rows
    )
    return [
        (
            indices,
            pad_rows(
                [sources[i] for i in indices],
                widths[k],
                rows[k],
                pad_id=pad_id,
                special_tokens=special_tokens,
            ),
        )
        for k, indices in groups
    ]


def _by_length(
    lengths: np.ndarray, widths: tuple[int, ...], rows: tuple[int, ...]
) -> Iterator[tuple[int, np.ndarray]]:
    """Bucket by bucket, the indices of each batch, shortest first."""
    order = np.argsort(lengths, kind="stable")
    buckets = batch_plan.narrowest(lengths, widths)[order]
    for bucket, size in enumerate(rows):
        members = order[buckets == bucket]
        for start in range(0, len(members), size):
            yield bucket, members[start : start + size]
