"""The files of a model of Marian: the weights ``*.npz``, with the options of the model in them, and
in the same folder ``decoder.yml``, vocabularies and SentencePiece models, as OPUS-MT publishes
them.

Facts from ``src/common/io.cpp``, ``src/data/default_vocab.cpp`` and ``src/common/config.cpp`` of
marian-dev 1.12. Of the paths in ``decoder.yml`` only the last part is used, so no other folder is
read.

NumPy's ``.npz`` is a zip file with an array in each member, ``name.npy``. Arrays are mapped into
memory from the file itself. Members that are compressed and arrays of Python objects are refused,
so nothing is unpickled and no small file becomes a large array.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.storage import tensors, untrusted, yaml_data
from jax_transformer.storage.pt import zip_archive
from jax_transformer.storage.tensors import LazyTensor, TensorInfo
from jax_transformer.storage.untrusted import shown

OPTIONS = "special:model.yml"
DECODER, END = "decoder.yml", "</s>"
SENTENCEPIECE = ("source.spm", "target.spm")
_LONGEST_OPTIONS = 1_000_000
_TRAINING = ".optimizer.npz"
_VOCABULARIES = (".yml", ".yaml", ".json")
_SUFFIX = ".npy"
_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 4096
_MOST_AXES = 32
# numpy.lib.format evaluates a header as a literal: it takes the last of two equal keys, lengths
# that are truth values or below zero, and fails in many ways. This is the form that is written.
# No part can match in two ways, so that a long header does not take long
_HEADER = (
    r"\{'descr': '([^']{1,80})', 'fortran_order': (True|False), "
    r"'shape': \(((?:[0-9]{1,15}, )*(?:[0-9]{1,15},?)?)\),? ?\} *\n?"
)
_DTYPE = r"[<|=](f[248]|[iu][1248])"


@dataclass(frozen=True)
class Model:
    """A model whose arrays are not read."""

    path: Path
    """The file of weights."""
    arrays: Mapping[str, LazyTensor]
    options: Mapping[str, Any]
    """The options of the model: text, or lists of text."""
    decoder: Mapping[str, Any]
    """The content of ``decoder.yml``; empty if there is none."""
    decoder_file: Path | None
    vocabularies: tuple[Path, ...]
    """The file of each side's vocabulary; empty if there are none."""
    sentencepiece: tuple[Path, ...]
    """The SentencePiece model of each side; empty if lines are cut otherwise."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that decides the model, once."""
        decoder = [] if self.decoder_file is None else [self.decoder_file]
        return tuple(dict.fromkeys([self.path, *decoder, *self.vocabularies, *self.sentencepiece]))


def weights(folder: Path) -> list[Path]:
    """List the files of weights in a folder, without the states of optimizers."""
    return sorted(path for path in folder.glob("*.npz") if not path.name.endswith(_TRAINING))


def find(path: Path) -> Model:
    """Find the files of the model at ``path``, a file of weights or a folder with one.

    Raises InputError if a file is missing or damaged, or the folder has several models;
    UnsafeFileError if a file declares more data than it has, or holds Python objects.
    """
    of_folder = path / DECODER
    if path.is_dir():
        path = _weights(path, _decoder(of_folder))
    # training writes it with the model's name before it
    candidates = (of_folder, path.with_name(f"{path.name}.{DECODER}"), path.with_name(DECODER))
    decoder_file = next((file for file in candidates if file.is_file()), None)
    settings = {} if decoder_file is None else _decoder(decoder_file)
    arrays = scan_npz(path)
    if OPTIONS not in arrays:
        raise InputError(f"{path}: has no {OPTIONS}, which Marian writes with every model")
    options = _options(path, arrays.pop(OPTIONS))
    vocabularies = _vocabularies(path.parent, settings)
    pieces = [path.parent / name for name in SENTENCEPIECE]
    if vocabularies and all(file.suffix == ".spm" for file in vocabularies):
        pieces = [*vocabularies]
    sentencepiece = tuple(pieces) if all(file.is_file() for file in pieces) else ()
    return Model(path, arrays, options, settings, decoder_file, vocabularies, sentencepiece)


