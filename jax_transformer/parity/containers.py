"""The floating-point and complex arrays in nested containers: pytrees and dataclasses."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def inexact(tree: Any) -> Iterator[Any]:
    """The floating-point and complex arrays, in order. Those of an NNX module are left out: a
    module that is passed as an argument must stay that object."""
    for leaf in jax.tree.leaves(tree, is_leaf=_is_module):
        if isinstance(leaf, jax.Array | np.ndarray):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                yield leaf
        elif _is_dataclass(leaf):
            for value in _fields(leaf).values():
                yield from inexact(value)


def replaced(tree: Any, old: Any, new: Any) -> Any:
    """The tree with an array replaced wherever it occurs."""

    def replace(leaf: Any) -> Any:
        if leaf is old:
            return new
        if _is_dataclass(leaf):
            fields = _fields(leaf)
            changed = {name: replaced(value, old, new) for name, value in fields.items()}
            if any(changed[name] is not value for name, value in fields.items()):
                return dataclasses.replace(leaf, **changed)
        return leaf

    return jax.tree.map(replace, tree, is_leaf=_is_module)


def _is_module(value: Any) -> bool:
    return isinstance(value, nnx.Pytree)


def _is_dataclass(value: Any) -> bool:
    """True for an object of a dataclass that is no pytree, and no module."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not _is_module(value)


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
