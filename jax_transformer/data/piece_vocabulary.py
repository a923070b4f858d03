"""Vocabularies whose ids are in ``vocab.json`` and whose pieces are cut by Python or SentencePiece.

They encode and decode as transformers 5.23 does (``tokenization_python.py`` and the classes of the
families).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import SupportsInt

import tokenizers

from jax_transformer.data.tokenizer_settings import TokenizerSettings
from jax_transformer.data.vocabulary import Vocabulary, cleaned_up
from jax_transformer.errors import InputError
from jax_transformer.storage.untrusted import shown


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
        self._cut, self._join, self._ids, self._unknown_id = cut, join, ids, ids[unknown]
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
            whole = part in self._added and not self._cuts_added_tokens
            pieces = [part] if whole else self._pieces(part)
            ids += [
                self._added.get(piece, self._ids.get(piece, self._unknown_id)) for piece in pieces
            ]
        return ids

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return :meth:`encode` of each line."""
        return [self.encode(line) for line in lines]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text of ids, without special tokens; an id that has no token has no text."""
        tokens = [self._texts[i] for i in map(int, ids) if i in self._texts]
        text = self._join([token for token in tokens if token not in self._special])
        if self._recipe.underlines_are_spaces:
            text = text.replace("▁", " ")
        text = text.strip()
        return cleaned_up(text) if self._cleans_up else text

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        return self._added.get(token, self._ids.get(token))

    def tokens(self) -> dict[int, str]:
        """Return the text of every token by its id."""
        return dict(self._texts)

    def names(self) -> list[str]:
        """List every token's text."""
        return [*self._ids, *self._added]

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
