"""Products of factors that are rounded to bfloat16, held to float64 sums of the rounded numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import transformer
from jax_transformer.config import MatmulPrecision
from jax_transformer.nn.products import product
from jax_transformer.training import loss
from parity_tests.unit.helpers import batch, furthest, random_model, tiny

HIGHEST, MEDIUM = MatmulPrecision
SIZES = [(3, 5, 7), (6, 6, 6), (1, 4, 2), (33, 17, 9)]


def rounded(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.bfloat16), np.float64)


def arrays(sizes: tuple[int, int, int], dtype: str) -> list[jax.Array]:
    """The factors, and the gradient of the product."""
    m, k, n = sizes
    draw = np.random.default_rng(m + n)
    return [jnp.asarray(draw.normal(size=shape), dtype) for shape in [(m, k), (k, n), (m, n)]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded_products_are_exact_sums_of_rounded_factors(dtype, sizes):
    """Forward, and both gradients. In bfloat16 the result is rounded once, to half a unit."""
    x, kernel, gradient = arrays(sizes, dtype)
    y, back = jax.vjp(partial(product, precision=MEDIUM), x, kernel)
    ours = [y, *back(gradient)]
    x, kernel, gradient = map(rounded, (x, kernel, gradient))
    expected = [x @ kernel, gradient @ kernel.T, x.T @ gradient]
    for mine, exact in zip(ours, expected, strict=True):
        assert mine.dtype == dtype and mine.shape == exact.shape
        bound = 1e-6 if dtype == "float32" else 2**-8
        assert np.all(np.abs(np.asarray(mine, np.float64) - exact) <= bound * (np.abs(exact) + 1))


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", HIGHEST), ("float64", HIGHEST), ("float64", MEDIUM)]
)
def test_other_products_are_not_rounded(dtype, precision):
    x, kernel, gradient = arrays((5, 6, 7), dtype)
    y, back = jax.vjp(partial(product, precision=precision), x, kernel)
    plain, plain_back = jax.vjp(jnp.matmul, x, kernel)
    for mine, other in zip([y, *back(gradient)], [plain, *plain_back(gradient)], strict=True):
        assert mine.dtype == dtype and np.array_equal(mine, other)
