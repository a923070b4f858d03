"""Evaluation of a traced model, equation by equation.

A visitor is shown its marked arrays and may replace them, also inside jit, remat, scan (one
iteration after the other) and vmap. A wide evaluation computes in float64 what the model computes
in narrower floats: casts to these are dropped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jax_transformer.errors import ConfigError
from jax_transformer.parity import jaxprs

if TYPE_CHECKING:
    from jax_transformer.parity.recording import Visitor

Iterations = tuple[tuple[int, int], ...]
"""The number of the pass and the length of each scan around, outermost first."""


class Point(NamedTuple):
    """The static facts of a marked array."""

    call: int
    """Equal for the arrays of one call of a module."""
    name: str
    """The module's dotted path; ``{}`` in it stands for the number of a scan's iteration."""
    kind: str
    """``input``, ``input 1``, ..., ``output``; if there is no module, ``point``, and ``added`` for
    an array that is only added there."""
    layers: int | None = None
    """The length of the scan that is meant by ``{}``; None for the outermost."""
    bias: str = ""
    """The path of the array that a point adds at its end, if that is used nowhere else."""
    narrow: str = ""
    """The dtype of 16 bits that a point, or code after those before it, computes in."""

    def path(self, iterations: Iterations) -> str:
        """Return the name in these iterations. Without a scan, the part ``{}`` is left out."""
        numbers = [i for i, length in iterations if self.layers in (None, length)]
        if numbers:
            return self.name.replace("{}", str(numbers[0]))
        return ".".join(part for part in self.name.split(".") if part != "{}")


TAP = core.Primitive("parity_tap")
"""The identity, with a Point."""
TAP.def_impl(lambda x, *, point: x)
TAP.def_abstract_eval(lambda x, *, point: x)
mlir.register_lowering(TAP, lambda context, x, *, point: [x])
ad.primitive_jvps[TAP] = lambda xs, dxs, *, point: (TAP.bind(*xs, point=point), dxs[0])
# Under vmap the axis of the batch comes first, as in a model without vmap
batching.primitive_batchers[TAP] = lambda args, axes, *, point: (
    TAP.bind(jnp.moveaxis(args[0], axes[0], 0), point=point),
    0,
)


def mark(x: jax.Array, point: Point) -> jax.Array:
    """Return ``x``, as the array of a point."""
    return TAP.bind(x, point=point)


_CALLS = (*jaxprs.CALLS, "custom_vjp_call")
"""Primitives whose body is run once; a function's own rule for its derivative is not used."""
_AS_THEY_ARE = ("bitcast_convert_type", "pure_callback", "io_callback", "ffi_call", "pallas_call")
"""Primitives whose dtypes are a part of what they do."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of jaxprs for a visitor; in float64 only if ``wide``."""

    visitor: "Visitor"
    wide: bool = False

    def run(
        self, closed: core.ClosedJaxpr, arguments: Sequence[Any], iterations: Iterations = ()
    ) -> list[Any]:
        """Return the outputs. Raises ConfigError for marked arrays in a while loop or condition."""
        jaxpr = closed.jaxpr
        variables = (*jaxpr.constvars, *jaxpr.invars)
        known = (*map(self._constant, closed.consts), *arguments)
        values: dict[core.Var, Any] = dict(zip(variables, known, strict=True))

        def read(atom: Any) -> Any:
            return self._constant(atom.val) if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            outputs = self._outputs(equation, inputs, iterations)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _constant(self, value: Any) -> Any:
        """Return a constant of the model in the evaluation's dtype. A number that was rounded in
        tracing, such as an epsilon, becomes the short decimal, or the root of a fraction, that it
        was.
        """
        if not self.wide or not is_narrow(value):
            return value
        if np.ndim(value) == 0 and not jnp.iscomplexobj(value):
            rounded = np.asarray(value)[()]
            # The largest numbers of a dtype fill masks
            exact = float(rounded) if abs(float(rounded)) > 1e30 else _exact(rounded)
            if exact is not None:
                return np.float64(exact)
        self.visitor.round_constant()
        return widened(jnp.asarray(value))

    def _outputs(
        self, equation: core.JaxprEqn, inputs: Sequence[Any], iterations: Iterations
    ) -> Sequence[Any]:
        primitive, params = equation.primitive, equation.params
        narrow = narrow_dtype(equation)
        if primitive is TAP:
            return [self.visitor.visit(params["point"], iterations, inputs[0], narrow)]
        tapped = any(each.primitive is TAP for each in jaxprs.equations(equation))
        if narrow and not tapped:
            self.visitor.compute_narrow(narrow)
        if not tapped and not (narrow and self.wide):
            return jaxprs.bind(equation, inputs)
        bodies = list(jaxprs.bodies(equation))
        if tapped and (len(bodies) != 1 or primitive.name == "while"):
            raise ConfigError(
                f"a module is called inside {primitive.name}, whose body is not run a known number"
                " of times: compare a call without it, for example with call_flax="
            )
        if tapped and primitive.name == "scan":
            return self._scan(params, inputs, iterations)
        if primitive.name == "custom_jvp_call" and not tapped:
            return self._with_own_derivative(params, inputs)
        if tapped or primitive.name in _CALLS:
            return self.run(bodies[0], inputs, iterations)
        return self._bind_wide(equation, inputs)

    def _bind_wide(self, equation: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
        """Run an equation in float64; as it is, on narrow inputs, if it cannot be run so."""
        primitive = equation.primitive
        if primitive.name == "reduce_precision":
            return list(inputs)
        if primitive.name not in _AS_THEY_ARE:
            params = {name: self._wide_param(value) for name, value in equation.params.items()}
            try:
                outputs = primitive.bind(*inputs, **params)
                return list(outputs) if primitive.multiple_results else [outputs]
            except Exception:  # of any kind, from the primitive's own rules
                pass
        avals: Any = [atom.aval for atom in equation.invars]
        narrow = [
            jax.lax.convert_element_type(x, aval.dtype) if is_narrow(aval) else x
            for x, aval in zip(inputs, avals, strict=True)
        ]
        return [widened(x) for x in jaxprs.bind(equation, narrow)]

    def _wide_param(self, value: Any) -> Any:
        if isinstance(value, np.dtype):
            return _wide(value)
        if type(value) is tuple:  # may be the branches of a condition
            return tuple(map(self._wide_param, value))
        if isinstance(value, core.ClosedJaxpr):  # in JAX 0.12 every Jaxpr is one
            avals: Any = [jax.ShapeDtypeStruct(x.shape, _wide(x.dtype)) for x in value.in_avals]
            return jax.make_jaxpr(lambda *xs: self.run(value, xs))(*avals)
        if isinstance(value, core.Jaxpr):  # what a reduction or a scatter does with two numbers
            return self._wide_param(core.ClosedJaxpr(value, ())).jaxpr
        return value

    def _scan(
        self, params: Mapping[str, Any], inputs: Sequence[Any], iterations: Iterations
    ) -> list[Any]:
        """Run the body of ``jax.lax.scan`` once for each of its iterations."""
        length, reverse = params["length"], params["reverse"]
        constants, carry, xs = jaxprs.parts_of_scan(params, inputs)
        results: list[Any] = [None] * length
        for i in reversed(range(length)) if reverse else range(length):
            arguments = [*constants, *carry, *(x[i] for x in xs)]
            outputs = self.run(params["jaxpr"], arguments, (*iterations, (i, length)))
            carry, results[i] = outputs[: len(carry)], outputs[len(carry) :]
        return [*carry, *(jnp.stack(each) for each in zip(*results, strict=True))]

    def _with_own_derivative(self, params: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
        """Run a function of ``jax.custom_jvp``, such as relu, whose derivative at 0 is its own."""
        function = jax.custom_jvp(lambda *xs: self.run(params["call_jaxpr"], xs))

        def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            rule = params["jvp_jaxpr_fun"].call_wrapped(*[False] * len(primals))
            jaxpr, constants, zeros = rule
            both = self.run(core.ClosedJaxpr(jaxpr, constants), [*primals, *tangents])
            outputs, nonzero = both[: len(zeros)], iter(both[len(zeros) :])
            pairs = zip(outputs, zeros, strict=True)
            return outputs, [jnp.zeros_like(x) if zero else next(nonzero) for x, zero in pairs]

        function.defjvp(derivative)
        return function(*inputs)


# Dtypes


def is_narrow(array: Any) -> bool:
    """Return True for floating-point and complex numbers below float64."""
    dtype = getattr(array, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and _wide(dtype) != dtype


def _wide(dtype: Any) -> np.dtype:
    """Return float64 or complex128 for a narrower dtype, other dtypes as they are."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return np.dtype("complex128" if jnp.issubdtype(dtype, jnp.complexfloating) else "float64")


def widened(x: Any) -> Any:
    """Return an array in float64 or complex128 if it has narrower numbers."""
    return jax.lax.convert_element_type(x, _wide(x.dtype)) if is_narrow(x) else x


def _exact(rounded: Any) -> float | None:
    """Return the number that a narrow one was probably rounded from: a decimal of few digits, or
    the root of a fraction of small numbers, as 1/√d of an attention and √(2/π) of a GELU; in 16
    bits that of a whole number, of which the one with the most factors of 2 is likeliest.
    """
    if not np.isfinite(rounded):
        return float(rounded)
    x, digits = abs(float(rounded)), 5 if rounded.dtype.itemsize == 4 else 2
    numbers = [float(f"{x:.{i}g}") for i in range(1, digits + 1)]
    for factor in (1.0, math.pi, 1 / math.pi) if x and digits == 5 else ():
        square = x * x * factor
        larger = max(square, 1 / square)
        if larger < 2**14:
            fraction = Fraction(larger).limit_denominator(int(math.sqrt(2**14 / larger)))
            numbers.append(math.sqrt((fraction if square > 1 else 1 / fraction) / factor))
    if digits == 2 and 2**-14 < x * x < 2**14:
        larger = max(x * x, 1 / (x * x))
        near = range(math.ceil(larger * (1 - 2**-6)), int(larger * (1 + 2**-6)) + 1)
        likely = sorted(near, key=lambda n: n & -n, reverse=True)
        numbers += [math.sqrt(n) if x > 1 else 1 / math.sqrt(n) for n in likely]
    with np.errstate(over="ignore"):
        fitting = (number for number in numbers if rounded.dtype.type(number) == abs(rounded))
        exact = next(fitting, None)
    return None if exact is None else math.copysign(exact, rounded)


def narrow_dtype(equation: core.JaxprEqn) -> str | None:
    """Return the narrowest dtype below float64 that an equation has anywhere."""
    atoms: Any = (
        atom for each in jaxprs.equations(equation) for atom in (*each.invars, *each.outvars)
    )
    names = [np.dtype(atom.aval.dtype).name for atom in atoms if is_narrow(atom.aval)]
    return min(names, key=itemsize, default=None)


def itemsize(dtype: str) -> int:
    """Return the bytes of a number."""
    return np.dtype(jnp.dtype(dtype)).itemsize
