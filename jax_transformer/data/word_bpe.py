"""Byte-pair encoding of lower-cased words, as ParlAI and transformers' BlenderbotSmall do it.

A word's last symbol ends with ``</w>`` while pairs are merged; the pieces of a word but the last
are written with ``@@`` (Sennrich et al. 2016). Facts from ``tokenization_blenderbot_small.py`` of
transformers 5.23, whose regular expressions know Unicode's white space, not that of Python's
``re``.
"""

import itertools
import math
import re
from collections.abc import Sequence

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WORDS = re.compile(rf"[^{_SPACE}]+\n?")
_SPACES = re.compile(rf"[{_SPACE}]{{2,}}")
_PUNCTUATION = re.compile(r"([.,!?()])")
END, _CONTINUED = "</w>", "@@"
_REMEMBERED = 100_000  # words


class Merges:
    """A word to its symbols, by merges in the order in which they are tried."""

    def __init__(self, merges: Sequence[tuple[str, str]]) -> None:
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._cut: dict[str, list[str]] = {}

    def __call__(self, word: str) -> list[str]:
        """Return the symbols of a word, the last one with ``</w>``."""
        if word not in self._cut:
            if len(self._cut) >= _REMEMBERED:
                self._cut.clear()
            self._cut[word] = self._merged([*word[:-1], word[-1] + END])
        return self._cut[word]

    def _merged(self, symbols: list[str]) -> list[str]:
        """Merge the pair of the lowest rank wherever it occurs, until no pair has a rank."""
        while len(symbols) > 1:
            pairs = set(itertools.pairwise(symbols))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, math.inf))
            if best not in self._ranks:
                break
            symbols = _merge(symbols, best)
        return symbols


class WordBpe:
    """Text to pieces and back by the merges of a ``merges.txt``; a :class:`.PieceModel`."""

    def __init__(self, merges: Sequence[tuple[str, str]]) -> None:
        """``merges`` in the order in which they are tried."""
        self._merges = Merges(merges)

    def cut(self, text: str) -> list[str]:
        """Return the pieces of a text."""
        return [
            piece
            for word in _WORDS.findall(text)
            for part in _parts(word)
            for piece in self._pieces(part.lower())
        ]

    def join(self, pieces: Sequence[str]) -> str:
        """Return the text of pieces."""
        return " ".join(pieces).replace(f"{_CONTINUED} ", "")

    def _pieces(self, word: str) -> list[str]:
        *rest, last = self._merges(word)
        return [*(symbol + _CONTINUED for symbol in rest), last.removesuffix(END)]


def _parts(word: str) -> list[str]:
    """Cut punctuation off a word, and write a line's end as a word."""
    word = _PUNCTUATION.sub(r" \1", word).replace("'", " ' ")
    word = _SPACES.sub(" ", word).replace("\n", " __newln__")
    return [part for part in word.split(" ") if part]


def _merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    i = 0
    while i < len(symbols):
        if tuple(symbols[i : i + 2]) == pair:
            merged.append("".join(pair))
            i += 2
        else:
            merged.append(symbols[i])
            i += 1
    return merged
