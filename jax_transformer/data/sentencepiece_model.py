"""SentencePiece models: read by their own library, and taken apart so that ``tokenizers`` can
rebuild them.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage.untrusted import shown

# Numbers of ``sentencepiece_model.proto``: the fields of a model, of a piece, of its trainer, of
# its normalizer, and the types of pieces and models
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _CHARSMAP = 3, 2
_CONTROL, _USER_DEFINED = 3, 4
UNIGRAM, BPE = 1, 2


@dataclass(frozen=True)
class Pieces:
    """The parts of a model."""

    scored: list[tuple[str, float]]
    """Every piece with its score, in the order of ids."""
    control: list[str]
    """Pieces that no text is cut into."""
    user_defined: list[str]
    """Pieces that are never cut."""
    charsmap: bytes | None
    """The normalization of characters, compiled."""
    algorithm: int
    """``UNIGRAM`` or ``BPE``, or another number."""


class SentencePieceModel:
    """A model that the library itself runs; a :class:`.PieceModel`."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def cut(self, text: str) -> list[str]:
        """Return the pieces of a text."""
        return self.processor.encode(text, out_type=str)

    def join(self, pieces: Sequence[str]) -> str:
        """Return the text of pieces."""
        return self.processor.decode_pieces(list(pieces))


def load(path: Path, content: bytes) -> SentencePieceModel:
    """Return the model of a file.

    Raises:
        InputError: the file is not a model.
        ConfigError: SentencePiece is not installed.
    """
    try:
        import sentencepiece
    except ImportError:
        raise ConfigError(
            f"{path}: needs SentencePiece: pip install 'jax-seq2seq[sentencepiece]'"
        ) from None
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: not a SentencePiece model: {shown(str(error).splitlines()[0], 120)}"
        ) from None
    return SentencePieceModel(processor)


def take_apart(model: SentencePieceModel) -> Pieces:
    """Return the parts of a model, as the library writes it: what else a file holds is
    not there.
    """
    scored: list[tuple[str, float]] = []
    by_type: dict[int, list[str]] = {_CONTROL: [], _USER_DEFINED: []}
    charsmap, algorithm = None, UNIGRAM
    for field, value in _fields(model.processor.serialized_model_proto()):
        if field == _PIECES:
            piece = dict(_fields(value))
            text = piece.get(_TEXT, b"").decode("utf-8")
            scored.append((text, struct.unpack("<f", piece.get(_SCORE, bytes(4)))[0]))
            by_type.get(piece.get(_TYPE, 0), []).append(text)
        elif field == _TRAINER:
            algorithm = dict(_fields(value)).get(_MODEL_TYPE, UNIGRAM)
        elif field == _NORMALIZER:
            charsmap = dict(_fields(value)).get(_CHARSMAP) or None
    return Pieces(scored, by_type[_CONTROL], by_type[_USER_DEFINED], charsmap, algorithm)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message in the wire format of protocol buffers: whole numbers, and
    bytes.
    """
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
