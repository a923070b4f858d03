"""Named points of a computation, found in its jaxpr, also inside jit, remat, scan and vmap.

:func:`tap` marks an array while a function is traced, and :func:`evaluate` runs the jaxpr: it
hands every marked array to its caller, and goes through the bodies of transformations that hold
some, one iteration of a scan after the other. :func:`inexact` finds arrays in nested containers.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jax_transformer.errors import ConfigError


class Iteration(NamedTuple):
    """One pass through the body of a scan."""

    number: int
    length: int


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

    def path(self, iterations: Sequence["Iteration"]) -> str:
        """Return the name in these iterations. Without a scan, the part ``{}`` is left out."""
        numbers = [i for i, length in iterations if self.layers in (None, length)]
        if numbers:
            return self.name.replace("{}", str(numbers[0]))
        return ".".join(part for part in self.name.split(".") if part != "{}")


Visit = Callable[[Point, tuple[Iteration, ...], jax.Array], jax.Array]
"""Takes a point, the iterations of the scans around it (outermost first) and its array; returns the
array to go on with."""

_tap = core.Primitive("parity_tap")
"""The identity, with a Point."""
_tap.def_impl(lambda x, *, point: x)
_tap.def_abstract_eval(lambda x, *, point: x)
mlir.register_lowering(_tap, lambda context, x, *, point: [x])
ad.primitive_jvps[_tap] = lambda primals, tangents, *, point: (
    _tap.bind(*primals, point=point),
    tangents[0],
)
# Under vmap the axis of the batch comes first, as in a model without vmap
batching.primitive_batchers[_tap] = lambda args, axes, *, point: (
    _tap.bind(jnp.moveaxis(args[0], axes[0], 0), point=point),
    0,
)


_calls = itertools.count()


def new_call() -> int:
    """Return a number that no other call has."""
    return next(_calls)


def mark(x: jax.Array, point: Point) -> jax.Array:
    """Return ``x``, as the array of a point."""
    return _tap.bind(x, point=point)


def tap(name: str, x: jax.Array) -> jax.Array:
    """Return ``x``, to be compared under ``name`` in a comparison of models without Flax modules.

    ``{}`` in the name stands for the number of an iteration of the scan around it, as in
    ``layers.{}.mlp``. Outside a comparison this does nothing, also under jit.
    """
    return mark(x, Point(new_call(), name, "point"))


def evaluate(jaxpr: core.ClosedJaxpr, arguments: Sequence[Any], visit: Visit) -> list[Any]:
    """Return the outputs of a jaxpr. ``visit`` may replace every marked array.

    Raises ConfigError if one is inside a while loop or a condition.
    """
    return _evaluate(jaxpr.jaxpr, jaxpr.consts, arguments, visit, ())


def _evaluate(
    jaxpr: core.Jaxpr,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    visit: Visit,
    iterations: tuple[Iteration, ...],
) -> list[Any]:
    values: dict[core.Var, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True)
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
        else:
            body = _body(equation)
            outputs = _evaluate(body.jaxpr, body.consts, inputs, visit, iterations)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _bind(equation: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Run an equation as it is."""
    named = {
        atom: value
        for atom, value in zip(equation.invars, inputs, strict=True)
        if isinstance(atom, core.Var)
    }
    info = core.DebugInfo("parity", equation.primitive.name, None, None)
    alone = core.Jaxpr((), list(named), equation.outvars, [equation], equation.effects, info)
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*named.values())


def _scan(
    params: dict[str, Any],
    inputs: Sequence[Any],
    visit: Visit,
    iterations: tuple[Iteration, ...],
) -> list[Any]:
    """Run the body of ``jax.lax.scan`` once for each of its iterations."""
    body, length = params["jaxpr"], params["length"]
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    constants, carry, xs = inputs[:first], inputs[first:last], inputs[last:]
    results: list[Any] = [None] * length
    for i in reversed(range(length)) if params["reverse"] else range(length):
        outputs = _evaluate(
            body.jaxpr,
            body.consts,
            [*constants, *carry, *(x[i] for x in xs)],
            visit,
            (*iterations, Iteration(i, length)),
        )
        carry, results[i] = outputs[: len(carry)], outputs[len(carry) :]
    return [*carry, *(jnp.stack(each) for each in zip(*results, strict=True))]


def _body(equation: core.JaxprEqn) -> core.ClosedJaxpr:
    """Return the jaxpr that an equation runs once: of jit, remat, or a function with a rule for
    its derivative, which is differentiated as it is written here.
    """
    name = equation.primitive.name
    bodies = list(_jaxprs(equation))
    if len(bodies) != 1 or name == "while":
        raise ConfigError(
            f"a module is called inside {name}, whose body is not run a known number of times:"
            " compare a call without it, for example with call_flax="
        )
    return bodies[0]


def _has_taps(equation: core.JaxprEqn) -> bool:
    return any(
        inner.primitive is _tap or _has_taps(inner)
        for body in _jaxprs(equation)
        for inner in body.jaxpr.eqns
    )


def _jaxprs(equation: core.JaxprEqn) -> Iterator[core.ClosedJaxpr]:
    values = itertools.chain.from_iterable(
        value if isinstance(value, tuple | list) else (value,) for value in equation.params.values()
    )
    for value in values:
        if isinstance(value, core.ClosedJaxpr):
            yield value
        elif isinstance(value, core.Jaxpr):
            yield core.ClosedJaxpr(value, ())


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
