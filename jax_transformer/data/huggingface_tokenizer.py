"""The tokenizers of Hugging Face folders: their files, what each recipe puts around a line, and
their languages.

Facts from transformers 5.23 (``models/*/tokenization_*.py``); ids and text are as its own
classes give them.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_transformer.architectures import tokenizer_recipe
from jax_transformer.architectures.tokenizer_recipe import Algorithm, LanguagePlace, TargetStart
from jax_transformer.data import vocabulary
from jax_transformer.data.tokenizer import SpecialTokens, TokenizerPair
from jax_transformer.data.vocabulary import TokenizerSettings, Vocabulary
from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.storage import atomic, huggingface_folder, untrusted
from jax_transformer.storage.run_files import LANGUAGES_FILE
from jax_transformer.storage.untrusted import shown

LineEnds = SpecialTokens | ConfigError
MAX_FILE_SIZE = 200_000_000  # bytes
_MODEL_FILES = ("config.json", "generation_config.json")
_SETTINGS_FILES = (
    *_MODEL_FILES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)


@dataclass(frozen=True)
class TokenizerFiles:
    """A folder's vocabularies, before languages are chosen."""

    settings: TokenizerSettings
    source: Vocabulary
    target: Vocabulary
    contents: dict[str, bytes]
    """Every file that was read, by name."""
    languages: tuple[str, ...]
    """The codes of the languages that it has."""

    @property
    def reads_one_language(self) -> bool:
        """True if a source is in one language, and begins with the target's."""
        languages = self.settings.recipe.languages
        return languages is not None and languages.place is LanguagePlace.TARGET_BEFORE_SOURCE

    @property
    def default_source_language(self) -> str | None:
        """The source language that transformers takes if none is given."""
        languages = self.settings.recipe.languages
        if languages is None:
            return None
        language_set = self.settings.text("language_codes") or ""
        code = languages.default_sources.get(language_set, languages.default_source)
        return code if code in self.languages else None

    @property
    def digest(self) -> str:
        """SHA-256 of the files that decide ids."""
        sha256 = hashlib.sha256()
        for name, content in sorted(self.contents.items()):
            if name not in _MODEL_FILES:
                sha256.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
        return sha256.hexdigest()

    def id_of(self, side: Vocabulary, token: str) -> int:
        """Return the id of a token. Raises InputError if the vocabulary does not have it."""
        index = side.id_of(token)
        if index is None:
            raise InputError(f"{self.settings.folder}: its vocabulary has no {shown(token)}")
        return index

    def role_id(self, side: Vocabulary, role: str) -> int:
        """Return the id of the token with a role, such as ``eos_token``."""
        return self.id_of(side, self.settings.token(role))

    def language_id(self, side: Vocabulary, language: str) -> int:
        """Return the id of a language's token.

        Raises ConfigError if the folder does not have the language.
        """
        folder, recipe = self.settings.folder, self.settings.recipe
        if recipe.languages is None or not self.languages:
            raise ConfigError(
                f"{folder}: its tokenizer has no languages; leave out {shown(language)}"
            )
        if language not in self.languages:
            some = f"; it has {', '.join(self.languages[:8])}, ..."
            near = nearest(language, list(self.languages)) or some
            raise ConfigError(f"{folder}: its tokenizer has no language {shown(language)}{near}")
        return self.id_of(side, recipe.languages.token.format(language))

    def language_named(self, key: str) -> str | None:
        """Return the code of the language in a setting, which may be its token, or None."""
        name, languages = self.settings.text(key), self.settings.recipe.languages
        match = languages and name and re.fullmatch(languages.pattern, name)
        return match[1] if match else name

    @property
    def pad_id(self) -> int:
        """The id of padding, which the model has once for both sides."""
        return self.role_id(self.source, "pad_token")

    @property
    def start_id(self) -> int:
        """The decoder's first token: the model's ``decoder_start_token_id``, or the recipe's."""
        start = self.settings.model.get("decoder_start_token_id")
        if type(start) is int:
            return start
        role = self.settings.recipe.start
        return self.pad_id if role == "pad_token" else self.role_id(self.target, role)


