"""SentencePiece models: read by its own library, and taken apart into what ``tokenizers`` builds the same vocabulary of."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage.untrusted import shown

# Of ``sentencepiece_model.proto``: fields of a model, of a piece, of what trained it, of its normalizer; and types of pieces and models
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _CHARSMAP = 3, 2
_CONTROL, _USER_DEFINED = 3, 4
UNIGRAM, BPE = 1, 2


@dataclass(frozen=True)
class Pieces:
    """A model taken apart."""

    scored: list[tuple[str, float]]
    """Every piece with its score, in the order of ids."""
    control: list[str]
    """Pieces that no text becomes."""
    user_defined: list[str]
    """Pieces that are never cut."""
    charsmap: bytes | None
    """The normalization of characters, compiled."""
    algorithm: int
    """``UNIGRAM`` or ``BPE``, or another number."""


def load(path: Path, content: bytes) -> Any:
    """The library's processor of a model. Raises InputError for a file that is none, ConfigError where the library is not installed."""
    try:
        import sentencepiece
    except ImportError:
        raise ConfigError(
            f"{path}: needs SentencePiece: pip install 'jax-transformer[sentencepiece]'"
        ) from None
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: not a SentencePiece model: {shown(str(error).splitlines()[0], 120)}"
        ) from None
    return processor


def apart(processor: Any) -> Pieces:
    """The parts of a model, of the library's own writing of it: what a file holds beside them is gone."""
    scored: list[tuple[str, float]] = []
    kinds: dict[int, list[str]] = {_CONTROL: [], _USER_DEFINED: []}
    charsmap, algorithm = None, UNIGRAM
    for field, value in _fields(processor.serialized_model_proto()):
        if field == _PIECES:
            told = dict(_fields(value))
            text = told.get(_TEXT, b"").decode("utf-8")
            scored.append((text, struct.unpack("<f", told.get(_SCORE, bytes(4)))[0]))
            kinds.get(told.get(_TYPE, 0), []).append(text)
        elif field == _TRAINER:
            algorithm = dict(_fields(value)).get(_MODEL_TYPE, UNIGRAM)
        elif field == _NORMALIZER:
            charsmap = dict(_fields(value)).get(_CHARSMAP) or None
    return Pieces(scored, kinds[_CONTROL], kinds[_USER_DEFINED], charsmap, algorithm)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message in protocol buffers' wire format: whole numbers, and bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield field, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}[wire]
        yield field, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
