"""Tensors that are read while those before them are hashed and written."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np

from jax_transformer.storage import tensors
from jax_transformer.storage.lazy import LazyState, LazyTensor

_MOST = 64 << 20
"""Bytes of tensors that may be read before they are asked for. A larger one is never."""


@contextmanager
def reading(state: LazyState) -> Iterator[dict[str, LazyTensor]]:
    """The tensors, each of which is to be read once and in this order, as arrays in C order.

    A thread reads those that follow. An error of it is raised when the tensor is asked for.
    """
    reader = _ReadAhead(state)
    try:
        yield {
            name: LazyTensor(tensor.info, partial(reader.array, name))
            for name, tensor in state.items()
        }
    finally:
        reader.close()


class _ReadAhead:
    def __init__(self, state: LazyState):
        self._left = iter(state.items())
        self._next = next(self._left, None)
        self._thread = ThreadPoolExecutor(1)
        self._begun: dict[str, tuple[int, Future[np.ndarray]]] = {}

    def array(self, name: str) -> np.ndarray:
        while name not in self._begun:
            self._begin()
        array = self._begun.pop(name)[1].result()
        waiting = sum(size for size, _ in self._begun.values())
        while self._next is not None and waiting + self._next[1].nbytes <= _MOST:
            waiting += self._next[1].nbytes
            self._begin()
        return array

    def _begin(self) -> None:
        """Begin to read the next tensor."""
        assert self._next is not None, "each tensor is read once"
        name, tensor = self._next
        self._begun[name] = tensor.nbytes, self._thread.submit(_contiguous, tensor)
        self._next = next(self._left, None)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def _contiguous(tensor: LazyTensor) -> np.ndarray:
    return tensors.contiguous(tensor.read())
