"""The tokenizers of Hugging Face folders: what each recipe puts around a line, and its languages.

Facts from transformers 5.23 (``models/*/tokenization_*.py``); ids and text are as its own
classes give them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from jax_transformer.architectures.tokenizer_recipe import LanguagePlace, TargetStart
from jax_transformer.data import tokenizer_files
from jax_transformer.data.tokenizer import TokenizerPair
from jax_transformer.data.tokenizer_files import TokenizerFiles
from jax_transformer.data.vocabulary import LineEnds, Vocabulary
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import atomic, huggingface_folder, untrusted
from jax_transformer.storage.run_files import LANGUAGES_FILE
from jax_transformer.storage.untrusted import shown


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
        source_lang: one of its ``languages`` (``en_XX``, ``eng_Latn``, ``en``); None takes the one
            of ``tokenizer_config.json``.
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
    for vocabulary, language in ((files.source, source_lang), (files.target, target_lang)):
        if language is not None and not files.languages:
            files.language_id(vocabulary, language)


def _assemble(
    files: TokenizerFiles, source_lang: str | None, target_lang: str | None
) -> HuggingFaceTokenizer:
    recipe = files.settings.recipe
    start, at_start = files.start_id, False
    if recipe.languages is not None:
        at_start = recipe.languages.target_start is TargetStart.DECODER_START
    if at_start and target_lang is not None:
        start = files.language_id(files.target, target_lang)
    after = recipe.after if recipe.after_target is None else recipe.after_target
    source_ends = _plain_ends(files, files.source, recipe.after)
    target_ends = _plain_ends(files, files.target, after)
    ends: tuple[LineEnds | ConfigError, LineEnds | ConfigError] = (source_ends, target_ends)
    if not files.reads_one_language:
        source_lang = source_lang or files.default_source_language
        ends = (
            _with_language(files, files.source, source_ends, source_lang, "source_lang"),
            _with_language(files, files.target, target_ends, target_lang, "target_lang"),
        )
    elif target_lang is not None and files.languages:
        code = files.language_id(files.source, target_lang)
        ends = (source_ends._replace(prefix=(code,)), target_ends)
    source, target = (
        vocabulary.with_ends(
            line_ends,
            pad_id=files.pad_id,
            bos_id=start,
            eos_id=files.role_id(vocabulary, "eos_token"),
            digest=files.digest,
        )
        for vocabulary, line_ends in zip((files.source, files.target), ends, strict=True)
    )
    return HuggingFaceTokenizer(source, target, files, source_lang, target_lang)


def _with_language(
    files: TokenizerFiles,
    vocabulary: Vocabulary,
    plain: LineEnds,
    language: str | None,
    option: str,
) -> LineEnds | ConfigError:
    """Return the ids around a line with its language's token, if there are several languages."""
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


def _plain_ends(files: TokenizerFiles, vocabulary: Vocabulary, after: tuple[str, ...]) -> LineEnds:
    """Return the ids around a line. A tokenizer of the generic class may name no token that begins
    a line, or none that ends it but ``eos_token``.
    """
    named = files.settings.special_tokens
    begins = [role for role in files.settings.recipe.before if role in named]
    ends = [role if role in named else "eos_token" for role in after]
    prefix, suffix = (
        tuple(files.role_id(vocabulary, role) for role in roles) for roles in (begins, ends)
    )
    first = (files.id_of(vocabulary, text) for text in files.settings.recipe.before_without_role)
    return LineEnds((*first, *prefix), suffix)
