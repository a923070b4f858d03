"""Checkpoints that are read and written a few arrays at a time, so that they may be larger than the
memory.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.storage import checkpoint
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.storage.lazy import LazyState, LazyTensor

_BATCH = 64 << 20
"""Bytes of arrays that one call of Orbax writes; a larger array has a call of its own."""
_READ = 32 << 20
"""Bytes of arrays that are read at once."""
_ALONE = 4 << 20
"""Bytes of an array that is read without others."""


def scan(opened: Checkpoint, groups: Collection[str]) -> dict[str, LazyTensor]:
    """Return the arrays of some groups by their path in the tree, none of them read."""
    reader = _Reader(opened)
    return {
        name: LazyTensor(info, partial(reader.array, name))
        for name, info in opened.tensors.items()
        if name.partition("/")[0] in groups
    }


class _Reader:
    """Reads small arrays together with the next ones in the tree.

    What was read and not yet asked for is dropped when there is too much of it, and read again.
    """

    def __init__(self, opened: Checkpoint):
        self._opened = opened
        self._waiting: dict[str, np.ndarray] = {}

    def array(self, name: str) -> np.ndarray:
        if name not in self._waiting:
            if sum(array.nbytes for array in self._waiting.values()) > _READ:
                self._waiting.clear()
            self._waiting |= self._opened.selected(self._following(name))
        return self._waiting.pop(name)

    def _following(self, first: str) -> list[str]:
        tensors = self._opened.tensors
        names = list(tensors)
        chosen, size = [first], tensors[first].nbytes
        if size > _ALONE:
            return chosen
        for name in names[names.index(first) + 1 :]:
            if tensors[name].nbytes > _ALONE:
                continue
            size += tensors[name].nbytes
            if size > _READ or name.partition("/")[0] != first.partition("/")[0]:
                break
            if name not in self._waiting:
                chosen.append(name)
        return chosen


def write(
    folder: Path, step: int, groups: Mapping[str, LazyState], *, about: dict[str, Any]
) -> Path:
    """Write ``folder/step`` as :func:`.checkpoint.save` does, a few arrays at a time.

    ``groups`` are arrays by name, by the group's name. They are not compressed: of numbers that
    look random zstd saves a tenth, in three times the time. Raises as that function, and as the
    arrays when they are read.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False
    context.memory.deepcopy_host_arrays = False  # nothing changes them meanwhile
    empty: dict[str, dict[str, np.ndarray]] = {
        group: {} for group, arrays in groups.items() if not arrays
    }
    with context, checkpoint.new(folder, step, about=about) as temporary:
        # Orbax does not find its parts under a name that begins with a dot
        complete = temporary.with_name(f"{temporary.name}.parts") / str(step)
        complete.parent.mkdir()
        for number, batch in enumerate(_batches(groups)):
            tree: dict[str, dict[str, np.ndarray]] = {} if number else dict(empty)
            for group, name, tensor in batch:
                tree.setdefault(group, {})[name] = np.asarray(tensor.read(), order="C")
            ocp.partial.save(complete, tree)
            del tree
        ocp.partial.finalize(complete)
        os.rename(complete, temporary)
        complete.parent.rmdir()
    return folder.resolve() / str(step)


def _batches(groups: Mapping[str, LazyState]) -> Iterator[list[tuple[str, str, LazyTensor]]]:
    batch: list[tuple[str, str, LazyTensor]] = []
    size = 0
    for group, arrays in groups.items():
        for name, tensor in arrays.items():
            if batch and size + tensor.nbytes > _BATCH:
                yield batch
                batch, size = [], 0
            batch.append((group, name, tensor))
            size += tensor.nbytes
    yield batch
