"""Loops over batches whose rows end at different times: rows that are done leave the batch."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Carry = TypeVar("Carry")

_LEAST_ROWS = 8
"""A loop of fewer rows is not worth a program of its own: a step takes nearly as long as before."""


def batch_sizes(batch: int) -> tuple[int, ...]:
    """The numbers of rows that a loop goes through: all of them, a half, and a quarter.

    A symbolic number, of an exported program, has only itself.
    """
    if not isinstance(batch, int):
        return (batch,)
    return tuple(size for size in (batch, batch // 2, batch // 4) if size >= _LEAST_ROWS) or (
        batch,
    )


def while_loop(
    is_open: Callable[[Carry], Bool[Array, " b"]],
    step: Callable[[Carry], Carry],
    start: Carry,
    results: Callable[[Carry], Any],
    batch: int,
) -> Any:
    """The ``results`` of a ``jax.lax.while_loop`` that lasts until no row is open.

    All arrays of the carry and of the results but scalars have the batch as their first axis. When
    no more rows are open than the next of :func:`batch_sizes`, the loop goes on with these. Steps
    must not change the results of a row that is not open, and no row may open again.
    """
    rows = jnp.arange(batch, dtype=jnp.int32)
    return _loop(is_open, step, start, results, None, rows, batch_sizes(batch))


def _loop(
    is_open: Callable[[Any], Bool[Array, " b"]],
    step: Callable[[Any], Any],
    carry: Any,
    results: Callable[[Any], Any],
    before: Any,
    rows: Int[Array, " r"],
    sizes: Sequence[int],
) -> Any:
    """The results of all rows, those of ``rows`` from this loop, the others from ``before``."""
    next_size = sizes[1] if len(sizes) > 1 else 0
    carry = jax.lax.while_loop(lambda c: is_open(c).sum() > next_size, step, carry)
    now = results(carry)
    if before is not None:
        now = jax.tree.map(lambda old, new: old.at[rows].set(new), before, now)
    if not next_size:
        return now

    def go_on() -> Any:
        left = jnp.argsort(~is_open(carry), stable=True)[:next_size]
        fewer = jax.tree.map(lambda x: x[left] if x.ndim else x, carry)
        return _loop(is_open, step, fewer, results, now, rows[left], sizes[1:])

    return jax.lax.cond(is_open(carry).any(), go_on, lambda: now)
