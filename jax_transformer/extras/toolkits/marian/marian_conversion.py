"""A model of Marian that is converted: its configuration for each kind, its tokenizer's files, and
its settings of decoding.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_transformer.architectures import huggingface_config
from jax_transformer.convert import card
from jax_transformer.errors import InputError
from jax_transformer.extras.toolkits import toolkit_weights
from jax_transformer.extras.toolkits.marian import marian_model
from jax_transformer.extras.toolkits.marian.marian_model import Model
from jax_transformer.formats.kinds import DEPLOYED, Kind
from jax_transformer.formats.pretrained import Pretrained
from jax_transformer.storage import huggingface_folder as folders
from jax_transformer.storage.tensors import Note
from jax_transformer.storage.untrusted import shown

PAD, UNKNOWN = "<pad>", "<unk>"
_LONGEST = 512
"""The longest translation, as in the published folders of transformers."""
_READ = ("models", "vocabs", "beam-size", "normalize", "allow-unk", "relative-paths")


def as_for(source: Pretrained, kind: Kind) -> Pretrained:
    """Return the source as a destination of this kind needs it: as transformers computes for a
    Hugging Face folder, otherwise as Marian does.
    """
    if source.marian is None or kind is not Kind.HUGGINGFACE:
        return source
    return Pretrained(**vars(toolkit_weights.of_marian(source.marian, for_transformers=True)))


def notes(source: Pretrained, model: Model, kind: Kind) -> tuple[Note, ...]:
    """Return notes on what a destination does not have."""
    return tuple(_notes(source, model, kind))


def _notes(source: Pretrained, model: Model, kind: Kind) -> Iterator[Note]:
    if kind is Kind.HUGGINGFACE:
        yield Note(
            "Marian's positions and norms",
            "transformers computes sinusoids of other wavelengths, and norms with 1e-5 for Marian's"
            " 1e-6, so that logits differ, as in the folders of OPUS-MT on the hub",
        )
    if kind.is_file:
        return
    if (reason := _no_tokenizer(source, model)) is not None:
        yield Note("the tokenizer", reason)
    for name, value in model.decoder.items():
        if name not in _READ:
            yield Note(f"{name}={shown(value)} of {marian_model.DECODER}", "is not read")


def _no_tokenizer(source: Pretrained, model: Model) -> str | None:
    config = source.config
    assert config is not None  # every model of Marian has one
    if not model.vocabularies or not model.sentencepiece:
        return (
            f"needs a vocabulary and {' and '.join(marian_model.SENTENCEPIECE)} next to the weights"
        )
    if config.source_pad_id != config.target_pad_id:
        return "has vocabularies of two lengths, and transformers' has one id for padding"
    return None


def files(
    source: Pretrained, model: Model, kind: Kind, target: Path, dtype: str | None
) -> Mapping[str, bytes]:
    """Return the files that go into a folder of this kind: tokenizer, and settings of decoding."""
    config = source.config
    assert config is not None
    tokenizer: dict[str, bytes] = {}
    if not kind.is_file and _no_tokenizer(source, model) is None:
        tokenizer = _tokenizer(model, config.target_pad_id)
    if kind in DEPLOYED:
        return tokenizer
    if kind not in (Kind.RUN, Kind.HUGGINGFACE):
        return {}
    ids = {
        "pad_token_id": config.target_pad_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.bos_id,
    }
    sizes = {"vocab_size": config.source_vocab_size, "decoder_vocab_size": config.target_vocab_size}
    data: dict[str, Any] = {"model_type": "marian", **sizes, **ids}
    decoding = ids | _decoding(model, config.target_pad_id)
    written = tokenizer | {folders.GENERATION: folders.to_json(decoding)}
    if kind is Kind.HUGGINGFACE:
        dtypes = {array.dtype for array in model.arrays.values()} if dtype is None else {dtype}
        data = huggingface_config.to_config(config)
        data |= {"dtype": next(iter(dtypes))} if len(dtypes) == 1 else {}
        numbers = sum(array.info.size for array in model.arrays.values())
        written[folders.CARD] = card.new(target.absolute().name, "marian", numbers, None).encode()
    return written | {folders.CONFIG: folders.to_json(data)}


def _decoding(model: Model, pad_id: int) -> dict[str, Any]:
    """The settings of ``decoder.yml`` as transformers has them.

    Marian has no token for padding, and writes none for unknown words unless ``allow-unk`` is set.
    """
    settings = model.decoder
    never = [pad_id]
    if model.vocabularies and settings.get("allow-unk", "false") != "true":
        unknown = _ids(model, -1).get(UNKNOWN)
        never += [] if unknown is None else [unknown]
    decoding: dict[str, Any] = {
        "bad_words_ids": [[token] for token in never],
        "max_length": _LONGEST,
    }
    if settings:
        decoding["num_beams"] = int(_number(model, "beam-size", "12", r"[1-9]\d{0,2}"))
        decoding["length_penalty"] = _number(model, "normalize", "0", r"\d{1,3}(\.\d{1,9})?")
    return decoding


def _number(model: Model, name: str, default: str, pattern: str) -> float:
    """A setting of ``decoder.yml`` below 1000; ``default`` is Marian's."""
    value = model.decoder.get(name, default)
    if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
        raise InputError(f"{model.decoder_file}: {name}={shown(value)} is not supported")
    return float(value)


# Tokenizer


def _tokenizer(model: Model, pad_id: int) -> dict[str, bytes]:
    """Return the files of transformers' tokenizer: SentencePiece models and ids."""
    separate = model.vocabularies[0] != model.vocabularies[-1]
    names = ("vocab.json", "target_vocab.json") if separate else ("vocab.json",)
    settings = {
        "tokenizer_class": "MarianTokenizer",
        "separate_vocabs": separate,
        "model_max_length": _LONGEST,
    }
    files = {"tokenizer_config.json": folders.to_json(settings)}
    for side, name in enumerate(names):
        ids = _ids(model, side)
        if any(token not in ids for token in (marian_model.END, UNKNOWN)):
            raise InputError(
                f"{model.vocabularies[side]}: has no {marian_model.END} or no {UNKNOWN}"
            )
        if PAD in ids or max(ids.values()) >= pad_id:
            raise InputError(
                f"{model.vocabularies[side]}: does not belong to {model.path}, whose {pad_id:,} "
                f"words are followed by {PAD}"
            )
        files[name] = folders.to_json(ids | {PAD: pad_id})
    sides = zip(marian_model.SENTENCEPIECE, (model.sentencepiece * 2)[:2], strict=True)
    return files | {name: path.read_bytes() for name, path in sides}


def _ids(model: Model, side: int) -> dict[str, int]:
    """The ids of a side's vocabulary; of a SentencePiece model, its pieces in order."""
    from jax_transformer.data import sentencepiece_vocabulary

    path = model.vocabularies[side]
    if path.suffix != ".spm":
        return marian_model.read_vocabulary(path)
    processor = sentencepiece_vocabulary.load(path, path.read_bytes())
    pieces = sentencepiece_vocabulary.take_apart(path, processor)
    return {piece: number for number, (piece, _) in enumerate(pieces.scored)}
