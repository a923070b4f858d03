"""The tokens by id of both sides, as CTranslate2 takes and returns them, and its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_transformer.architectures.tokenizer_recipe import TargetStart
from jax_transformer.config import TransformerConfig
from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair


@dataclass(frozen=True)
class Vocabularies:
    """The tokens of both sides by id, all different, and the settings of CTranslate2's
    ``config.json`` that name some of them.
    """

    source: list[str]
    target: list[str]
    settings: Mapping[str, Any]


def of(
    config: TransformerConfig,
    tokenizer: Tokenizer | TokenizerPair | None,
    *,
    explicit: bool = False,
) -> Vocabularies:
    """Return the vocabularies of a model.

    Without a tokenizer, a token is its id in decimal. Our own tokenizers put nothing around a line
    but its end, which the engine then adds itself (``add_source_eos``). Tokenizers of
    Hugging Face folders add special tokens themselves, as with CTranslate2's own converters.
    If ``explicit``, the decoder's start is given with each line.
    """
    sides = (None, None) if tokenizer is None else (tokenizer.source, tokenizer.target)
    source, target = (
        _texts(None if side is None else side.tokens(), size)
        for side, size in zip(
            sides, (config.source_vocab_size, config.target_vocab_size), strict=True
        )
    )
    eos = target[config.eos_id]
    own = tokenizer is not None and not isinstance(tokenizer, HuggingFaceTokenizer)
    settings = {
        "bos_token": target[config.bos_id],
        "eos_token": eos,
        # Its engine appends an unknown token to a vocabulary that has none, and knows one for both
        "unk_token": next((text for text in (_unknown(tokenizer), eos) if text in source), eos),
        "decoder_start_token": None
        if explicit or _starts_with_language(tokenizer)
        else target[config.bos_id],
        "add_source_bos": False,
        "add_source_eos": own
        and tokenizer is not None
        and [source[i] for i in tokenizer.suffix] == [eos],
    }
    return Vocabularies(source, target, settings)


def _texts(tokens: Mapping[int, str] | None, size: int) -> list[str]:
    """Return a text for each id. An id without a token, or with the text of another, has a new
    text.
    """
    texts: dict[str, None] = {}
    for i in range(size):
        text = str(i) if tokens is None else tokens.get(i, f"<unused{i}>")
        texts[f"{text}<{i}>" if text in texts else text] = None
    return list(texts)


def _unknown(tokenizer: Tokenizer | TokenizerPair | None) -> str | None:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    token = tokenizer.files.settings.special_tokens.get("unk_token")
    return None if token is None else token.content


def _starts_with_language(tokenizer: Tokenizer | TokenizerPair | None) -> bool:
    """Return True if each line must be given the language that its translation starts with."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.languages:
        return False
    languages = tokenizer.files.settings.recipe.languages
    return languages is not None and languages.target_start is TargetStart.DECODER_START