def _weights(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Return the one file of weights of a folder: which ``decoder.yml`` names, or the only one."""
    named = settings.get("models")
    if isinstance(named, list) and len(named) > 1:
        raise InputError(
            f"{folder / DECODER}: names {len(named)} models, an ensemble: give one file of weights"
        )
    if isinstance(named, list) and named and isinstance(named[0], str):
        path = _in(folder, named[0])
        if not path.is_file():
            raise InputError(f"{path}: missing, and {DECODER} names it: give the file of weights")
        return path
    paths = weights(folder)
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths[:8])
        raise InputError(f"{folder}: has {len(paths)} models ({names}): give one file of weights")
    return paths[0]


def _in(folder: Path, named: str) -> Path:
    """Return the file in a folder that a path in ``decoder.yml`` names: its last part."""
    name = PurePosixPath(named).name
    if not untrusted.is_file_name(name):
        raise UnsafeFileError(
            f"{folder / DECODER}: refused: {shown(named)} is not a name of a file"
        )
    return folder / name


def _decoder(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    return _map(str(path), untrusted.read_bytes(path, _LONGEST_OPTIONS))


def _options(path: Path, tensor: LazyTensor) -> Mapping[str, Any]:
    if tensor.dtype not in ("int8", "uint8") or tensor.nbytes > _LONGEST_OPTIONS:
        raise InputError(f"{path}: {OPTIONS} is {tensor.nbytes:,} bytes of {tensor.dtype}")
    content = tensor.read().astype(np.uint8, copy=False).tobytes().rstrip(b"\0")
    return _map(f"{path} ({OPTIONS})", content)


def _map(where: str, content: bytes) -> Mapping[str, Any]:
    options = yaml_data.parse(where, content)
    if not isinstance(options, dict):
        raise InputError(f"{where}: is not a map of options")
    return options


def _vocabularies(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the vocabulary of each side, by ``decoder.yml`` or by OPUS-MT's names."""
    named = settings.get("vocabs")
    if isinstance(named, list) and len(named) == 2 and all(isinstance(one, str) for one in named):
        paths = [_in(folder, one) for one in named]
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise InputError(f"{missing[0]}: missing, and {DECODER} names it")
        return tuple(paths)
    sides = [sorted(folder.glob(f"*{side}.vocab.yml")) for side in ("src", "trg")]
    shared = sorted(folder.glob("*vocab.yml"))
    if all(len(paths) == 1 for paths in sides):
        return sides[0][0], sides[1][0]
    return (shared[0], shared[0]) if len(shared) == 1 else ()


def read_vocabulary(path: Path) -> dict[str, int]:
    """Read the ids of a vocabulary: YAML, JSON or text. Raises InputError unless unique."""
    if path.suffix not in _VOCABULARIES:
        tokens = untrusted.read_lines(path)
        result = {token: number for number, token in enumerate(tokens)}
        if len(result) != len(tokens):
            raise InputError(f"{path}: has a token twice")
        return result
    ids = untrusted.read_json(path) if path.suffix == ".json" else yaml_data.read(path)
    if not isinstance(ids, dict):
        raise InputError(f"{path}: is not a map from tokens to ids")
    result = {token: _id(path, token, value) for token, value in ids.items()}
    if len(set(result.values())) != len(result):
        raise InputError(f"{path}: two tokens have one id")
    return result


def _id(path: Path, token: str, value: Any) -> int:
    text = str(value) if isinstance(value, str | int) else ""
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise InputError(f"{path}: the id of {shown(token)} is {shown(value)}")
    return int(text)


def end_id(model: Model) -> int:
    """Return the id of the token that ends a line: the target vocabulary's, otherwise 0."""
    if not model.vocabularies or model.vocabularies[-1].suffix == ".spm":
        return 0
    return read_vocabulary(model.vocabularies[-1]).get(END, 0)


# Arrays of NumPy


def is_npz(path: Path) -> bool:
    """Return True if the first member of a zip file is an array."""
    return (zip_archive.first_member(path) or b"").endswith(_SUFFIX.encode())


def scan_npz(path: Path) -> dict[str, LazyTensor]:
    """Return the arrays by name, none of them read; reading one verifies its checksum.

    Raises InputError for damage and for arrays of an unknown form; UnsafeFileError for an array
    that holds Python objects, is compressed, or declares another number of bytes than it has.
    """
    with zip_archive.Archive(path, not_for_disk=True) as archive:
        others = [name for name in archive.members if not name.endswith(_SUFFIX)]
        if others:
            raise InputError(f"{path}: {shown(others[0])} is not an array (.npy)")
        return {
            name.removesuffix(_SUFFIX): _npy(path, name, member)
            for name, member in archive.members.items()
        }


def verify_npz(path: Path) -> str:
    """Read every byte and return the SHA-256. Raises InputError if a checksum does not hold."""
    with zip_archive.Archive(path, not_for_disk=True) as archive:
        return archive.verify()


def _npy(path: Path, name: str, member: zip_archive.Member) -> LazyTensor:
    header, start = _npy_header(path, name, member)
    match = re.fullmatch(_HEADER, header)
    if match is None:
        raise InputError(f"{path}: {shown(name)} has the header {shown(header)}")
    dtype, order, sizes = match.groups()
    if not re.fullmatch(_DTYPE, dtype):
        if "O" in dtype:
            raise UnsafeFileError(
                f"{path}: refused: {shown(name)} holds Python objects, which only pickle reads"
            )
        raise InputError(f"{path}: {shown(name)} is of dtype {shown(dtype)}")
    shape = tuple(int(size) for size in sizes.replace(" ", "").split(",") if size)
    if order == "True":
        raise InputError(f"{path}: {shown(name)} is stored column by column, as no toolkit does")
    if len(shape) > _MOST_AXES:
        raise InputError(f"{path}: {shown(name)} has {len(shape)} axes")
    kind = np.dtype(dtype.replace("=", "<"))
    declared, size = math.prod(shape) * kind.itemsize, member.start + member.size - start
    if declared != size:
        raise UnsafeFileError(
            f"{path}: refused: {shown(name)} declares {declared:,} bytes, and has {size:,}"
        )

    def read() -> np.ndarray:
        zip_archive.verify_member(path, name, member)
        return tensors.map_file(path, start, dtype=kind, shape=shape)

    return LazyTensor(TensorInfo(shape, kind.name), read)


def _npy_header(path: Path, name: str, member: zip_archive.Member) -> tuple[str, int]:
    """Return the header's text, and the first byte of the numbers."""
    with open(path, "rb") as file:
        file.seek(member.start)
        begin = file.read(min(member.size, 12))
        width = {1: 2, 2: 4, 3: 4}.get(begin[6] if len(begin) == 12 else 0, 0)
        if begin[:6] != _MAGIC or not width:
            raise InputError(f"{path}: {shown(name)} does not begin as an array of NumPy")
        length, before = int.from_bytes(begin[8 : 8 + width], "little"), 8 + width
        if length > min(_LONGEST_HEADER, member.size - before):
            raise InputError(f"{path}: {shown(name)} has a header of {length:,} bytes")
        file.seek(member.start + before)
        return file.read(length).decode("latin-1"), member.start + before + length
