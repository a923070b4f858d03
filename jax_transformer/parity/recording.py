"""What every module of a Flax model takes and gives on one batch, and the gradients there: NNX and Linen, under jit."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jax_transformer.errors import ConfigError

Tree = Any
_WITHIN = "what goes in and out there cannot be had. The comparison runs under jit by itself: compare without that, as by call_flax="


@dataclass
class Recording:
    """As of ``torch_reference.recording``: arrays by ``CALL/what``, calls in the order in which they ended, gradients of parameters by path."""

    order: list[str] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    result: np.ndarray | None = None

    def at(self, place: str) -> np.ndarray | None:
        """The array there, if one was recorded."""
        return self.arrays.get(place)


@dataclass(frozen=True)
class Subject:
    """A Flax model as functions of its arrays."""

    parameters: Mapping[str, Any]
    """What gradients are taken of, by dotted path,"""
    others: Mapping[str, Any]
    """and all other arrays."""
    names: tuple[str, ...]
    """The dotted paths of its modules."""
    run: Callable[[Mapping[str, Any], "Tape", Sequence[Any]], Any]
    """Calls it with these arrays and a batch while the tape listens."""


class Tape:
    """Listens to modules while a model is traced: keeps what goes in and out, and adds ``nudges``, whose gradients are those of the places."""

    def __init__(self, names: Collection[str] | None, nudges: Mapping[str, Any]):
        self.names, self.nudges = names, nudges
        self.order: list[str] = []
        self.arrays: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._open: set[int] = set()

    def call(
        self, name: str, module: object, method: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """``method(*args, **kwargs)``, which is the call of the module of that name."""
        if (
            not name
            or (self.names is not None and name not in self.names)
            or id(module) in self._open
        ):
            return method(*args, **kwargs)
        key = f"{name}#{self._counts.get(name, 0)}"
        self._counts[name] = self._counts.get(name, 0) + 1
        for i, array in enumerate({id(leaf): leaf for leaf in _floats((args, kwargs))}.values()):
            args, kwargs = self._watched(
                (args, kwargs), array, f"{key}/input{f' {i}' if i else ''}"
            )
        self._open.add(id(module))
        try:
            result = method(*args, **kwargs)
        finally:
            self._open.discard(id(module))
        self.order.append(key)
        found = next(_floats(result), None)
        return result if found is None else self._watched(result, found, f"{key}/output")

    def _watched(self, value: Tree, array: Any, place: str) -> Tree:
        """``value`` with the array recorded, and nudged wherever it stands in it."""
        nudged = array + self.nudges[place].astype(array.dtype) if place in self.nudges else array
        self.arrays[place] = nudged
        return jax.tree.map(
            lambda leaf: nudged if leaf is array else leaf, value, is_leaf=_is_module
        )


def record(
    subject: Subject,
    batch: Sequence[Any],
    *,
    names: Collection[str] | None = None,
    dtype: str = "float64",
    seed: int | None = 0,
) -> Recording:
    """Run the model in ``dtype``, with its floating-point arrays and the batch's cast, in one jitted function.

    Arguments as of ``torch_reference.recording.record``. JAX must be in 64-bit mode for float64.
    """

    def cast(value: Any) -> jax.Array:
        array = jnp.asarray(value)
        return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array

    parameters, others = (
        {name: cast(array) for name, array in group.items()}
        for group in (subject.parameters, subject.others)
    )
    inputs = [cast(array) for array in batch]
    order: list[str] = []

    def run(parameters: Tree, nudges: Tree) -> tuple[Any, tuple[dict[str, Any], Any]]:
        tape = Tape(names, nudges)
        output = next(_floats(subject.run({**parameters, **others}, tape, inputs)), None)
        if output is None:
            raise ConfigError(
                "the Flax model gives no floating-point array: give call_flax= a function that does"
            )
        order[:] = tape.order
        if seed is None:
            return jnp.zeros((), output.dtype), (tape.arrays, output)
        weights = np.random.default_rng(seed).standard_normal(output.shape)
        return (output * jnp.asarray(weights, output.dtype)).sum(), (tape.arrays, output)

    gradients: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    try:
        if seed is None:
            _, (arrays, output) = jax.jit(run)(parameters, {})
        else:
            shapes = jax.eval_shape(run, parameters, {})[1][0]
            nudges = {place: jnp.zeros(leaf.shape, leaf.dtype) for place, leaf in shapes.items()}
            gradients, (arrays, output) = jax.jit(jax.grad(run, argnums=(0, 1), has_aux=True))(
                parameters, nudges
            )
    except jax.errors.UnexpectedTracerError:
        raise ConfigError(
            f"a module is called within jit, scan or the like of the model's own: {_WITHIN}"
        ) from None
    places = {f"{place} gradient": array for place, array in gradients[1].items()}
    return Recording(
        order,
        {name: _array(value) for name, value in (arrays | places).items()},
        _arrays(gradients[0]),
        _array(output),
    )


def _arrays(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: _array(value) for name, value in values.items()}


def _array(value: Any) -> np.ndarray:
    """A copy; 16-bit floats as float32, which holds them exactly."""
    array = np.array(value)
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def _is_module(value: Any) -> bool:
    return isinstance(
        value, nnx.Pytree
    )  # a model's part that is an argument stays the part that it is


def _floats(value: Tree) -> Iterator[Any]:
    """The floating-point arrays in nested containers, in order."""
    for leaf in jax.tree.leaves(value, is_leaf=_is_module):
        if isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating):
            yield leaf


def of_nnx(model: nnx.Module, call: Callable[..., Any] | None = None) -> Subject:
    """An NNX model; ``call(model, *batch)`` in the place of ``model(*batch)``."""
    graphdef, state = nnx.split(model)
    flat = list(nnx.to_flat_state(state))
    leaves = {".".join(map(str, path)): variable for path, variable in flat}
    values = {name: variable.get_value() for name, variable in leaves.items()}
    trained = {name for name, variable in leaves.items() if issubclass(variable.type, nnx.Param)}

    def run(arrays: Mapping[str, Any], tape: Tape, batch: Sequence[Any]) -> Any:
        pairs = [
            (path, variable.replace(arrays[".".join(map(str, path))])) for path, variable in flat
        ]
        made = nnx.merge(graphdef, nnx.from_flat_state(pairs))
        paths = {id(part): ".".join(map(str, path)) for path, part in nnx.iter_modules(made)}
        with _listening({type(part) for _, part in nnx.iter_modules(made)}, paths, tape):
            return call(made, *batch) if call is not None else made(*batch)

    names = tuple(".".join(map(str, path)) for path, _ in nnx.iter_modules(model) if path)
    return Subject(
        {name: value for name, value in values.items() if name in trained},
        {name: value for name, value in values.items() if name not in trained},
        names,
        run,
    )


@contextlib.contextmanager
def _listening(kinds: Collection[type], paths: Mapping[int, str], tape: Tape) -> Iterator[None]:
    """While it lasts, calls of these classes' modules go by the tape. NNX has no hook of its own for what goes into a call."""
    originals = {
        kind: vars(base)["__call__"]
        for kind in kinds
        for base in [_caller(kind)]
        if base is not None
    }
    own = {kind: "__call__" in vars(kind) for kind in originals}

    def listening(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self) not in paths and jax.tree.leaves(nnx.state(self, nnx.Param)):
                raise ConfigError(
                    f"a copy of a {type(self).__name__} is called, as nnx.jit, nnx.remat and nnx.scan make them: {_WITHIN}"
                )
            return tape.call(
                paths.get(id(self), ""), self, lambda *a, **k: original(self, *a, **k), args, kwargs
            )

        return called

    try:
        for kind, original in originals.items():
            kind.__call__ = listening(original)  # type: ignore[method-assign]
        yield
    finally:
        for kind, original in originals.items():
            if own[kind]:
                kind.__call__ = original  # type: ignore[method-assign]
            else:
                del kind.__call__


