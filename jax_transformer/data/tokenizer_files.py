"""The files of a Hugging Face folder's tokenizer, with their ids and languages."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from jax_transformer.architectures.tokenizer_recipe import LanguagePlace
from jax_transformer.data import tokenizer_settings, vocabulary
from jax_transformer.data.tokenizer_settings import TokenizerSettings
from jax_transformer.data.vocabulary import Vocabulary
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
        both: Vocabulary = vocabulary.from_json(fast, contents[fast.name], settings)
        source, target = both, both
    elif missing:
        raise InputError(_missing_files(settings, missing))
    else:
        from jax_transformer.data import vocabulary_files

        contents |= {name: _bytes(folder / name) for name in names}
        source, target = vocabulary_files.vocabularies(contents, settings)
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


def _languages(settings: TokenizerSettings, side: Vocabulary) -> tuple[str, ...]:
    languages = settings.recipe.languages
    if languages is None:
        return ()
    pattern = re.compile(languages.pattern)
    codes = [match[1] for name in side.names() if (match := pattern.fullmatch(name))]
    codes += [
        code for code in languages.published if side.id_of(languages.token.format(code)) is not None
    ]
    return tuple(dict.fromkeys(codes))


def _check_model(files: TokenizerFiles) -> None:
    """Raise InputError if ``config.json`` is not of the tokenizer's model."""
    model, path = files.settings.model, files.settings.folder / "config.json"
    separate = files.settings.recipe.separate or files.settings.flag("separate_vocabs")
    own = "decoder_vocab_size" if separate else "vocab_size"
    for name, side, keys in (
        ("source", files.source, ("src_vocab_size", "vocab_size")),
        ("target", files.target, ("tgt_vocab_size", own)),
    ):
        size = next((model[key] for key in keys if key in model), None)
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
