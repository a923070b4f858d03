"""Span corruption, the task that T5 learns from plain text: Raffel et al. 2020, section 3.1.4.

Random spans of a text are replaced by sentinels. The target has each sentinel with the tokens that
it replaces. The spans are other ones at every step.

Axes: n texts, p parts of one.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int32

from jax_transformer.data.encoding import (
    CHUNK,
    EncodedPairs,
    Vocabulary,
    special_ids,
    special_tokens,
)
from jax_transformer.data.tokenizer import SENTINEL
from jax_transformer.errors import ConfigError

Tokens = Int32[np.ndarray, " _"]


@dataclass(frozen=True)
class Noise:
    """The amount of noise. The defaults of T5 are 0.15 and 3."""

    density: float
    """Share of the tokens to replace."""
    span_length: float
    """Mean number of tokens of a span."""

    def counts(self, length: int) -> tuple[int, int]:
        """Return the number of tokens that are replaced in a text of ``length``, and of spans."""
        replaced = min(max(round(length * self.density), 1), length - 1)
        return replaced, min(max(round(replaced / self.span_length), 1), length - replaced)

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the lengths of a text's source and target, without special tokens."""
        replaced, spans = self.counts(length)
        return length - replaced + spans, replaced + spans

    def longest(self, source_room: int, target_room: int) -> int:
        """Return the length of the longest text whose source and target fit; below 2 if none."""
        length = 1
        while all(map(int.__le__, self.lengths(length + 1), (source_room, target_room))):
            length += 1
        return length


def corrupt(
    tokens: Tokens, parts: Int[np.ndarray, "p 2"], sentinels: Sequence[int]
) -> tuple[Tokens, Tokens]:
    """Return source and target of a text. Each of ``parts`` is a number of tokens to keep, and the
    number after them to replace.
    """
    source, target, begin = [], [], 0
    for (keep, replace), sentinel in zip(parts.tolist(), sentinels, strict=False):
        source += [*tokens[begin : begin + keep], sentinel]
        target += [sentinel, *tokens[begin + keep : begin + keep + replace]]
        begin += keep + replace
    return np.array(source, np.int32), np.array(target, np.int32)


@dataclass(frozen=True, eq=False)
class CorruptedTexts:
    """Texts with other spans replaced at every step."""

    noise: Noise
    sentinels: tuple[int, ...]
    seed: int

    def at(
        self, step: int, numbers: Int[np.ndarray, " b"], pairs: EncodedPairs, width: int
    ) -> EncodedPairs:
        """Return texts with the spans of a step, as sources and targets."""
        del width  # the lengths are the same at every step
        # Keys of epochs have a second word below 2**63
        key = np.array([self.seed % 2**64, 2**63 + step], np.uint64)
        sources, targets = [], []
        for number, tokens in zip(numbers.tolist(), pairs.sources, strict=True):
            random = np.random.Philox(key=key, counter=[0, number, 0, 0])
            replaced, spans = self.noise.counts(len(tokens))
            sizes = [_parts(n, spans, random) for n in (len(tokens) - replaced, replaced)]
            source, target = corrupt(tokens, np.stack(sizes, axis=1), self.sentinels)
            sources.append(source)
            targets.append(target)
        return dataclasses.replace(pairs, sources=sources, targets=targets)

    def lengths(self, encoded: EncodedPairs, longest: int) -> Int[np.ndarray, "n 2"]:
        """Return the lengths of sources and targets, with their special tokens."""
        del longest  # of the texts, to which they were cut
        of_length = {n: self.noise.lengths(n) for n in set(map(len, encoded.sources))}
        sizes = [added.size for added in encoded.special_tokens]
        lengths = [of_length[len(text)] for text in encoded.sources]
        return np.array(lengths, np.int64).reshape(-1, 2) + np.array(sizes)


def _parts(total: int, count: int, random: np.random.Philox) -> Int[np.ndarray, " p"]:
    """Return the sizes of ``count`` random parts of ``total``, none of them empty."""
    chosen = np.argsort(random.random_raw(total - 1), kind="stable")[: count - 1]
    return np.diff(np.concatenate([[0], np.sort(chosen) + 1, [total]]))


def corrupted_texts(
    lines: Sequence[str],
    vocabulary: Vocabulary,
    noise: Noise,
    max_source_length: int,
    max_target_length: int,
    seed: int,
) -> tuple[EncodedPairs, CorruptedTexts]:
    """Return lines as texts, in pieces whose source and target are within the maxima: as sources
    with empty targets, and with their spans of each step.

    Lines and pieces of fewer than two tokens are left out. Raises ConfigError if the tokenizer has
    too few sentinels or a maximum has no room.
    """
    tokenizer = vocabulary.source
    added = special_tokens(tokenizer)
    most = noise.longest(max_source_length - added.size, max_target_length - added.size)
    if most < 2:
        raise ConfigError(
            f"a maximum of {min(max_source_length, max_target_length)} tokens has no room for a "
            "text of two with its sentinels"
        )
    spans, sentinels = noise.counts(most)[1], tokenizer.sentinels
    if spans > len(sentinels):
        raise ConfigError(
            f"data.task=span-corruption replaces up to {spans} spans of a text, and the tokenizer "
            f"has {len(sentinels)} sentinels {SENTINEL.format(0)}, {SENTINEL.format(1)} …"
        )
    texts: list[np.ndarray] = []
    indices: list[int] = []
    for start in range(0, len(lines), CHUNK):
        for i, ids in enumerate(tokenizer.encode_batch(lines[start : start + CHUNK]), start):
            for j in range(0, len(ids) - 1, most):
                texts.append(np.array(ids[j : j + most], np.int32))
                indices.append(i)
    empty, special = np.zeros(0, np.int32), special_ids(vocabulary.source, vocabulary.target)
    encoded = EncodedPairs(
        texts, [empty] * len(texts), special, np.array(indices, np.int64), 0, added=(added, added)
    )
    return encoded, CorruptedTexts(noise, sentinels, seed)
