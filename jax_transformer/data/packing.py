"""Packing: rows of a batch that hold several pairs, one after another.

Each token has the number of its pair in the row, its segment, from which the model knows what it
may see (Krell et al. 2021, https://arxiv.org/abs/2107.02027).

Pairs of the same lengths are of one kind, and rows with as many pairs of each kind have one
pattern. A plan is a list of patterns, so its size depends on the number of kinds, not of pairs.

Axes: n pairs, k kinds, m patterns, q pairs of a row of each pattern.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jax_transformer.config import TransformerConfig
from jax_transformer.data import shuffle
from jax_transformer.errors import ConfigError

_MULTIPLE = 4
"""The width of a row's shorter side is a multiple of this."""
_EPOCHS = 2**62
"""Added to the number of an epoch, it has keys that differ from those of the order of batches."""


def rounded(lengths: Int[np.ndarray, "n 2"]) -> Int[np.ndarray, "n 2"]:
    """Return the lengths of the pairs' kinds: exact up to 32, then multiples of 2, from 64 of 4.

    So there are fewer kinds. A kind lies in one step of a
    :class:`~jax_transformer.data.batches.LengthTable`: a shard has its pairs in their order.
    """
    units = np.where(lengths <= 32, 1, np.where(lengths <= 64, 2, 4))
    return -(-lengths // units) * units


class Kinds(NamedTuple):
    """The kinds of pairs, in the order of the pairs' numbers: by part, source and target."""

    parts: Int[np.ndarray, " k"]
    lengths: Int[np.ndarray, "k 2"]
    """Those of :func:`rounded`."""
    counts: Int[np.ndarray, " k"]

    @classmethod
    def of(
        cls, lengths: Int[np.ndarray, "n 2"], parts: Int[np.ndarray, " n"] | None = None
    ) -> "tuple[Kinds, Int[np.ndarray, ' n']]":
        """Return the kinds of pairs, of which there is at least one, and the indices that put the
        pairs in their order; pairs of a kind keep their own.
        """
        of_part = np.zeros(len(lengths), np.int64) if parts is None else parts
        keys = np.column_stack([of_part, rounded(lengths)])
        order = np.lexsort(keys.T[::-1])
        return cls.merged(keys[order], np.ones(len(keys), np.int64)), order

    @classmethod
    def merged(cls, keys: Int[np.ndarray, "n 3"], counts: Int[np.ndarray, " n"]) -> "Kinds":
        """Return the kinds of part, source and target, of which the same ones are adjacent."""
        other = (np.diff(keys, axis=0) != 0).any(axis=1)
        first = np.flatnonzero(np.concatenate([[True], other]))
        return cls(keys[first, 0], keys[first, 1:], np.add.reduceat(counts, first))


class Pattern(NamedTuple):
    """Rows that hold as many pairs of each kind."""

    kinds: Int[np.ndarray, " _"]
    """The kinds in a row, each once."""
    taken: Int[np.ndarray, " _"]
    """The number of pairs of each."""
    times: int
    """The number of rows."""


def patterns(
    lengths: Int[np.ndarray, "k 2"], counts: Int[np.ndarray, " k"], widths: tuple[int, int]
) -> list[Pattern]:
    """Return rows whose ``widths`` their sources fit, and their targets, for all pairs of kinds.

    A row begins with the longest pair that is left, even if that is rounded beyond the width, and
    takes the one that leaves the least room until none fits. The same kinds are combined as often
    as there are pairs of them.
    """
    longest_first = np.argsort(-lengths.sum(axis=1), kind="stable")
    source, target = np.ascontiguousarray(lengths[longest_first].T)
    left, first, rows = counts[longest_first].copy(), 0, []
    while first < len(left):
        fits, (room, target_room) = np.arange(first, len(left)), widths
        chosen, picked = first, []
        while len(fits):
            picked.append(chosen)
            left[chosen] -= 1
            room, target_room = room - source[chosen], target_room - target[chosen]
            fits = fits[(source[fits] <= room) & (target[fits] <= target_room) & (left[fits] > 0)]
            after = (room - source[fits]) / widths[0], (target_room - target[fits]) / widths[1]
            most = np.maximum(*after)
            if len(fits):
                best = np.flatnonzero(most == most.min())
                chosen = int(fits[best[np.add(*after)[best].argmin()]])
        kinds, taken = np.unique(picked, return_counts=True)
        again = int((left[kinds] // taken).min())
        left[kinds] -= again * taken
        rows.append(Pattern(longest_first[kinds], taken, 1 + again))
        while first < len(left) and not left[first]:
            first += 1
    return rows


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of several pairs, numbered by part and pattern."""

    kinds: Kinds
    patterns: list[Pattern]
    parts: Int[np.ndarray, " p"]
    """The number of rows of each part."""
    widths: tuple[int, int]
    """Widths of sources and targets."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    @functools.cached_property
    def _times(self) -> Int[np.ndarray, " m"]:
        return np.array([pattern.times for pattern in self.patterns])

    @functools.cached_property
    def _ends(self) -> Int[np.ndarray, " m"]:
        return np.cumsum(self._times)

    @functools.cached_property
    def _slots(self) -> tuple[Int[np.ndarray, "q 3"], Int[np.ndarray, " m"]]:
        """For each pair of a row of each pattern: its kind, its number in this kind in the first
        row, and the step to that in the next row; and the end of each pattern's.
        """
        used, slots, sizes = np.zeros(len(self.kinds.counts), np.int64), [], []
        for kinds, taken, times in self.patterns:
            repeated = np.repeat(kinds, taken)
            within = np.arange(len(repeated)) - np.repeat(np.cumsum(taken) - taken, taken)
            first = used[repeated] + within
            slots.append(np.column_stack([repeated, first, np.repeat(taken, taken)]))
            used[kinds] += taken * times
            sizes.append(len(repeated))
        return np.concatenate(slots), np.cumsum(sizes)

    def pairs(
        self, rows: Int[np.ndarray, " b"], seed: int, epoch: int
    ) -> list[Int[np.ndarray, " _"]]:
        """Return the pairs of each of these rows in an epoch.

        In each epoch the pairs of a kind share a row with others, which is computed.
        """
        slots, ends = self._slots
        pattern = np.searchsorted(self._ends, rows, side="right")
        number = rows - (self._ends - self._times)[pattern]
        sizes = np.diff(ends, prepend=0)[pattern]
        stops = np.cumsum(sizes)
        offsets = np.repeat(ends[pattern] - stops, sizes)
        kind, first, step = slots[np.arange(len(offsets)) + offsets].T
        keys = shuffle.keys(seed, _EPOCHS + epoch, len(self.kinds.counts))
        counts = self.kinds.counts
        within = shuffle.shuffled(first + np.repeat(number, sizes) * step, counts[kind], keys[kind])
        return np.split((np.cumsum(counts) - counts)[kind] + within, stops)[:-1]


def pack_all(
    kinds: Kinds, width: int, longest: Int[np.ndarray, " 2"], tokens: Int[np.ndarray, " 2"]
) -> PackedRows:
    """Return all pairs in rows of which the longer side has this ``width``.

    ``longest`` and ``tokens`` are those of the two sides of all pairs. Pairs of different parts
    share no row. Raises ConfigError if a pair does not fit.
    """
    if longest.max() > width:
        raise ConfigError(
            f"data.packing={width} is under the longest pair, {longest.max()} tokens: raise it, or "
            "lower data.max_source_length and data.max_target_length"
        )
    in_ratio = -(-width * tokens // (tokens.max() * _MULTIPLE)) * _MULTIPLE
    source, target = np.clip(in_ratio, longest, width).tolist()
    rows, of_parts = [], np.zeros(int(kinds.parts.max()) + 1, np.int64)
    for part in range(len(of_parts)):
        of_part = np.flatnonzero(kinds.parts == part)
        of_rows = patterns(kinds.lengths[of_part], kinds.counts[of_part], (source, target))
        rows += [pattern._replace(kinds=of_part[pattern.kinds]) for pattern in of_rows]
        of_parts[part] = sum(pattern.times for pattern in of_rows)
    return PackedRows(kinds, rows, of_parts, (source, target))


def check(width: int, config: TransformerConfig) -> None:
    """Raise ConfigError if a model cannot be trained on packed rows of this width."""
    if config.unpackable:
        raise ConfigError(f"data.packing={width}: {config.architecture}: {config.unpackable}")
    if width > config.longest:
        raise ConfigError(f"data.packing={width} is over the model's max_length={config.longest}")
