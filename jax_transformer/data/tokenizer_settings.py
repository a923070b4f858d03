"""The settings of a Hugging Face folder's tokenizer, from its small JSON files.

Facts from transformers 5.23 (``tokenization_utils_base.py``): tokens are named by
``added_tokens_decoder`` of ``tokenizer_config.json``, otherwise by ``special_tokens_map.json`` and
``added_tokens.json``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jax_transformer.architectures import huggingface
from jax_transformer.architectures.tokenizer_recipe import TokenizerRecipe
from jax_transformer.errors import InputError
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
        """True if extra special tokens are listed, even none: transformers then adds none of its
        own.
        """
        return "extra_special_tokens" in self.values or "additional_special_tokens" in self.values


def read(folder: Path) -> TokenizerSettings:
    """Read a folder's JSON files.

    Raises InputError if one is damaged or the tokenizer is not known.
    """
    values = _object(folder, FILE)
    model = _object(folder, "generation_config.json") | _object(folder, "config.json")
    recipe = _recipe(folder, values, model)
    if "added_tokens_decoder" in values:
        added = {
            _id(folder, key): _token(folder, value)
            for key, value in _mapping(folder, values["added_tokens_decoder"]).items()
        }
        named = values
    else:
        named = values | _object(folder, "special_tokens_map.json")
        special = {token.content for token in _extra_tokens(folder, named)}
        special |= {
            _token(folder, named[role]).content for role in ROLES if named.get(role) is not None
        }
        added = {
            _id(folder, index): AddedToken(
                text, normalized=text not in special, special=text in special
            )
            for text, index in _object(folder, "added_tokens.json").items()
        }
    by_text = {token.content: token for token in added.values()}
    # The generic class, which reads tokenizer.json as it is, has no tokens of its own
    is_generic = values.get("tokenizer_class") in _GENERIC and (folder / "tokenizer.json").exists()
    roles = ({} if is_generic else dict(recipe.tokens)) | {
        role: named[role] for role in ROLES if named.get(role) is not None
    }
    special_tokens = {
        role: _special_token(folder, recipe, role, roles[role], by_text)
        for role in ROLES
        if role in roles
    }
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


def _token(folder: Path, value: Any) -> AddedToken:
    """Return a token that is text, or an object that says how it is matched in text."""
    match value:
        case str() if _is_text(value):
            return AddedToken(value, special=True, normalized=False)
        case {"content": str() as content, **options} if _is_text(content):
            flags = {name: options.get(name, False) for name in ("lstrip", "rstrip", "single_word")}
            special = options.get("special", True)
            flags |= {"special": special, "normalized": options.get("normalized", not special)}
            if all(isinstance(flag, bool) for flag in flags.values()):
                return AddedToken(content, **flags)
    raise InputError(f"{folder}: a special token is {shown(value)}, not text")


def _is_text(value: str) -> bool:
    """Return False for half of a surrogate pair, which JSON can write and is not a character."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _special_token(
    folder: Path, recipe: TokenizerRecipe, role: str, value: Any, added: dict[str, AddedToken]
) -> AddedToken:
    token = _token(folder, value)
    if token.content in added:
        return added[token.content]
    if isinstance(value, str) and role in recipe.token_flags:
        return AddedToken(value, special=True, **recipe.token_flags[role])
    return token


def _extra_tokens(folder: Path, named: dict[str, Any]) -> list[AddedToken]:
    tokens = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
    if isinstance(tokens, dict):
        tokens = list(tokens.values())
    if not isinstance(tokens, list):
        raise InputError(f"{folder}: the extra special tokens are {shown(tokens)}, not a list")
    return [_token(folder, token) for token in tokens]
