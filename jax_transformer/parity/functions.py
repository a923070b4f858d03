"""JAX models as functions of their arrays that mark what their modules take and return: NNX and
Linen modules, and plain functions with :func:`jax_transformer.parity.tap`."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

from jax_transformer.parity import evaluation, points, recording
from jax_transformer.parity.evaluation import Point
from jax_transformer.parity.recording import ModelFunction
from jax_transformer.weights import any_model

Shapes = Mapping[str, tuple[int, ...]]
_PATH = "_parity_path"
"""A module's path, as its static attribute: nnx.jit, nnx.remat, nnx.scan and nnx.vmap call copies
of modules, which have the attribute too."""


class _Marker:
    """Marks the arrays of module calls in a trace; ``arrays`` are the model's, by dotted path."""

    def __init__(self, arrays: Mapping[str, Any]):
        self.shapes = {name: np.shape(array) for name, array in arrays.items()}
        self._open: set[str] = set()
        self._stacks: list[tuple[str, int]] = []

    def call(self, path: str, own_shapes: Shapes, method: Any, args: tuple, kwargs: dict) -> Any:
        """Return ``method(*args, **kwargs)``, marked as a call of the module of that path, whose
        arrays now have ``own_shapes``, by their path below the module.
        """
        stack = self._stack(path, own_shapes)
        name, layers = path, None
        if stack is not None:
            root, layers = stack
            name = f"{root}.{{}}{path.removeprefix(root)}"
        if not path or name in self._open:  # a method of its own, or a module of the same scope
            return method(*args, **kwargs)
        call = next(recording.calls)

        def mark(tree: Any, arrays: Sequence[Any], kind: str) -> Any:
            marked = {}
            for i, array in enumerate({id(array): array for array in arrays}.values()):
                point = Point(call, name, f"{kind} {i}" if i else kind, layers)
                marked[id(array)] = evaluation.mark(jax.numpy.asarray(array), point)
            return recording.map_arrays(lambda array: marked.get(id(array), array), tree)

        args, kwargs = mark((args, kwargs), recording.inexact((args, kwargs)), "input")
        args, kwargs = mark((args, kwargs), recording.masks((args, kwargs)), "mask")
        self._open.add(name)
        self._stacks += [stack] if stack is not None else []
        try:
            result = method(*args, **kwargs)
        finally:
            self._open.discard(name)
            if stack is not None:
                self._stacks.pop()
        return mark(result, recording.inexact(result)[:1], "output")

    def _stack(self, path: str, own_shapes: Shapes) -> tuple[str, int] | None:
        """Return the module that holds the weights of several layers, and their number, if a call
        has those of one layer; None otherwise.
        """
        for name, shape in own_shapes.items():
            stacked = self.shapes.get(f"{path}.{name}", shape)
            axes = [i for i in range(len(stacked)) if stacked[:i] + stacked[i + 1 :] == shape]
            if len(stacked) > len(shape) and axes:
                layers = stacked[axes[0]]
                around = [root for root, n in self._stacks if n == layers]
                roots = [root for root in around if path == root or path.startswith(f"{root}.")]
                return (roots or [points.root_of_layers(path, layers, self.shapes)])[0], layers
        return None


def from_nnx(model: nnx.Module, call: Callable[..., Any] | None = None) -> ModelFunction:
    """Return an NNX model as a function; ``call(model, *batch)`` replaces ``model(*batch)``."""
    values, merge = any_model.opened(model)
    flat = nnx.to_flat_state(nnx.state(model))
    trained = {any_model.dotted(path) for path, x in flat if isinstance(x, nnx.Param)}
    statistics = {any_model.dotted(path) for path, x in flat if isinstance(x, nnx.BatchStat)}

    def run(arrays: Mapping[str, Any], batch: Sequence[Any]) -> Any:
        merged = merge(arrays)
        kinds = set()
        for path, part in nnx.iter_modules(merged):
            setattr(part, _PATH, any_model.dotted(path))
            kinds.add(type(part))
        with _intercepted(kinds, _Marker(values)):
            return call(merged, *batch) if call is not None else merged(*batch)

    constants = frozenset(values) - trained - statistics
    return ModelFunction(*_divided(values, trained), run, constants)


def _divided(
    values: Mapping[str, Any], trained: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {name: value for name, value in values.items() if name in trained}
    return own, {name: value for name, value in values.items() if name not in trained}


@contextlib.contextmanager
def _intercepted(kinds: Collection[type], marker: _Marker) -> Iterator[None]:
    """Mark the calls of these classes' modules meanwhile: NNX has no hook for a call's inputs."""
    owners = {owner for kind in kinds for owner in kind.__mro__ if "__call__" in vars(owner)}
    originals: dict[Any, Callable[..., Any]] = {each: each.__call__ for each in owners}

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(self, _PATH):  # not of this model
                return original(self, *args, **kwargs)
            own = nnx.to_flat_state(nnx.state(self, nnx.Param))
            shapes = {any_model.dotted(path): variable.get_value().shape for path, variable in own}
            method = partial(original, self)
            return marker.call(getattr(self, _PATH), shapes, method, args, kwargs)

        return call

    try:
        for owner, original in originals.items():
            owner.__call__ = recorded(original)
        yield
    finally:
        for owner, original in originals.items():
            owner.__call__ = original


def from_linen(
    module: linen.Module, variables: Mapping[str, Any], call: Callable[..., Any] | None = None
) -> ModelFunction:
    """Return a Linen module as a function; ``call(bound, *batch)`` replaces ``bound(*batch)``."""
    values, merge = any_model.opened(dict(variables))
    trained = any_model.opened({"params": variables.get("params", {})})[0].keys()

    def run(arrays: Mapping[str, Any], batch: Sequence[Any]) -> Any:
        marker = _Marker(values)

        def intercept(method: Callable[..., Any], args: tuple, kwargs: dict, context: Any) -> Any:
            if context.method_name != "__call__":
                return method(*args, **kwargs)
            own = any_model.opened(context.module.variables.get("params", {}))[0]
            own_shapes = {name: np.shape(array) for name, array in own.items()}
            path = any_model.dotted(context.module.path)
            return marker.call(path, own_shapes, method, args, kwargs)

        with linen.intercept_methods(intercept):
            return module.apply(merge(arrays), *batch, method=call)

    constants = {name for name in values if not name.startswith("batch_stats.")} - trained
    return ModelFunction(*_divided(values, trained), run, frozenset(constants))


def from_function(
    function: Callable[..., Any], parameters: Any, call: Callable[..., Any] | None = None
) -> ModelFunction:
    """Return ``function(parameters, *batch)`` with a pytree of parameters, for models of Haiku,
    Equinox and others, whose points to compare are named by :func:`jax_transformer.parity.tap`.

    ``call(function, parameters, *batch)`` replaces it. Leaves that are not arrays stay as they are.
    """
    arrays, merge = any_model.opened(parameters)
    trained = [name for name, x in arrays.items() if jax.numpy.issubdtype(x.dtype, np.inexact)]

    def run(values: Mapping[str, Any], batch: Sequence[Any]) -> Any:
        merged = merge(values)
        return call(function, merged, *batch) if call is not None else function(merged, *batch)

    return ModelFunction(*_divided(arrays, trained), run)
