"""Computations in narrow floats are evaluated in float64, primitive by primitive."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jax_transformer.parity import evaluation, recording
from jax_transformer.parity.evaluation import Evaluation, Point, mark

Function = Callable[[jax.Array, Any], Any]
"""A computation on an array in a dtype."""


class Visitor:
    def __init__(self) -> None:
        self.narrow: set[str] = set()
        self.rounded = 0
        self.visited: list[str] = []

    def compute_narrow(self, dtype):
        self.narrow.add(dtype)

    def round_constant(self):
        self.rounded += 1

    def visit(self, point, iterations, x, narrow):
        self.visited.append(point.path(iterations))
        return x


@pytest.mark.parametrize(("layers", "name"), [(None, "a.1.b"), (3, "a.2.b"), (5, "a.b")])
def test_the_number_in_a_point_s_name_is_that_of_the_scan_of_as_many_layers(layers, name):
    point = Point(1, "a.{}.b", "output", layers)
    assert point.path(((1, 2), (2, 3), (0, 3))) == name and point.path(()) == "a.b"


@dataclasses.dataclass
class Output:
    hidden: Any
    other: Any
    count: int = dataclasses.field(default=3, init=False)


def test_arrays_in_dataclasses_are_mapped_and_what_is_equal_stays_that_object():
    x, module = np.ones(2), nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    output = Output(x, Output(module, [x, "text"]))
    changed = recording.map_arrays(lambda array: 2 * array, {"a": output})["a"]
    assert changed.other.hidden is module and changed.other.other[1] == "text"
    assert (changed.hidden == 2).all() and (changed.other.other[0] == 2).all()
    assert recording.map_arrays(lambda array: array, Output(x, None)).hidden is x
    for same in (Output(module, x), Output(x, 1)):
        assert recording.map_arrays(lambda array: array, same) is same


def test_an_equation_has_the_narrowest_dtype_of_all_inside():
    def run(x, y):
        return jax.jit(lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32) * 2)(x, y)

    for dtypes, narrowest in (("bfloat16", "bfloat16"), ("float32", "float32")):
        x = jnp.ones((2, 2), dtypes)
        (equation,) = jax.make_jaxpr(run)(x, x).eqns
        assert evaluation.narrow_dtype(equation) == narrowest
    (equation,) = jax.make_jaxpr(jnp.sin)(np.ones(2)).eqns
    assert evaluation.narrow_dtype(equation) is None


@jax.custom_vjp
def cube(x):
    return x**3


cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x * x * g,))


def loop(x, dtype):
    first = jnp.zeros((), dtype), x
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 0.7, jnp.sin(c[1])), first)[1]


def scan(x, dtype):
    return lax.scan(lambda c, row: (c + jnp.exp(row), c * 0.1), x[0], x, reverse=True)


FUNCTIONS: dict[str, Function] = {
    "norm": lambda x, _: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5),
    "gelu": lambda x, _: jax.nn.gelu(x) + jax.nn.gelu(x, approximate=False),
    "softmax": lambda x, _: jax.nn.softmax(x / np.sqrt(7).astype(x.dtype)),
    "products": lambda x, dtype: jnp.einsum("ij,kj->ik", x, x, preferred_element_type=dtype),
    "convolution": lambda x, _: lax.conv(x[None, None], x[None, None, :2, :2], (1, 1), "SAME"),
    "sort": lambda x, _: (jnp.sort(x), jnp.cumsum(x, 0), jnp.argmax(x, 1), x.max(), x.var()),
    "scatter": lambda x, _: x.at[jnp.array([0, 2, 0])].add(x[:3]).at[1].set(x[0]),
    "reduce": lambda x, dtype: lax.reduce(x, dtype(0.1), lambda a, b: a + b * 0.3, (1,)),
    "window": lambda x, dtype: lax.reduce_window(x, dtype(0), lax.add, (2, 2), (1, 1), "VALID"),
    "positions": lambda x, dtype: jnp.sin(x * 10000 ** -jnp.arange(0, 1, 0.25, dtype)[None]),
    "scan": scan,
    "while": loop,
    "cond": lambda x, _: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "remat and jit": lambda x, _: jax.checkpoint(jax.jit(lambda x: jnp.tanh(x) * 0.3))(x),
    "own derivatives": lambda x, _: jax.nn.relu(x) + cube(x) + jax.nn.silu(x),
    "complex": lambda x, _: jnp.abs(jnp.fft.fft(x)) * 0.3,
}

NOT_DIFFERENTIABLE = ("while", "reduce", "window")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, jnp.float32) for name in FUNCTIONS), ("norm", jnp.bfloat16), ("scan", jnp.float16)],
)
def test_narrow_floats_become_float64(name, dtype):
    function, visitor = FUNCTIONS[name], Visitor()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 4)), jnp.float64)

    def narrow(x: jax.Array) -> Any:
        return jax.tree.leaves(function(x.astype(dtype), dtype))

    def wide(x: jax.Array) -> Any:
        return Evaluation(visitor, wide=True).run(jaxpr, [x])

    def both(run: Callable[[jax.Array], Any], x: jax.Array) -> Any:
        def total(x):
            outputs = [y for y in run(x) if jnp.issubdtype(y.dtype, jnp.inexact)]
            return sum((y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum() for y in outputs)

        gradients = [] if name in NOT_DIFFERENTIABLE else [jax.grad(total)(x)]
        return [*run(x), *gradients]

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(narrow)(x)
        expected = both(lambda x: jax.tree.leaves(function(x, jnp.float64)), x)
        for actual, each in zip(both(wide, x), expected, strict=True):
            assert actual.dtype == each.dtype
            np.testing.assert_allclose(actual, each, rtol=1e-13, atol=1e-14)
    assert jnp.dtype(dtype).name in visitor.narrow and not visitor.rounded


@pytest.mark.parametrize("reverse", [False, True])
def test_a_marked_array_of_a_scan_is_visited_in_each_iteration(reverse):
    def function(x: jax.Array) -> Any:
        def body(carry, row):  # with a constant, a carry and a result
            marked = mark(row * x[0], Point(1, "layers.{}", "output"))
            return carry * 0.5 + marked, carry.sum()

        return lax.scan(body, x[1], x, reverse=reverse)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)), jnp.float32)
    outputs = Evaluation(visitor := Visitor()).run(jax.make_jaxpr(function)(x), [x])
    for actual, each in zip(outputs, function(x), strict=True):
        np.testing.assert_allclose(actual, each, rtol=1e-6)
    assert visitor.visited == [f"layers.{i}" for i in ((2, 1, 0) if reverse else (0, 1, 2))]


def test_the_derivative_of_a_function_with_its_own_rule_is_kept():
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(lambda x: jax.nn.relu(x.astype(jnp.float32)))(jnp.zeros(2))
        gradient = jax.grad(lambda x: Evaluation(Visitor(), wide=True).run(jaxpr, [x])[0].sum())
        np.testing.assert_array_equal(gradient(jnp.array([0.0, 2.0])), [0, 1])


def test_bits_and_random_numbers_keep_their_dtype():
    def function(x: jax.Array) -> Any:
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
        return bits, jax.random.uniform(jax.random.key(0), (3,), jnp.float32)

    with jax.enable_x64(True):
        x = jnp.array([0.1, 2.0])
        jaxpr = jax.make_jaxpr(function)(x)
        for actual, each in zip(
            Evaluation(Visitor(), wide=True).run(jaxpr, [x]), function(x), strict=True
        ):
            np.testing.assert_array_equal(actual, each)


@pytest.mark.parametrize(
    "number",
    [1e-5, 1e-12, 0.044715, -0.3, 10000.0, 8**-0.5, 96**-0.5, -(2**0.5), (2 / np.pi) ** 0.5, 1 / 3],
)
def test_numbers_of_a_program_are_recognised(number):
    assert evaluation._exact(np.float32(number)) == pytest.approx(number, rel=1e-15)


def test_other_constants_are_counted_and_kept():
    table, number = np.float32([0.123456789, 2]), np.float32(0.123456789)
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(lambda x: x.astype(jnp.float32) * table * number)(jnp.ones(2))
        (actual,) = Evaluation(visitor := Visitor(), wide=True).run(jaxpr, [jnp.ones(2)])
    assert visitor.rounded == 2
    np.testing.assert_array_equal(actual, table.astype(np.float64) * np.float64(number))
