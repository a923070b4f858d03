"""Products of factors that are rounded to bfloat16, held to float64 sums of the rounded numbers."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from jax_transformer.config import Init, MatmulPrecision
from jax_transformer.nn.layers import linear
from jax_transformer.nn.products import product
from parity_tests.unit.helpers import batch, furthest, random_model, tiny

HIGHEST, MEDIUM = MatmulPrecision
SIZES = [(3, 5, 7), (6, 6, 6), (1, 4, 2)]


def rounded(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.bfloat16), np.float64)


def arrays(sizes: tuple[int, int, int], dtype: str) -> list[jax.Array]:
    """The factors, and the gradient of the product."""
    m, k, n = sizes
    draw = np.random.default_rng(m + n)
    return [jnp.asarray(draw.normal(size=shape), dtype) for shape in [(m, k), (k, n), (m, n)]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_rounded_products_are_exact_sums_of_rounded_factors(dtype, bound, transposed, sizes):
    """Forward, and both gradients, which are rounded to the factors' dtype."""
    x, kernel, gradient = arrays(sizes, dtype)
    turned = kernel.T if transposed else kernel
    multiply = partial(product, precision=MEDIUM, transposed=transposed)
    y, back = jax.jit(partial(jax.vjp, multiply))(x, turned)
    by_x, by_kernel = back(gradient)
    ours = [y, by_x, by_kernel.T if transposed else by_kernel]
    x, kernel, gradient = map(rounded, (x, kernel, gradient))
    expected = [x @ kernel, gradient @ kernel.T, x.T @ gradient]
    for mine, exact in zip(ours, expected, strict=True):
        assert mine.dtype == dtype and mine.shape == exact.shape
        assert furthest(mine, exact) <= bound * (np.abs(exact).max() + 1)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_bias_is_added_before_the_sums_are_rounded(sizes):
    """So each element is as exact as its dtype, also where the bias is nearly minus the sum."""
    x, kernel, _ = arrays(sizes, "bfloat16")
    sums = rounded(x) @ rounded(kernel)
    bias = jnp.asarray(0.01 - sums[0], jnp.bfloat16)
    config = tiny("small").with_sizes(compute_dtype="bfloat16", matmul_precision=MEDIUM)
    layer = linear(config, Init.XAVIER, *sizes[1:], bias=True, rngs=nnx.Rngs(0))
    layer.kernel.set_value(kernel)
    layer.bias.set_value(bias)
    exact = sums + rounded(bias)
    assert np.all(np.abs(rounded(layer(x)) - exact) <= 2**-8 * np.abs(exact) + 1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float32", HIGHEST), ("float64", HIGHEST), ("float64", MEDIUM), ("bfloat16", HIGHEST)],
)
def test_other_products_are_not_rounded(dtype, precision, transposed):
    x, kernel, gradient = arrays((5, 6, 7), dtype)
    turned = kernel.T if transposed else kernel
    y, back = jax.vjp(partial(product, precision=precision, transposed=transposed), x, turned)
    plain, plain_back = jax.vjp(lambda a, b: a @ (b.T if transposed else b), x, turned)
    for mine, other in zip([y, *back(gradient)], [plain, *plain_back(gradient)], strict=True):
        assert mine.dtype == dtype and np.array_equal(mine, other)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("t5", {}), ("lesson10_repaired", {"scan_layers": True, "remat": "full"})],
    ids=str,
)
def test_every_product_with_a_weight_is_rounded_also_backward(name, changes):
    """In the loss and its gradient; the products of attention remain in float32."""
    config = tiny(name, **{"num_layers": 1} | changes)
    source, target = map(jnp.asarray, batch(config))

    def total(model):
        return jnp.square(model(source, target)).sum()

    def computed(precision: MatmulPrecision) -> tuple[set[str], Any]:
        model = random_model(config.with_sizes(matmul_precision=precision), dtype="float32")
        step = nnx.jit(nnx.value_and_grad(total)).lower(model)
        products = [line for line in step.as_text().splitlines() if "dot_general" in line]
        with_weights = [line for line in products if "batching_dims" not in line]
        assert len(with_weights) < len(products)
        kinds = re.findall(r": \(tensor<\S*x(\w+)>, tensor", "\n".join(with_weights))
        return set(kinds), lambda: float(step.compile()(model)[0])

    (exact, value), (medium, other) = map(computed, MatmulPrecision)
    assert (exact, medium) == ({"f32"}, {"bf16"})
    if name == "t5" and not changes:  # what the programs compute is compared of one
        assert 0 < abs(other() / value() - 1) < 1e-2


def test_on_a_mesh_factors_are_rounded_and_multiplied_in_float32():
    """A layout cannot be demanded of parts on several devices; bfloat16 is multiplied as it is."""
    x, kernel, _ = arrays((4, 5, 6), "float32")
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def traced(precision: MatmulPrecision, *factors: jax.Array) -> str:
        return str(jax.make_jaxpr(partial(product, precision=precision))(*factors))

    narrow = [factor.astype("bfloat16") for factor in (x, kernel)]
    with jax.sharding.use_abstract_mesh(mesh):
        text = traced(MEDIUM, x, kernel)
        assert "layout" not in text and text.count("reduce_precision") == 2
        assert traced(MEDIUM, *narrow) == traced(HIGHEST, *narrow)
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))):
        value = jax.jit(partial(product, precision=MEDIUM))(x, kernel)
    assert furthest(value, rounded(x) @ rounded(kernel)) < 1e-5
    for factors in ([x, kernel], narrow):
        text = traced(MEDIUM, *factors)
        assert text.count("layout") >= 3 and "preferred_element_type=float32" in text