def _caller(kind: type) -> type | None:
    """The class that gives ``kind`` its ``__call__``."""
    return next((base for base in kind.__mro__ if "__call__" in vars(base)), None)


def of_linen(
    module: linen.Module, variables: Mapping[str, Any], call: Callable[..., Any] | None = None
) -> Subject:
    """A Linen module and its variables; ``call(bound_module, *batch)`` in the place of ``bound_module(*batch)``."""
    flat, form = jax.tree_util.tree_flatten_with_path(dict(variables))
    paths = [tuple(str(getattr(key, "key", key)) for key in path) for path, _ in flat]
    names = [".".join(path[1:]) if path[0] == "params" else ".".join(path) for path in paths]
    values = dict(zip(names, (leaf for _, leaf in flat), strict=True))
    trained = {name for name, path in zip(names, paths, strict=True) if path[0] == "params"}

    def run(arrays: Mapping[str, Any], tape: Tape, batch: Sequence[Any]) -> Any:
        def listen(method: Callable[..., Any], args: tuple, kwargs: dict, context: Any) -> Any:
            if context.method_name != "__call__":
                return method(*args, **kwargs)
            return tape.call(".".join(context.module.path), context.module, method, args, kwargs)

        tree = jax.tree.unflatten(form, [arrays[name] for name in names])
        with linen.intercept_methods(listen):
            return module.apply(tree, *batch, method=call)

    modules = dict.fromkeys(
        ".".join(path[1:end])
        for path in paths
        if path[0] == "params"
        for end in range(2, len(path))
    )
    return Subject(
        {n: v for n, v in values.items() if n in trained},
        {n: v for n, v in values.items() if n not in trained},
        tuple(modules),
        run,
    )
