"""The files of a Hugging Face tokenizer: the vocabularies of a folder, and their ids
and languages.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jax_transformer.architectures.huggingface import Algorithm, Languages
from jax_transformer.data import fast_vocabulary, piece_vocabulary, tokenizer_settings
from jax_transformer.data.piece_vocabulary import PieceVocabulary, SentencePieceModel
from jax_transformer.data.subword_vocabulary import SubwordVocabulary
from jax_transformer.data.tokenizer_settings import TokenizerSettings
from jax_transformer.data.word_bpe import WordBpe
from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.storage import untrusted
from jax_transformer.storage.untrusted import shown

MAX_FILE_SIZE = 200_000_000  # bytes
_SETTINGS_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_MODEL_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class TokenizerFiles:
    """A folder's vocabularies, before languages are chosen."""

    settings: TokenizerSettings
    source: SubwordVocabulary
    target: SubwordVocabulary
    contents: dict[str, bytes]
    """Every file that was read, by name."""
    languages: tuple[str, ...]
    """The codes of the languages that it has."""

    @property
    def separate(self) -> bool:
        """True if each side has a vocabulary of its own."""
        return self.settings.flag("separate_vocabs")

    @property
    def default_source_language(self) -> str | None:
        """The source language that transformers takes if none is given."""
        languages = self.settings.recipe.languages
        code = None if languages is None else languages.default_source
        return code if code in self.languages else None

    @property
    def digest(self) -> str:
        """SHA-256 of the files that decide ids."""
        sha256 = hashlib.sha256()
        for name, content in sorted(self.contents.items()):
            if name not in _MODEL_FILES:
                sha256.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
        return sha256.hexdigest()

    def id_of(self, vocabulary: SubwordVocabulary, token: str) -> int:
        """Return the id of a token. Raises InputError if the vocabulary does not have it."""
        index = vocabulary.id_of(token)
        if index is None:
            raise InputError(f"{self.settings.folder}: its vocabulary has no {shown(token)}")
        return index

    def role_id(self, vocabulary: SubwordVocabulary, role: str) -> int:
        """Return the id of the token with a role, such as ``eos_token``."""
        return self.id_of(vocabulary, self.settings.token(role))

    def language_id(self, vocabulary: SubwordVocabulary, language: str) -> int:
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
        return self.id_of(vocabulary, recipe.languages.token.format(language))

    @property
    def pad_id(self) -> int:
        """The id of padding, which the model has once for both sides."""
        return self.role_id(self.source, "pad_token")

    @property
    def start_id(self) -> int:
        """The decoder's first token: the model's ``decoder_start_token_id``, or that of
        the recipe.
        """
        start = self.settings.model.get("decoder_start_token_id")
        if type(start) is int:
            return start
        role = self.settings.recipe.start
        return self.pad_id if role == "pad_token" else self.role_id(self.target, role)


