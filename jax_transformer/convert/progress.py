"""A progress bar of a conversion, on a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from jax_transformer.storage.lazy import LazyState, LazyTensor


@contextmanager
def shown(state: LazyState, title: str) -> Iterator[LazyState]:
    """The tensors, with a bar on stderr that counts the bytes of those that were read. Without a
    terminal there is none.
    """
    if not sys.stderr.isatty():
        yield state
        return
    from tqdm import tqdm

    total = sum(tensor.nbytes for tensor in state.values())
    with tqdm(
        desc=title, total=total, unit="B", unit_scale=True, dynamic_ncols=True, leave=False
    ) as bar:
        of: dict[int, LazyTensor] = {}  # so that ties stay
        yield {
            name: of.setdefault(id(tensor), LazyTensor(tensor.info, partial(_counted, tensor, bar)))
            for name, tensor in state.items()
        }


def _counted(tensor: LazyTensor, bar: Any) -> np.ndarray:
    array = tensor.read()
    bar.update(array.nbytes)
    return array
