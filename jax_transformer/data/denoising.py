"""Tasks of plain text, whose sources and targets are other ones at every step.

- Span corruption, T5's: Raffel et al. 2020, section 3.1.4. Random spans of a text are replaced by
  sentinels. The target has each sentinel with the tokens that it replaces.
- Denoising, BART's: Lewis et al. 2019, sections 2.2 and 5.1. Sentences are shuffled, and random
  spans become masks. The target is the text.
- Prefix language modelling: Raffel et al. 2020, section 3.2.3. The target is the rest of a text
  from a random token on.

Axes: n texts, p parts of one, s its spans.
"""

import bisect
import dataclasses
import math
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
from jax_transformer.data.options import DataOptions, Task
from jax_transformer.data.tokenizer import MASK, SENTINEL, Tokenizer
from jax_transformer.errors import ConfigError

Tokens = Int32[np.ndarray, " _"]


@dataclass(frozen=True)
class SpanCorruption:
    """T5's task. Its defaults are 0.15 and 3."""

    density: float
    """Share of the tokens to replace."""
    span_length: float
    """Mean number of tokens of a span."""
    sentinels: tuple[int, ...] = ()

    def counts(self, length: int) -> tuple[int, int]:
        """Return the number of tokens that are replaced in a text of ``length``, and of spans."""
        replaced = min(max(round(length * self.density), 1), length - 1)
        return replaced, min(max(round(replaced / self.span_length), 1), length - replaced)

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the lengths of a text's source and target, the same at every step."""
        replaced, spans = self.counts(length)
        return length - replaced + spans, replaced + spans

    def __call__(self, tokens: Tokens, random: np.random.Philox) -> tuple[Tokens, Tokens]:
        replaced, spans = self.counts(len(tokens))
        sizes = [_parts(n, spans, random) for n in (len(tokens) - replaced, replaced)]
        return corrupt(tokens, np.stack(sizes, axis=1), self.sentinels)

    def check(self, length: int) -> None:
        """Raise ConfigError if there are too few sentinels for a text of ``length``."""
        spans = self.counts(length)[1]
        if spans > len(self.sentinels):
            raise ConfigError(
                f"data.task=span-corruption replaces up to {spans} spans of a text, and the "
                f"tokenizer has {len(self.sentinels)} sentinels {SENTINEL.format(0)}, "
                f"{SENTINEL.format(1)} …"
            )


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


@dataclass(frozen=True)
class Denoising:
    """BART's task. Its defaults are 0.3 and 3.

    As fairseq's ``DenoisingDataset`` does, spans begin at random tokens: they may meet or overlap,
    and end with the text. Their lengths are of a Poisson distribution; one of length 0 is a mask
    between two tokens.
    """

    density: float
    """Share of the tokens to replace, rounded up."""
    span_length: float
    """Mean number of tokens of a span."""
    mask: int
    ends: tuple[int, ...] = ()
    """The tokens that end a sentence."""

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the longest source and the length of a target: the text's."""
        return length, length

    def __call__(self, tokens: Tokens, random: np.random.Philox) -> tuple[Tokens, Tokens]:
        ends = np.isin(tokens, self.ends)
        sentences = np.split(tokens, np.flatnonzero(ends[:-1] & ~ends[1:]) + 1)
        shuffled = np.concatenate([sentences[i] for i in _permutation(len(sentences), random)])
        sizes = self.sizes(math.ceil(len(tokens) * self.density), random)
        inserted, sizes = int(np.sum(sizes == 0)), sizes[sizes > 0]
        source = infill(shuffled, _permutation(len(tokens), random)[: len(sizes)], sizes, self.mask)
        # A source is never longer than its text: batches are planned for that
        inserted = min(inserted, len(tokens) - len(source))
        among = np.sort(_permutation(len(source) + inserted, random)[:inserted])
        return np.insert(source, among - np.arange(inserted), self.mask), tokens

    def sizes(self, total: int, random: np.random.Philox) -> Int[np.ndarray, " s"]:
        """Return lengths of spans, which are ``total`` together: the last is cut to that."""
        counts = np.arange(total)  # longer ones are cut
        log_factorials = np.cumsum(np.log(np.maximum(counts, 1)))
        logs = counts * math.log(self.span_length) - self.span_length - log_factorials
        below, sizes = np.cumsum(np.exp(logs)), np.zeros(0, np.int64)
        while sizes.sum() < total:
            uniform = (random.random_raw(total) >> np.uint64(11)) * 2.0**-53
            sizes = np.append(sizes, np.searchsorted(below, uniform, side="right"))
        sizes = sizes[: np.searchsorted(np.cumsum(sizes), total) + 1]
        sizes[-1] -= sizes.sum() - total
        return sizes


def infill(
    tokens: Tokens, starts: Int[np.ndarray, " s"], sizes: Int[np.ndarray, " s"], mask: int
) -> Tokens:
    """Return tokens with a mask for each span, unless it begins within another."""
    masked, keep = tokens.copy(), np.ones(len(tokens), bool)
    masked[starts] = mask
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        keep[start + 1 : start + size] = False
    return masked[keep]