def read(folder: Path) -> TokenizerFiles:
    """Read a folder's vocabularies.

    Raises InputError if they are missing, damaged or not of one model.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    settings = tokenizer_settings.read(folder)
    recipe = settings.recipe
    contents = {name: _bytes(folder / name) for name in _SETTINGS_FILES if (folder / name).exists()}
    names = [*recipe.files]
    if settings.flag("separate_vocabs"):
        names.append("target_vocab.json")
    missing = [name for name in names if not (folder / name).is_file()]
    fast = folder / "tokenizer.json"
    if fast.exists() and (missing or not recipe.reads_own_files_first):
        contents[fast.name] = _bytes(fast)
        vocabulary = fast_vocabulary.from_json(fast, contents[fast.name], settings)
        source: SubwordVocabulary = vocabulary
        target: SubwordVocabulary = vocabulary
    elif missing:
        raise InputError(_missing_files(settings, missing))
    else:
        contents |= {name: _bytes(folder / name) for name in names}
        source, target = _vocabularies(contents, settings)
    files = TokenizerFiles(settings, source, target, contents, _languages(settings, source))
    _check_model(files)
    return files


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
    untrusted.check_readable(path)
    if path.stat().st_size > MAX_FILE_SIZE:
        raise InputError(
            f"{path}: {path.stat().st_size:,} bytes, over the {MAX_FILE_SIZE:,} that a tokenizer's"
            " file may have"
        )
    return path.read_bytes()


def _vocabularies(
    contents: Mapping[str, bytes], settings: TokenizerSettings
) -> tuple[SubwordVocabulary, SubwordVocabulary]:
    """Source and target, one object if they are one vocabulary, from the files of the recipe."""
    folder, algorithm = settings.folder, settings.recipe.algorithm
    if algorithm is Algorithm.BYTE_BPE:
        fast = fast_vocabulary.from_merges(
            folder / "vocab.json", contents["vocab.json"], contents["merges.txt"], settings
        )
        return fast, fast
    if algorithm is Algorithm.WORD_BPE:
        return _word_vocabulary(contents, settings)
    sampling = settings.values.get("sp_model_kwargs")
    if sampling:
        raise InputError(
            f"{folder / tokenizer_settings.FILE}: sp_model_kwargs is {shown(sampling)}; remove it"
        )
    models = {
        name: piece_vocabulary.load_sentencepiece(folder / name, contents[name])
        for name in settings.recipe.files
        if name.endswith((".spm", ".model"))
    }
    if algorithm is Algorithm.REBUILT_PIECES:
        ((name, model),) = models.items()
        pieces = piece_vocabulary.take_apart(model)
        fast = fast_vocabulary.from_pieces(folder / name, pieces, settings)
        return fast, fast
    return _piece_vocabularies(list(models.values()), contents, settings)


def _word_vocabulary(
    contents: Mapping[str, bytes], settings: TokenizerSettings
) -> tuple[SubwordVocabulary, SubwordVocabulary]:
    path, merges = settings.folder / "merges.txt", contents["merges.txt"]
    # transformers skips the first line, and what follows the last line's end
    if not merges.startswith(b"#version") or not merges.endswith(b"\n"):
        raise InputError(f"{path}: does not begin with #version, or its last line has no end")
    model = WordBpe(fast_vocabulary.read_merges(path, merges))
    path = settings.folder / "vocab.json"
    ids = tokenizer_settings.read_vocabulary(path, contents[path.name])
    vocabulary = PieceVocabulary(path, ids, model, settings)
    return vocabulary, vocabulary


def _piece_vocabularies(
    models: list[SentencePieceModel], contents: Mapping[str, bytes], settings: TokenizerSettings
) -> tuple[SubwordVocabulary, SubwordVocabulary]:
    """Vocabularies whose ids are in ``vocab.json``, with one model for both sides or
    one for each.
    """
    path = settings.folder / "vocab.json"
    ids = tokenizer_settings.read_vocabulary(path, contents["vocab.json"])
    languages = settings.recipe.languages
    if languages is not None and languages.sets:
        codes = _language_set(languages, settings)
        ids = {languages.token.format(code): len(ids) + i for i, code in enumerate(codes)} | ids
    if len(models) == 1:
        vocabulary = PieceVocabulary(path, ids, models[0], settings)
        return vocabulary, vocabulary
    reads, writes = models
    source = PieceVocabulary(path, ids, reads, settings)
    if not settings.flag("separate_vocabs"):
        # transformers then joins the pieces of a target by the source's model
        return source, PieceVocabulary(path, ids, writes, settings, joined_by=reads)
    path = settings.folder / "target_vocab.json"
    target_ids = tokenizer_settings.read_vocabulary(path, contents[path.name])
    return source, PieceVocabulary(path, target_ids, writes, settings)


def _language_set(languages: Languages, settings: TokenizerSettings) -> list[str]:
    """The codes that follow the vocabulary, of the set that the folder names."""
    name = settings.text("language_codes") or next(iter(languages.sets))
    if name not in languages.sets:
        raise InputError(
            f"{settings.folder / tokenizer_settings.FILE}: language_codes is {shown(name)}, not"
            f" {' or '.join(languages.sets)}"
        )
    return list(languages.sets[name])


def _languages(settings: TokenizerSettings, vocabulary: SubwordVocabulary) -> tuple[str, ...]:
    languages = settings.recipe.languages
    if languages is None:
        return ()
    pattern = re.compile(languages.pattern)
    codes = [match[1] for name in vocabulary.names() if (match := pattern.fullmatch(name))]
    codes += [
        code
        for code in languages.published
        if vocabulary.id_of(languages.token.format(code)) is not None
    ]
    return tuple(dict.fromkeys(codes))


def _check_model(files: TokenizerFiles) -> None:
    """Raise InputError if ``config.json`` is not that of the tokenizer's model."""
    model, path = files.settings.model, files.settings.folder / "config.json"
    for side, vocabulary, key in (
        ("source", files.source, "vocab_size"),
        ("target", files.target, "decoder_vocab_size"),
    ):
        size = model.get(key if files.separate else "vocab_size")
        if type(size) is int and size < vocabulary.size:
            raise InputError(
                f"{path}: a vocabulary of {size} is smaller than the tokenizer's of"
                f" {vocabulary.size} ({side}); they are not of one model"
            )
    for key, expected in (
        ("pad_token_id", files.pad_id),
        ("eos_token_id", files.role_id(files.source, "eos_token")),
    ):
        index = model.get(key)
        if type(index) is int and index != expected:
            raise InputError(
                f"{path}: {key} is {index}, and the tokenizer's {expected}; they are not of one"
                " model"
            )
