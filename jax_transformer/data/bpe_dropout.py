"""BPE dropout (Provilkov et al. 2020): training text is cut into other tokens at every step.

The draws of ``tokenizers`` cannot be seeded. So the library normalises text, cuts it into words and
says what the usual tokens of a word are; the merges that are dropped are drawn here, as a function
of seed, step and pair, and a resumed run equals an uninterrupted one.
"""

import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jax_transformer.data.encoding import EncodedPairs
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import ConfigError

_SAMPLE = 1000  # pairs that tell by how much text grows
_REMEMBERED = 1_000_000  # words
Draw = Callable[[], float]


class BpeDropout:
    """A BPE tokenizer that drops each possible merge with probability ``rate``."""

    def __init__(self, tokenizer: Tokenizer, rate: float) -> None:
        """Raises ConfigError if the tokenizer is not byte-pair encoding."""
        model = tokenizer.bpe
        if model is None:
            raise ConfigError(
                f"data.bpe_dropout={rate} needs a tokenizer of byte-pair encoding, and this one "
                "is not: set it to 0"
            )
        settings = json.loads(model.to_str())["model"]
        if settings["continuing_subword_prefix"] or settings["end_of_word_suffix"]:
            raise ConfigError(
                f"data.bpe_dropout={rate} does not know a tokenizer with "
                "continuing_subword_prefix or end_of_word_suffix: set it to 0"
            )
        self.rate, self._model, self._bpe = rate, model, model.model
        self._ids: dict[str, int] = settings["vocab"]
        pairs = [m.split(" ") if isinstance(m, str) else m for m in settings["merges"]]
        self._merges = {
            (self._ids[a], self._ids[b]): (rank, self._ids[a + b])
            for rank, (a, b) in enumerate(pairs)
        }
        self._usual: dict[str, list[int]] = {}

    def encode(self, line: str, usual: list[int], room: int, draw: Draw) -> list[int]:
        """Tokens of a line, at most ``room``; ``usual`` are those without dropout.

        If there is too little room, the last words keep their usual tokens. A line whose words do
        not give the usual tokens keeps these: it was cut, or has the text of a special token.
        """
        normalizer = self._model.normalizer
        text = line if normalizer is None else normalizer.normalize_str(line)
        words = [(word, self._tokens(word)) for word, _ in self._pieces(text)]
        if list(itertools.chain.from_iterable(tokens for _, tokens in words)) != usual:
            return usual
        dropped = [self._dropped(word, tokens, draw) for word, tokens in words]
        excess = sum(map(len, dropped)) - room
        for i in range(len(words) - 1, -1, -1):
            if excess <= 0:
                break
            excess -= len(dropped[i]) - len(words[i][1])
            dropped[i] = words[i][1]
        return list(itertools.chain.from_iterable(dropped))

    def _pieces(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        splitter = self._model.pre_tokenizer
        return [(text, (0, len(text)))] if splitter is None else splitter.pre_tokenize_str(text)

    def _tokens(self, word: str) -> list[int]:
        """Return the usual tokens of a word."""
        if word not in self._usual:
            if len(self._usual) >= _REMEMBERED:
                self._usual.clear()
            self._usual[word] = [token.id for token in self._bpe.tokenize(word)]
        return self._usual[word]

    def _dropped(self, word: str, usual: list[int], draw: Draw) -> list[int]:
        """Return the tokens of a word if each possible merge is dropped with the rate."""
        draws = [draw() for _ in range(len(word) - len(usual))]
        if min(draws, default=1.0) >= self.rate or any(c not in self._ids for c in word):
            return usual  # no merge is dropped, or there is none
        return self._merged([self._ids[c] for c in word], itertools.chain(draws, iter(draw, None)))

    def _merged(self, symbols: list[int], draws: Iterator[float]) -> list[int]:
        while True:
            possible = sorted(
                (*self._merges[pair], i)
                for i, pair in enumerate(itertools.pairwise(symbols))
                if pair in self._merges
            )
            for _, merged, i in possible:
                if next(draws) >= self.rate:
                    symbols = [*symbols[:i], merged, *symbols[i + 2 :]]
                    break
            else:
                return symbols


@dataclass(frozen=True, eq=False)
class DroppedPairs:
    """Training pairs with other tokens at every step."""

    pairs: Sequence[tuple[str, str]]
    """The text that was encoded."""
    source: BpeDropout
    target: BpeDropout
    seed: int

    def at(
        self, step: int, numbers: Int[np.ndarray, " b"], pairs: EncodedPairs, width: int
    ) -> EncodedPairs:
        """Return pairs with their tokens of a step, within ``width``."""
        del numbers
        texts = [self.pairs[i] for i in pairs.indices.tolist()]
        draws = [random.Random(f"{self.seed} {step} {i}").random for i in pairs.indices.tolist()]
        rooms = [width - special_tokens.size for special_tokens in pairs.special_tokens]

        def drawn(side: int, dropout: BpeDropout, usual: list[np.ndarray]) -> list[np.ndarray]:
            return [
                np.array(dropout.encode(text[side], ids.tolist(), rooms[side], draw), np.int32)
                for text, ids, draw in zip(texts, usual, draws, strict=True)
            ]

        sources = drawn(0, self.source, pairs.sources)
        return dataclasses.replace(
            pairs, sources=sources, targets=drawn(1, self.target, pairs.targets)
        )

    def lengths(self, encoded: EncodedPairs, longest: int) -> Int[np.ndarray, "n 2"]:
        """Return lengths to plan batches by: grown as the first pairs grow, up to ``longest``."""
        usual, some = encoded.lengths, np.arange(min(_SAMPLE, len(encoded.sources)))
        growth = self.at(-1, some, encoded.take(some), longest).lengths.sum() / usual[some].sum()
        return np.maximum(usual, np.minimum(np.ceil(usual * growth).astype(usual.dtype), longest))


def dropped_pairs(
    rate: float, pairs: Sequence[tuple[str, str]], source: Tokenizer, target: Tokenizer, seed: int
) -> DroppedPairs:
    """Return pairs with BPE dropout.

    Raises ConfigError for tokenizers that are not byte-pair encoding.
    """
    both = BpeDropout(source, rate)
    return DroppedPairs(pairs, both, both if target is source else BpeDropout(target, rate), seed)
