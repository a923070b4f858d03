"""Targets of fuzzing: the files of weights."""

import io
import json
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from campaigns.fuzzing import mutators
from campaigns.fuzzing.harness import Flat, Read, Target, file_reader
from jax_transformer.errors import UnsafeFileError
from jax_transformer.storage import pt, safetensors, tensors
from jax_transformer.storage.pt import unpickler, writer
from parity_tests.unit import hostile, hostile_containers

OPCODES = (
    b"(NK\x88\x89JM\x8a\x8bGX\x8c\x8dUTCB\x8e\x96}])t\x85\x86\x87aesuhjqr\x94c\x93RbQ.\x95\x81\x92"
    b"io012P\x82\x8f\x90\x91\x97IVSgpdl\x80"
)
_STORAGES = {"0": 16, "1": 64, "2": 0}
_NAMES = (
    "torch._utils _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter collections OrderedDict "
    "Counter torch Size device _codecs encode latin1 builtins bytes bytearray complex argparse "
    "Namespace FloatStorage torch.storage UntypedStorage float32 storage cpu _metadata"
).split()


def _file(write: Any) -> bytes:
    """Return the bytes that ``write`` writes to the path that it is given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        write(path)
        return path.read_bytes()


def _weight() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


# PyTorch's files


def _read_pt(path: Path) -> None:
    """Describe and read a file, and compare the two."""
    size = path.stat().st_size
    described = pt.describe(path)
    pt.tied(described)
    _same_as_described(path, described, size)
    with_keys = pt.open_state(path)
    tensors.arrays(with_keys.state)
    pt.verify(path)


def _same_as_described(path: Path, described: Any, size: int) -> None:
    try:
        leaves = [leaf for _, leaf in pt.leaves(pt.read(path)) if isinstance(leaf, np.ndarray)]
    except UnsafeFileError as error:
        raise AssertionError(f"described, and then refused: {error}") from error
    shapes = [leaf.shape for _, leaf in pt.leaves(described) if isinstance(leaf, pt.TensorView)]
    assert [leaf.shape for leaf in leaves] == shapes, "other shapes than described"
    taken = sum({id(leaf): leaf.nbytes for leaf in leaves}.values())
    assert taken <= size, "more numbers than the file has"


def _pt_seeds() -> Iterator[bytes]:
    """Files of ours, of protocols 2 and 4, and one made by hand."""
    weight = _weight()
    arrays = {str(dtype): np.zeros(3, dtype) for dtype in tensors.DTYPES.values()}
    plain: dict[str, Any] = {"epoch": 3, "betas": (0.9, 0.999), "name": "é", "raw": b"\xff"}
    state = {"model": {"a.weight": weight, "tied": weight, **arrays}, **plain, "none": [None, True]}
    yield _file(lambda path: writer.write(path, state))
    yield _file(lambda path: writer.write(path, {"a": weight}))
    strided = hostile.tensor(shape=hostile.numbers(2, 2), stride=hostile.numbers(1, 2))
    yield hostile.file(b"](" + hostile.tensor() + strided + b"e")
    yield hostile.file(b"]\x94(" + hostile.short("a") + b"\x94h\x01N\x86e", 4)


def _pickle_seeds() -> Iterator[bytes]:
    for content in _pt_seeds():
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
            pickle = archive.read(name)
        if len(pickle) < 1000:
            yield pickle
    for body in hostile.MACHINE.values():
        yield hostile.pickle(body)
    yield hostile.pickle(
        hostile.tensor(
            hostile.storage(
                kind=hostile.name("torch.storage", "UntypedStorage"), size=hostile.number(16)
            ),
            rest=(b"\x89", hostile.HOOKS, hostile.name("torch", "float32")),
            function=hostile.V3,
        )
    )
    yield hostile.pickle(hostile.name("argparse", "Namespace") + b")\x81}" + b"X\1\0\0\0aNsb")


def _read_pickle(folder: Path) -> Read:
    """The pickle in a file, with storages of known sizes."""
    return lambda content: unpickler.Unpickler("file", _STORAGES, 500).value(content)


def _pickle(draw: Random, content: bytes, flat: Flat) -> bytes:
    """Replace or insert an instruction, or any bytes."""
    at = draw.randrange(len(content) + 1)
    match draw.randrange(8):
        case 0:
            return content[:at] + bytes([draw.choice(OPCODES)]) + content[at + 1 :]
        case 1:
            return content[:at] + bytes([draw.choice(OPCODES)]) + content[at:]
        case 2:
            return content[:at] + hostile.text(draw.choice(_NAMES)) + content[at:]
        case 3:
            number = draw.choice((*mutators.NUMBERS, -1, 2**62, 2**63))
            return content[:at] + hostile.number(number) + content[at:]
    return flat(content)


# Files with a header


def _read_safetensors(path: Path) -> None:
    size = path.stat().st_size
    described = safetensors.describe(path)
    safetensors.metadata(path)
    try:
        arrays = safetensors.read(path)
    except UnsafeFileError as error:
        raise AssertionError(f"described, and then refused: {error}") from error
    assert {name: array.shape for name, array in arrays.items()} == {
        name: info.shape for name, info in described.items()
    }
    assert sum(array.nbytes for array in arrays.values()) <= size, "more numbers than the file has"


def _safetensors_seeds() -> Iterator[bytes]:
    small = {"a": _weight(), "b": np.arange(5, dtype=np.int8), "c": np.array(1.0)}
    yield _file(lambda path: safetensors.write(path, small | {"d": np.ones(2, bool)}))
    yield hostile_containers.good_safetensors()


def _read_index(folder: Path) -> Read:
    """The index of a folder's weights, next to two equal files."""
    for name in ("a", "b"):
        shard = hostile_containers.good_safetensors()
        (folder / f"{name}.safetensors").write_bytes(shard)
    return file_reader("model.safetensors.index.json", safetensors.read)(folder)


def _index_seeds() -> Iterator[bytes]:
    for names in ({"a": "a.safetensors"}, {"a": "b.safetensors"}, {"b": "a.safetensors"}):
        yield json.dumps({"metadata": {"total_size": 16}, "weight_map": names}).encode()


_KEYS = tuple(
    f'"{key}"'.encode() for key in "dtype shape data_offsets __metadata__ F32 BOOL".split()
)
_zip_pt = mutators.zip_members(_pickle, hostile.zipped, "data.pkl")

TARGETS = {
    "pickle": Target(
        _read_pickle, _pickle_seeds, 100_000, 4, _pickle, tuple(name.encode() for name in _NAMES),
        longest=2000, ratio=1000,
    ),
    "pt": Target(
        file_reader("model.pt", _read_pt), _pt_seeds, 7_500, 1,
        mutators.sometimes(0.6, _zip_pt), longest=16_000, ratio=300,
    ),
    "safetensors": Target(
        file_reader("model.safetensors", _read_safetensors), _safetensors_seeds, 25_000, 2,
        mutators.sometimes(0.7, mutators.after_length),
        tuple(f'"{key}"'.encode() for key in _KEYS),
    ),
    "index": Target(
        _read_index, _index_seeds, 25_000, 1,
        mutators.json_values,
    ),
}  # fmt: skip
