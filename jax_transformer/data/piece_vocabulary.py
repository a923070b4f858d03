"""Vocabularies whose ids are in ``vocab.json`` and whose pieces are cut by Python or SentencePiece.

They encode and decode as transformers 5.23 does (``tokenization_python.py`` and the classes of the
families). SentencePiece models are read by their own library, and taken apart so that
``tokenizers`` can rebuild them.
"""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import AddedToken

from jax_transformer.architectures.tokenizer_recipe import TokenizerRecipe
from jax_transformer.data.subword_vocabulary import cleaned_up
from jax_transformer.data.tokenizer_settings import TokenizerSettings
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage.untrusted import shown

# Numbers of ``sentencepiece_model.proto``: the fields of a model, of a piece, of its trainer, of
# its normalizer, and the types of pieces and models
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _CHARSMAP = 3, 2
_CONTROL, _USER_DEFINED = 3, 4
UNIGRAM, BPE = 1, 2


@runtime_checkable
class PieceModel(Protocol):
    """The algorithm that cuts text into pieces, and joins them."""

    def cut(self, text: str) -> list[str]:
        """Return the pieces of a text."""
        ...

    def join(self, pieces: Sequence[str]) -> str:
        """Return the text of pieces."""
        ...


@dataclass(frozen=True)
class AddedTokens:
    """The tokens that are never cut: they are looked for in text before anything else."""

    ids: dict[str, int]
    tokens: dict[str, AddedToken]

    @classmethod
    def of(cls, settings: TokenizerSettings, vocabulary: Mapping[str, int]) -> "AddedTokens":
        """Return those of a folder.

        Tokens whose ids the folder names come first, then special tokens with the ids of the
        vocabulary, or with new ones after it.
        """
        tokens = {token.content: token for token in settings.added_tokens.values()}
        ids = {token.content: index for index, token in settings.added_tokens.items()}
        next_id = len(vocabulary.keys() | ids.keys())
        for token in [*settings.special_tokens.values(), *settings.extra_tokens]:
            if token.content in ids or not token.content:
                continue
            if token.content not in vocabulary:
                ids[token.content], next_id = next_id, next_id + 1
            else:
                ids[token.content] = vocabulary[token.content]
            tokens[token.content] = token
        single = sorted(text for text, token in tokens.items() if token.single_word)
        if single:
            raise InputError(
                f"{settings.folder}: the added token {shown(single[0])} is single_word, which is"
                " not supported; remove that"
            )
        return cls(ids, tokens)

    def split(self, line: str) -> list[str]:
        """Cut a line into added tokens and the text between them.

        The first token wins, and of several at one place the longest.
        """
        pattern = "|".join(re.escape(text) for text in sorted(self.ids, key=len, reverse=True))
        parts = [part for part in re.split(f"({pattern})", line) if part] if pattern else [line]
        for i, part in enumerate(parts):
            token = self.tokens.get(part)
            if token is None:
                continue
            if token.rstrip and i + 1 < len(parts):
                parts[i + 1] = parts[i + 1].lstrip()
            if token.lstrip and i > 0:
                parts[i - 1] = parts[i - 1].rstrip()
        return [part for part in parts if part]


