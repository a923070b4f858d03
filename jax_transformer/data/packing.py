"""Packing: rows of a batch that hold several pairs, one after another.

Each token has the number of its pair in the row, its segment, from which the model knows what it
may see (Krell et al. 2021, https://arxiv.org/abs/2107.02027).

Axes: n all pairs, p pairs of a row, r rows.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jax_transformer.config import TransformerConfig
from jax_transformer.data import shuffle
from jax_transformer.errors import ConfigError

_MULTIPLE = 4
"""The width of a row's shorter side is a multiple of this."""


def pack(
    lengths: Int[np.ndarray, "n 2"], widths: tuple[int, int], order: Int[np.ndarray, " m"]
) -> list[Int[np.ndarray, " _"]]:
    """Return the pairs ``order`` in rows whose ``widths`` their sources fit, and their targets.

    A row begins with the longest pair that is left, and takes the one that leaves the least room
    until none fits. Pairs of equal lengths keep their order. The same lengths are combined as
    often as there are pairs of them, so the time depends on the number of lengths, not of pairs.
    """
    kinds, kind, counts = np.unique(lengths[order], axis=0, return_inverse=True, return_counts=True)
    by_kind = order[np.argsort(kind.reshape(-1), kind="stable")]
    begins = np.cumsum(counts) - counts
    left, longest_first = counts.copy(), np.argsort(-kinds.sum(axis=1), kind="stable")
    rows: list[np.ndarray] = []
    while left.any():
        first = longest_first[left[longest_first] > 0][0]
        taken, room = np.zeros_like(left), np.array(widths)
        chosen: int | None = int(first)
        while chosen is not None:
            taken[chosen] += 1
            room = room - kinds[chosen]
            fits = np.flatnonzero((left > taken) & (kinds <= room).all(axis=1))
            after = (room - kinds[fits]) / widths
            ranked = np.lexsort((after.sum(axis=1), after.max(axis=1)))
            chosen = int(fits[ranked[0]]) if len(fits) else None
        used = np.flatnonzero(taken)
        times = int((left[used] // taken[used]).min())
        columns = [
            by_kind[begins[i] : begins[i] + times * taken[i]].reshape(times, taken[i]) for i in used
        ]
        rows.extend(np.concatenate(columns, axis=1))
        begins, left = begins + times * taken, left - times * taken
    return rows


class PackedRows(NamedTuple):
    """Rows of several pairs."""

    pairs: list[Int[np.ndarray, " _"]]
    """The pairs of each row."""
    lengths: Int[np.ndarray, "r 2"]
    parts: Int[np.ndarray, " r"]
    widths: tuple[int, int]
    """Widths of sources and targets."""


def pack_all(
    lengths: Int[np.ndarray, "n 2"],
    width: int,
    seed: int,
    parts: Int[np.ndarray, " n"] | None = None,
) -> PackedRows:
    """Return all pairs in rows of which the longer side has this ``width``.

    Which pairs share a row depends on the seed. Pairs of different parts share none. Raises
    ConfigError if a pair does not fit.
    """
    longest, totals = lengths.max(axis=0), lengths.sum(axis=0)
    if longest.max() > width:
        raise ConfigError(
            f"data.packing={width} is under the longest pair, {longest.max()} tokens: raise it, or "
            "lower data.max_source_length and data.max_target_length"
        )
    in_ratio = -(-width * totals // (totals.max() * _MULTIPLE)) * _MULTIPLE
    source, target = np.clip(in_ratio, longest, width).tolist()
    # The last of the keys of which the first ones are those of epochs
    (keys,), count = shuffle.keys(seed, 2**64 - 1, 1), len(lengths)
    order, rows = shuffle.shuffled(np.arange(count), count, keys), []
    parts = np.zeros(count, int) if parts is None else parts
    for part in np.unique(parts):
        rows += pack(lengths, (source, target), order[parts[order] == part])
    sums = np.array([lengths[row].sum(axis=0) for row in rows])
    return PackedRows(rows, sums, np.array([parts[row[0]] for row in rows]), (source, target))


def check(width: int, config: TransformerConfig) -> None:
    """Raise ConfigError if a model cannot be trained on packed rows of this width."""
    if config.unpackable:
        raise ConfigError(f"data.packing={width}: {config.architecture}: {config.unpackable}")
    if width > config.longest:
        raise ConfigError(f"data.packing={width} is over the model's max_length={config.longest}")
