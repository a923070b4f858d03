"""Weight tables of any model: NNX modules, variables of Linen, and other pytrees of arrays, such as
Equinox modules and Haiku's parameters.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.weights import arrays, rules
from jax_transformer.weights.rules import Alias, Rule


@dataclass(frozen=True)
class Stacked:
    """A module or array that holds several layers along an axis: of ``nnx.vmap`` and
    ``nnx.scan``, or experts. Rules name the layers one by one: with ``Stacked("layers")`` the
    array ``layers.kernel`` becomes ``layers.0.kernel``, ``layers.1.kernel`` and so on.

    Each ``{word}`` in ``flax`` stands for one part of a name. With ``parts`` the layers are so many
    equal parts of the axis, one after the other, as of a joined query, key and value.
    """

    flax: str
    axis: int = 0
    parts: int = 0


@dataclass(frozen=True)
class Unused:
    """A tensor that no Flax array holds, such as the count of batches of ``nn.BatchNorm``."""

    torch: str


def from_torch(
    state_dict: Mapping[str, Any], table: Iterable[Any], into: Any, dtype: Any = None
) -> Any:
    """Return a copy of ``into`` with the arrays that a table makes of a PyTorch state_dict.

    Args:
        state_dict: name -> np.ndarray or torch tensor.
        table: :class:`.Rule`, :class:`.Alias`, :class:`Stacked` and :class:`Unused`.
        into: an NNX module, variables of Linen or another pytree; it may have shapes in place of
            arrays, as ``nnx.eval_shape`` and ``jax.eval_shape`` return them.
        dtype: dtype of floating-point arrays; None keeps that of the tensors.

    Raises:
        ConfigError: the table does not name every array of ``into`` exactly once.
        InputError: tensors are missing, unexpected or mis-shaped, all in one message.
    """
    parts, (named, rebuild) = Parts(table), opened(into)
    blank = np.zeros((), bool)
    layers = parts.layers({name: np.broadcast_to(blank, x.shape) for name, x in named.items()})
    state = {name: arrays.of(name, value) for name, value in state_dict.items()}
    if missing := sorted(set(parts.unused) - state.keys()):
        raise InputError(f"missing {', '.join(missing)}, which the table leaves unused")
    state = {name: array for name, array in state.items() if name not in parts.unused}
    shapes = {name: layer.shape for name, (_, layer) in layers.items()}
    flax = rules.to_flax(parts.rules, state, shapes)
    dtypes = {origin: flax[name].dtype for name, (origin, _) in layers.items()}
    result = {name: np.empty(x.shape, dtypes[name]) for name, x in named.items()}
    for name, (origin, layer) in parts.layers(result).items():
        if flax[name].dtype != layer.dtype:
            raise InputError(f"{origin}: its layers are {layer.dtype} and {flax[name].dtype}")
        layer[...] = flax[name]
    return rebuild({name: _as_jax(name, array, dtype) for name, array in result.items()})


def to_torch(
    model: Any, table: Iterable[Any], unused: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Return the PyTorch tensors that a table makes of a model's arrays.

    The inverse of :func:`from_torch`, bit for bit. ``unused`` has the tensors that the table leaves
    unused; without it they are left out.
    """
    parts = Parts(table)
    layers = parts.layers({name: arrays.of(name, x) for name, x in opened(model)[0].items()})
    tensors = rules.to_torch(parts.rules, {name: layer for name, (_, layer) in layers.items()})
    more = {name: x for name, x in (unused or {}).items() if name in parts.unused}
    return tensors | {name: arrays.of(name, x).copy() for name, x in more.items()}


def _as_jax(name: str, array: np.ndarray, dtype: Any) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.floating):
        return arrays.as_jax(name, array, dtype)
    converted = jnp.array(array, copy=True)
    if converted.dtype != array.dtype:
        raise InputError(f"{name} is {array.dtype} and JAX is in 32-bit mode: set jax_enable_x64")
    return converted


def opened(model: Any) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], Any]]:
    """Return a model's arrays by dotted path (below the word ``params`` of Linen), without the
    state of random numbers and without arrays of an NNX module that are no variables, and a
    function that returns a copy of the model with other arrays.
    """
    if isinstance(model, nnx.Module):
        graphdef, state = nnx.split(model)
        flat = [*nnx.to_flat_state(state)]
        variables = {dotted(path): x for path, x in flat if isinstance(x, nnx.Variable)}
        every = {name: x.get_value() for name, x in variables.items()}
        random = {name for name, x in variables.items() if issubclass(x.type, nnx.RngState)}

        def merge(values: Mapping[str, Any]) -> Any:
            new = every | dict(values)
            pairs = [
                (path, x.replace(new[name]) if (name := dotted(path)) in new else x)
                for path, x in flat
            ]
            return nnx.merge(graphdef, nnx.from_flat_state(pairs))

        return {name: x for name, x in every.items() if name not in random}, merge
    leaves, treedef = jax.tree_util.tree_flatten_with_path(model)
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".").removeprefix("params.")
        for path, _ in leaves
    ]
    if len(set(names)) < len(names):
        raise ConfigError("two arrays of the model have the same path")
    every = dict(zip(names, (leaf for _, leaf in leaves), strict=True))
    weights = {
        name: leaf
        for name, leaf in every.items()
        if hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }
    return weights, lambda values: jax.tree.unflatten(treedef, (every | dict(values)).values())


def dotted(path: Iterable[Any]) -> str:
    """Return the name of a path in a model."""
    return ".".join(map(str, path))


class Parts:
    """The entries of a table by their kind."""

    def __init__(self, table: Iterable[Any]):
        entries = list(table)
        self.rules: rules.Table = [each for each in entries if isinstance(each, Rule | Alias)]
        self.stacks = [each for each in entries if isinstance(each, Stacked)]
        self.unused = [each.torch for each in entries if isinstance(each, Unused)]

    def layers(self, named: Mapping[str, np.ndarray]) -> dict[str, tuple[str, np.ndarray]]:
        """Return the arrays that the rules name: views of the model's. Raises ConfigError if a
        stack has no array, or the rules do not name every layer once.
        """
        current = layers_of(named, self.stacks)
        try:
            rules.check_complete(self.rules, current)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return current


def layers_of(
    named: Mapping[str, np.ndarray], stacks: Iterable[Stacked]
) -> dict[str, tuple[str, np.ndarray]]:
    """Return a model's arrays, those of stacks layer by layer, each with the name of its origin."""
    current = {name: (name, array) for name, array in named.items()}
    for stack in stacks:
        before, current = current, {}
        words = re.split(r"\{\w+\}", stack.flax)
        pattern = re.compile(f"({'[^.]+'.join(map(re.escape, words))})(\\..+)?")
        for name, (origin, array) in before.items():
            match = pattern.fullmatch(name)
            if match is None:
                current[name] = origin, array
                continue
            if not -array.ndim <= stack.axis < array.ndim:
                shape = f"its shape is {array.shape}"
                raise ConfigError(f"{origin} has no axis {stack.axis} of layers: {shape}")
            if stack.parts and array.shape[stack.axis] % stack.parts:
                raise ConfigError(f"{origin} has no {stack.parts} equal parts: {array.shape}")
            pieces = np.split(array, stack.parts, stack.axis) if stack.parts else None
            for i, layer in enumerate(pieces or np.moveaxis(array, stack.axis, 0)):
                current[f"{match[1]}.{i}{match[2] or ''}"] = origin, layer
        if current.keys() == before.keys():
            hint = nearest(stack.flax, sorted(before))
            raise ConfigError(f"the model has no arrays of {stack.flax}{hint}")
    return current
