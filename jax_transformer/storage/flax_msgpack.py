"""Weights that transformers' Flax classes saved before version 5 dropped them:
``flax_model.msgpack``, in one file or in shards with an index.

BART, mBART, Marian, Pegasus, T5 and mT5 had such classes. Their modules have the names of the
PyTorch classes, so that a parameter's path is its PyTorch name except for the last word: a Dense
layer has ``kernel`` of shape (in, out), an Embed ``embedding``, a LayerNorm ``scale``; T5's norm
already has ``weight``. Computed positions and tied copies are not in a file. Facts from
transformers 4's ``modeling_flax_{bart,mbart,marian,pegasus,t5}.py`` and ``modeling_flax_utils.py``.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.storage import index, msgpack
from jax_transformer.storage.msgpack import Keys
from jax_transformer.storage.tensors import TensorInfo
from jax_transformer.storage.untrusted import shown

FILE = "flax_model.msgpack"
INDEX = "flax_model.msgpack.index.json"
_LAST = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "weight": "weight",
    "bias": "bias",
}
_TOP_LEVEL = ("final_logits_bias",)


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Every array of a file, or of all files that an index names, under the names of transformers'
    PyTorch classes and with their axes.

    Raises:
        InputError: a file is missing or damaged, or holds names that these classes did not have;
            all are listed.
        UnsafeFileError: a file declares more bytes than it has.
    """
    extents = _headers(Path(path))
    names = _names(Path(path), {keys: extent.shape for keys, extent in extents.items()})
    return {name: _as_torch(keys, msgpack.read(extents[keys])) for keys, name in names.items()}


def describe(path: str | Path) -> dict[str, TensorInfo]:
    """Shape and dtype of everything that ``read`` returns; no array is read. Raises as ``read``."""
    extents = _headers(Path(path))
    names = _names(Path(path), {keys: extent.shape for keys, extent in extents.items()})
    shapes = {
        keys: extent.shape[::-1] if keys[-1] == "kernel" else extent.shape
        for keys, extent in extents.items()
    }
    return {
        name: TensorInfo(shapes[keys], extents[keys].dtype.name) for keys, name in names.items()
    }


def files(path: str | Path) -> list[Path]:
    """The files that hold the arrays: all that an index names, in order, or the file itself."""
    return index.shards(Path(path)) if index.is_index(path) else [Path(path)]


def to_state(arrays: Mapping[Keys, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by their paths in transformers' Flax classes, under the names of its PyTorch classes.
    Raises InputError as ``read``.
    """
    names = _names(Path("these arrays"), {keys: array.shape for keys, array in arrays.items()})
    return {name: _as_torch(keys, arrays[keys]) for keys, name in names.items()}


def _headers(path: Path) -> dict[Keys, msgpack.ArrayExtent]:
    headers = {file: msgpack.header(file) for file in files(path)}
    if index.is_index(path):
        index.check(
            path, {file: {"/".join(keys) for keys in extents} for file, extents in headers.items()}
        )
    return {keys: extent for extents in headers.values() for keys, extent in extents.items()}


def _names(path: Path, shapes: Mapping[Keys, tuple[int, ...]]) -> dict[Keys, str]:
    """The PyTorch name of each path. Raises InputError with every path that no Flax class has."""
    names: dict[Keys, str] = {}
    taken: set[str] = set()
    wrong: list[str] = []
    for keys, shape in shapes.items():
        *above, last = keys
        name = ".".join(keys if keys == _TOP_LEVEL else (*above, _LAST.get(last, "")))
        if keys != _TOP_LEVEL and (not above or last not in _LAST):
            wrong.append(f"{shown('/'.join(keys))} is no parameter of a Dense, Embed or norm")
        elif last == "kernel" and len(shape) != 2:
            wrong.append(
                f"{shown('/'.join(keys))} has the shape {shape}, and a kernel has two dimensions"
            )
        elif name in taken:
            wrong.append(f"{shown('/'.join(keys))} would be a second {shown(name)}")
        names[keys] = name
        taken.add(name)
    if wrong:
        more = f"; and {len(wrong) - 5:,} more" if len(wrong) > 5 else ""
        raise InputError(
            f"{path}: not weights of transformers' Flax BART, mBART, Marian, Pegasus, T5 or mT5: "
            f"{'; '.join(wrong[:5])}{more}"
        )
    return names


def _as_torch(keys: Keys, array: np.ndarray) -> np.ndarray:
    """A copy of a kernel with the axes of torch.nn.Linear, (out, in); everything else as it is."""
    return np.ascontiguousarray(array.T) if keys[-1] == "kernel" else array