class PieceVocabulary:
    """Text to ids and back by a model of pieces and a vocabulary of them; a
    :class:`.SubwordVocabulary`.
    """

    def __init__(
        self,
        path: Path,
        vocabulary: dict[str, int],
        model: PieceModel,
        settings: TokenizerSettings,
        *,
        joined_by: PieceModel | None = None,
    ) -> None:
        """``joined_by`` is the model that makes text of pieces, if it is another one."""
        unknown = settings.token("unk_token")
        if unknown not in vocabulary:
            raise InputError(f"{path}: has no {shown(unknown)}, the token for unknown pieces")
        added = AddedTokens.of(settings, vocabulary)
        self._model, self._joined_by = model, joined_by or model
        self._ids, self._added = vocabulary, added
        self._texts = {index: text for text, index in vocabulary.items()}
        self._texts |= {index: text for text, index in added.ids.items()}
        self._unknown_id = vocabulary[unknown]
        # A token is special by its role or by the list of extra ones, not by what it says of itself
        special = [*settings.special_tokens.values(), *settings.extra_tokens]
        self._special = {token.content for token in special}
        self._cuts_added_tokens = settings.flag("split_special_tokens")
        self._cleans_up = settings.flag("clean_up_tokenization_spaces", settings.recipe.cleans_up)
        self._recipe: TokenizerRecipe = settings.recipe
        self.size = max(self._texts, default=-1) + 1

    def encode(self, line: str) -> list[int]:
        """Return the ids of a line."""
        if self._cuts_added_tokens:
            return [self._id(piece) for piece in self._pieces(line)]
        ids: list[int] = []
        for part in self._added.split(line):
            if part in self._added.ids:
                ids.append(self._added.ids[part])
            else:
                ids += [self._id(piece) for piece in self._pieces(part)]
        return ids

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return :meth:`encode` of each line."""
        return [self.encode(line) for line in lines]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens; an id that has no token has no text."""
        tokens = [self._texts[i] for i in ids if i in self._texts]
        text = self._joined_by.join([token for token in tokens if token not in self._special])
        if self._recipe.underlines_are_spaces:
            text = text.replace("▁", " ")
        text = text.strip()
        return cleaned_up(text) if self._cleans_up else text

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        return self._added.ids.get(token, self._ids.get(token))

    def tokens(self) -> dict[int, str]:
        """Return the text of every token by its id."""
        return dict(self._texts)

    def names(self) -> list[str]:
        """List every token's text."""
        return [*self._ids, *self._added.ids]

    def _id(self, piece: str) -> int:
        return self._added.ids.get(piece, self._ids.get(piece, self._unknown_id))

    def _pieces(self, text: str) -> list[str]:
        if self._recipe.code_brackets is None:
            return self._model.cut(text)
        opening, closing = self._recipe.code_brackets
        end = text.find(closing) if text.startswith(opening) else -1
        if end < 0:
            return self._model.cut(text)
        end += len(closing)
        return [text[:end], *self._model.cut(text[end:])]


class SentencePieceModel:
    """A model that the library itself runs; a :class:`.PieceModel`."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def cut(self, text: str) -> list[str]:
        """Return the pieces of a text."""
        return self.processor.encode(text, out_type=str)

    def join(self, pieces: Sequence[str]) -> str:
        """Return the text of pieces."""
        return self.processor.decode_pieces(list(pieces))


def load_sentencepiece(path: Path, content: bytes) -> SentencePieceModel:
    """Return the SentencePiece model of a file.

    Raises:
        InputError: the file is not a model.
        ConfigError: SentencePiece is not installed.
    """
    try:
        import sentencepiece
    except ImportError:
        raise ConfigError(
            f"{path}: needs SentencePiece: pip install 'jax-seq2seq[sentencepiece]'"
        ) from None
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: not a SentencePiece model: {shown(str(error).splitlines()[0], 120)}"
        ) from None
    return SentencePieceModel(processor)


@dataclass(frozen=True)
class Pieces:
    """The parts of a SentencePiece model."""

    scored: list[tuple[str, float]]
    """Every piece with its score, in the order of ids."""
    control: list[str]
    """Pieces that no text is cut into."""
    user_defined: list[str]
    """Pieces that are never cut."""
    charsmap: bytes | None
    """The normalization of characters, compiled."""
    algorithm: int
    """``UNIGRAM`` or ``BPE``, or another number."""


def take_apart(path: Path, model: SentencePieceModel) -> Pieces:
    """Return the parts of a model as the library writes it, without what else a file holds.

    Raises InputError naming the file for a piece that is no text, or a field that is no field.
    """
    try:
        return _parts(model)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        reason = shown(str(error), 120)
        raise InputError(f"{path}: not a SentencePiece model that can be read: {reason}") from None


def _parts(model: SentencePieceModel) -> Pieces:
    scored: list[tuple[str, float]] = []
    by_type: dict[int, list[str]] = {_CONTROL: [], _USER_DEFINED: []}
    charsmap, algorithm = None, UNIGRAM
    for field, value in _fields(model.processor.serialized_model_proto()):
        if field == _PIECES:
            piece = dict(_fields(value))
            text = piece.get(_TEXT, b"").decode("utf-8")
            scored.append((text, struct.unpack("<f", piece.get(_SCORE, bytes(4)))[0]))
            by_type.get(piece.get(_TYPE, 0), []).append(text)
        elif field == _TRAINER:
            algorithm = dict(_fields(value)).get(_MODEL_TYPE, UNIGRAM)
        elif field == _NORMALIZER:
            charsmap = dict(_fields(value)).get(_CHARSMAP) or None
    return Pieces(scored, by_type[_CONTROL], by_type[_USER_DEFINED], charsmap, algorithm)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message in the wire format of protocol buffers: whole numbers, and
    bytes.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield field, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}[wire]
        yield field, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