def read_files(folder: Path) -> TokenizerFiles:
    """Read a folder's vocabularies.

    Raises InputError if they are missing, damaged or not of one model.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    settings = vocabulary.read_settings(folder)
    recipe = settings.recipe
    small = [name for name in _SETTINGS_FILES if (folder / name).exists()]
    contents = {name: _bytes(folder / name) for name in small}
    separate = settings.flag("separate_vocabs")
    names = [*recipe.files, *(["target_vocab.json"] if separate else [])]
    missing = [name for name in names if not (folder / name).is_file()]
    fast = folder / "tokenizer.json"
    if fast.exists() and (missing or not recipe.reads_own_files_first):
        contents[fast.name] = _bytes(fast)
        both: Vocabulary = vocabulary.from_json(fast, contents[fast.name], settings)
        source, target = both, both
    elif missing:
        raise InputError(_missing_files(settings, missing))
    else:
        contents |= {name: _bytes(folder / name) for name in names}
        source, target = _own_vocabularies(contents, settings)
    codes = () if recipe.languages is None else _languages(recipe.languages, source)
    files = TokenizerFiles(settings, source, target, contents, codes)
    _check_model(files)
    return files


def _own_vocabularies(
    contents: Mapping[str, bytes], settings: TokenizerSettings
) -> tuple[Vocabulary, Vocabulary]:
    """Return the source's and the target's vocabulary of a folder without ``tokenizer.json``.

    They are one object if they are one vocabulary. What cuts and joins pieces is imported here.
    """
    algorithm = settings.recipe.algorithm
    if algorithm is Algorithm.BYTE_BPE:
        path, merges = settings.folder / "vocab.json", contents["merges.txt"]
        fast = vocabulary.from_merges(path, contents[path.name], merges, settings)
        return fast, fast
    if algorithm in (Algorithm.MOSES_BPE, Algorithm.WORD_BPE):
        from jax_transformer.data import piece_vocabulary

        if algorithm is Algorithm.MOSES_BPE:
            return piece_vocabulary.of_moses(contents, settings)
        both = piece_vocabulary.of_words(contents, settings)
        return both, both
    from jax_transformer.data import sentencepiece_vocabulary

    return sentencepiece_vocabulary.vocabularies(contents, settings)


def _missing_files(settings: TokenizerSettings, missing: list[str]) -> str:
    present = sorted(
        path.name
        for path in settings.folder.iterdir()
        if path.name.endswith((".json", ".spm", ".model", ".txt"))
    )
    other = "" if settings.recipe.reads_own_files_first else ", nor tokenizer.json"
    return (
        f"{settings.folder}: no {' and '.join(missing)}{other}, for {settings.recipe.name}'s"
        f" tokenizer (there: {shown(', '.join(present) or 'nothing', 200)}); copy the tokenizer's"
        " files there"
    )


def _bytes(path: Path) -> bytes:
    atomic.check_readable(path)
    if path.stat().st_size > MAX_FILE_SIZE:
        raise InputError(
            f"{path}: {path.stat().st_size:,} bytes, over the {MAX_FILE_SIZE:,} that a tokenizer's"
            " file may have"
        )
    return path.read_bytes()


def _languages(languages: tokenizer_recipe.Languages, side: Vocabulary) -> tuple[str, ...]:
    pattern = re.compile(languages.pattern)
    codes = [match[1] for name in side.names() if (match := pattern.fullmatch(name))]
    codes += [
        code for code in languages.published if side.id_of(languages.token.format(code)) is not None
    ]
    return tuple(dict.fromkeys(codes))


def _check_model(files: TokenizerFiles) -> None:
    """Raise InputError if ``config.json`` is not of the tokenizer's model."""
    model, path = files.settings.model, files.settings.folder / "config.json"
    own = "decoder_vocab_size" if files.settings.flag("separate_vocabs") else "vocab_size"
    for name, side, keys in (
        ("source", files.source, ("src_vocab_size", "vocab_size")),
        ("target", files.target, ("tgt_vocab_size", own)),
    ):
        size = model.get(keys[0], model.get(keys[1]))
        if type(size) is int and size < side.vocab_size:
            raise InputError(
                f"{path}: a vocabulary of {size} is smaller than the tokenizer's of"
                f" {side.vocab_size} ({name}); they are not of one model"
            )
    for key, expected in (
        ("pad_token_id", files.pad_id),
        ("eos_token_id", files.role_id(files.source, "eos_token")),
    ):
        if key == "pad_token_id" and files.settings.recipe.padding_is_unused:
            continue
        index = model.get(key)
        if type(index) is int and index != expected:
            raise InputError(
                f"{path}: {key} is {index}, and the tokenizer's {expected}; they are not of one"
                " model"
            )


