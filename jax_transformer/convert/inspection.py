"""The content of a file or folder of weights: names, shapes, dtypes, ties, sizes and hashes.

No weights are loaded, and for files no jax.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.extras.toolkits import toolkit_weights
from jax_transformer.extras.toolkits.marian import marian_model, npz
from jax_transformer.extras.toolkits.t5x import t5x_checkpoint
from jax_transformer.formats import kinds
from jax_transformer.formats.kinds import Kind
from jax_transformer.storage import (
    checkpoint,
    checksums,
    read_back,
    safetensors,
)
from jax_transformer.storage import huggingface_folder as folders
from jax_transformer.storage.tensors import TensorInfo
from jax_transformer.storage.untrusted import plain


@dataclass(frozen=True)
class Contents:
    """The content of a file or folder, without the values of its arrays."""

    path: str
    kind: str
    tensors: dict[str, TensorInfo]
    values: dict[str, Any]
    """Entries of a PyTorch file that are no tensors, or those of a Hugging Face config.json."""
    ties: list[tuple[str, ...]]
    """Groups of names that are one tensor."""
    sha256: dict[str, str]
    """Hashes by file name; in a checkpoint of T5X by array, without its compression."""

    def lines(self) -> Iterator[str]:
        yield from map(plain, self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.path}: {self.kind}"
        width = max(map(len, self.tensors), default=0)
        for name, tensor in sorted(self.tensors.items()):
            yield (
                f"{name:{width}}  {'x'.join(map(str, tensor.shape)) or 'scalar':>14}  "
                f"{tensor.dtype}"
            )
        yield from (f"{name} = {value!r}"[:200] for name, value in self.values.items())
        yield from (f"tied {' = '.join(names)}" for names in self.ties)
        yield (
            f"{len(self.tensors)} arrays, {sum(tensor.size for tensor in self.tensors.values()):,} "
            "numbers"
        )
        yield f"{sum(tensor.nbytes for tensor in self.tensors.values()):,} bytes"
        yield from (f"sha256 {digest}  {name}" for name, digest in self.sha256.items())

    def to_data(self) -> dict[str, Any]:
        arrays = {
            name: {"shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": tensor.nbytes}
            for name, tensor in self.tensors.items()
        }
        values = {
            name: value if isinstance(value, bool | int | float | str | None) else repr(value)
            for name, value in self.values.items()
        }
        return {
            "path": self.path,
            "kind": self.kind,
            "tensors": arrays,
            "values": values,
            "ties": self.ties,
            "sha256": self.sha256,
        }


def inspect(path: str | Path) -> Contents:
    """Describe the file or folder at ``path``.

    Raises InputError if its kind is not known or a checksum does not hold, CheckpointError if a
    checkpoint is damaged, UnsafeFileError if a file tries to run code or declares more data than it
    has.
    """
    path = kinds.local(path)
    kind = kinds.of(path)
    if kind is Kind.PT:
        return _pt(path)
    if kind is Kind.HUGGINGFACE:
        return _huggingface(path)
    if kind is Kind.T5X:
        return _t5x(path)
    if kind is Kind.MARIAN:
        return _marian(path)
    if kind.is_file:
        files = dict.fromkeys([path, *safetensors.files(path)])
        return Contents(
            str(path),
            kind.value,
            safetensors.describe(path),
            {},
            [],
            {file.name: checksums.sha256(file) for file in files},
        )
    return _checkpoint(path, kind)


def _pt(path: Path) -> Contents:
    from jax_transformer.storage import pt

    described = pt.describe(path)
    leaves = dict(pt.leaves(described))
    tensors = {
        name: TensorInfo(tuple(leaf.shape), str(leaf.dtype))
        for name, leaf in leaves.items()
        if isinstance(leaf, pt.TensorView)
    }
    values = {name: leaf for name, leaf in leaves.items() if name not in tensors}
    toolkit = toolkit_weights.toolkit_of(described)
    kind = Kind.PT.value if toolkit is None else f"{Kind.PT.value}, a checkpoint of {toolkit.title}"
    return Contents(
        str(path),
        kind,
        tensors,
        values,
        pt.tied(described),
        {path.name: pt.verify(path)},
    )


def _huggingface(path: Path) -> Contents:
    folder = folders.find(path)
    folders.verify(folder)
    values = {
        name: value
        for name, value in folder.data.items()
        if value is not None and not isinstance(value, dict | list)
    }
    files = [*folder.files, *(path / name for name in folder.extra_names)]
    hashes = {file.name: checksums.sha256(file) for file in files}
    return Contents(
        str(path),
        Kind.HUGGINGFACE.value,
        folders.describe(folder),
        values,
        folders.ties(folder),
        hashes,
    )


def _t5x(path: Path) -> Contents:
    opened = t5x_checkpoint.find(path)
    hashes = {name: read_back.sha256(array.read()) for name, array in opened.arrays.items()}
    return Contents(
        str(path),
        Kind.T5X.value,
        {name: array.info for name, array in opened.arrays.items()},
        {"version": opened.version},
        [],
        {t5x_checkpoint.INDEX: checksums.sha256(path / t5x_checkpoint.INDEX)} | hashes,
    )


def _marian(path: Path) -> Contents:
    model = marian_model.find(path)
    hashes = {file.name: checksums.sha256(file) for file in model.files}
    hashes[model.path.name] = npz.verify(model.path)
    infos = {name: array.info for name, array in model.arrays.items()}
    title = str(model.path)
    return Contents(title, Kind.MARIAN.value, infos, dict(model.options), [], hashes)


def _checkpoint(path: Path, kind: Kind) -> Contents:
    from jax_transformer.storage import integrity, run_folder

    hashes: dict[str, str] = {}
    if kind is Kind.STEP:
        path = path.absolute()
        if not path.name.isdecimal():
            raise InputError(f"{path}: a single checkpoint has its step as its name")
        root, step = path.parent, int(path.name)
    else:
        run = run_folder.RunFolder(path)
        integrity.verify_all(path)
        hashes = {name: checksums.sha256(path / name) for name in checksums.read(path)}
        last = run.last_step()
        if last is None:
            raise InputError(f"{path}: holds no checkpoint")
        root, step = run.checkpoints, last
    opened = checkpoint.open(root, step, verified=kind is Kind.RUN)
    return Contents(
        str(path),
        f"checkpoint of step {step}",
        dict(opened.tensors),
        {},
        [],
        hashes | opened.about["sha256"],
    )
