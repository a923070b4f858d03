"""Recording of a Flax model on one batch: each module's inputs, outputs and gradients.

NNX and Linen models are both recorded, under jit. ``torch_reference.recording`` is the counterpart.
"""

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
_INSIDE = (
    "its inputs and outputs cannot be recorded there. The comparison uses jit itself: compare a"
    " call without these transformations, for example with call_flax="
)


@dataclass
class Recording:
    """Arrays of one run, as in ``torch_reference.recording``.

    ``arrays`` are named ``CALL/input`` and so on, ``order`` lists the calls in the order in which
    they ended, and ``parameters`` holds gradients by path.
    """

    order: list[str] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    result: np.ndarray | None = None

    def get(self, name: str) -> np.ndarray | None:
        """The array of that name, or None."""
        return self.arrays.get(name)


@dataclass(frozen=True)
class FlaxFunction:
    """A Flax model as a function of its arrays."""

    parameters: Mapping[str, Any]
    """Arrays that gradients are taken of, by dotted path."""
    others: Mapping[str, Any]
    """All other arrays."""
    names: tuple[str, ...]
    """Dotted paths of the modules."""
    run: Callable[[Mapping[str, Any], "Tape", Sequence[Any]], Any]
    """Calls the model with the given arrays and batch, and records its modules on the tape."""


class Tape:
    """Records module calls while a model is traced.

    ``perturbations`` (zeros) are added to the recorded arrays, so that the gradient with respect to
    a perturbation is the gradient with respect to that array.
    """

    def __init__(self, names: Collection[str] | None, perturbations: Mapping[str, Any]):
        self.names, self.perturbations = names, perturbations
        self.order: list[str] = []
        self.arrays: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._open: set[int] = set()

    def call(
        self, name: str, module: object, method: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """``method(*args, **kwargs)``, recorded as a call of the module of that name."""
        if (
            not name
            or (self.names is not None and name not in self.names)
            or id(module) in self._open
        ):
            return method(*args, **kwargs)
        key = f"{name}#{self._counts.get(name, 0)}"
        self._counts[name] = self._counts.get(name, 0) + 1
        for i, array in enumerate({id(leaf): leaf for leaf in _floats((args, kwargs))}.values()):
            args, kwargs = self._record((args, kwargs), array, f"{key}/input{f' {i}' if i else ''}")
        self._open.add(id(module))
        try:
            result = method(*args, **kwargs)
        finally:
            self._open.discard(id(module))
        self.order.append(key)
        output = next(_floats(result), None)
        return result if output is None else self._record(result, output, f"{key}/output")

    def _record(self, tree: Tree, array: Any, name: str) -> Tree:
        """``tree`` with the array recorded, and perturbed wherever it occurs."""
        perturbed = array
        if name in self.perturbations:
            perturbed = array + self.perturbations[name].astype(array.dtype)
        self.arrays[name] = perturbed
        return jax.tree.map(
            lambda leaf: perturbed if leaf is array else leaf, tree, is_leaf=_is_module
        )


def record(
    function: FlaxFunction,
    batch: Sequence[Any],
    *,
    names: Collection[str] | None = None,
    dtype: str = "float64",
    seed: int | None = 0,
) -> Recording:
    """Run the model in ``dtype`` in one jitted function and record it.

    The model's and the batch's floating-point arrays are cast. The other arguments are those of
    ``torch_reference.recording.record``. float64 needs JAX in 64-bit mode.
    """
    parameters, others = (
        {name: _cast(array, dtype) for name, array in group.items()}
        for group in (function.parameters, function.others)
    )
    inputs = [_cast(array, dtype) for array in batch]
    order: list[str] = []

    def run(parameters: Tree, perturbations: Tree) -> tuple[Any, tuple[dict[str, Any], Any]]:
        tape = Tape(names, perturbations)
        output = next(_floats(function.run({**parameters, **others}, tape, inputs)), None)
        if output is None:
            raise ConfigError(
                "the Flax model returns no floating-point array: pass call_flax= a function that"
                " does"
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
            zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
            gradients, (arrays, output) = jax.jit(jax.grad(run, argnums=(0, 1), has_aux=True))(
                parameters, zeros
            )
    except jax.errors.UnexpectedTracerError:
        raise ConfigError(
            f"a module is called inside jit, scan or a similar transformation: {_INSIDE}"
        ) from None
    arrays |= {f"{name} gradient": array for name, array in gradients[1].items()}
    return Recording(order, _numpy(arrays), _numpy(gradients[0]), _to_numpy(output))


def _cast(value: Any, dtype: str) -> jax.Array:
    array = jnp.asarray(value)
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _numpy(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: _to_numpy(value) for name, value in values.items()}


def _to_numpy(value: Any) -> np.ndarray:
    """A copy; 16-bit floats become float32, which holds them exactly."""
    array = np.array(value)
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def _is_module(value: Any) -> bool:
    return isinstance(value, nnx.Pytree)  # a module passed as an argument must stay that object


def _floats(tree: Tree) -> Iterator[Any]:
    """The floating-point arrays in nested containers, in order."""
    for leaf in jax.tree.leaves(tree, is_leaf=_is_module):
        if isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating):
            yield leaf


def from_nnx(model: nnx.Module, call: Callable[..., Any] | None = None) -> FlaxFunction:
    """An NNX model as a function; ``call(model, *batch)`` replaces ``model(*batch)``."""
    graphdef, state = nnx.split(model)
    flat = list(nnx.to_flat_state(state))
    leaves = {".".join(map(str, path)): variable for path, variable in flat}
    values = {name: variable.get_value() for name, variable in leaves.items()}
    trained = {name for name, variable in leaves.items() if issubclass(variable.type, nnx.Param)}

    def run(arrays: Mapping[str, Any], tape: Tape, batch: Sequence[Any]) -> Any:
        pairs = [
            (path, variable.replace(arrays[".".join(map(str, path))])) for path, variable in flat
        ]
        merged = nnx.merge(graphdef, nnx.from_flat_state(pairs))
        paths = {id(part): ".".join(map(str, path)) for path, part in nnx.iter_modules(merged)}
        with _intercepted({type(part) for _, part in nnx.iter_modules(merged)}, paths, tape):
            return call(merged, *batch) if call is not None else merged(*batch)

    names = tuple(".".join(map(str, path)) for path, _ in nnx.iter_modules(model) if path)
    return FlaxFunction(
        {name: value for name, value in values.items() if name in trained},
        {name: value for name, value in values.items() if name not in trained},
        names,
        run,
    )


@contextlib.contextmanager
def _intercepted(kinds: Collection[type], paths: Mapping[int, str], tape: Tape) -> Iterator[None]:
    """Route calls of these classes' modules through the tape while the context is open.

    NNX has no hook of its own for a call's inputs.
    """
    originals = {
        kind: vars(base)["__call__"]
        for kind in kinds
        for base in [_defining_class(kind)]
        if base is not None
    }
    own = {kind: "__call__" in vars(kind) for kind in originals}

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self) not in paths and jax.tree.leaves(nnx.state(self, nnx.Param)):
                raise ConfigError(
                    f"a copy of a {type(self).__name__} is called, as nnx.jit, nnx.remat and"
                    f" nnx.scan make them: {_INSIDE}"
                )
            return tape.call(
                paths.get(id(self), ""), self, lambda *a, **k: original(self, *a, **k), args, kwargs
            )

        return call

    try:
        for kind, original in originals.items():
            kind.__call__ = recorded(original)  # type: ignore[method-assign]
        yield
    finally:
        for kind, original in originals.items():
            if own[kind]:
                kind.__call__ = original  # type: ignore[method-assign]
            else:
                del kind.__call__


