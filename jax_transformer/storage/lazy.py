"""Tensors that are read from their files when they are needed, so that a conversion of any size
holds one at a time.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.storage import tensors
from jax_transformer.storage.tensors import Shape, TensorInfo


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor that :meth:`read` reads each time it is called. Nothing keeps the array.

    Names that are tied have the same LazyTensor.
    """

    info: TensorInfo
    read: Callable[[], np.ndarray] = field(repr=False)
    """Return the array. It may be read-only, and its memory may be the file's."""

    @property
    def shape(self) -> Shape:
        return self.info.shape

    @property
    def dtype(self) -> str:
        """NumPy's name of the dtype, as in :class:`.TensorInfo`."""
        return self.info.dtype

    @property
    def nbytes(self) -> int:
        return self.info.nbytes

    def numpy_dtype(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))


LazyState = Mapping[str, LazyTensor]
_MOST_AHEAD = 64 << 20
"""Bytes of tensors that may be read before they are asked for. A larger one is never."""


def of(array: np.ndarray) -> LazyTensor:
    """Return a tensor of an array that is in memory already."""
    return LazyTensor(TensorInfo(array.shape, array.dtype.name), lambda: array)


def in_memory(state: Mapping[str, np.ndarray]) -> dict[str, LazyTensor]:
    """Return tensors of arrays that are in memory already; equal objects are tied."""
    tensors_of = {id(array): of(np.asarray(array)) for array in state.values()}
    return {name: tensors_of[id(array)] for name, array in state.items()}


def arrays(state: LazyState) -> dict[str, np.ndarray]:
    """Read all tensors into memory of their own; names that are tied have one array."""
    read: dict[int, np.ndarray] = {}
    for tensor in state.values():
        if id(tensor) not in read:
            read[id(tensor)] = np.array(tensor.read(), order="C", subok=False)
    return {name: read[id(tensor)] for name, tensor in state.items()}


def read_ahead(state: Iterable[LazyTensor]) -> Generator[np.ndarray, None, None]:
    """Yield the array of each tensor, in C order. A thread reads those that follow while an array
    is in use; an error of it is raised when the tensor's turn comes. The arrays are not kept.
    """
    left, begun = deque(state), deque[tuple[int, Future[np.ndarray]]]()
    thread = ThreadPoolExecutor(1)
    try:
        while left or begun:
            while left and (
                not begun
                or sum(size for size, _ in begun) - begun[0][0] + left[0].nbytes <= _MOST_AHEAD
            ):
                tensor = left.popleft()
                begun.append((tensor.nbytes, thread.submit(_in_c_order, tensor)))
            yield begun.popleft()[1].result()
    finally:
        thread.shutdown(cancel_futures=True)


def _in_c_order(tensor: LazyTensor) -> np.ndarray:
    return tensors.contiguous(tensor.read())


def map_file(path: Path, start: int, *, dtype: np.dtype, shape: Shape) -> np.ndarray:
    """Map a part of a file into memory, read-only. Raises InputError if it is not there."""
    info = TensorInfo(shape, dtype.name)
    try:
        if start + info.nbytes > os.stat(path).st_size:
            raise InputError(f"{path}: became shorter while it was read")
        if not info.nbytes:
            return np.empty(shape, dtype)
        raw = np.memmap(path, np.uint8, "r", start, (info.nbytes,))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return np.asarray(raw).view(dtype).reshape(shape)


def differing_ties(ties: Mapping[str, str], state: LazyState) -> list[str]:
    """List the tensors that differ from the ones that the model ties them with, by ``ties``.

    Only copies of which both are stored are read.
    """
    return [
        f"{name} differs from {other}, but the model ties them"
        for name, other in ties.items()
        if name in state
        and other in state
        and state[name] is not state[other]
        and not tensors.same(state[name].read(), state[other].read())
    ]


class Cast:
    """A cast of floating-point tensors to ``dtype``, and its loss in the tensors that are read."""

    def __init__(self, dtype: str):
        self.dtype = dtype
        self._target = np.dtype(getattr(ml_dtypes, dtype, dtype))
        self._count = 0
        self._largest, self._where = 0.0, ""
        self._overflowed: dict[str, int] = {}
        self._measured: set[str] = set()

    def apply(self, state: LazyState) -> dict[str, LazyTensor]:
        """Return the tensors as they are after the cast; tied ones stay tied."""
        casts: dict[int, LazyTensor] = {}
        result = {}
        for name, tensor in state.items():
            result[name] = tensor
            if tensors.is_float(tensor.dtype) and tensor.dtype != self.dtype:
                info = TensorInfo(tensor.shape, self.dtype)
                cast = LazyTensor(info, partial(self._read, name, tensor))
                result[name] = casts.setdefault(id(tensor), cast)
                self._count += 1
        return result

    def loss(self) -> tensors.CastLoss:
        """Return the loss in the tensors that have been read."""
        return tensors.CastLoss(
            self.dtype, self._count, self._largest, self._where, self._overflowed
        )

    def _read(self, name: str, tensor: LazyTensor) -> np.ndarray:
        before = tensor.read()
        with np.errstate(over="ignore", invalid="ignore"):
            after = before.astype(self._target)
        if name not in self._measured:
            self._measured.add(name)
            error, infinite = tensors.cast_error(before, after)
            if error > self._largest:
                self._largest, self._where = error, name
            if infinite:
                self._overflowed[name] = infinite
        return after
