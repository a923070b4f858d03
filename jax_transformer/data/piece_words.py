"""Vocabularies whose pieces SentencePiece's library finds and whose ids stand in ``vocab.json``: those of Marian and of M2M100.

As transformers 5.23 encodes and decodes with them (``tokenization_python.py``, ``tokenization_marian.py``, ``tokenization_m2m_100.py``).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jax_transformer.data import fast_words
from jax_transformer.data.huggingface_files import Described, Kind
from jax_transformer.errors import InputError
from jax_transformer.storage.untrusted import shown


@dataclass(frozen=True)
class Added:
    """The tokens that are found in text whole, before SentencePiece sees what is between them."""

    ids: dict[str, int]
    tokens: dict[str, AddedToken]

    @classmethod
    def of(cls, told: Described, vocabulary: Mapping[str, int]) -> "Added":
        """Those of a folder: told ids first; then special tokens with the ids of the vocabulary, or with new ones behind it."""
        tokens = {token.content: token for token in told.added.values()}
        ids = {token.content: index for index, token in told.added.items()}
        following = len(vocabulary.keys() | ids.keys())
        for token in [*told.named.values(), *told.extra]:
            if token.content in ids or not token.content:
                continue
            if token.content not in vocabulary:
                ids[token.content], following = following, following + 1
            else:
                ids[token.content] = vocabulary[token.content]
            tokens[token.content] = token
        single = sorted(text for text, token in tokens.items() if token.single_word)
        if single:
            raise InputError(
                f"{told.folder}: the added token {shown(single[0])} is single_word, which is not supported; remove that"
            )
        return cls(ids, tokens)

    def split(self, line: str) -> list[str]:
        """A line cut into added tokens and what is between them; the first token wins, of several at one place the longest."""
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


class PieceWords:
    """Text to ids and back by a SentencePiece model and a vocabulary of its pieces."""

    def __init__(
        self,
        path: Path,
        vocabulary: dict[str, int],
        processor: Any,
        told: Described,
        *,
        joins: Any = None,
    ) -> None:
        """``joins`` is the model that makes text of pieces, where it is another."""
        unknown = told.named["unk_token"].content
        if unknown not in vocabulary:
            raise InputError(f"{path}: has no {shown(unknown)}, the token for what is unknown")
        added = Added.of(told, vocabulary)
        self._processor, self._joins = processor, joins or processor
        self._ids, self._added = vocabulary, added
        self._texts = {index: text for text, index in vocabulary.items()} | {
            index: text for text, index in added.ids.items()
        }
        self._unknown, self._unknown_id = unknown, vocabulary[unknown]
        # An added token that only says of itself that it is special is text: transformers asks for a role or the list of extra ones
        self._special = {token.content for token in [*told.named.values(), *told.extra]}
        self._whole = told.flag("split_special_tokens")
        self._marian = told.kind is Kind.MARIAN
        self._clean = told.flag("clean_up_tokenization_spaces")
        self.size = max(self._texts, default=-1) + 1

    def encode(self, line: str) -> list[int]:
        """The ids of a line, without those around it."""
        if self._whole:
            return [self._id(piece) for piece in self._pieces(line)]
        ids: list[int] = []
        for part in self._added.split(line):
            if part in self._added.ids:
                ids.append(self._added.ids[part])
            else:
                ids += [self._id(piece) for piece in self._pieces(part)]
        return ids

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """``encode`` of each line."""
        return [self.encode(line) for line in lines]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; of an id without a token, nothing."""
        tokens = [
            self._texts[i] for i in ids if i in self._texts and self._texts[i] not in self._special
        ]
        text = self._joins.decode_pieces(tokens)
        text = (text.replace("▁", " ") if self._marian else text).strip()
        return fast_words.cleaned(text) if self._clean else text

    def id_of(self, token: str) -> int | None:
        """The id of a token by its text."""
        return self._added.ids.get(token, self._ids.get(token))

    def names(self) -> list[str]:
        """Every token's text."""
        return [*self._ids, *self._added.ids]

    def _id(self, piece: str) -> int:
        return self._added.ids.get(piece, self._ids.get(piece, self._unknown_id))

    def _pieces(self, part: str) -> list[str]:
        end = part.find("<<") if self._marian and part.startswith(">>") else -1
        code = [part[: end + 2]] if end >= 0 else []
        return code + self._processor.encode(part[end + 2 :] if code else part, out_type=str)
