"""The vocabularies of a Hugging Face folder that has no ``tokenizer.json``, from its own files.

They encode and decode as transformers 5.23 does (``tokenization_python.py`` and the classes of the
families).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsInt

import tokenizers
from tokenizers import AddedToken

from jax_transformer.architectures.tokenizer_recipe import Algorithm, Languages
from jax_transformer.data import tokenizer_settings, vocabulary
from jax_transformer.data.tokenizer_settings import TokenizerSettings
from jax_transformer.data.vocabulary import Vocabulary, cleaned_up
from jax_transformer.errors import InputError
from jax_transformer.storage.untrusted import shown

Vocabularies = tuple[Vocabulary, Vocabulary]


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

    def tokens(self) -> dict[int, str]:
        """Return the text of every token by its id."""
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


# What cuts and joins pieces is imported where a folder needs it


def vocabularies(contents: Mapping[str, bytes], settings: TokenizerSettings) -> Vocabularies:
    """Return the source's and the target's, which are one object if they are one vocabulary."""
    algorithm = settings.recipe.algorithm
    if algorithm is Algorithm.BYTE_BPE:
        path = settings.folder / "vocab.json"
        merges = contents["merges.txt"]
        fast = vocabulary.from_merges(path, contents[path.name], merges, settings)
        return fast, fast
    if algorithm is Algorithm.MOSES_BPE:
        return _moses(contents, settings)
    if algorithm is Algorithm.WORD_BPE:
        return _words(contents, settings)
    return _sentencepiece(contents, settings)


def _words(contents: Mapping[str, bytes], settings: TokenizerSettings) -> Vocabularies:
    from jax_transformer.data.word_bpe import WordBpe

    path, merges = settings.folder / "merges.txt", contents["merges.txt"]
    # transformers skips the first line, and what follows the last line's end
    if not merges.startswith(b"#version") or not merges.endswith(b"\n"):
        raise InputError(f"{path}: does not begin with #version, or its last line has no end")
    model = WordBpe(vocabulary.read_merges(path, merges))
    path = settings.folder / "vocab.json"
    ids = vocabulary.read_ids(path, contents[path.name])
    both = PieceVocabulary(path, ids, settings, model.cut, model.join)
    return both, both


def _moses(contents: Mapping[str, bytes], settings: TokenizerSettings) -> Vocabularies:
    from jax_transformer.data import word_bpe

    folder = settings.folder
    langs = settings.values.get("langs")
    if (
        not isinstance(langs, list)
        or len(langs) != 2
        or not all(isinstance(lang, str) and lang.isalpha() and lang.isascii() for lang in langs)
    ):
        raise InputError(
            f"{folder / tokenizer_settings.FILE}: langs is {shown(langs)}, not the codes of a"
            " source's and a target's language"
        )
    path = folder / "merges.txt"
    if not contents[path.name].endswith(b"\n"):  # transformers skips what follows the last line
        raise InputError(f"{path}: its last line has no end")
    merges = vocabulary.read_merges(path, contents[path.name], counted=True)
    names = ("vocab-src.json", "vocab-tgt.json")
    ids = [vocabulary.read_ids(folder / name, contents[name]) for name in names]
    moses, lowers = word_bpe.load_sacremoses(path), settings.flag("do_lower_case")
    models = [word_bpe.MosesBpe(moses, merges, lang, lowers=lowers) for lang in langs]
    source, target = (
        PieceVocabulary(folder / name, own, settings, model.cut, model.join)
        for name, own, model in zip(names, ids, models, strict=True)
    )
    return source, target


def _sentencepiece(contents: Mapping[str, bytes], settings: TokenizerSettings) -> Vocabularies:
    from jax_transformer.data import sentencepiece_vocabulary

    folder, recipe = settings.folder, settings.recipe
    sampling = settings.values.get("sp_model_kwargs")
    if sampling:
        raise InputError(
            f"{folder / tokenizer_settings.FILE}: sp_model_kwargs is {shown(sampling)}; remove it"
        )
    names = [name for name in recipe.files if name.endswith((".spm", ".model"))]
    models = [sentencepiece_vocabulary.load(folder / name, contents[name]) for name in names]
    if recipe.algorithm not in (Algorithm.ARRANGED_PIECES, Algorithm.REBUILT_PIECES):
        return _with_ids(models, contents, settings)
    path = folder / names[0]
    pieces = sentencepiece_vocabulary.take_apart(path, models[0])
    both: Vocabulary
    if recipe.algorithm is Algorithm.REBUILT_PIECES:
        both = sentencepiece_vocabulary.from_pieces(path, pieces, settings)
    else:
        both = _arranged(path, models[0], pieces.scored, settings)
    return both, both


def _arranged(
    path: Path, model: Any, scored: list[tuple[str, float]], settings: TokenizerSettings
) -> Vocabulary:
    """Return the vocabulary whose ids are the family's order of the model's pieces and its
    languages.
    """
    layout, languages = settings.recipe.pieces, settings.recipe.languages
    assert layout is not None and languages is not None, "of every recipe with ARRANGED_PIECES"
    codes = [languages.token.format(code) for code in _language_set(languages, settings)]
    texts = {role: token.content for role, token in settings.special_tokens.items()}
    arranged = layout.arrange(scored, texts, codes)
    ids = {text: i for i, (text, _) in enumerate(arranged)}
    # A special token that has no place is unknown, but still never cut
    ids = dict.fromkeys(texts.values(), ids[texts["unk_token"]]) | ids
    own = [AddedToken(code, special=True, normalized=False) for code in codes]
    settings = replace(settings, extra_tokens=[*own, *settings.extra_tokens])
    return _cut_by(path, ids, settings, model, model)


def _with_ids(
    models: list[Any], contents: Mapping[str, bytes], settings: TokenizerSettings
) -> Vocabularies:
    """Return vocabularies whose ids are in ``vocab.json``, with one model for both sides or one for
    each.
    """
    path = settings.folder / "vocab.json"
    ids = vocabulary.read_ids(path, contents["vocab.json"])
    languages = settings.recipe.languages
    if languages is not None and languages.sets:
        codes = _language_set(languages, settings)
        ids = {languages.token.format(code): len(ids) + i for i, code in enumerate(codes)} | ids
    reads = models[0]
    source = _cut_by(path, ids, settings, reads, reads)
    if len(models) == 1:
        return source, source
    writes = models[1]
    if not settings.flag("separate_vocabs"):
        # transformers then joins the pieces of a target by the source's model
        return source, _cut_by(path, ids, settings, writes, reads)
    path = settings.folder / "target_vocab.json"
    target_ids = vocabulary.read_ids(path, contents[path.name])
    return source, _cut_by(path, target_ids, settings, writes, writes)


def _cut_by(
    path: Path, ids: dict[str, int], settings: TokenizerSettings, cuts: Any, joins: Any
) -> Vocabulary:
    """Return the vocabulary of pieces that one SentencePiece model cuts and another joins."""
    cut = partial(cuts.encode, out_type=str)
    return PieceVocabulary(path, ids, settings, cut, joins.decode_pieces)


def _language_set(languages: Languages, settings: TokenizerSettings) -> list[str]:
    """Return the codes that follow the vocabulary, of the set that the folder names."""
    name = settings.text("language_codes") or next(iter(languages.sets))
    if name not in languages.sets:
        raise InputError(
            f"{settings.folder / tokenizer_settings.FILE}: language_codes is {shown(name)}, not"
            f" {' or '.join(languages.sets)}"
        )
    return list(languages.sets[name])