def _defining_class(kind: type) -> type | None:
    """The class that ``kind`` inherits its ``__call__`` from."""
    return next((base for base in kind.__mro__ if "__call__" in vars(base)), None)


def from_linen(
    module: linen.Module, variables: Mapping[str, Any], call: Callable[..., Any] | None = None
) -> FlaxFunction:
    """A Linen module and its variables as a function.

    ``call(bound_module, *batch)`` replaces ``bound_module(*batch)``.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(dict(variables))
    paths = [tuple(str(getattr(key, "key", key)) for key in path) for path, _ in flat]
    names = [".".join(path[1:]) if path[0] == "params" else ".".join(path) for path in paths]
    values = dict(zip(names, (leaf for _, leaf in flat), strict=True))
    trained = {name for name, path in zip(names, paths, strict=True) if path[0] == "params"}

    def run(arrays: Mapping[str, Any], tape: Tape, batch: Sequence[Any]) -> Any:
        def intercept(method: Callable[..., Any], args: tuple, kwargs: dict, context: Any) -> Any:
            if context.method_name != "__call__":
                return method(*args, **kwargs)
            return tape.call(".".join(context.module.path), context.module, method, args, kwargs)

        tree = jax.tree.unflatten(treedef, [arrays[name] for name in names])
        with linen.intercept_methods(intercept):
            return module.apply(tree, *batch, method=call)

    modules = dict.fromkeys(
        ".".join(path[1:end])
        for path in paths
        if path[0] == "params"
        for end in range(2, len(path))
    )
    return FlaxFunction(
        {name: value for name, value in values.items() if name in trained},
        {name: value for name, value in values.items() if name not in trained},
        tuple(modules),
        run,
    )
