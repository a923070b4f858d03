"""A model of Marian, which is read under transformers' names and never written."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax_transformer.architectures import huggingface_config, huggingface_state
from jax_transformer.errors import InputError, about_file
from jax_transformer.extras.toolkits.marian import marian_model, marian_names
from jax_transformer.extras.toolkits.marian.marian_model import Model
from jax_transformer.formats import model_card
from jax_transformer.formats.base import Destination, Format, Pretrained
from jax_transformer.formats.contents import Contents
from jax_transformer.formats.huggingface_folders import completed_notes
from jax_transformer.storage import huggingface_folder, run_files
from jax_transformer.storage.tensors import Note
from jax_transformer.storage.untrusted import shown

PAD, UNKNOWN = "<pad>", "<unk>"
_LONGEST = 512
"""The longest translation, as in the published folders of transformers."""
_READ = ("models", "vocabs", "beam-size", "normalize", "allow-unk", "relative-paths")


@dataclass(frozen=True)
class MarianWeights(Pretrained):
    """A model of Marian under transformers' names, with the row of zeros for padding."""

    marian: Model | None = None
    without_tokenizer = "gets its tokenizer in a run: jax-transformer convert FILE runs/NAME"

    def converted_to(self, destination: Format) -> Pretrained:
        """Return the model as Marian, or for a Hugging Face folder as transformers, computes it."""
        if destination.name != "hf":
            return self
        assert self.marian is not None  # open() finds it
        return _opened(self.format, self.marian, for_transformers=True)

    def notes_for(self, to: Destination) -> tuple[Note, ...]:
        assert self.marian is not None
        note = Note(
            "Marian's positions and norms",
            "transformers computes sinusoids of other wavelengths, and norms with 1e-5 for "
            "Marian's 1e-6, so that logits differ, as in the folders of OPUS-MT on the hub",
        )
        notes = [note] if to.format.name == "hf" else []
        if not to.format.is_file:
            if (reason := self._no_tokenizer()) is not None:
                notes.append(Note("the tokenizer", reason))
            notes += [
                Note(f"{name}={shown(value)} of {marian_model.DECODER}", "is not read")
                for name, value in self.marian.decoder.items()
                if name not in _READ
            ]
        return tuple(notes)

    def _no_tokenizer(self) -> str | None:
        model, config = self.marian, self.config
        assert model is not None and config is not None
        if not model.vocabularies or not model.sentencepiece:
            pieces = " and ".join(marian_model.SENTENCEPIECE)
            return f"needs a vocabulary and {pieces} next to the weights"
        if config.source_pad_id != config.target_pad_id:
            return "has vocabularies of two lengths, and transformers' has one id for padding"
        return None

    def files_for(self, to: Destination) -> Mapping[str, bytes]:
        """Return the files that go into a folder: tokenizer, and settings of decoding."""
        model, config = self.marian, self.config
        assert model is not None and config is not None
        files: dict[str, bytes] = {}
        if not to.format.is_file and self._no_tokenizer() is None:
            files = _tokenizer(model, config.target_pad_id)
        if not to.format.has_extra_files:
            return files if to.format.takes("tokenizer_config.json") else {}
        ids = {
            "pad_token_id": config.target_pad_id,
            "eos_token_id": config.eos_id,
            "decoder_start_token_id": config.bos_id,
        }
        data: dict[str, Any] = {
            "model_type": "marian",
            "vocab_size": config.source_vocab_size,
            "decoder_vocab_size": config.target_vocab_size,
            **ids,
        }
        generation = ids | _decoding(model, config.target_pad_id)
        files[huggingface_folder.GENERATION] = huggingface_folder.to_json(generation)
        if to.format.name == "hf":
            dtypes = {to.dtype or array.dtype for array in model.arrays.values()}
            data = huggingface_config.to_config(config)
            data |= {"dtype": next(iter(dtypes))} if len(dtypes) == 1 else {}
            numbers = sum(array.info.size for array in model.arrays.values())
            name = to.path.absolute().name
            files[huggingface_folder.CARD] = model_card.new(name, "marian", numbers, None).encode()
        return files | {huggingface_folder.CONFIG: huggingface_folder.to_json(data)}


class MarianModel(Format):
    name, title, mark = "marian", "model of Marian", "*.npz"

    def recognises(self, path: Path) -> bool:
        return marian_model.is_npz(path) if path.is_file() else bool(marian_model.weights(path))

    def open(self, path: Path, **options: Any) -> Pretrained:
        return _opened(self, marian_model.find(path))

    def inspect(self, path: Path) -> Contents:
        model = marian_model.find(path)
        hashes = {model.path.name: marian_model.verify_npz(model.path)}
        hashes |= {file.name: run_files.sha256(file) for file in model.files[1:]}
        infos = {name: array.info for name, array in model.arrays.items()}
        return Contents(str(model.path), self.title, infos, hashes, dict(model.options))


def _opened(format: Format, model: Model, *, for_transformers: bool = False) -> Pretrained:
    """Return the weights, with the positions and norms of Marian or of transformers."""
    with about_file(model.path):
        config = marian_names.configuration(model.options)
        weights = marian_names.state(model.arrays, config)
    eos_id = marian_model.end_id(model)
    with about_file(model.vocabularies[-1] if model.vocabularies else model.path):
        config = replace(config, eos_id=eos_id)
    if for_transformers:
        config = marian_names.as_transformers_computes(config)
    tensors = huggingface_state.complete(
        {name: tensor.info for name, tensor in weights.items()}, config
    )
    return MarianWeights(
        format,
        model.path,
        str(model.path),
        tensors,
        lambda: huggingface_state.complete(weights, config),
        config,
        weights=model.path.name,
        files=model.files,
        derived=completed_notes(tensors, weights, config),
        marian=model,
    )


def _decoding(model: Model, pad_id: int) -> dict[str, Any]:
    """Return the settings of ``decoder.yml`` as transformers has them.

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
    """Return a setting of ``decoder.yml`` below 1000; ``default`` is Marian's."""
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
    files = {"tokenizer_config.json": huggingface_folder.to_json(settings)}
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
        files[name] = huggingface_folder.to_json(ids | {PAD: pad_id})
    sides = zip(marian_model.SENTENCEPIECE, (model.sentencepiece * 2)[:2], strict=True)
    return files | {name: path.read_bytes() for name, path in sides}


def _ids(model: Model, side: int) -> dict[str, int]:
    """Return the ids of a side's vocabulary; of a SentencePiece model, its pieces in order."""
    from jax_transformer.data import sentencepiece_vocabulary

    path = model.vocabularies[side]
    if path.suffix != ".spm":
        return marian_model.read_vocabulary(path)
    processor = sentencepiece_vocabulary.load(path, path.read_bytes())
    pieces = sentencepiece_vocabulary.take_apart(path, processor)
    return {piece: number for number, (piece, _) in enumerate(pieces.scored)}


FORMAT = MarianModel()
