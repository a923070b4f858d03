"""The settings of a Hugging Face folder's tokenizer, and the vocabularies of ``tokenizers``.

Settings come from a folder's small JSON files, vocabularies from a ``tokenizer.json`` or from the
two files of byte-level BPE. What is built is as transformers 5.23 builds it, so that ids are the
same (``tokenization_utils_base.py`` and ``tokenization_*.py`` of the families).
"""

import copy
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, SupportsInt

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jax_transformer.architectures import huggingface
from jax_transformer.architectures.tokenizer_recipe import TokenizerRecipe
from jax_transformer.data.tokenizer import SpecialTokens, Tokenizer, guarded, text_of
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import untrusted
from jax_transformer.storage.untrusted import shown

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILE = "tokenizer_config.json"
# For these classes the model's type decides
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend")


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings of a folder's tokenizer, and the recipe of its class."""

    folder: Path
    recipe: TokenizerRecipe
    special_tokens: dict[str, AddedToken]
    """The tokens with a role, such as ``pad_token``, in the order in which transformers adds them.
    """
    extra_tokens: list[AddedToken]
    """Special tokens without a role."""
    added_tokens: dict[int, AddedToken]
    """The tokens whose ids the folder names."""
    values: dict[str, Any]
    """``tokenizer_config.json``."""
    model: dict[str, Any]
    """``config.json``, and what it leaves out from ``generation_config.json``."""

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a setting that is true or false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{self.folder / FILE}: {name} is {shown(value)}, not true or false")
        return default if value is None else value

    def number(self, name: str, default: int) -> int:
        """Return a setting that is a count."""
        value = self.values.get(name, default)
        if type(value) is not int or not 0 <= value <= 100_000:
            raise InputError(
                f"{self.folder / FILE}: {name} is {shown(value)}, not a number up to 100,000"
            )
        return value

    def text(self, name: str) -> str | None:
        """Return a setting that is text, or None."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{self.folder / FILE}: {name} is {shown(value)}, not text")
        return value

    def token(self, role: str) -> str:
        """Return the text of the token with this role. Raises InputError if there is none."""
        if role not in self.special_tokens:
            raise InputError(f"{self.folder / FILE}: names no {role}; add it")
        return self.special_tokens[role].content

    @property
    def lists_tokens(self) -> bool:
        """True if the folder lists extra special tokens, or ids of added tokens."""
        return bool(self.extra_tokens or self.added_tokens)

    @property
    def lists_extra_tokens(self) -> bool:
        """True if extra special tokens are listed, even none, so transformers adds none itself."""
        return "extra_special_tokens" in self.values or "additional_special_tokens" in self.values


def read_settings(folder: Path) -> TokenizerSettings:
    """Read a folder's JSON files.

    Raises InputError if one is damaged or the tokenizer is not known.
    """
    values = _object(folder, FILE)
    model = _object(folder, "generation_config.json") | _object(folder, "config.json")
    recipe = _recipe(folder, values, model)
    named, added = values, {}
    if "added_tokens_decoder" in values:
        decoder = _mapping(folder, values["added_tokens_decoder"])
        added = {
            _id(folder, key): _token(folder, value, special=False) for key, value in decoder.items()
        }
    else:
        named = values | _object(folder, "special_tokens_map.json")
        tokens = [_token(folder, named[role]) for role in ROLES if named.get(role) is not None]
        special = {token.content for token in (*_extra_tokens(folder, named), *tokens)}
        for text, index in _object(folder, "added_tokens.json").items():
            is_special = text in special
            token = AddedToken(text, normalized=not is_special, special=is_special)
            added[_id(folder, index)] = token
    by_text = {token.content: token for token in added.values()}
    # The generic class, which reads tokenizer.json as it is, has no tokens of its own
    is_generic = values.get("tokenizer_class") in _GENERIC and (folder / "tokenizer.json").exists()
    special_tokens = {}
    for role in ROLES:
        value = named.get(role)
        if value is None and not is_generic:
            value = recipe.tokens.get(role)
        if value is None:
            continue
        token = _token(folder, value)
        if token.content in by_text:
            token = by_text[token.content]
        elif isinstance(value, str) and role in recipe.token_flags:
            token = AddedToken(value, special=True, **recipe.token_flags[role])
        special_tokens[role] = token
    extra = _extra_tokens(folder, named)
    return TokenizerSettings(folder, recipe, special_tokens, extra, added, values, model)


def _recipe(folder: Path, values: dict[str, Any], model: dict[str, Any]) -> TokenizerRecipe:
    model_type = model.get("model_type")
    family = huggingface.find_family(model_type)
    for name in (values.get("tokenizer_class"), model.get("tokenizer_class")):
        if name is None or name in _GENERIC:
            continue
        recipe = huggingface.find_recipe(name, family) if isinstance(name, str) else None
        if recipe is not None:
            return recipe
        raise InputError(
            f"{folder}: a tokenizer of the class {shown(name)} is not known; known are"
            f" {', '.join(huggingface.tokenizer_recipes())}"
        )
    if family is None:
        problem = "names no tokenizer_class and no model_type"
        if model_type is not None:
            problem = f"names the model_type {shown(model_type)}"
        raise InputError(
            f"{folder}: {problem}; set tokenizer_class in tokenizer_config.json to one of"
            f" {', '.join(huggingface.tokenizer_recipes())}"
        )
    return family.recipe({path.name for path in folder.iterdir()})


def _object(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object of a file; empty if there is no such file."""
    path = folder / name
    return _mapping(path, untrusted.read_json(path)) if path.exists() else {}