class PrefixLM:
    """Prefix language modelling: a text is cut at a random token."""

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the longest source and target: the other has a token at least."""
        return length - 1, length - 1

    def __call__(self, tokens: Tokens, random: np.random.Philox) -> tuple[Tokens, Tokens]:
        end = 1 + int(random.random_raw()) % (len(tokens) - 1)
        return tokens[:end], tokens[end:]


Objective = SpanCorruption | Denoising | PrefixLM
"""A task of plain text. Called with a text of at least two tokens and a generator, it returns a
source and a target; ``lengths`` are the longest of both, without special tokens."""


def density(options: DataOptions, task: Task) -> float:
    """Return the share of the tokens to replace."""
    usual = 0.3 if task is Task.DENOISING else 0.15
    return usual if options.noise_density is None else options.noise_density


def objective(options: DataOptions, task: Task, tokenizer: Tokenizer) -> Objective:
    """Return a task of plain text with the options' noise.

    Raises ConfigError if the tokenizer lacks a mask.
    """
    noise = density(options, task), options.mean_noise_span_length
    if task is Task.PREFIX_LM:
        return PrefixLM()
    if task is Task.SPAN_CORRUPTION:
        return SpanCorruption(*noise, tokenizer.sentinels)
    ids = {text: index for index, text in tokenizer.tokens().items()}
    if MASK not in ids:
        raise ConfigError(
            f"data.task=denoising replaces spans by {MASK}, and the tokenizer has no such token"
        )
    ends = tuple(index for text, index in ids.items() if text.endswith((".", "!", "?")))
    return Denoising(*noise, ids[MASK], ends)


def longest(task: Objective, source_room: int, target_room: int) -> int:
    """Return the length of the longest text whose source and target fit; below 2 if none."""
    length = 1
    while all(map(int.__le__, task.lengths(length + 1), (source_room, target_room))):
        length += 1
    return length


@dataclass(frozen=True, eq=False)
class DrawnTexts:
    """Texts with other sources and targets at every step."""

    tasks: tuple[Objective, ...]
    """The task of each file."""
    seed: int
    ends: tuple[int, ...] = ()
    """The number of lines up to the end of each file but the last."""

    def at(
        self, step: int, numbers: Int[np.ndarray, " b"], pairs: EncodedPairs, width: int
    ) -> EncodedPairs:
        """Return texts with their sources and targets of a step."""
        del width  # batches are planned for the longest
        # Keys of epochs have a second word below 2**63
        key = np.array([self.seed % 2**64, 2**63 + step], np.uint64)
        sources, targets = [], []
        tasks = self._tasks(pairs)
        for number, tokens, task in zip(numbers.tolist(), pairs.sources, tasks, strict=True):
            random = np.random.Philox(key=key, counter=[0, number, 0, 0])
            source, target = task(tokens, random)
            sources.append(source)
            targets.append(target)
        return dataclasses.replace(pairs, sources=sources, targets=targets)

    def lengths(self, encoded: EncodedPairs, longest: int) -> Int[np.ndarray, "n 2"]:
        """Return the longest lengths of sources and targets, with their special tokens."""
        del longest  # of the texts, to which they were cut
        pairs = zip(self._tasks(encoded), encoded.sources, strict=True)
        lengths = [task.lengths(len(text)) for task, text in pairs]
        sizes = [added.size for added in encoded.special_tokens]
        return np.array(lengths, np.int64).reshape(-1, 2) + np.array(sizes)

    def _tasks(self, texts: EncodedPairs) -> list[Objective]:
        """Return the task of each text."""
        files = np.searchsorted(self.ends, texts.indices, side="right")
        return [self.tasks[i] for i in files.tolist()]


def _permutation(count: int, random: np.random.Philox) -> Int[np.ndarray, " _"]:
    return np.argsort(random.random_raw(count), kind="stable")


def _parts(total: int, count: int, random: np.random.Philox) -> Int[np.ndarray, " p"]:
    """Return the sizes of ``count`` random parts of ``total``, none of them empty."""
    chosen = _permutation(total - 1, random)[: count - 1]
    return np.diff(np.concatenate([[0], np.sort(chosen) + 1, [total]]))


def drawn_texts(
    lines: Sequence[str],
    vocabulary: Vocabulary,
    tasks: tuple[Objective, ...],
    max_source_length: int,
    max_target_length: int,
    seed: int,
    ends: tuple[int, ...] = (),
) -> tuple[EncodedPairs, DrawnTexts]:
    """Return lines as texts, in pieces whose source and target are within the maxima: as sources
    with empty targets, and with their sources and targets of each step. ``tasks`` and ``ends`` are
    as in :class:`DrawnTexts`.

    Lines and pieces of fewer than two tokens are left out. Raises ConfigError if the tokenizer has
    too few sentinels or a maximum has no room.
    """
    tokenizer = vocabulary.source
    added = special_tokens(tokenizer)
    rooms = max_source_length - added.size, max_target_length - added.size
    most = [longest(task, *rooms) for task in tasks]
    if min(most) < 2:
        raise ConfigError(
            f"a maximum of {min(max_source_length, max_target_length)} tokens has no room for a "
            "text of two tokens"
        )
    for task, length in zip(tasks, most, strict=True):
        if isinstance(task, SpanCorruption):
            task.check(length)
    texts: list[np.ndarray] = []
    indices: list[int] = []
    for start in range(0, len(lines), CHUNK):
        for i, ids in enumerate(tokenizer.encode_batch(lines[start : start + CHUNK]), start):
            size = most[bisect.bisect(ends, i)]
            for j in range(0, len(ids) - 1, size):
                texts.append(np.array(ids[j : j + size], np.int32))
                indices.append(i)
    empty, special = np.zeros(0, np.int32), special_ids(vocabulary.source, vocabulary.target)
    encoded = EncodedPairs(
        texts, [empty] * len(texts), special, np.array(indices, np.int64), 0, added=(added, added)
    )
    return encoded, DrawnTexts(tasks, seed, ends)
