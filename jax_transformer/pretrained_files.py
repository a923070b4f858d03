"""What a Hugging Face folder brings beside its weights, also within a run that was made of one: tokenizer, languages, and how to decode."""

import dataclasses
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.data import huggingface_tokenizer
from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer
from jax_transformer.errors import ConfigError
from jax_transformer.generate import huggingface
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.storage import huggingface as folders
from jax_transformer.transformer import Transformer

_NARROWEST = 16


def is_folder(path: Path) -> bool:
    """Whether this is a Hugging Face folder, and not a run."""
    here = (
        path.is_dir() and not (path / "checkpoints").is_dir() and (path / folders.CONFIG).is_file()
    )
    return here and "model_type" in folders.configuration(path)


def model(path: Path) -> Transformer:
    """The model of a folder in the dtypes of its file. Raises as :func:`jax_transformer.convert.load`."""
    from jax_transformer.convert import library

    found: Transformer = library.load(path)
    return found


def tokenizer(
    path: Path, source_lang: str | None = None, target_lang: str | None = None
) -> HuggingFaceTokenizer:
    """The tokenizer of a folder between two languages, where its family has some. Raises as :func:`load_huggingface`."""
    return huggingface_tokenizer.load_huggingface(
        path, source_lang=source_lang, target_lang=target_lang
    )


def has_tokenizer(path: Path) -> bool:
    """Whether a folder holds a file of a tokenizer."""
    return any((path / name).is_file() for name in folders.TOKENIZER)


def between(found: Any, source_lang: str | None, target_lang: str | None, where: Path) -> Any:
    """A run's tokenizer between other languages. Raises ConfigError for one that knows of no languages."""
    if source_lang is None and target_lang is None:
        return found
    if not isinstance(found, HuggingFaceTokenizer):
        raise ConfigError(
            f"--source-lang and --target-lang are for Hugging Face tokenizers of several languages, and that of {where} is none"
        )
    return found.with_languages(source_lang, target_lang)


def decoding(path: Path, config: TransformerConfig, words: Any = None) -> GenerationConfig:
    """How transformers' ``generate`` decodes with a folder's files, into the target language of the tokenizer ``words``.

    Raises InputError, naming the file, for what is asked for there and not done here.
    """
    data, file = huggingface.read(path)
    found = huggingface.from_generation_config(data, config, where=str(file))
    if not isinstance(words, HuggingFaceTokenizer) or words.target_lang is None:
        return found
    forced = words.forced_bos_id()
    return dataclasses.replace(
        found,
        decoder_start_token_id=words.bos_id,
        forced_bos_token_id=found.forced_bos_token_id if forced is None else forced,
    )


def widths(config: TransformerConfig) -> tuple[int, ...]:
    """What batches are padded to: each twice the one before, so that a handful of programs reads every length."""
    found = [_NARROWEST]
    while found[-1] < config.longest:
        found.append(2 * found[-1])
    return tuple(width for width in found if width < config.longest)