def _mapping(path: Path, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InputError(f"{path}: {shown(data)} is not an object")
    return data


def _id(folder: Path, value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    if type(value) is int and 0 <= value < 10**9:
        return value
    raise InputError(f"{folder}: the id of an added token is {shown(value)}")


def _token(folder: Path, value: Any, *, special: bool = True) -> AddedToken:
    """Return a token that is text, or an object that says how it is matched in text; ``special`` if
    that does not say so.
    """
    match value:
        case str() if _is_text(value):
            return AddedToken(value, special=True, normalized=False)
        case {"content": str() as content, **options} if _is_text(content):
            flags = {name: options.get(name, False) for name in ("lstrip", "rstrip", "single_word")}
            flags["special"] = is_special = options.get("special", special)
            flags["normalized"] = options.get("normalized", not is_special)
            if all(isinstance(flag, bool) for flag in flags.values()):
                return AddedToken(content, **flags)
    raise InputError(f"{folder}: a special token is {shown(value)}, not text")


def _is_text(value: str) -> bool:
    """Return False for half of a surrogate pair, which JSON can write and is not a character."""
    return re.search("[\ud800-\udfff]", value) is None


def _extra_tokens(folder: Path, named: dict[str, Any]) -> list[AddedToken]:
    tokens = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
    if isinstance(tokens, dict):
        tokens = list(tokens.values())
    if not isinstance(tokens, list):
        raise InputError(f"{folder}: the extra special tokens are {shown(tokens)}, not a list")
    return list(map(partial(_token, folder), tokens))


class Vocabulary(Tokenizer):
    """A vocabulary of a Hugging Face folder; with ids around a line, the tokenizer of a side.

    The text of a special token becomes that token, as in transformers. Normalization may shrink any
    text, so nothing is known of a line before it is encoded.
    """

    _longest_token = None
    _ids: dict[str, int]
    _line_ends: SpecialTokens | ConfigError
    _hash: str

    def with_ends(
        self,
        line_ends: SpecialTokens | ConfigError,
        *,
        pad_id: int,
        bos_id: int,
        eos_id: int,
        digest: str,
    ) -> "Vocabulary":
        """Return the tokenizer of a side. ``digest`` is a hash of the files.

        ``line_ends`` may be the error to raise once they are needed: a language must be given
        first.
        """
        side = copy.copy(self)
        side._line_ends, side.pad_id, side.bos_id, side.eos_id = line_ends, pad_id, bos_id, eos_id
        # Hashes are recorded in run folders: version 0.1 hashed a plain tuple
        hashed = repr(tuple(line_ends) if isinstance(line_ends, SpecialTokens) else line_ends)
        side._hash = hashlib.sha256((digest + hashed).encode()).hexdigest()
        return side

    def _ends(self) -> SpecialTokens:
        """Return the ids around a line; raises ConfigError if a language must be given first."""
        if isinstance(self._line_ends, ConfigError):
            raise self._line_ends
        return self._line_ends

    @property
    def prefix(self) -> tuple[int, ...]:
        return self._ends().prefix

    @property
    def suffix(self) -> tuple[int, ...]:
        return self._ends().suffix

    @property
    def hash(self) -> str:
        """SHA-256 of the files that decide ids, and of the ids around a line."""
        return self._hash

    def save(self, path: str | Path) -> None:
        """Raise ConfigError: the files belong to both sides."""
        raise ConfigError(
            f"{path}: the files of a Hugging Face tokenizer belong to both sides; use"
            " HuggingFaceTokenizer.save"
        )

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        return self._ids.get(token)

    def names(self) -> list[str]:
        """List the tokens that may be languages, by their text."""
        return list(self._ids)


class FastVocabulary(Vocabulary):
    """A vocabulary of a model of ``tokenizers``."""

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
        self.vocab_size = max(self._ids.values(), default=-1) + 1
        self._cleans_up = settings.flag("clean_up_tokenization_spaces") and self.bpe is None

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text of ids, without special tokens."""
        text = super().decode(ids)
        if self._left_out is not None:
            text = re.sub(self._left_out, "", text)
        return cleaned_up(text) if self._cleans_up else text

    def names(self) -> list[str]:
        """List the tokens that are never cut, in the order of their ids."""
        added = self._model.get_added_tokens_decoder()
        return [token.content for _, token in sorted(added.items())]


def _add_tokens(model: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Mark the model's special tokens, and add unknown ones with the ids that the folder names."""
    model.add_tokens(list(dict(sorted(settings.added_tokens.items())).values()))
    known = model.get_vocab(with_added_tokens=True)
    for index, token in settings.added_tokens.items():
        if (now := known.get(token.content)) != index:
            outcome = "cannot be added" if now is None else f"becomes {now}"
            raise InputError(
                f"the added token {shown(token.content)} has the id {index}, and {outcome}"
            )
    present = set(map(attrgetter("content"), model.get_added_tokens_decoder().values()))
    last = settings.special_tokens.get(settings.recipe.added_last or "")
    special: list[AddedToken] = []
    at_end: list[AddedToken] = []
    for token in (*settings.special_tokens.values(), *settings.extra_tokens):
        if token.content not in present:
            (at_end if token is last else special).append(token)
    model.add_special_tokens(special + at_end)


def from_json(path: Path, content: bytes, settings: TokenizerSettings) -> FastVocabulary:
    """Return the vocabulary of a ``tokenizer.json``, with its normalization and its words."""
    text = text_of(path, content, "not a tokenizer file: ")
    with guarded(path):
        model = tokenizers.Tokenizer.from_str(text)
    return FastVocabulary(path, model, settings)


def from_merges(
    path: Path, vocabulary: bytes, merges: bytes, settings: TokenizerSettings
) -> FastVocabulary:
    """Return the byte-level BPE of ``vocab.json`` (``path``) and ``merges.txt``."""
    ids = read_ids(path, vocabulary)
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


def read_ids(path: Path, content: bytes) -> dict[str, int]:
    """Return the tokens and ids of a ``vocab.json``. Raises InputError if it is no vocabulary."""
    data = untrusted.parse_json(path, content)
    if not isinstance(data, dict) or not all(
        type(index) is int and 0 <= index < 2**31 for index in data.values()
    ):
        raise InputError(f"{path}: not a vocabulary: no object of ids")
    return data


def read_merges(path: Path, content: bytes, *, counted: bool = False) -> list[tuple[str, str]]:
    """Return the merges of a ``merges.txt``, in their order.

    ``counted`` lines may have a count after the two tokens. Raises InputError if a line is not two
    tokens.
    """
    pairs = []
    for number, line in enumerate(text_of(path, content).split("\n"), 1):
        tokens = line.split(" ")
        if line.startswith("#version") or not line.strip():
            continue
        if len(tokens) != 2 and not (counted and len(tokens) == 3):
            raise InputError(f"{path}: line {number} is {shown(line)}, not two tokens")
        pairs.append((tokens[0], tokens[1].rstrip("\r")))
    return pairs


# The replacements of transformers' ``clean_up_tokenization``, in its order
_CLEANED = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")] + [
    (f" {end}", end) for end in "n't 'm 's 've 're".split()
]


def cleaned_up(text: str) -> str:
    """Return text without spaces before punctuation, as ``clean_up_tokenization`` does."""
    for pattern, replacement in _CLEANED:
        text = text.replace(pattern, replacement)
    return text
