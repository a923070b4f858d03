"""Targets of fuzzing: arrays of flax, NumPy and zarr."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np

from campaigns.fuzzing import mutators
from campaigns.fuzzing.harness import Flat, InputFile, Read, Target, file_reader
from jax_transformer.extras.toolkits import flax_msgpack, msgpack
from jax_transformer.extras.toolkits.marian import marian_model
from jax_transformer.extras.toolkits.t5x import t5x_checkpoint, zarr
from jax_transformer.storage import tensors
from parity_tests import marian_files


def _read_msgpack(path: Path) -> None:
    size = path.stat().st_size
    extents = msgpack.header(path)
    arrays = [msgpack.read(extent) for extent in extents.values()]
    assert sum(array.nbytes for array in arrays) <= size, "more numbers than the file has"
    tensors.arrays(flax_msgpack.scan(path))


def _msgpack_seeds() -> Iterator[bytes]:
    from flax import serialization

    weight = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    layer = {"kernel": weight, "bias": np.zeros(4, np.float16)}
    tree = {
        "model": {"shared": {"embedding": weight}, "encoder": {"layers": {"0": {"fc1": layer}}}}
    }
    yield serialization.msgpack_serialize(tree)
    yield serialization.msgpack_serialize({"a": np.float32(1), "b": np.ones(3, bool)})
    pieces = {"0": np.zeros(2, np.int8), "1": np.zeros(1, np.int8)}
    chunked = {"__msgpack_chunked_array__": True, "shape": {"0": 3}, "chunks": pieces}
    yield serialization.msgpack_serialize({"a": chunked})


def _msgpack_values(draw: Random, content: bytes, flat: Flat) -> bytes:
    """Change a value anywhere in a tree, or its bytes."""
    if draw.random() < 0.7:
        return flat(content)
    from flax import serialization

    try:
        tree = mutators.other_value(draw, serialization.msgpack_restore(content))
        return serialization.msgpack_serialize(tree)
    except Exception:  # not every tree can be written
        return flat(content)


# NumPy's files, of Marian


def _read_npz(path: Path) -> None:
    size = path.stat().st_size
    marian_model.is_npz(path)
    for array in marian_model.scan_npz(path).values():
        assert array.read().nbytes <= size, "more numbers than the file has"
    marian_model.verify_npz(path)


def _npz_seeds() -> Iterator[bytes]:
    weight = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    arrays = {"a": weight, "b": np.arange(3, dtype=np.int8)}
    members = {f"{name}.npy": marian_files.npy(array) for name, array in arrays.items()}
    yield marian_files.npz(members)
    chosen = marian_files.options(dec_depth=1)
    yield marian_files.model({"Wemb": weight}, chosen)


def _pack_npz(members: list[tuple[str, bytes]]) -> bytes:
    return marian_files.npz(dict(members))


def _member_start(draw: Random, content: bytes, flat: Flat) -> bytes:
    """Change the header of an array, not its numbers."""
    return flat(content[:128]) + content[128:]


# T5X


def _checkpoint(folder: Path) -> Path:
    arrays = {
        "encoder.layers_0.mlp.wi.kernel": np.ones((6, 5), np.float32),
        "decoder.decoder_norm.scale": np.ones(7),
        "token_embedder.embedding": np.ones((3, 4), np.float16),
    }
    inner = folder / "checkpoint_5"
    if not inner.exists():
        t5x_checkpoint.write(inner, tensors.in_memory(arrays), 5)
    return inner


def _read_t5x(name: str) -> Callable[[Path], Read]:
    def begin(folder: Path) -> Read:
        inner = _checkpoint(folder)
        size = sum(each.stat().st_size for each in inner.rglob("*") if each.is_file())

        def read(_: Path) -> None:
            for array in t5x_checkpoint.find(inner).arrays.values():
                assert array.read().nbytes <= zarr.RATIO * size, "more numbers than files hold"

        return file_reader(name, read)(inner)

    return begin


def _t5x_seeds(name: str) -> Callable[[], Iterator[bytes]]:
    def seeds() -> Iterator[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            yield (_checkpoint(Path(folder)) / name).read_bytes()

    return seeds


def _read_zarr(folder: Path) -> Read:
    inner = folder / "array"
    zarr.write(inner, np.ones((6, 5), np.float32))
    file = InputFile(inner / zarr.METADATA)
    chunk = InputFile(inner / "0.0")
    good = (inner / "0.0").read_bytes()

    def read(content: bytes) -> None:
        """Read the description, and behind a NUL the chunk."""
        description, sign, data = content.partition(b"\0")
        file.put(description)
        chunk.put(data if sign else good)
        zarr.open_array(inner).read()

    return read


def _zarr_seeds() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder, "array")
        zarr.write(inner, np.ones((6, 5), np.float32))
        description = (inner / zarr.METADATA).read_bytes()
        yield description
        yield description + b"\0" + (inner / "0.0").read_bytes()
        plain = description.replace(b'{"id":"gzip","level":1}', b"null")
        yield plain + b"\0" + bytes(120)


_ZARR_KEYS = tuple(f'"{key}"'.encode() for key in sorted(zarr._KEYS))
_zip_npz = mutators.zip_members(_member_start, _pack_npz, ".npy")

TARGETS = {
    "msgpack": Target(
        file_reader("flax_model.msgpack", _read_msgpack), _msgpack_seeds, 50_000, 2,
        _msgpack_values, (b"__msgpack_chunked_array__", b"shape", b"chunks"),
    ),
    "npz": Target(
        file_reader("model.npz", _read_npz), _npz_seeds, 7_500, 1,
        mutators.sometimes(0.6, _zip_npz), (b"'descr'", b"'fortran_order'", b"'shape'"),
        longest=8000,
    ),
    "t5x": Target(
        _read_t5x(t5x_checkpoint.INDEX), _t5x_seeds(t5x_checkpoint.INDEX), 7_500, 1,
        _msgpack_values,
        (b"kvstore", b"driver", b"zarr", b"transform"), memory=8_000_000,
    ),
    "zarr": Target(
        _read_zarr, _zarr_seeds, 25_000, 1, mutators.json_values, _ZARR_KEYS, ratio=1200,
    ),
}  # fmt: skip
