"""Recording of a JAX model on one batch: each module's inputs, outputs and gradients.

The model is traced once, and :func:`mark` marks its modules' arrays. The jaxpr is then evaluated
under jit, equation by equation, also inside jit, remat, scan (one iteration after the other) and
vmap, where it holds marked arrays. ``torch_reference.recording`` is the counterpart.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jax_transformer.errors import ConfigError


@dataclass(frozen=True)
class ModelFunction:
    """A model as a function of its arrays."""

    parameters: Mapping[str, Any]
    """Arrays that gradients are taken of, by dotted path."""
    others: Mapping[str, Any]
    """All other arrays."""
    run: Callable[[Mapping[str, Any], Sequence[Any]], Any]
    """Calls the model with the given arrays and batch, and marks its modules' arrays."""


# Named points of a computation, found in its jaxpr


Iterations = tuple[tuple[int, int], ...]
"""The number of the pass and the length of each scan around, outermost first."""


class Point(NamedTuple):
    """The static facts of a marked array."""

    call: int
    """Equal for the arrays of one call of a module."""
    name: str
    """The module's dotted path; ``{}`` in it stands for the number of a scan's iteration."""
    kind: str
    """``input``, ``input 1``, ..., ``output``, or ``point`` if there is no module."""
    layers: int | None = None
    """The length of the scan that is meant by ``{}``; None for the outermost."""

    def path(self, iterations: Iterations) -> str:
        """Return the name in these iterations. Without a scan, the part ``{}`` is left out."""
        numbers = [i for i, length in iterations if self.layers in (None, length)]
        if numbers:
            return self.name.replace("{}", str(numbers[0]))
        return ".".join(part for part in self.name.split(".") if part != "{}")


Visit = Callable[[Point, Iterations, jax.Array], jax.Array]
"""Takes a point, the iterations around it and its array; returns the array to go on with."""

_tap = core.Primitive("parity_tap")
"""The identity, with a Point."""
_tap.def_impl(lambda x, *, point: x)
_tap.def_abstract_eval(lambda x, *, point: x)
mlir.register_lowering(_tap, lambda context, x, *, point: [x])
ad.primitive_jvps[_tap] = lambda xs, dxs, *, point: (_tap.bind(*xs, point=point), dxs[0])
# Under vmap the axis of the batch comes first, as in a model without vmap
batching.primitive_batchers[_tap] = lambda args, axes, *, point: (
    _tap.bind(jnp.moveaxis(args[0], axes[0], 0), point=point),
    0,
)


calls = itertools.count()
"""Numbers of calls, each taken once."""


def mark(x: jax.Array, point: Point) -> jax.Array:
    """Return ``x``, as the array of a point."""
    return _tap.bind(x, point=point)


def tap(name: str, x: jax.Array) -> jax.Array:
    """Return ``x``, to be compared under ``name`` in a comparison of models without Flax modules.

    ``{}`` in the name stands for the number of an iteration of the scan around it, as in
    ``layers.{}.mlp``. Outside a comparison this does nothing, also under jit.
    """
    return mark(x, Point(next(calls), name, "point"))


