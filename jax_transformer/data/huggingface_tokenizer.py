"""The tokenizers of Hugging Face folders: what each recipe puts around a line, and its languages.

Facts from transformers 5.23 (``models/*/tokenization_*.py``); ids and text are those of its own
classes.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, SupportsInt

import tokenizers

from jax_transformer.architectures.tokenizer_recipe import LanguagePlace, TargetStart
from jax_transformer.data import tokenizer_files
from jax_transformer.data.fast_vocabulary import FastVocabulary
from jax_transformer.data.subword_vocabulary import SubwordVocabulary
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.data.tokenizer_files import TokenizerFiles
from jax_transformer.errors import ConfigError
from jax_transformer.storage import atomic


class LineEnds(NamedTuple):
    """The ids before and after those of a line."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


class SideTokenizer(Tokenizer):
    """The tokenizer of sources, or of targets: a vocabulary with ids of its own around a line."""

    def __init__(
        self,
        vocabulary: SubwordVocabulary,
        line_ends: LineEnds | ConfigError,
        *,
        pad_id: int,
        bos_id: int,
        eos_id: int,
        digest: str,
    ) -> None:
        """``line_ends`` may be the error to raise once they are needed: a language must be given
        first.
        """
        self._vocabulary, self._line_ends, self._digest = vocabulary, line_ends, digest
        self.pad_id, self.bos_id, self.eos_id = pad_id, bos_id, eos_id
        self.vocab_size = vocabulary.size

    def tokens(self) -> dict[int, str]:
        """Return the text of every token by its id, as the vocabulary spells it."""
        return self._vocabulary.tokens()

    @property
    def bpe(self) -> tokenizers.Tokenizer | None:
        """The tokenizer of the library, if its model is byte-pair encoding."""
        vocabulary = self._vocabulary
        return vocabulary.bpe if isinstance(vocabulary, FastVocabulary) else None

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids before those of a line in a batch.

        Raises ConfigError if a language must be given first.
        """
        return self._known_line_ends().prefix

    @property
    def suffix(self) -> tuple[int, ...]:
        """The ids after those of a line in a batch.

        Raises ConfigError if a language must be given first.
        """
        return self._known_line_ends().suffix

    def _known_line_ends(self) -> LineEnds:
        if isinstance(self._line_ends, ConfigError):
            raise self._line_ends
        return self._line_ends

    def encode(self, line: str) -> list[int]:
        """Return the ids of a line, without those around it.

        The text of a special token becomes that token, as in transformers.
        """
        return self._vocabulary.encode(line)

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return :meth:`encode` of each line."""
        return self._vocabulary.encode_batch(lines)

    def fewest_tokens(self, line: str) -> int:
        """Return 0: normalization may shrink any text."""
        return 0

    def beginning(self, line: str, tokens: int) -> str:
        """Return all of the line: normalization may shrink any text."""
        return line

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text of ids; special tokens are dropped."""
        return self._vocabulary.decode([int(i) for i in ids])

    @property
    def hash(self) -> str:
        """SHA-256 of the files that decide ids, and of the ids around a line."""
        return self._digest

    def save(self, path: str | Path) -> None:
        """Raises ConfigError: the files belong to both sides."""
        raise ConfigError(
            f"{path}: the files of a Hugging Face tokenizer belong to both sides; use"
            " HuggingFaceTokenizer.save"
        )


@dataclass(frozen=True)
class HuggingFaceTokenizer(TokenizerPair):
    """The tokenizer of a folder, between two languages, with one vocabulary or two."""

    source: SideTokenizer
    target: SideTokenizer
    files: TokenizerFiles
    source_lang: str | None
    target_lang: str | None

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that it can be given, by the codes that its family uses."""
        return self.files.languages

    @property
    def separate(self) -> bool:
        """True if each side has a vocabulary of its own."""
        return self.files.separate

    @property
    def bos_id(self) -> int:
        """The decoder's first token."""
        return self.target.bos_id

    @property
    def vocab_size(self) -> int:
        """One above the largest id of a source; the model's vocabulary may be larger."""
        return self.source.vocab_size

    def beginning(self, line: str, tokens: int) -> str:
        """Return all of the line."""
        return self.source.beginning(line, tokens)

    def with_languages(
        self, source_lang: str | None = None, target_lang: str | None = None
    ) -> "HuggingFaceTokenizer":
        """Return the same tokenizer between other languages; None keeps a language.

        Raises:
            ConfigError: it does not have a language.
        """
        _check_languages(self.files, source_lang, target_lang)
        return _assemble(
            self.files, source_lang or self.source_lang, target_lang or self.target_lang
        )

    def forced_bos_id(self, target_lang: str | None = None) -> int | None:
        """Return the id that a translation must begin with, after the decoder's start.

        That is the target language's in mBART-50, M2M100 and NLLB. None in other families, and if
        no target language is given here or before: then the model's ``forced_bos_token_id`` counts.
        mBART's decoder starts with the language instead, which is ``bos_id``.

        Raises:
            ConfigError: it does not have the language.
        """
        code, recipe = target_lang or self.target_lang, self.files.settings.recipe.languages
        if recipe is not None and recipe.target_start is TargetStart.FORCED and code is not None:
            return self.files.language_id(self.files.target, code)
        if target_lang is not None:
            self.files.language_id(self.files.target, target_lang)  # raises for an unknown language
        return None

    def save(self, folder: str | Path) -> None:
        """Write the files that it was read from, byte for byte, into an existing folder."""
        for name, content in self.files.contents.items():
            with atomic.file(Path(folder) / name) as temporary:
                temporary.write_bytes(content)