@dataclass(frozen=True)
class HuggingFaceTokenizer(TokenizerPair):
    """The tokenizer of a folder, between two languages, with one vocabulary or two."""

    source: Vocabulary
    target: Vocabulary
    files: TokenizerFiles
    source_lang: str | None
    target_lang: str | None

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that it can be given, by the codes that its family uses."""
        return self.files.languages

    @property
    def bos_id(self) -> int:
        """The decoder's first token."""
        return self.target.bos_id

    @property
    def vocab_size(self) -> int:
        """One above the largest id of a source; the model's vocabulary may be larger."""
        return self.source.vocab_size

    def with_languages(
        self, source_lang: str | None = None, target_lang: str | None = None
    ) -> "HuggingFaceTokenizer":
        """Return the same tokenizer between other languages; None keeps a language.

        Raises ConfigError if it does not have a language.
        """
        _check_languages(self.files, source_lang, target_lang)
        return _assemble(
            self.files, source_lang or self.source_lang, target_lang or self.target_lang
        )

    def forced_bos_id(self) -> int | None:
        """Return the id that a translation must begin with, after the decoder's start.

        That is the target language's in mBART-50, M2M100 and NLLB. None in other families, and
        without a target language: then the model's ``forced_bos_token_id`` counts. mBART's decoder
        starts with the language instead, which is ``bos_id``.
        """
        languages, code = self.files.settings.recipe.languages, self.target_lang
        if languages is None or languages.target_start is not TargetStart.FORCED or code is None:
            return None
        return self.files.language_id(self.files.target, code)

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
        source_lang: one of its ``languages`` (``en_XX``, ``eng_Latn``, ``en``); None takes the one
            of ``tokenizer_config.json``.
        target_lang: the same for targets; ``fra`` stands for ``>>fra<<`` of a Marian model.

    Raises:
        InputError: files are missing, damaged or do not fit each other.
        ConfigError: the tokenizer does not have a language, or SentencePiece is not installed.
    """
    files = read_files(Path(folder))
    _check_languages(files, source_lang, target_lang)
    return _assemble(
        files,
        source_lang or files.language_named("src_lang"),
        target_lang or files.language_named("tgt_lang"),
    )


def save_in_run(tokenizer: HuggingFaceTokenizer, folder: Path) -> None:
    """Write the files, and the languages next to them, into a run folder."""
    inner = folder / huggingface_folder.IN_RUN
    inner.mkdir(exist_ok=True)
    tokenizer.save(inner)
    languages = {"source_lang": tokenizer.source_lang, "target_lang": tokenizer.target_lang}
    if any(languages.values()):
        atomic.write_text(folder / LANGUAGES_FILE, json.dumps(languages) + "\n")


def load_from_run(folder: Path) -> HuggingFaceTokenizer:
    """Return the tokenizer of a run folder that was imported from a Hugging Face folder."""
    path = folder / LANGUAGES_FILE
    languages = untrusted.read_json(path) if path.exists() else {}
    if (
        not isinstance(languages, dict)
        or set(languages) - {"source_lang", "target_lang"}
        or not all(isinstance(code, str | None) for code in languages.values())
    ):
        raise InputError(
            f"{path}: {shown(languages)} is not an object of source_lang and target_lang"
        )
    return load_huggingface(folder / huggingface_folder.IN_RUN, **languages)


def _check_languages(
    files: TokenizerFiles, source_lang: str | None, target_lang: str | None
) -> None:
    """Raise ConfigError for a language that would have no effect."""
    if source_lang is not None and files.reads_one_language:
        raise ConfigError(
            f"{files.settings.folder}: a {files.settings.recipe.name} model reads one language;"
            f" leave out source_lang={source_lang!r}"
        )
    for side, language in ((files.source, source_lang), (files.target, target_lang)):
        if language is not None and not files.languages:
            files.language_id(side, language)


def _assemble(
    files: TokenizerFiles, source_lang: str | None, target_lang: str | None
) -> HuggingFaceTokenizer:
    recipe, start, at_start = files.settings.recipe, files.start_id, False
    languages = recipe.languages
    if languages is not None:
        at_start = languages.target_start is TargetStart.DECODER_START
    if at_start and target_lang is not None:
        start = files.language_id(files.target, target_lang)
    after = recipe.after if recipe.after_target is None else recipe.after_target
    source_ends = _plain_ends(files, files.source, recipe.after)
    target_ends = _plain_ends(files, files.target, after)
    ends: tuple[LineEnds, LineEnds] = (source_ends, target_ends)
    if languages is not None and not files.reads_one_language:
        source_lang = source_lang or files.default_source_language
        ends = (
            _with_language(files, files.source, source_ends, source_lang, "source_lang"),
            _with_language(files, files.target, target_ends, target_lang, "target_lang"),
        )
    elif target_lang is not None and files.languages:
        code = files.language_id(files.source, target_lang)
        ends = (source_ends._replace(prefix=(code,)), target_ends)
    ids: dict[str, Any] = {"pad_id": files.pad_id, "bos_id": start, "digest": files.digest}
    source, target = (
        side.with_ends(line_ends, eos_id=files.role_id(side, "eos_token"), **ids)
        for side, line_ends in zip((files.source, files.target), ends, strict=True)
    )
    return HuggingFaceTokenizer(source, target, files, source_lang, target_lang)


def _with_language(
    files: TokenizerFiles,
    vocabulary: Vocabulary,
    plain: SpecialTokens,
    language: str | None,
    option: str,
) -> LineEnds:
    """Return the ids around a line with its language's token, if there are several languages."""
    settings = files.settings
    languages = settings.recipe.languages
    if languages is None or (language is None and not files.languages):
        return plain
    if language is None:
        some = ", ".join(files.languages[:8])
        return ConfigError(f"{settings.folder}: give {option}, one of {some}, ...")
    code = files.language_id(vocabulary, language)
    last_if = languages.last_if is not None and settings.flag(languages.last_if)
    if last_if or languages.place is LanguagePlace.LAST:
        return SpecialTokens(plain.prefix, (*plain.suffix, code))
    return SpecialTokens((code, *plain.prefix), plain.suffix)


def _plain_ends(
    files: TokenizerFiles, vocabulary: Vocabulary, after: tuple[str, ...]
) -> SpecialTokens:
    """Return the ids around a line. A tokenizer of the generic class may name no token that begins
    a line, or none that ends it but ``eos_token``.
    """
    recipe, named = files.settings.recipe, files.settings.special_tokens
    prefix = [files.id_of(vocabulary, text) for text in recipe.before_without_role]
    prefix += [files.role_id(vocabulary, role) for role in recipe.before if role in named]
    roles = [role if role in named else "eos_token" for role in after]
    return SpecialTokens(tuple(prefix), tuple(files.role_id(vocabulary, role) for role in roles))
