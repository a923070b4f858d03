"""The tokenizer or the two of a run, and the model's configuration that goes with them."""

from collections.abc import Iterable
from pathlib import Path

from jax_transformer.architectures import families
from jax_transformer.config import TransformerConfig, Tying
from jax_transformer.data import tokenizer
from jax_transformer.data.options import DataOptions, Vocabularies
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.training.options import TrainOptions

TextPairs = list[tuple[str, str]]
Vocabulary = Tokenizer | TokenizerPair


def ready(options: TrainOptions, folder: Path) -> Vocabulary | None:
    """The tokenizer that is given or that the run has already; None where it is yet to be trained.

    One that is given is read anew when a run goes on, so that a changed file is noticed. Without data.json, which is written last, what lies in
    the folder was not finished.
    """
    data = options.data
    if data.tokenizer is not None:
        given = Tokenizer.load(data.tokenizer)
        return (
            given
            if data.target_tokenizer is None
            else TokenizerPair(given, Tokenizer.load(data.target_tokenizer))
        )
    if not (folder / "data.json").exists() or not tokenizer.in_folder(folder):
        return None
    found = tokenizer.load_folder(folder)
    if isinstance(found, TokenizerPair) != (data.vocabularies is Vocabularies.SEPARATE):
        raise InputError(
            f"{folder}: its tokenizer is not that of data.vocabularies={data.vocabularies.value}"
        )
    return found


def train(data: DataOptions, pairs: TextPairs, model: TransformerConfig) -> Vocabulary:
    """Learn the vocabulary of both sides, or one of each, with the model's special ids."""

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


def config(options: TrainOptions, found: Vocabulary | None) -> TransformerConfig:
    """The model's configuration: with the sizes and special ids of a tokenizer, or with those that one is yet to be trained to.

    Raises ConfigError where the two sides cannot have the vocabularies that the options ask for.
    """
    data = options.data
    if found is None:
        made = options.model.config(data.vocab_size, data.vocab_size)
    else:
        source, target = found.source, found.target
        ids = {
            "source_pad_id": source.pad_id,
            "target_pad_id": target.pad_id,
            "bos_id": target.bos_id,
            "eos_id": target.eos_id,
        }
        made = options.model.config(source.vocab_size, target.vocab_size, **ids)
    if data.vocabularies is Vocabularies.SHARED:
        if made.source_pad_id != made.target_pad_id:
            raise ConfigError(
                f"one vocabulary for both sides needs one pad id, not {made.source_pad_id} and {made.target_pad_id}"
            )
    elif made.tying is Tying.ALL:
        raise ConfigError(
            "tying=all shares one embedding between two vocabularies; with data.vocabularies=separate give model.tying output or none"
        )
    return made


def limits(data: DataOptions, model: TransformerConfig) -> tuple[int, int]:
    """The longest source and target, in tokens. Raises ConfigError for one over the model's."""
    found = []
    for name in ("max_source_length", "max_target_length"):
        value = getattr(data, name)
        if value is not None and value > model.longest:
            raised = f"max_length={model.max_length}; raise that too"
            reach = (
                raised
                if model.longest == model.max_length
                else f"positions, which reach {model.longest} tokens"
            )
            raise ConfigError(f"data.{name}={value} is over the model's {reach}")
        found.append(families.usual_length(model) if value is None else value)
    return found[0], found[1]
