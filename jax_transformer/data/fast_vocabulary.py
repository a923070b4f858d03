"""Vocabularies that ``tokenizers`` encodes with.

They come from a ``tokenizer.json``, from the two files of byte-level BPE, or are rebuilt from a
SentencePiece model. What is rebuilt is as transformers 5.23 builds it (``tokenization_*.py`` of the
families, and ``convert_from_spm`` of ``convert_slow_tokenizer.py``), so that ids are the same.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jax_transformer.architectures.tokenizer_recipe import RebuiltPieces
from jax_transformer.data import piece_vocabulary, tokenizer_settings
from jax_transformer.data.piece_vocabulary import Pieces
from jax_transformer.data.subword_vocabulary import cleaned_up
from jax_transformer.data.tokenizer import guarded
from jax_transformer.data.tokenizer_settings import TokenizerSettings
from jax_transformer.errors import InputError
from jax_transformer.storage.untrusted import shown


class FastVocabulary:
    """Text to ids and back by a model of ``tokenizers``; a :class:`.SubwordVocabulary`."""

    def __init__(
        self, path: Path, model: tokenizers.Tokenizer, settings: TokenizerSettings
    ) -> None:
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = settings.flag("split_special_tokens")
        self._path, self._model, self._left_out = path, model, settings.recipe.left_out
        with guarded(path):
            _add_tokens(model, settings)
            self._ids = model.get_vocab(with_added_tokens=True)
        self.size = max(self._ids.values(), default=-1) + 1
        is_bpe = isinstance(model.model, models.BPE)
        self._cleans_up = settings.flag("clean_up_tokenization_spaces") and not is_bpe

    @property
    def bpe(self) -> tokenizers.Tokenizer | None:
        """The tokenizer of the library, if its model is byte-pair encoding."""
        return self._model if isinstance(self._model.model, models.BPE) else None

    def encode(self, line: str) -> list[int]:
        """Return the ids of a line."""
        return self.encode_batch([line])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return :meth:`encode` of each line, on all cores."""
        with guarded(self._path):
            encodings = self._model.encode_batch_fast(list(lines), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        with guarded(self._path):
            text = self._model.decode(list(ids), skip_special_tokens=True)
        if self._left_out is not None:
            text = re.sub(self._left_out, "", text)
        return cleaned_up(text) if self._cleans_up else text

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        return self._ids.get(token)

    def tokens(self) -> dict[int, str]:
        """Return the text of every token by its id."""
        return {index: text for text, index in self._ids.items()}

    def names(self) -> list[str]:
        """List the tokens that are never cut, in the order of their ids."""
        added = self._model.get_added_tokens_decoder()
        return [token.content for _, token in sorted(added.items())]


def from_json(path: Path, content: bytes, settings: TokenizerSettings) -> FastVocabulary:
    """Return the vocabulary of a ``tokenizer.json``, with its normalization and its words."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a tokenizer file: not valid UTF-8") from None
    with guarded(path):
        model = tokenizers.Tokenizer.from_str(text)
    return FastVocabulary(path, model, settings)


def read_merges(path: Path, content: bytes, *, counted: bool = False) -> list[tuple[str, str]]:
    """Return the merges of a ``merges.txt``, in their order.

    ``counted`` lines may have a count after the two tokens. Raises InputError if a line is not two
    tokens.
    """
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not valid UTF-8") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        tokens = line.split(" ")
        if line.startswith("#version") or not line.strip():
            continue
        if len(tokens) != 2 and not (counted and len(tokens) == 3):
            raise InputError(f"{path}: line {number} is {shown(line)}, not two tokens")
        pairs.append((tokens[0], tokens[1].rstrip("\r")))
    return pairs


def from_merges(
    path: Path, vocabulary: bytes, merges: bytes, settings: TokenizerSettings
) -> FastVocabulary:
    """Return the byte-level BPE of ``vocab.json`` (``path``) and ``merges.txt``."""
    ids = tokenizer_settings.read_vocabulary(path, vocabulary)
    merges_path = path.with_name("merges.txt")
    pairs = read_merges(merges_path, merges)
    with guarded(merges_path):
        model = tokenizers.Tokenizer(
            models.BPE(
                ids, pairs, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
            )
        )
    prefix_space = settings.flag("add_prefix_space", settings.recipe.prefix_space)
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    model.decoder = decoders.ByteLevel()
    return FastVocabulary(path, model, settings)


def from_pieces(path: Path, pieces: Pieces, settings: TokenizerSettings) -> FastVocabulary:
    """Return the vocabulary that transformers rebuilds from a SentencePiece model."""
    layout = settings.recipe.pieces
    assert layout is not None, "asked only for recipes with Algorithm.REBUILT_PIECES"
    own_tokens = settings.recipe.own_tokens(settings)
    with guarded(path):
        _check_algorithm(pieces, settings)
        texts = {role: token.content for role, token in settings.special_tokens.items()}
        arranged = layout.arrange(pieces.scored, texts, own_tokens)
        unknown = texts["unk_token"]
        if layout.bpe:
            core = _merged(arranged, pieces, unknown)
        else:
            core = _unigram(arranged, layout, unknown)
        model = tokenizers.Tokenizer(core)
        metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
        words: list[Any] = [pre_tokenizers.WhitespaceSplit()] if layout.splits_words else []
        model.pre_tokenizer = pre_tokenizers.Sequence([*words, metaspace]) if words else metaspace
        normal = _normalizers(pieces, layout)
        if normal:
            model.normalizer = normalizers.Sequence(normal) if len(normal) > 1 else normal[0]
        model.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True)
        if not settings.lists_extra_tokens:
            own = [text for text in own_tokens if text not in pieces.user_defined]
            for texts_of_kind, special in (
                ([*pieces.control, *own], True),
                (pieces.user_defined, False),
            ):
                model.add_tokens(
                    [AddedToken(t, normalized=False, special=special) for t in texts_of_kind]
                )
    return FastVocabulary(path, model, settings)


def _check_algorithm(pieces: Pieces, settings: TokenizerSettings) -> None:
    bpe = settings.recipe.pieces is not None and settings.recipe.pieces.bpe
    if pieces.algorithm != (piece_vocabulary.BPE if bpe else piece_vocabulary.UNIGRAM):
        kind = "BPE" if bpe else "unigram"
        raise InputError(
            f"not a {kind} model, which {settings.recipe.name}'s is; give the folder a"
            " tokenizer.json"
        )


def _unigram(scored: list[tuple[str, float]], layout: RebuiltPieces, unknown: str) -> Any:
    unknown_id = layout.unknown_id
    if unknown_id is None:
        unknown_id = next((i for i, (text, _) in enumerate(scored) if text == unknown), 0)
    return models.Unigram(scored, unk_id=unknown_id, byte_fallback=False)


def _merged(scored: list[tuple[str, float]], pieces: Pieces, unknown: str) -> Any:
    ids = {text: i for i, text in enumerate(dict.fromkeys(text for text, _ in scored))}
    order = {text: i for i, (text, _) in enumerate(pieces.scored)}
    # The file has no merges: every cut of a piece into two others is one, earlier pieces first
    merges = [
        (text[:at], text[at:])
        for text in order
        for at in range(1, len(text))
        if text[:at] in order and text[at:] in order
    ]
    merges.sort(
        key=lambda pair: (
            order[pair[0] + pair[1]],
            len(pair[0]),
            len(pair[1]),
            order[pair[0]],
            order[pair[1]],
        )
    )
    return models.BPE(
        ids, merges, dropout=None, unk_token=unknown, fuse_unk=True, byte_fallback=False
    )


def _normalizers(pieces: Pieces, layout: RebuiltPieces) -> list[Any]:
    if not layout.normalizes:
        return []
    mapped = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    replaces = layout.replaces if mapped else layout.replaces_without_map
    return [*mapped, *(normalizers.Replace(Regex(old), new) for old, new in replaces)]


def _add_tokens(model: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Mark the special tokens of the model, and add unknown ones with the ids that the folder
    names.
    """
    model.add_tokens([token for _, token in sorted(settings.added_tokens.items())])
    known = model.get_vocab(with_added_tokens=True)
    for index, token in settings.added_tokens.items():
        if known.get(token.content) != index:
            outcome = "cannot be added"
            if token.content in known:
                outcome = f"becomes {known[token.content]}"
            raise InputError(
                f"the added token {shown(token.content)} has the id {index}, and {outcome}"
            )
    present = {token.content for token in model.get_added_tokens_decoder().values()}
    special = [*settings.special_tokens.values(), *settings.extra_tokens]
    last = settings.special_tokens.get(settings.recipe.added_last or "")
    special.sort(key=lambda token: token is last)
    model.add_special_tokens([token for token in special if token.content not in present])