def load_huggingface(
    folder: str | Path, *, source_lang: str | None = None, target_lang: str | None = None
) -> HuggingFaceTokenizer:
    """Return the tokenizer of a Hugging Face folder.

    Args:
        folder: the folder.
        source_lang: one of its ``languages`` (``en_XX``, ``eng_Latn``, ``en``); None takes that of
            ``tokenizer_config.json``.
        target_lang: the same for targets; ``fra`` stands for ``>>fra<<`` of a Marian model.

    Raises:
        InputError: files are missing, damaged or do not fit each other.
        ConfigError: the tokenizer does not have a language, or SentencePiece is not installed.
    """
    files = tokenizer_files.read(Path(folder))
    _check_languages(files, source_lang, target_lang)
    return _assemble(
        files,
        source_lang or files.language_named("src_lang"),
        target_lang or files.language_named("tgt_lang"),
    )


def _check_languages(
    files: TokenizerFiles, source_lang: str | None, target_lang: str | None
) -> None:
    """Raise ConfigError for a language that would have no effect."""
    if source_lang is not None and _reads_one_language(files):
        raise ConfigError(
            f"{files.settings.folder}: a {files.settings.recipe.name} model reads one language;"
            f" leave out source_lang={source_lang!r}"
        )
    for vocabulary, language in ((files.source, source_lang), (files.target, target_lang)):
        if language is not None and not files.languages:
            files.language_id(vocabulary, language)


def _reads_one_language(files: TokenizerFiles) -> bool:
    languages = files.settings.recipe.languages
    return languages is not None and languages.place is LanguagePlace.TARGET_BEFORE_SOURCE


def _assemble(
    files: TokenizerFiles, source_lang: str | None, target_lang: str | None
) -> HuggingFaceTokenizer:
    languages = files.settings.recipe.languages
    if not _reads_one_language(files):
        source_lang = source_lang or files.default_source_language
    start = files.start_id
    starts_with_language = (
        languages is not None and languages.target_start is TargetStart.DECODER_START
    )
    if starts_with_language and target_lang is not None:
        start = files.language_id(files.target, target_lang)
    ends = (_source_ends(files, source_lang, target_lang), _target_ends(files, target_lang))
    source, target = (
        SideTokenizer(
            vocabulary,
            line_ends,
            pad_id=files.pad_id,
            bos_id=start,
            eos_id=files.role_id(vocabulary, "eos_token"),
            digest=hashlib.sha256(files.digest.encode() + _hashed(line_ends)).hexdigest(),
        )
        for vocabulary, line_ends in zip((files.source, files.target), ends, strict=True)
    )
    return HuggingFaceTokenizer(source, target, files, source_lang, target_lang)


def _hashed(line_ends: LineEnds | ConfigError) -> bytes:
    # Hashes are recorded in run folders: those of version 0.1 are over a plain tuple
    return repr(tuple(line_ends) if isinstance(line_ends, LineEnds) else line_ends).encode()


def _source_ends(
    files: TokenizerFiles, source_lang: str | None, target_lang: str | None
) -> LineEnds | ConfigError:
    """The ids around a source, or the error to raise for them if a language is missing."""
    recipe = files.settings.recipe
    plain = _plain_ends(files, files.source, recipe.after)
    if not _reads_one_language(files):
        return _with_language(files, files.source, plain, source_lang, "source_lang")
    if target_lang is None or not files.languages:
        return plain
    return LineEnds((files.language_id(files.source, target_lang),), plain.suffix)


def _target_ends(files: TokenizerFiles, target_lang: str | None) -> LineEnds | ConfigError:
    """The ids around a target, or the error to raise for them if a language is missing."""
    recipe = files.settings.recipe
    after = recipe.after if recipe.after_target is None else recipe.after_target
    plain = _plain_ends(files, files.target, after)
    if _reads_one_language(files):
        return plain
    return _with_language(files, files.target, plain, target_lang, "target_lang")


def _with_language(
    files: TokenizerFiles,
    vocabulary: SubwordVocabulary,
    plain: LineEnds,
    language: str | None,
    option: str,
) -> LineEnds | ConfigError:
    """The ids around a line with its language's token, if the tokenizer is one of several
    languages.
    """
    settings = files.settings
    languages = settings.recipe.languages
    if languages is None or (language is None and not files.languages):
        return plain
    if language is None:
        some = ", ".join(files.languages[:8])
        return ConfigError(f"{settings.folder}: give {option}, one of {some}, ...")
    code = files.language_id(vocabulary, language)
    last = languages.place is LanguagePlace.LAST
    if languages.last_if is not None and settings.flag(languages.last_if):
        last = True
    if last:
        return LineEnds(plain.prefix, (*plain.suffix, code))
    return LineEnds((code, *plain.prefix), plain.suffix)


def _plain_ends(
    files: TokenizerFiles, vocabulary: SubwordVocabulary, after: tuple[str, ...]
) -> LineEnds:
    """The ids around a line. A tokenizer of the generic class may name no token that begins a line,
    or none that ends it but ``eos_token``.
    """
    named = files.settings.special_tokens
    begins = [role for role in files.settings.recipe.before if role in named]
    ends = [role if role in named else "eos_token" for role in after]
    prefix, suffix = (
        tuple(files.role_id(vocabulary, role) for role in roles) for roles in (begins, ends)
    )
    first = (files.id_of(vocabulary, text) for text in files.settings.recipe.before_without_role)
    return LineEnds((*first, *prefix), suffix)
