"""Text to ids: the tokenizer that options name or a run folder holds; a corpus encoded once; pairs
that are too long are dropped or cut, and counted.

Axes: n all pairs. The length of a side counts the special tokens around it, of which our own
tokenizers have one, the end.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jax_transformer import errors
from jax_transformer.architectures.registry import usual_length
from jax_transformer.config import TransformerConfig
from jax_transformer.data.options import DataOptions
from jax_transformer.data.tokenizer import SpecialTokens, Tokenizer, TokenizerPair
from jax_transformer.storage.huggingface_folder import IN_RUN
from jax_transformer.storage.run_files import SHARED_FILE, SIDE_FILES

Vocabulary = Tokenizer | TokenizerPair
# Pairs encoded at a time: bounds the memory of ids as Python integers.
CHUNK = 10_000
_VOCABULARIES = [
    f"{IN_RUN}/{name}"
    for name in "tokenizer.json spiece.model sentencepiece.bpe.model vocab.json "
    "vocab-src.json".split()
]
"""The files of a Hugging Face tokenizer in a run folder, of which it has at least one."""


class SpecialIds(NamedTuple):
    """The special tokens of the two vocabularies."""

    source_pad: int
    source_eos: int
    target_pad: int
    target_bos: int
    target_eos: int


@dataclass(frozen=True, eq=False)
class EncodedPairs:
    """A corpus as ids, without special tokens."""

    sources: list[np.ndarray]
    targets: list[np.ndarray]
    ids: SpecialIds
    indices: Int[np.ndarray, " n"]
    """Index of each pair in the list that was encoded."""
    dropped_long: int
    """Number of pairs that were dropped because a side was over its maximum."""
    cut_long: int = 0
    """Number of pairs with a side that was cut at its maximum."""
    added: tuple[SpecialTokens, SpecialTokens] | None = None
    """Special tokens of a source and of a target; if None, each has only its end token."""

    @property
    def special_tokens(self) -> tuple[SpecialTokens, SpecialTokens]:
        ends = self.ids.source_eos, self.ids.target_eos
        return self.added or (SpecialTokens((), ends[:1]), SpecialTokens((), ends[1:]))

    def take(self, numbers: Int[np.ndarray, " b"]) -> "EncodedPairs":
        """Return the pairs of these numbers, in this order."""
        chosen = numbers.tolist()
        return dataclasses.replace(
            self,
            sources=[self.sources[i] for i in chosen],
            targets=[self.targets[i] for i in chosen],
            indices=self.indices[numbers],
        )

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, "n 2"]:
        """Lengths of source and target, with the special tokens of each."""
        source, target = self.special_tokens
        sides = (list(map(len, self.sources)), list(map(len, self.targets)))
        lengths = np.array(sides, np.int64).T
        return lengths + np.array([source.size, target.size])


def named_tokenizer(options: DataOptions) -> Vocabulary | None:
    """Load the tokenizer that the options name, or the two; None if they name none."""
    if options.tokenizer is None:
        return None
    first = Tokenizer.load(options.tokenizer)
    if options.target_tokenizer is None:
        return first
    return TokenizerPair(first, Tokenizer.load(options.target_tokenizer))


def has_tokenizer(path: str | Path) -> bool:
    """Return True if a run folder holds a tokenizer, or at least one of two."""
    return any((Path(path) / name).exists() for name in (SHARED_FILE, *SIDE_FILES, *_VOCABULARIES))


def load_tokenizer(path: str | Path) -> Vocabulary:
    """Return the tokenizer that a run folder holds, or its two.

    Raises InputError that names a missing file.
    """
    folder = Path(path)
    sides = [name for name in SIDE_FILES if (folder / name).exists()]
    if (folder / SHARED_FILE).exists():
        if sides:
            raise errors.InputError(
                f"{folder}: holds {SHARED_FILE} and {sides[0]}; both sides share a vocabulary or"
                " each has its own"
            )
        return Tokenizer.load(folder / SHARED_FILE)
    if sides:
        return TokenizerPair(*(Tokenizer.load(folder / name) for name in SIDE_FILES))
    if has_tokenizer(folder):
        from jax_transformer.data import huggingface_tokenizer

        return huggingface_tokenizer.load_from_run(folder)
    raise errors.InputError(
        f"{folder / SHARED_FILE}: missing (a run converted from bare weights has none until its"
        " tokenizer is copied there)"
    )


def save_tokenizer(tokenizer: Vocabulary, path: str | Path) -> None:
    """Write the files that :func:`load_tokenizer` reads."""
    folder = Path(path)
    if isinstance(tokenizer, Tokenizer):
        tokenizer.save(folder / SHARED_FILE)
    elif type(tokenizer) is TokenizerPair:
        for side, name in zip((tokenizer.source, tokenizer.target), SIDE_FILES, strict=True):
            side.save(folder / name)
    else:
        from jax_transformer.data import huggingface_tokenizer

        assert isinstance(tokenizer, huggingface_tokenizer.HuggingFaceTokenizer)
        huggingface_tokenizer.save_in_run(tokenizer, folder)


def limits(options: DataOptions, config: TransformerConfig) -> tuple[int, int]:
    """Return the maximum length of source and of target in tokens.

    Raises ConfigError if it is over the model's.
    """
    lengths = []
    for name in ("max_source_length", "max_target_length"):
        value = getattr(options, name)
        if value is not None and value > config.longest:
            reach = f"positions, which reach {config.longest} tokens"
            if config.longest == config.max_length:
                reach = f"max_length={config.max_length}; raise that too"
            raise errors.ConfigError(f"data.{name}={value} is over the model's {reach}")
        lengths.append(usual_length(config) if value is None else value)
    return lengths[0], lengths[1]


def encode_pairs(
    pairs: Sequence[tuple[str, str]],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    max_length: int,
    max_target_length: int | None = None,
    *,
    cut: bool = False,
) -> EncodedPairs:
    """Return pairs as ids, without those that are too long.

    A pair with a side over ``max_length``, its special tokens included, is dropped; with ``cut``
    that side keeps its first tokens. Both are counted. ``max_target_length`` is the maximum of
    targets if it differs. Raises InputError if no pair is left, ConfigError if a maximum has no
    room for the special tokens.

    A huge line is never encoded whole, unless its tokenizer is one that cannot bound tokens by
    characters (``Tokenizer.fewest_tokens``).
    """
    limits = max_length, max_target_length or max_length
    encoded = encode_some(pairs, source_tokenizer, target_tokenizer, *limits, cut=cut)
    if not encoded.sources:
        raise errors.InputError(none_fits(len(pairs), limits))
    return encoded


def none_fits(count: int, limits: tuple[int, int]) -> str:
    """Return the message that none of ``count`` pairs is within the maxima."""
    limit = f"max_length={limits[0]}"
    if limits[0] != limits[1]:
        limit = f"max_source_length={limits[0]}, max_target_length={limits[1]}"
    return f"none of the {count} pairs is within {limit} tokens; raise it, or shorten the lines"


def encode_some(
    pairs: Sequence[tuple[str, str]],
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    source_limit: int,
    target_limit: int,
    *,
    cut: bool = False,
) -> EncodedPairs:
    """Return what :func:`encode_pairs` does, also if no pair is left."""
    one, other = source_tokenizer, target_tokenizer
    added = special_tokens(one), special_tokens(other)
    source_room, target_room = source_limit - added[0].size, target_limit - added[1].size
    if min(source_room, target_room) < 0:
        raise errors.ConfigError(
            f"a maximum of {min(source_limit, target_limit)} tokens has no room "
            f"for the {max(added[0].size, added[1].size)} special ones"
        )
    sources: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    indices, cut_long = [], 0
    for start in range(0, len(pairs), CHUNK):
        chunk, first, second = [], [], []
        for i, (text, translation) in enumerate(pairs[start : start + CHUNK], start):
            if cut or (
                one.fewest_tokens(text) <= source_room
                and other.fewest_tokens(translation) <= target_room
            ):
                chunk.append(i)
                first.append(one.beginning(text, source_room + 1))
                second.append(other.beginning(translation, target_room + 1))
        encoded = zip(chunk, one.encode_batch(first), other.encode_batch(second), strict=True)
        for i, source, target in encoded:
            too_long = len(source) > source_room or len(target) > target_room
            if cut or not too_long:
                indices.append(i)
                cut_long += too_long
                sources.append(np.array(source[:source_room], np.int32))
                targets.append(np.array(target[:target_room], np.int32))
    return EncodedPairs(
        sources,
        targets,
        special_ids(one, other),
        np.array(indices, np.int64),
        dropped_long=len(pairs) - len(indices),
        cut_long=cut_long,
        added=added,
    )


def special_ids(source: Tokenizer, target: Tokenizer) -> SpecialIds:
    """Return the special ids of two tokenizers, which may be one."""
    return SpecialIds(source.pad_id, source.eos_id, target.pad_id, target.bos_id, target.eos_id)


def encode_sources(
    lines: Sequence[str],
    tokenizer: Vocabulary,
    max_length: int,
    where: str = "",
    *,
    first_number: int = 1,
) -> list[list[int]]:
    """Return the ids of lines to be translated.

    Raises InputError that begins with ``where`` and names the first line over ``max_length``, its
    special tokens included; a huge line is refused without being encoded.
    """
    added = special_tokens(tokenizer).size
    too_long = len(lines)
    for i, line in enumerate(lines):
        fewest = tokenizer.fewest_tokens(line) + added
        if fewest > max_length:
            too_long = i
            break
    encoded = tokenizer.encode_batch(lines[:too_long])
    for number, ids in enumerate(encoded, first_number):
        if len(ids) + added > max_length:
            raise errors.InputError(
                f"{where}line {number} is {len(ids) + added} tokens long, "
                f"over the model's max_length={max_length}"
            )
    if too_long < len(lines):
        raise errors.InputError(
            f"{where}line {first_number + too_long} is at least {fewest} tokens long, "
            f"over the model's max_length={max_length}"
        )
    return encoded


def cut_sources(
    lines: Sequence[str], tokenizer: Vocabulary, max_length: int
) -> tuple[list[list[int]], list[bool]]:
    """Return the ids of lines to be translated, cut at ``max_length`` with the special tokens, and
    True for each that was cut; a huge line is not encoded whole.
    """
    room = max_length - special_tokens(tokenizer).size
    encoded = tokenizer.encode_batch([tokenizer.source.beginning(line, room + 1) for line in lines])
    return [ids[:room] for ids in encoded], [len(ids) > room for ids in encoded]


def special_tokens(tokenizer: Vocabulary) -> SpecialTokens:
    """Return the special tokens around a line of a tokenizer, or of its source side."""
    return SpecialTokens(tokenizer.prefix, tokenizer.suffix)
