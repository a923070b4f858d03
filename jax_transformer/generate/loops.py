"""The computation of a batch: rows that are done leave it, and a CPU decodes two halves at once.

XLA divides every operation of a program over the cores and waits for all of them. The operations of
a decoding step are so short that a core does more with a program of its own.
"""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_transformer.runtime import distributed
from jax_transformer.shapes import AnyArray, Source

Carry = TypeVar("Carry")

_ROWS_OF_A_LOOP = 8
"""A loop of fewer rows is not worth a program of its own: a step takes nearly as long as before."""
_ROWS_OF_HALVES = 16
"""Smaller batches are not divided."""
THREAD_SETTINGS: dict[str, Callable[[Any], AbstractContextManager]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_device": jax.default_device,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
}
"""JAX's settings that change what is computed, and that a thread can have for itself."""


def batch_sizes(batch: int) -> tuple[int, ...]:
    """Return the numbers of rows that a loop goes through: all of them, a half, and a quarter.

    A symbolic number, of an exported program, has only itself.
    """
    if not isinstance(batch, int) or batch < 2 * _ROWS_OF_A_LOOP:
        return (batch,)
    halves = (batch, batch // 2)
    return halves if batch < 4 * _ROWS_OF_A_LOOP else (*halves, batch // 4)


def while_loop(
    is_open: Callable[[Carry], Bool[Array, " b"]],
    step: Callable[[Carry], Carry],
    carry: Carry,
    results: Callable[[Carry], Any],
    sizes: Sequence[int],
    rows: Int[Array, " r"] | None = None,
    before: Any = None,
) -> Any:
    """Return the ``results`` of a ``jax.lax.while_loop`` that lasts until no row is open.

    All arrays of the carry and of the results but scalars have the batch as their first axis. When
    no more rows are open than the next of the ``sizes``, see :func:`batch_sizes`, the loop goes on
    with these: it then computes the ``rows`` of the batch, and the results of the others are in
    ``before``. Steps must not change the results of a row that is not open, and no row may open
    again.
    """
    next_size = sizes[1] if len(sizes) > 1 else 0
    carry = jax.lax.while_loop(lambda c: is_open(c).sum() > next_size, step, carry)
    now = results(carry)
    if before is not None:
        now = jax.tree.map(lambda old, new: old.at[rows].set(new), before, now)
    if not next_size:
        return now
    current = jnp.arange(sizes[0], dtype=jnp.int32) if rows is None else rows

    def go_on() -> Any:
        left = jnp.argsort(~is_open(carry), stable=True)[:next_size]
        fewer = jax.tree.map(lambda x: x[left] if x.ndim else x, carry)
        return while_loop(is_open, step, fewer, results, sizes[1:], current[left], now)

    return jax.lax.cond(is_open(carry).any(), go_on, lambda: now)


class Rows(NamedTuple):
    """The arrays of a batch, a row for each source."""

    source: Source
    row_ids: Int[AnyArray, " b"] | None = None
    prompt: Int[AnyArray, "b p"] | None = None

    def at(self, rows: slice) -> "Rows":
        """Return some of the rows."""
        some: list[Any] = [None if array is None else np.asarray(array)[rows] for array in self]
        return Rows(*some)


def in_halves(
    decode: Callable[[Rows], Sequence[AnyArray]], batch: Rows, weights: Sequence[Any]
) -> list[np.ndarray]:
    """Return the arrays that ``decode`` returns for a batch, on the host.

    ``decode`` is called for each half, or for all rows if halves would not be faster; it returns
    as soon as its program runs.
    """
    if not _divides(batch, weights):
        return list(map(distributed.on_host, decode(batch)))
    source, row_ids, prompt = batch
    count = len(np.asarray(source))
    batch = Rows(source, np.arange(count, dtype=np.int32) if row_ids is None else row_ids, prompt)
    length = -(-count // 2)  # both halves of an odd number have the row in the middle
    first, second = batch.at(slice(length)), batch.at(slice(count - length, None))
    settings = [(context, getattr(jax.config, name)) for name, context in THREAD_SETTINGS.items()]

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
    """Return True for enough rows on one CPU of several cores."""
    count = np.shape(batch.source)[:1]
    for array in (batch.row_ids, batch.prompt):
        if array is not None and np.shape(array)[:1] != count:
            return False
    few = count < (_ROWS_OF_HALVES,)
    if few or distributed.cores() == 1 or distributed.count() > 1:
        return False
    devices = {device for x in weights if isinstance(x, Array) for device in x.devices()}
    return len(devices) == 1 and devices.pop().platform == "cpu"
