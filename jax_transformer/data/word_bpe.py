"""Byte-pair encoding of words by the merges of a ``merges.txt``, for two families.

:class:`WordBpe` cuts lower-cased words, as ParlAI and transformers' BlenderbotSmall do it:
the pieces of a word but the last are written with ``@@`` (Sennrich et al. 2016).
:class:`MosesBpe` cuts Moses' tokens, as transformers' FSMT does it: sacremoses, a port of
Moses' scripts (Koehn et al. 2007), normalises and tokenises text, and a word's last piece ends with
``</w>``. Facts from ``tokenization_blenderbot_small.py``, whose regular expressions know Unicode's
white space and not Python's, and ``tokenization_fsmt.py`` of transformers 5.23, and from Moses'
``replace-unicode-punctuation.perl``.
"""

import itertools
import math
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_transformer.errors import ConfigError

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WORDS = re.compile(rf"[^{_SPACE}]+\n?")
_SPACES = re.compile(rf"[{_SPACE}]{{2,}}")
_PUNCTUATION = re.compile(r"([.,!?()])")
_END, _CONTINUED = "</w>", "@@"
_REMEMBERED = 100_000  # words
_PLAIN_PUNCTUATION = str.maketrans(
    dict(zip("，、”“∶：？《》）！（；」「～’━〈〉【】％", ',,""::?"")!(;""~\'-<>[]%', strict=True))
    | dict(zip("０１２３４５６７８９", "0123456789", strict=True))
    | {"…": "..."}
)
_FULL_STOPS = re.compile(r"[。．]\s*")


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
            self._cut[word] = self._merged([*word[:-1], word[-1] + _END])
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
    """Text to pieces and back."""

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
        return [*(symbol + _CONTINUED for symbol in rest), last.removesuffix(_END)]


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


class MosesBpe:
    """Text of a language to pieces and back."""

    def __init__(
        self, moses: Any, merges: Sequence[tuple[str, str]], lang: str, *, lowers: bool
    ) -> None:
        """``moses`` is the module sacremoses; ``lowers`` writes text in lower case first."""
        self._normalizer = moses.MosesPunctNormalizer(lang=lang)
        self._tokenizer = moses.MosesTokenizer(lang=lang)
        self._detokenizer = moses.MosesDetokenizer(lang=lang)
        self._lowers = lowers
        self._bpe = Merges(merges)

    def cut(self, text: str) -> list[str]:
        """Return the pieces of a text."""
        text = text.lower() if self._lowers else text
        text = _FULL_STOPS.sub(". ", text).translate(_PLAIN_PUNCTUATION)
        text = self._normalizer.normalize(text)
        text = "".join(char for char in text if not unicodedata.category(char).startswith("C"))
        words = self._tokenizer.tokenize(text, aggressive_dash_splits=True, escape=True)
        return [piece for word in words if word for piece in self._bpe(word)]

    def join(self, pieces: Sequence[str]) -> str:
        """Return the text of pieces."""
        text = "".join(piece.replace(" ", "").replace(_END, " ") for piece in pieces)
        return self._detokenizer.detokenize(text.split())


def load_sacremoses(path: Path) -> Any:
    """Return the module sacremoses.

    Raises ConfigError, which names the file that needs it, if it is not installed.
    """
    try:
        import sacremoses
    except ImportError:
        raise ConfigError(
            f"{path}: needs sacremoses: pip install 'jax-seq2seq[sacremoses]'"
        ) from None
    return sacremoses
