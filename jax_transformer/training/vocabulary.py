"""The tokenizer (or two) of a run, and the model configuration that fits it."""

from collections.abc import Iterable
from pathlib import Path

from jax_transformer.architectures.huggingface import usual_length
from jax_transformer.config import TransformerConfig, Tying
from jax_transformer.data import run_tokenizer
from jax_transformer.data.options import DataOptions, Vocabularies
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.training.options import TrainOptions

TextPairs = list[tuple[str, str]]
Vocabulary = Tokenizer | TokenizerPair


def ready(options: TrainOptions, folder: Path) -> Vocabulary | None:
    """The tokenizer that the options name or that the run has; None if it must be trained first.

    A named tokenizer is read again at every resume, so that a changed file is noticed. A folder
    without data.json, which is written last, is unfinished: its tokenizer is not used.
    """
    data = options.data
    if data.tokenizer is not None:
        source = Tokenizer.load(data.tokenizer)
        if data.target_tokenizer is None:
            return source
        return TokenizerPair(source, Tokenizer.load(data.target_tokenizer))
    if not (folder / "data.json").exists() or not run_tokenizer.in_folder(folder):
        return None
    loaded = run_tokenizer.load_folder(folder)
    if isinstance(loaded, TokenizerPair) != (data.vocabularies is Vocabularies.SEPARATE):
        raise InputError(
            f"{folder}: its tokenizer does not fit data.vocabularies={data.vocabularies.value}"
        )
    return loaded


def train(data: DataOptions, pairs: TextPairs, model: TransformerConfig) -> Vocabulary:
    """Train one tokenizer for both sides or one for each, with the model's special ids."""

    def learn(lines: Iterable[str], pad_id: int) -> Tokenizer:
        return Tokenizer.train(
            lines, data.vocab_size, pad_id=pad_id, bos_id=model.bos_id, eos_id=model.eos_id
        )

    if data.vocabularies is Vocabularies.SHARED:
        return learn((line for pair in pairs for line in pair), model.source_pad_id)
    return TokenizerPair(
        learn((source for source, _ in pairs), model.source_pad_id),
        learn((target for _, target in pairs), model.target_pad_id),
    )


def config(options: TrainOptions, vocabulary: Vocabulary | None) -> TransformerConfig:
    """The model configuration with the tokenizer's sizes and special ids.

    Without a tokenizer, with the sizes that one will be trained to. Raises ConfigError if the two
    sides cannot have the vocabularies that the options ask for.
    """
    data = options.data
    if vocabulary is None:
        model = options.model.config(data.vocab_size, data.vocab_size)
    else:
        source, target = vocabulary.source, vocabulary.target
        ids = {
            "source_pad_id": source.pad_id,
            "target_pad_id": target.pad_id,
            "bos_id": target.bos_id,
            "eos_id": target.eos_id,
        }
        model = options.model.config(source.vocab_size, target.vocab_size, **ids)
    if data.vocabularies is Vocabularies.SHARED:
        if model.source_pad_id != model.target_pad_id:
            raise ConfigError(
                "one vocabulary for both sides needs one pad id, "
                f"not {model.source_pad_id} and {model.target_pad_id}"
            )
    elif model.tying is Tying.ALL:
        raise ConfigError(
            "tying=all shares one embedding between two vocabularies; "
            "with data.vocabularies=separate give model.tying output or none"
        )
    return model


def limits(data: DataOptions, model: TransformerConfig) -> tuple[int, int]:
    """Maximum length of source and target in tokens. Raises ConfigError if over the model's."""
    lengths = []
    for name in ("max_source_length", "max_target_length"):
        value = getattr(data, name)
        if value is not None and value > model.longest:
            reach = (
                f"max_length={model.max_length}; raise that too"
                if model.longest == model.max_length
                else f"positions, which reach {model.longest} tokens"
            )
            raise ConfigError(f"data.{name}={value} is over the model's {reach}")
        lengths.append(usual_length(model) if value is None else value)
    return lengths[0], lengths[1]