def _evaluate(
    closed: core.ClosedJaxpr,
    arguments: Sequence[Any],
    visit: Visit,
    iterations: Iterations = (),
) -> list[Any]:
    """Return the outputs of a jaxpr. ``visit`` may replace every marked array.

    Raises ConfigError if one is inside a while loop or a condition.
    """
    jaxpr = closed.jaxpr
    values: dict[core.Var, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True)
    )

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        if equation.primitive is _tap:
            outputs = [visit(equation.params["point"], iterations, inputs[0])]
        elif not _has_taps(equation):
            outputs = _bind(equation, inputs)
        elif equation.primitive.name == "scan":
            outputs = _scan(equation.params, inputs, visit, iterations)
        else:  # jit, remat, or a function with a rule for its derivative, which is not used
            name, bodies = equation.primitive.name, list(_jaxprs(equation))
            if len(bodies) != 1 or name == "while":
                raise ConfigError(
                    f"a module is called inside {name}, whose body is not run a known number of"
                    " times: compare a call without it, for example with call_flax="
                )
            outputs = _evaluate(bodies[0], inputs, visit, iterations)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _bind(equation: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Run an equation as it is."""
    atoms = zip(equation.invars, inputs, strict=True)
    named = {atom: value for atom, value in atoms if isinstance(atom, core.Var)}
    info = core.DebugInfo("parity", equation.primitive.name, None, None)
    alone = core.Jaxpr((), list(named), equation.outvars, [equation], equation.effects, info)
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*named.values())


def _scan(
    params: dict[str, Any], inputs: Sequence[Any], visit: Visit, iterations: Iterations
) -> list[Any]:
    """Run the body of ``jax.lax.scan`` once for each of its iterations."""
    length = params["length"]
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    constants, carry, xs = inputs[:first], inputs[first:last], inputs[last:]
    results: list[Any] = [None] * length
    for i in reversed(range(length)) if params["reverse"] else range(length):
        arguments = [*constants, *carry, *(x[i] for x in xs)]
        outputs = _evaluate(params["jaxpr"], arguments, visit, (*iterations, (i, length)))
        carry, results[i] = outputs[: len(carry)], outputs[len(carry) :]
    return [*carry, *(jnp.stack(each) for each in zip(*results, strict=True))]


def _has_taps(equation: core.JaxprEqn) -> bool:
    inner = (each for body in _jaxprs(equation) for each in body.jaxpr.eqns)
    return any(each.primitive is _tap or _has_taps(each) for each in inner)


def _jaxprs(equation: core.JaxprEqn) -> Iterator[core.ClosedJaxpr]:
    values = itertools.chain.from_iterable(
        value if isinstance(value, tuple | list) else (value,) for value in equation.params.values()
    )
    for value in values:
        if isinstance(value, core.ClosedJaxpr):
            yield value
        elif isinstance(value, core.Jaxpr):
            yield core.ClosedJaxpr(value, ())


# Recording


@dataclass
class Recording:
    """Arrays of one run, as in ``torch_reference.recording``.

    ``arrays`` are named ``CALL/input`` and so on, ``order`` lists the calls in the order in which
    they ended, and ``parameters`` holds gradients by path. The outputs of ``points`` are arrays
    that :func:`jax_transformer.parity.tap` names: they belong to no module.
    """

    order: list[str] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    result: np.ndarray | None = None
    points: frozenset[str] = frozenset()

    def get(self, name: str) -> np.ndarray | None:
        """Return the array of that name, or None."""
        return self.arrays.get(name)

    @classmethod
    def of_file(
        cls, arrays: Mapping[str, np.ndarray], dtype: str, order: Sequence[str]
    ) -> "Recording":
        """Return the recording of one dtype in a file's arrays.

        Their names are ``DTYPE/arrays/...``, ``DTYPE/parameters/...`` and ``DTYPE/result``.
        """
        values, gradients = (
            below(f"{dtype}/{group}", arrays) for group in ("arrays", "parameters")
        )
        return cls(list(order), values, gradients, arrays[f"{dtype}/result"])


def below(group: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with ``GROUP/``, without it."""
    start = f"{group}/"
    return {name.removeprefix(start): x for name, x in arrays.items() if name.startswith(start)}


def record(
    function: ModelFunction, batch: Sequence[Any], *, dtype: str = "float64", seed: int | None = 0
) -> Recording:
    """Run the model in ``dtype`` in one jitted function and record it.

    The model's and the batch's floating-point and complex arrays are cast. The other arguments are
    those of ``torch_reference.recording.record``. float64 needs JAX in 64-bit mode. Raises
    ConfigError if the model returns no such array, or a module is called inside a while loop or a
    condition.
    """
    parameters, others = (
        {name: _cast(array, dtype) for name, array in group.items()}
        for group in (function.parameters, function.others)
    )
    inputs = [_cast(array, dtype) for array in batch]

    def call(parameters: Mapping[str, Any], others: Mapping[str, Any], inputs: Any) -> Any:
        return _first_array(function.run({**parameters, **others}, inputs))

    jaxpr = jax.make_jaxpr(call)(parameters, others, inputs)
    visitor = _Visitor({})

    def run(
        parameters: Mapping[str, Any], perturbations: Mapping[str, Any]
    ) -> tuple[Any, tuple[dict[str, Any], Any]]:
        nonlocal visitor
        visitor = _Visitor(perturbations)
        leaves = jax.tree.leaves((parameters, others, inputs))
        (output,) = _evaluate(jaxpr, leaves, visitor.visit)
        if seed is None:
            return jnp.zeros((), output.dtype), (visitor.arrays, output)
        weights = np.random.default_rng(seed).standard_normal(output.shape)
        return (output * jnp.asarray(weights, output.dtype)).sum(), (visitor.arrays, output)

    gradients: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    if seed is None:
        _, (arrays, output) = jax.jit(run)(parameters, {})
    else:
        shapes = jax.eval_shape(run, parameters, {})[1][0]
        zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
        differentiate = jax.grad(run, argnums=(0, 1), has_aux=True)
        gradients, (arrays, output) = jax.jit(differentiate)(parameters, zeros)
    of_parameters, of_arrays = (
        {name: _to_numpy(array, gradient=True) for name, array in group.items()}
        for group in gradients
    )
    named = {name: _to_numpy(array) for name, array in arrays.items()}
    named |= {f"{name} gradient": array for name, array in of_arrays.items()}
    points = frozenset(visitor.points)
    return Recording(visitor.order, named, of_parameters, _to_numpy(output), points)


def _first_array(output: Any) -> jax.Array:
    """Return the first floating-point array of a result, or the parts of its first complex one."""
    array = next(inexact(output), None)
    if array is None:
        raise ConfigError(
            "the JAX model returns no floating-point array: pass call_flax= a function that does"
        )
    array = jnp.asarray(array)
    return jnp.stack([array.real, array.imag], axis=-1) if jnp.iscomplexobj(array) else array


class _Visitor:
    """Records the marked arrays of one evaluation.

    ``perturbations`` (zeros) are added to them, so that the gradient with respect to a perturbation
    is the gradient with respect to that array.
    """

    def __init__(self, perturbations: Mapping[str, Any]):
        self.perturbations = perturbations
        self.order: list[str] = []
        self.points: set[str] = set()
        self.arrays: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._open: dict[Any, str] = {}

    def visit(self, point: Point, iterations: Iterations, array: Any) -> Any:
        call = (point.call, iterations)
        if call not in self._open:
            name = point.path(iterations)
            self._open[call] = f"{name}#{self._counts.get(name, 0)}"
            self._counts[name] = self._counts.get(name, 0) + 1
        key = self._open[call]
        kind = point.kind
        if kind == "point":
            self.points.add(key)
            kind = "output"
        if kind == "output":
            self.order.append(self._open.pop(call))
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return array
        name = f"{key}/{kind}"
        if name in self.perturbations:
            array = array + self.perturbations[name]
        self.arrays[name] = array
        return array


def _cast(value: Any, dtype: str) -> jax.Array:
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype("complex128" if dtype == "float64" else "complex64")
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _to_numpy(array: Any, *, gradient: bool = False) -> np.ndarray:
    """Return a copy. 16-bit floats become float32, which holds them exactly; complex numbers their
    parts, and a complex gradient the parts' gradient, as in PyTorch (JAX's is its conjugate).
    """
    copied = np.array(array)
    if np.iscomplexobj(copied):
        copied = np.conj(copied) if gradient else copied
        return np.stack([copied.real, copied.imag], axis=-1)
    return copied.astype(np.float32) if copied.dtype.itemsize == 2 else copied


# Floating-point and complex arrays in nested containers: pytrees and dataclasses


def inexact(tree: Any) -> Iterator[Any]:
    """Return the floating-point and complex arrays, in order. Those of an NNX module are left out:
    a module that is passed as an argument must stay that object.
    """
    for leaf in jax.tree.leaves(tree, is_leaf=_is_module):
        if isinstance(leaf, jax.Array | np.ndarray):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                yield leaf
        elif _is_dataclass(leaf):
            for value in _fields(leaf).values():
                yield from inexact(value)


def replaced(tree: Any, old: Any, new: Any) -> Any:
    """Return the tree with an array replaced wherever it occurs."""

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
    """Return True for an object of a dataclass that is neither a pytree nor a module."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not _is_module(value)


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
