"""Text as ids: a corpus encoded once, with what is too long dropped or cut, and counted.

Axes: n all pairs. The length of a side counts the special tokens around it, of which our own tokenizers have one, the end.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jax_transformer import errors
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair

# Pairs encoded at a time: bounds the memory of ids as Python integers.
CHUNK = 10_000


class SpecialIds(NamedTuple):
    """The special tokens of the two vocabularies."""

    source_pad: int
    source_eos: int
    target_pad: int
    target_bos: int
    target_eos: int


class Around(NamedTuple):
    """The ids before and behind those of a line."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True, eq=False)
class EncodedPairs:
    """A corpus as ids, without special tokens."""

    sources: list[np.ndarray]
    targets: list[np.ndarray]
    ids: SpecialIds
    kept: Int[np.ndarray, " n"]
    """Where each pair stood in the list that was encoded."""
    dropped_long: int
    """How many pairs had a side over its maximum and were left out."""
    cut_long: int = 0
    """How many pairs had one and lost its end."""
    around: tuple[Around, Around] | None = None
    """What stands around a source and a target; where None, each has its end token behind it."""

    @property
    def frames(self) -> tuple[Around, Around]:
        """``around``, told in any case."""
        return self.around or (
            Around((), (self.ids.source_eos,)),
            Around((), (self.ids.target_eos,)),
        )

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, "n 2"]:
        """Of source and target, with the special tokens of each."""
        more = np.array([frame.size for frame in self.frames])
        return (
            np.array(
                [
                    (len(source), len(target))
                    for source, target in zip(self.sources, self.targets, strict=True)
                ]
            )
            + more
        )


def encode_pairs(
    pairs: Sequence[tuple[str, str]],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    max_length: int,
    max_target_length: int | None = None,
    *,
    cut: bool = False,
) -> EncodedPairs:
    """Pairs as ids. One with a side over ``max_length``, its special tokens included, is dropped, or with ``cut`` keeps that side's first
    tokens; both are counted. Targets have a maximum of their own where ``max_target_length`` is given. Raises InputError if none is left,
    ConfigError where a maximum has no room for the special tokens.

    A huge line is never encoded whole, unless its tokenizer is one that cannot bound tokens by characters (``Tokenizer.fewest_tokens``).
    """
    limits = (max_length, max_length if max_target_length is None else max_target_length)
    tokenizers = (source_tokenizer, target_tokenizer)
    around = (around_of(source_tokenizer), around_of(target_tokenizer))
    rooms = [limit - frame.size for limit, frame in zip(limits, around, strict=True)]
    if min(rooms) < 0:
        raise errors.ConfigError(
            f"a maximum of {min(limits)} tokens has no room for the {max(frame.size for frame in around)} special ones"
        )
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    kept, cut_long = [], 0
    hopeful = [i for i, pair in enumerate(pairs) if cut or not _hopeless(pair, tokenizers, rooms)]
    for start in range(0, len(hopeful), CHUNK):
        chunk = hopeful[start : start + CHUNK]
        columns = [
            tokenizers[side].encode_batch(
                [tokenizers[side].beginning(pairs[i][side], rooms[side] + 1) for i in chunk]
            )
            for side in (0, 1)
        ]
        for i, source, target in zip(chunk, *columns, strict=True):
            too_long = len(source) > rooms[0] or len(target) > rooms[1]
            if cut or not too_long:
                kept.append(i)
                cut_long += too_long
                sides[0].append(np.array(source[: rooms[0]], np.int32))
                sides[1].append(np.array(target[: rooms[1]], np.int32))
    if not kept:
        limit = (
            f"max_length={limits[0]}"
            if limits[0] == limits[1]
            else f"max_source_length={limits[0]}, max_target_length={limits[1]}"
        )
        raise errors.InputError(
            f"none of the {len(pairs)} pairs is within {limit} tokens; raise it, or shorten the lines"
        )
    ids = SpecialIds(
        source_tokenizer.pad_id,
        source_tokenizer.eos_id,
        target_tokenizer.pad_id,
        target_tokenizer.bos_id,
        target_tokenizer.eos_id,
    )
    return EncodedPairs(
        *sides,
        ids,
        np.array(kept),
        dropped_long=len(pairs) - len(kept),
        cut_long=cut_long,
        around=around,
    )


def encode_sources(
    lines: Sequence[str], tokenizer: Tokenizer | TokenizerPair, max_length: int, where: str = ""
) -> list[list[int]]:
    """The ids of lines to be translated. Raises InputError that begins with ``where`` and names the first line over ``max_length``, its
    special tokens included; a huge line is refused without being encoded."""
    more = around_of(tokenizer).size
    fewest = [tokenizer.fewest_tokens(line) + more for line in lines]
    hopeless = next((i for i, count in enumerate(fewest) if count > max_length), len(lines))
    encoded = tokenizer.encode_batch(lines[:hopeless])
    for number, ids in enumerate(encoded, 1):
        if len(ids) + more > max_length:
            raise errors.InputError(
                f"{where}line {number} is {len(ids) + more} tokens long, over the model's max_length={max_length}"
            )
    if hopeless < len(lines):
        raise errors.InputError(
            f"{where}line {hopeless + 1} is at least {fewest[hopeless]} tokens long, over the model's max_length={max_length}"
        )
    return encoded


def around_of(tokenizer: Tokenizer | TokenizerPair) -> Around:
    """What stands around a line that a tokenizer reads, or of one side, around a line of that side."""
    return Around(tokenizer.prefix, tokenizer.suffix)


def _hopeless(
    pair: tuple[str, str], tokenizers: tuple[Tokenizer, Tokenizer], rooms: Sequence[int]
) -> bool:
    """Whether a side is too long by its characters alone."""
    return any(
        tokenizer.fewest_tokens(line) > room
        for tokenizer, line, room in zip(tokenizers, pair, rooms, strict=True)
    )
