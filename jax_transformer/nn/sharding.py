"""The axes of a mesh of devices, and constraints that divide a computation's arrays over them.

Rows of a batch are divided over the axes ``data`` and ``fsdp``; weights are replicated over
``data`` and divided over ``fsdp``; ``tensor`` divides heads, the feed-forward and the vocabulary.
The mesh is the one that ``jax.set_mesh`` has set. Without it, nothing here does anything.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

DATA, FSDP, TENSOR = MESH_AXES = ("data", "fsdp", "tensor")
ROWS = (DATA, FSDP)
"""The axes that divide the rows of a batch."""
Axes = str | tuple[str, ...] | None
"""The axes of the mesh that divide one dimension of an array; None replicates it."""


def constrain(x: Array, *dimensions: Axes) -> Array:
    """Divide the ``dimensions`` of ``x`` over these axes of the mesh, inside a jitted function.

    A dimension that they do not divide evenly is replicated.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, even_spec(x.shape, dimensions, mesh.shape))


def row_shards() -> int:
    """Return the number of parts into which the mesh divides a batch's rows; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in ROWS)


def divide_rows(x: Array) -> Array:
    """Divide the rows of an array over the mesh, if it divides them evenly."""
    dimensions = (ROWS, *[None] * (x.ndim - 1))
    if isinstance(x, jax.core.Tracer) or jax.sharding.get_abstract_mesh().empty:
        return constrain(x, *dimensions)
    mesh = jax.sharding.get_mesh()
    return place(x, NamedSharding(mesh, even_spec(x.shape, dimensions, mesh.shape)))


def place(tree: Any, shardings: Any) -> Any:
    """Return arrays with these shardings. Every process has all arrays, and keeps its parts."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    return jax.tree.map(_parts, tree, shardings)


def _parts(array: Any, sharding: NamedSharding) -> Array:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def even_spec(
    shape: Sequence[int], dimensions: Sequence[Axes], sizes: Mapping[str, int]
) -> PartitionSpec:
    """Return the spec of an array, without the axes that do not divide their dimension evenly."""
    even = []
    for size, axes in zip(shape, dimensions, strict=True):
        names = (axes,) if isinstance(axes, str) else axes or ()
        even.append(names if size % math.prod(sizes[name] for name in names) == 0 else ())
    return spec_of(even, sizes)


def spec_of(dimensions: Sequence[tuple[str, ...]], sizes: Mapping[str, int]) -> PartitionSpec:
    """Return the shortest spec of an array whose dimensions are divided over these axes.

    Without axes of size 1 and trailing Nones: JAX compiles a program again for a spec that differs
    in them only.
    """
    spec: list[Axes] = []
    for axes in dimensions:
        names = tuple(name for name in axes if sizes[name] > 1)
        spec.append(names[0] if len(names) == 1 else names or None)
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)
