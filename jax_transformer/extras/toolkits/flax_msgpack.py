"""Read ``flax_model.msgpack``, the weights of transformers' Flax classes before version 5.

They are in one file, or in shards with an index. The modules have the names of the PyTorch classes,
so that a parameter's path is its PyTorch name except for the last word: a Dense layer has
``kernel`` with the axes (in, out), an Embed ``embedding``, a LayerNorm ``scale``; a norm without a
bias already has ``weight``. Computed positions and tied copies are not in a file. Facts from
``modeling_flax_utils.py`` and the ``modeling_flax_*.py`` of each family in transformers 4.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.extras.toolkits import msgpack
from jax_transformer.extras.toolkits.msgpack import ArrayExtent, Keys
from jax_transformer.formats.safetensors_files import ArrayFile
from jax_transformer.storage import tensors, untrusted
from jax_transformer.storage.tensors import LazyState, LazyTensor, TensorInfo
from jax_transformer.storage.untrusted import shown

FILE = "flax_model.msgpack"
INDEX = "flax_model.msgpack.index.json"
_LAST = dict.fromkeys(("kernel", "embedding", "scale", "weight"), "weight") | {"bias": "bias"}
_TOP_LEVEL = ("final_logits_bias",)


def scan(path: str | Path) -> dict[str, LazyTensor]:
    """Return every array of a file, or of all files in an index, with PyTorch's names and axes,
    without reading one.

    Raises InputError if a file is missing or damaged, or has names that the Flax classes did not
    have, listing all; UnsafeFileError if it declares more data than it has.
    """
    path = Path(path)
    headers = {file: msgpack.header(file) for file in untrusted.files(path)}
    if untrusted.is_index(path):
        untrusted.check_shards(
            path, {file: {"/".join(keys) for keys in extents} for file, extents in headers.items()}
        )
    extents = {keys: extent for one in headers.values() for keys, extent in one.items()}
    result = {}
    for keys, name in _names(path, extents).items():
        extent, is_kernel = extents[keys], keys[-1] == "kernel"
        info = TensorInfo(extent.shape[::-1] if is_kernel else extent.shape, extent.dtype.name)
        result[name] = LazyTensor(info, partial(_transposed if is_kernel else msgpack.read, extent))
    return result


def _names(path: Path, extents: Mapping[Keys, ArrayExtent]) -> dict[Keys, str]:
    """Return PyTorch's name of each path. Raises InputError listing paths of no Flax class."""
    names: dict[Keys, str] = {}
    taken: set[str] = set()
    wrong: list[str] = []
    for keys, extent in extents.items():
        *above, last = keys
        name = ".".join(keys if keys == _TOP_LEVEL else (*above, _LAST.get(last, "")))
        if keys != _TOP_LEVEL and (not above or last not in _LAST):
            wrong.append(f"{shown('/'.join(keys))} is not a parameter of a Dense, Embed or norm")
        elif last == "kernel" and len(extent.shape) != 2:
            wrong.append(
                f"{shown('/'.join(keys))} has the shape {extent.shape}, and a kernel has two "
                "dimensions"
            )
        elif name in taken:
            wrong.append(f"{shown('/'.join(keys))} would be a second {shown(name)}")
        names[keys] = name
        taken.add(name)
    if wrong:
        more = f"; and {len(wrong) - 5:,} more" if len(wrong) > 5 else ""
        raise InputError(
            f"{path}: not weights of transformers' Flax encoder-decoders: "
            f"{'; '.join(wrong[:5])}{more}"
        )
    return names


def _transposed(extent: ArrayExtent) -> np.ndarray:
    """Read a kernel, and copy it to the axes of torch.nn.Linear, (out, in)."""
    return tensors.contiguous(msgpack.read(extent).T)


class FlaxMsgpack(ArrayFile):
    name, title, mark = "flax_msgpack", "file of transformers' Flax classes", FILE
    suffixes = (".msgpack",)

    def recognises(self, path: Path) -> bool:
        return path.name in (FILE, INDEX)

    def scan(self, path: Path) -> LazyState:
        return scan(path)


FORMAT = FlaxMsgpack()
