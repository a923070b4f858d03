"""A permutation that is computed and not stored: any of its elements, in the same small memory.

Each round adds, multiplies by an odd number and shifts, none of which maps two numbers of so many
bits to one (as in Kensler 2013, *Correlated Multi-Jittered Sampling*, section 4). A number that is
not below the count goes through the rounds again (Black and Rogaway 2002, section 4).
"""

import numpy as np
from jaxtyping import Int, UInt64

ROUNDS = 8


def keys(seed: int, epoch: int, count: int) -> UInt64[np.ndarray, "count rounds"]:
    """Return the keys of ``count`` permutations.

    They are Philox's raw words, which NumPy never changes (NEP 19).
    """
    random = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64))
    return random.random_raw((count, ROUNDS))


def shuffled(
    positions: Int[np.ndarray, " n"],
    count: int | Int[np.ndarray, " n"],
    rounds: UInt64[np.ndarray, "*n rounds"],
) -> Int[np.ndarray, " n"]:
    """Return the elements at these positions of a permutation of ``range(count)``.

    Each position may have a count and keys of its own.
    """
    bits = np.frexp(np.asarray(count) - 1)[1].astype(np.uint64)  # exact below 2**53
    masks, halves = (np.uint64(1) << bits) - np.uint64(1), (bits + np.uint64(1)) // np.uint64(2)
    elements, beyond = positions.astype(np.uint64), np.ones(len(positions), bool)
    while beyond.any():
        numbers, mask, half, keys = elements[beyond], masks, halves, rounds
        if np.ndim(count):
            mask, half, keys = masks[beyond], halves[beyond], rounds[beyond]
        for key in keys.T:
            numbers = (numbers + (key >> np.uint64(32))) * (key | np.uint64(1)) & mask
            numbers ^= numbers >> half
        elements[beyond] = numbers
        beyond = elements >= count
    return elements.astype(np.int64)
