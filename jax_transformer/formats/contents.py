"""The content of a file or folder of weights: names, shapes, dtypes, ties, sizes and hashes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_transformer.storage.tensors import TensorInfo
from jax_transformer.storage.untrusted import plain


@dataclass(frozen=True)
class Contents:
    """The content of a file or folder, without the values of its arrays."""

    path: str
    kind: str
    """The name of its format."""
    tensors: Mapping[str, TensorInfo]
    sha256: Mapping[str, str]
    """Hashes by file name; in a checkpoint of T5X by array, without its compression."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Entries of a PyTorch file that are not tensors, or those of a Hugging Face config.json."""
    ties: Sequence[tuple[str, ...]] = ()

    def lines(self) -> Iterator[str]:
        yield from map(plain, self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.path}: {self.kind}"
        width = max(map(len, self.tensors), default=0)
        for name, tensor in sorted(self.tensors.items()):
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            yield f"{name:{width}}  {shape:>14}  {tensor.dtype}"
        yield from (f"{name} = {value!r}"[:200] for name, value in self.values.items())
        yield from (f"tied {' = '.join(names)}" for names in self.ties)
        numbers = sum(tensor.size for tensor in self.tensors.values())
        yield f"{len(self.tensors)} arrays, {numbers:,} numbers"
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
            "ties": list(self.ties),
            "sha256": dict(self.sha256),
        }
