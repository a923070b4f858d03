"""Jaxprs taken apart: their equations, the same without calls inside, and on one device."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_transformer.errors import ConfigError

CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint")
"""Primitives that only run their body."""
_SHARDINGS = ("reshard", "mesh_cast", "sharding_constraint")
"""Primitives that return their input on other devices."""
Step = Callable[[core.JaxprEqn, Sequence[Any]], Sequence[Any]]
"""Returns the outputs of an equation."""


def bind(equation: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of an equation as it is."""
    atoms = zip(equation.invars, inputs, strict=True)
    named = {atom: value for atom, value in atoms if isinstance(atom, core.Var)}
    info = core.DebugInfo("parity", equation.primitive.name, None, None)
    alone = core.Jaxpr((), list(named), equation.outvars, [equation], equation.effects, info)
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*named.values())


def equations(equation: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """Return an equation and those inside it."""
    yield equation
    for body in bodies(equation):
        for each in body.jaxpr.eqns:
            yield from equations(each)


def bodies(equation: core.JaxprEqn) -> Iterator[core.ClosedJaxpr]:
    """Return the jaxprs that an equation runs."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each
            elif isinstance(each, core.Jaxpr):
                yield core.ClosedJaxpr(each, ())


def parts_of_scan(params: Mapping[str, Any], inputs: Sequence[Any]) -> Any:
    """Return the constants, the carry and the arrays of layers among the inputs of a scan."""
    if "ft_in" in params:  # from JAX 0.12 on
        return params["ft_in"].update(inputs).unpack()
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    return inputs[:first], inputs[first:last], inputs[last:]


def retraced(closed: core.ClosedJaxpr, step: Step) -> core.ClosedJaxpr:
    """Return the jaxpr of a run in which ``step`` returns the outputs of each equation."""
    avals: Any = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed.in_avals]
    return jax.make_jaxpr(partial(_run, closed, step))(*avals)


def _run(closed: core.ClosedJaxpr, step: Step, *arguments: Any) -> list[Any]:
    jaxpr = closed.jaxpr
    variables = (*jaxpr.constvars, *jaxpr.invars)
    constants = map(array_on_one_device, closed.consts)
    values: dict[Any, Any] = dict(zip(variables, (*constants, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return array_on_one_device(atom.val) if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        outputs = step(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def inlined(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return a jaxpr without calls and shardings, for one device. Raises ConfigError for shard_map
    on a mesh with explicit axes."""
    context = jax.make_jaxpr(lambda x: -x)(0.0).eqns[0].ctx  # a new function: nothing is cached
    return retraced(closed, partial(_inline, context))


def _inline(context: Any, equation: core.JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    name = equation.primitive.name
    if name == "shard_map" and any(map(_has_mesh, equation.outvars)):
        raise ConfigError(
            "shard_map on a mesh with explicit axes is not compared: pass call_flax= a function"
            " without it, or a mesh with AxisType.Auto"
        )
    if name in CALLS:
        (body,) = bodies(equation)
        return _run(body, partial(_inline, context), *inputs)
    if name in _SHARDINGS:
        return inputs
    params = {key: _without_shardings(value) for key, value in equation.params.items()}
    return bind(equation.replace(params=params, ctx=context), inputs)


def _without_shardings(value: Any) -> Any:
    if isinstance(value, jax.sharding.Sharding):
        return None
    if type(value) is tuple:  # may be the branches of a condition
        return tuple(map(_without_shardings, value))
    if isinstance(value, core.ClosedJaxpr):  # in JAX 0.12 every Jaxpr is one
        return inlined(value)
    if isinstance(value, core.Jaxpr):  # what a reduction does with two numbers
        return inlined(core.ClosedJaxpr(value, ())).jaxpr
    return value


def is_sharded(closed: core.ClosedJaxpr) -> bool:
    """Return True if the type of an array has its layout on a mesh."""
    every = (each for equation in closed.jaxpr.eqns for each in equations(equation))
    return any(map(_has_mesh, (atom for each in every for atom in (*each.invars, *each.outvars))))


def _has_mesh(atom: Any) -> bool:
    sharding = getattr(atom.aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


@contextlib.contextmanager
def on_one_device() -> Iterator[None]:
    """Leave a mesh with explicit axes meanwhile: arrays of programs have no sharding."""
    explicit = jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    none = jax.sharding.Mesh(np.empty((), object), ())
    with jax.set_mesh(none) if explicit else contextlib.nullcontext():
        yield


def array_on_one_device(array: Any) -> Any:
    """Return an array without the sharding in its type."""
    return array if jax.typeof(array).sharding.mesh.empty else jnp.asarray(np.asarray(array))
