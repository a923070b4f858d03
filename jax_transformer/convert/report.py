"""Reports of a conversion, as text and as data."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.convert import verify
from jax_transformer.convert.planning import Plan
from jax_transformer.storage import tensors
from jax_transformer.storage.untrusted import plain


@dataclass(frozen=True)
class Planned:
    """A conversion that was only planned (``--dry-run``)."""

    plan: Plan
    preset_sizes: Mapping[str, Any]
    """Sizes that no shape shows, taken from the preset."""

    def lines(self) -> Iterator[str]:
        yield from _size_lines(self.plan, self.preset_sizes)
        yield from self.plan.lines()
        yield "nothing was written"

    def to_data(self) -> dict[str, Any]:
        return {"plan": self.plan.to_data(), "kept": dict(self.preset_sizes)}


@dataclass(frozen=True)
class Outcome:
    """A finished conversion."""

    plan: Plan
    summary: str
    preset_sizes: Mapping[str, Any]
    loss: tensors.CastLoss | None
    checked: verify.Checked
    sha256: str
    """Hash of the file, or of a folder's weights by name, dtype, shape and bytes.

    The files of a folder themselves contain the time of writing.
    """
    files: tuple[str, ...] = ()
    """Files that were written with the weights."""

    def lines(self) -> Iterator[str]:
        yield self.summary
        yield from _size_lines(self.plan, self.preset_sizes)
        yield from (f"tied: {' = '.join(names)}" for names in self.plan.ties)
        yield from (
            f"not converted: {plain(note.name)}: {note.reason}" for note in self.plan.dropped
        )
        yield from (f"with them: {', '.join(self.files)}" for _ in self.files[:1])
        yield from self.loss.lines() if self.loss is not None else ()
        yield self.checked.line()
        yield f"sha256 {self.sha256}"

    def to_data(self) -> dict[str, Any]:
        loss = vars(self.loss) if self.loss is not None else None
        extra = {
            "cast": loss,
            "check": {"how": self.checked.method, "errors": self.checked.errors},
            "sha256": self.sha256,
            "files": list(self.files),
        }
        return {"plan": self.plan.to_data(), "kept": dict(self.preset_sizes)} | extra


def _size_lines(plan: Plan, preset_sizes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sizes that were read from the shapes, and those taken from the preset."""
    if plan.inferred:
        yield (
            "from the shapes: "
            f"{', '.join(f'{name}={size}' for name, size in plan.inferred.items())}"
        )
    if preset_sizes:
        yield (
            "the preset's, as no shape shows it: "
            f"{', '.join(f'{name}={value}' for name, value in preset_sizes.items())}"
        )


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_sha256(state: Mapping[str, np.ndarray]) -> str:
    """Hash every array's name, dtype, shape and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        array = state[name]
        digest.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
