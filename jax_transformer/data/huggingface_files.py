"""What the small files of a Hugging Face folder say of its tokenizer: its family, its special tokens, its settings.

Facts from transformers 5.23 (``tokenization_utils_base.py``): tokens are told by ``added_tokens_decoder`` of ``tokenizer_config.json``, else by
``special_tokens_map.json`` and ``added_tokens.json``.
"""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jax_transformer.errors import InputError
from jax_transformer.storage import json_text
from jax_transformer.storage.untrusted import shown

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Kind(enum.Enum):
    """A family of tokenizers: what stands around a line, and how a folder without ``tokenizer.json`` is read."""

    MARIAN = "Marian"
    BART = "Bart"
    MBART = "MBart"
    MBART50 = "MBart50"
    NLLB = "Nllb"
    M2M_100 = "M2M100"
    T5 = "T5"
    PEGASUS = "Pegasus"


_CLASSES = {f"{kind.value}Tokenizer": kind for kind in Kind} | {
    "RobertaTokenizer": Kind.BART,
    "MT5Tokenizer": Kind.T5,
}
# Of these the model's type tells the family
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend")
_MODEL_TYPES = {
    "marian": Kind.MARIAN,
    "bart": Kind.BART,
    "mbart": Kind.MBART,
    "m2m_100": Kind.M2M_100,
    "t5": Kind.T5,
    "mt5": Kind.T5,
    "umt5": Kind.T5,
    "pegasus": Kind.PEGASUS,
}
_DEFAULTS: dict[Kind, dict[str, str]] = {
    Kind.MARIAN: {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    Kind.M2M_100: {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
    },
    Kind.T5: {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    Kind.PEGASUS: {
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask_2>",
    },
}
_BART_TOKENS = dict(zip(NAMED, "<s> </s> <unk> </s> <pad> <s> <mask>".split(), strict=True))


@dataclass(frozen=True)
class Described:
    """What a folder says of its tokenizer."""

    folder: Path
    kind: Kind
    named: dict[str, AddedToken]
    """The tokens with a role, such as ``pad_token``, in the order in which transformers adds them."""
    extra: list[AddedToken]
    """Special tokens without one."""
    added: dict[int, AddedToken]
    """The tokens whose ids are told."""
    settings: dict[str, Any]
    """``tokenizer_config.json``."""
    model: dict[str, Any]
    """``config.json``, and what it leaves out from ``generation_config.json``."""

    def flag(self, name: str) -> bool:
        """A setting that is true or false; false where it is not told."""
        value = self.settings.get(name)
        if value is not None and not isinstance(value, bool):
            raise InputError(
                f"{self.folder / 'tokenizer_config.json'}: {name} is {shown(value)}, not true or false"
            )
        return bool(value)

    def number(self, name: str, default: int) -> int:
        """A setting that counts something."""
        value = self.settings.get(name, default)
        if type(value) is not int or not 0 <= value <= 100_000:
            raise InputError(
                f"{self.folder / 'tokenizer_config.json'}: {name} is {shown(value)}, not a number up to 100,000"
            )
        return value

    def text(self, name: str) -> str | None:
        """A setting that is a word."""
        value = self.settings.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(
                f"{self.folder / 'tokenizer_config.json'}: {name} is {shown(value)}, not text"
            )
        return value

    @property
    def lists_extra(self) -> bool:
        """Whether ``tokenizer_config.json`` lists extra special tokens, be it none: transformers then adds none that a family has of itself."""
        return (
            "extra_special_tokens" in self.settings or "additional_special_tokens" in self.settings
        )

    @property
    def pad(self) -> str:
        """The text of the padding token."""
        return self._role("pad_token")

    @property
    def eos(self) -> str:
        """The text of the end token."""
        return self._role("eos_token")

    def _role(self, name: str) -> str:
        if name not in self.named:
            raise InputError(f"{self.folder / 'tokenizer_config.json'}: tells no {name}; add it")
        return self.named[name].content


def describe(folder: Path) -> Described:
    """Read a folder's JSON files. Raises InputError where one is damaged or the family is not known."""
    settings = _object(folder, "tokenizer_config.json")
    model = _object(folder, "generation_config.json") | _object(folder, "config.json")
    kind = _kind(folder, settings, model)
    if "added_tokens_decoder" in settings:
        added = {
            _id(folder, key): _token(folder, value)
            for key, value in _mapping(folder, settings["added_tokens_decoder"]).items()
        }
        told = settings
    else:
        told = settings | _object(folder, "special_tokens_map.json")
        extra = {token.content for token in _extra(folder, told)}
        special = extra | {
            _token(folder, told[name]).content for name in NAMED if told.get(name) is not None
        }
        added = {
            _id(folder, index): AddedToken(
                text, normalized=text not in special, special=text in special
            )
            for text, index in _object(folder, "added_tokens.json").items()
        }
    by_text = {token.content: token for token in added.values()}
    roles = _DEFAULTS.get(kind, _BART_TOKENS) | {
        name: told[name] for name in NAMED if told.get(name) is not None
    }
    named = {
        name: _named(folder, kind, name, roles[name], by_text) for name in NAMED if name in roles
    }
    return Described(folder, kind, named, _extra(folder, told), added, settings, model)


def vocabulary(path: Path, content: bytes) -> dict[str, int]:
    """Tokens and ids of a ``vocab.json``. Raises InputError where it is no vocabulary."""
    found = json_text.parse(path, content)
    if not isinstance(found, dict) or not all(
        type(index) is int and 0 <= index < 2**31 for index in found.values()
    ):
        raise InputError(f"{path}: not a vocabulary: no object of ids")
    return found


def _kind(folder: Path, settings: dict[str, Any], model: dict[str, Any]) -> Kind:
    for told in (settings.get("tokenizer_class"), model.get("tokenizer_class")):
        if isinstance(told, str) and told.removesuffix("Fast") in _CLASSES:
            return _CLASSES[told.removesuffix("Fast")]
        if told is not None and told not in _GENERIC:
            raise InputError(
                f"{folder}: a tokenizer of the class {shown(told)} is not known; known are {', '.join(_CLASSES)}"
            )
    found = model.get("model_type")
    if not isinstance(found, str) or found not in _MODEL_TYPES:
        says = (
            f"the model_type {shown(found)}"
            if found is not None
            else "no tokenizer_class and no model_type"
        )
        raise InputError(
            f"{folder}: tells {says}; set tokenizer_class in tokenizer_config.json to one of {', '.join(_CLASSES)}"
        )
    plain = _MODEL_TYPES[found]
    # NLLB is a model of M2M100 with another tokenizer, whose vocabulary is the SentencePiece model's
    return Kind.NLLB if plain is Kind.M2M_100 and not (folder / "vocab.json").exists() else plain


def _object(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object in a file; empty where there is no such file."""
    return (
        _mapping(folder / name, json_text.read(folder / name)) if (folder / name).exists() else {}
    )


def _mapping(where: Path, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise InputError(f"{where}: {shown(found)} stands where an object should")
    return found


def _id(folder: Path, found: Any) -> int:
    if isinstance(found, str) and found.isascii() and found.isdecimal() and len(found) < 10:
        return int(found)
    if type(found) is int and 0 <= found < 10**9:
        return found
    raise InputError(f"{folder}: the id of an added token is {shown(found)}")


def _token(folder: Path, found: Any) -> AddedToken:
    """A token that is text, or an object that says how it is matched in text."""
    match found:
        case str():
            return AddedToken(found, special=True, normalized=False)
        case {"content": str() as content, **how}:
            flags = {name: how.get(name, False) for name in ("lstrip", "rstrip", "single_word")}
            special = how.get("special", True)
            flags |= {"special": special, "normalized": how.get("normalized", not special)}
            if all(isinstance(value, bool) for value in flags.values()):
                return AddedToken(content, **flags)
    raise InputError(f"{folder}: a special token is {shown(found)}, not text")


def _named(
    folder: Path, kind: Kind, name: str, found: Any, added: dict[str, AddedToken]
) -> AddedToken:
    token = _token(folder, found)
    if token.content in added:
        return added[token.content]
    if (
        name == "mask_token"
        and kind in (Kind.MBART, Kind.MBART50, Kind.NLLB)
        and isinstance(found, str)
    ):
        return AddedToken(found, lstrip=True, normalized=kind is Kind.NLLB, special=True)
    return token


def _extra(folder: Path, told: dict[str, Any]) -> list[AddedToken]:
    found = told.get("extra_special_tokens") or told.get("additional_special_tokens") or []
    if isinstance(found, dict):
        found = list(found.values())
    if not isinstance(found, list):
        raise InputError(f"{folder}: the extra special tokens are {shown(found)}, not a list")
    return [_token(folder, token) for token in found]
