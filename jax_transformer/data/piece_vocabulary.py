"""Vocabularies of pieces that Python cuts, and the byte-pair encoding of words for two families.

:class:`PieceVocabulary` encodes and decodes as transformers 5.23 does (``tokenization_python.py``).
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsInt

import tokenizers

from jax_transformer.data import vocabulary
from jax_transformer.data.vocabulary import TokenizerSettings, Vocabulary, cleaned_up
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage.untrusted import shown

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


class PieceVocabulary(Vocabulary):
    """Text to ids and back by a function that cuts text into pieces, one that joins them, and a
    vocabulary of them.

    Added tokens are never cut: they are looked for in text before anything else.
    """

    def __init__(
        self,
        path: Path,
        ids: dict[str, int],
        settings: TokenizerSettings,
        cut: Callable[[str], list[str]],
        join: Callable[[Sequence[str]], str],
    ) -> None:
        unknown = settings.token("unk_token")
        if unknown not in ids:
            raise InputError(f"{path}: has no {shown(unknown)}, the token for unknown pieces")
        self._cut, self._join, self._unknown_id = cut, join, ids[unknown]
        # A token is special by its role or by the list of extra ones, not by what it says of itself
        special = [*settings.special_tokens.values(), *settings.extra_tokens]
        self._special = {token.content for token in special}
        # Tokens whose ids the folder names come first, then special tokens with the ids of the
        # vocabulary, or with new ones after it
        self._added = {token.content: index for index, token in settings.added_tokens.items()}
        self._tokens = {token.content: token for token in settings.added_tokens.values()}
        next_id = len(ids.keys() | self._added.keys())
        for token in special:
            if token.content in self._added or not token.content:
                continue
            self._tokens[token.content] = token
            self._added[token.content] = ids.get(token.content, next_id)
            next_id += token.content not in ids
        single = sorted(text for text, token in self._tokens.items() if token.single_word)
        if single:
            raise InputError(
                f"{settings.folder}: the added token {shown(single[0])} is single_word, which is"
                " not supported; remove that"
            )
        self._ids = ids | self._added
        texts = {index: text for text, index in ids.items()}
        self._texts = texts | {index: text for text, index in self._added.items()}
        self._cuts_added_tokens = settings.flag("split_special_tokens")
        self._cleans_up = settings.flag("clean_up_tokenization_spaces", settings.recipe.cleans_up)
        self._recipe = settings.recipe
        self.vocab_size = max(self._texts, default=-1) + 1

    def encode(self, line: str) -> list[int]:
        """Return the ids of a line, without those around it."""
        ids: list[int] = []
        for part in [line] if self._cuts_added_tokens else self._parts(line):
            is_token = part in self._added and not self._cuts_added_tokens
            pieces = [part] if is_token else self._pieces(part)
            ids += [self._ids.get(piece, self._unknown_id) for piece in pieces]
        return ids

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        return [self.encode(line) for line in lines]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text of ids, without special tokens; an id that has no token has no text."""
        tokens = [self._texts[i] for i in map(int, ids) if i in self._texts]
        text = self._join([token for token in tokens if token not in self._special])
        if self._recipe.underlines_are_spaces:
            text = text.replace("▁", " ")
        text = text.strip()
        return cleaned_up(text) if self._cleans_up else text

    def tokens(self) -> dict[int, str]:
        return dict(self._texts)

    @property
    def bpe(self) -> tokenizers.Tokenizer | None:
        """None: the library has no model of these pieces."""
        return None

    def _parts(self, line: str) -> list[str]:
        """Cut a line into added tokens and the text between them.

        The first token wins, and of several at one place the longest.
        """
        pattern = "|".join(re.escape(text) for text in sorted(self._added, key=len, reverse=True))
        parts = [part for part in re.split(f"({pattern})", line) if part] if pattern else [line]
        for i, part in enumerate(parts):
            token = self._tokens.get(part)
            if token is None:
                continue
            if token.rstrip and i + 1 < len(parts):
                parts[i + 1] = parts[i + 1].lstrip()
            if token.lstrip and i > 0:
                parts[i - 1] = parts[i - 1].rstrip()
        return [part for part in parts if part]

    def _pieces(self, text: str) -> list[str]:
        if self._recipe.code_brackets is None:
            return self._cut(text)
        opening, closing = self._recipe.code_brackets
        end = text.find(closing) if text.startswith(opening) else -1
        if end < 0:
            return self._cut(text)
        end += len(closing)
        return [text[:end], *self._cut(text[end:])]


def of_words(contents: Mapping[str, bytes], settings: TokenizerSettings) -> Vocabulary:
    """Return the vocabulary of ``vocab.json`` whose pieces :class:`WordBpe` cuts."""
    path, merges = settings.folder / "merges.txt", contents["merges.txt"]
    # transformers skips the first line, and what follows the last line's end
    if not merges.startswith(b"#version") or not merges.endswith(b"\n"):
        raise InputError(f"{path}: does not begin with #version, or its last line has no end")
    model = WordBpe(vocabulary.read_merges(path, merges))
    path = settings.folder / "vocab.json"
    ids = vocabulary.read_ids(path, contents[path.name])
    return PieceVocabulary(path, ids, settings, model.cut, model.join)


def of_moses(
    contents: Mapping[str, bytes], settings: TokenizerSettings
) -> tuple[Vocabulary, Vocabulary]:
    """Return the source's and the target's vocabulary, whose pieces :class:`MosesBpe` cuts."""
    folder = settings.folder
    langs = settings.values.get("langs")
    if (
        not isinstance(langs, list)
        or len(langs) != 2
        or not all(isinstance(lang, str) and lang.isalpha() and lang.isascii() for lang in langs)
    ):
        raise InputError(
            f"{folder / vocabulary.FILE}: langs is {shown(langs)}, not the codes of a"
            " source's and a target's language"
        )
    path = folder / "merges.txt"
    if not contents[path.name].endswith(b"\n"):  # transformers skips what follows the last line
        raise InputError(f"{path}: its last line has no end")
    merges = vocabulary.read_merges(path, contents[path.name], counted=True)
    names = ("vocab-src.json", "vocab-tgt.json")
    ids = [vocabulary.read_ids(folder / name, contents[name]) for name in names]
    moses, lowers = load_sacremoses(path), settings.flag("do_lower_case")
    models = [MosesBpe(moses, merges, lang, lowers=lowers) for lang in langs]
    source, target = (
        PieceVocabulary(folder / name, own, settings, model.cut, model.join)
        for name, own, model in zip(names, ids, models, strict=True)
    )
    return source, target


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
    """Text to pieces and back, by merges in the order in which they are tried."""

    def __init__(self, merges: Sequence[tuple[str, str]]) -> None:
        self._merges = Merges(merges)

    def cut(self, text: str) -> list[str]:
        return [
            piece
            for word in _WORDS.findall(text)
            for part in _parts(word)
            for piece in self._pieces(part.lower())
        ]

    def join(self, pieces: Sequence[str]) -> str:
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
        text = text.lower() if self._lowers else text
        text = _FULL_STOPS.sub(". ", text).translate(_PLAIN_PUNCTUATION)
        text = self._normalizer.normalize(text)
        text = "".join(char for char in text if not unicodedata.category(char).startswith("C"))
        words = self._tokenizer.tokenize(text, aggressive_dash_splits=True, escape=True)
        return [piece for word in words if word for piece in self._bpe(word)]

    def join(self, pieces: Sequence[str]) -> str:
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
