"""Batches on a CPU, decoded in two halves at the same time.

XLA divides every operation of a program over the cores and waits for all of them. The operations of
a decoding step are so short that a core does more with a program of its own.
"""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from jax_transformer.runtime import distributed
from jax_transformer.shapes import AnyArray, Source

_LEAST_ROWS = 16
"""Smaller batches are not divided."""
_OF_A_THREAD: dict[str, Callable[[Any], AbstractContextManager]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_device": jax.default_device,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
}
"""JAX's settings that change what is computed, and that a thread can have for itself."""


class Rows(NamedTuple):
    """The arrays of a batch, a row for each source."""

    source: Source
    row_ids: Int[AnyArray, " b"] | None = None
    prompt: Int[AnyArray, "b p"] | None = None

    def at(self, rows: slice) -> "Rows":
        """Some of the rows."""
        some: list[Any] = [None if array is None else np.asarray(array)[rows] for array in self]
        return Rows(*some)


def run(
    decode: Callable[[Rows], Sequence[AnyArray]], batch: Rows, weights: Sequence[Any]
) -> list[np.ndarray]:
    """The arrays that ``decode`` returns for a batch, on the host.

    ``decode`` is called for each half, or for all rows where halves would not be faster; it returns
    as soon as its program runs.
    """
    if not _divides(batch, weights):
        return [distributed.on_host(array) for array in decode(batch)]
    source, row_ids, prompt = batch
    count = len(np.asarray(source))
    batch = Rows(source, np.arange(count, dtype=np.int32) if row_ids is None else row_ids, prompt)
    length = -(-count // 2)  # both halves of an odd number have the row in the middle
    first, second = batch.at(slice(length)), batch.at(slice(count - length, None))
    settings = [(context, getattr(jax.config, name)) for name, context in _OF_A_THREAD.items()]

    def decode_second() -> Sequence[AnyArray]:
        with contextlib.ExitStack() as stack:
            for context, value in settings:
                stack.enter_context(context(value))
            return decode(second)

    begun = decode(first)  # compiles the program of both
    with ThreadPoolExecutor(1) as pool:  # programs of the same thread would wait for each other
        others = pool.submit(decode_second).result()
    return [
        np.concatenate([distributed.on_host(one), distributed.on_host(other)[2 * length - count :]])
        for one, other in zip(begun, others, strict=True)
    ]


def _divides(batch: Rows, weights: Sequence[Any]) -> bool:
    """True for enough rows on one CPU of several cores."""
    counts = {np.shape(array)[:1] for array in batch if array is not None}
    (count,) = counts.pop() if len(counts) == 1 else (0,)
    if count < _LEAST_ROWS or distributed.cores() == 1 or distributed.count() > 1:
        return False
    devices = {device for x in weights if isinstance(x, Array) for device in x.devices()}
    return len(devices) == 1 and devices.pop().platform == "cpu"
