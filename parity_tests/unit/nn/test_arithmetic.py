"""Results that rounding could spoil; these faults no other test detected (docs/mutants.md)."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.config import MaskFill, Norm
from jax_transformer.data.batches import Batch
from jax_transformer.nn import layers
from jax_transformer.nn.attention import attend, masked_softmax
from jax_transformer.training import step
from parity_tests.unit.helpers import batch, random_model, tiny


def test_a_norm_of_large_numbers_keeps_its_digits():
    """At mean 1000 a difference of squares would err by more than the result."""
    x = (1000 + 0.01 * np.random.default_rng(0).normal(size=(2, 3, 64))).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(axis=-1, keepdims=True)) / np.sqrt(
        wide.var(axis=-1, keepdims=True) + 1e-12
    )
    # the precision of 0.01 next to 1000 in float32
    assert np.abs(np.asarray(layers.standardize(jnp.asarray(x), 1e-12)) - expected).max() < 2e-2


@pytest.mark.parametrize("kind", [Norm.LAYER, Norm.RMS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_norm_of_16_bits_is_computed_in_float32_and_rounded_once(dtype: str, kind: Norm):
    config: jt.TransformerConfig = tiny(d_model=64, num_heads=2, norm=kind, bias=kind is Norm.LAYER)
    module = layers.Normalization(config)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 64)) * 3 + 2, dtype)
    once = np.asarray(module(x.astype("float32")).astype(dtype), np.float64)
    assert (np.asarray(module(x), np.float64) == once).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_softmax_of_16_bits_is_computed_in_float32_and_rounded_once(dtype: str, masked: bool):
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5, 40)) * 3, dtype)
    mask = jnp.asarray(np.tri(5, 40, 20, dtype=bool))[None, None] if masked else None
    wide, rounded = (
        masked_softmax(each, mask, MaskFill.EXCLUDED, scale=1.0)
        for each in (scores.astype("float32"), scores)
    )
    assert rounded.dtype == dtype
    assert (np.asarray(rounded) == np.asarray(wide.astype(dtype))).all()


def test_every_exponential_root_and_logarithm_of_a_bfloat16_model_is_float32():
    """Softmax, norms and loss, forward and backward; nothing else here has them."""
    config = tiny("vaswani2017_base", num_layers=1, compute_dtype="bfloat16")
    arrays = transformer.flatten(random_model(config, dtype="float32"))
    source, target = batch(config)
    loss = partial(step.loss_sum, frozen={}, batch=Batch(source, target, target), config=config)
    program = jax.jit(jax.value_and_grad(lambda a: loss(a)[0])).lower(arrays).as_text()

    def dtypes(operation: str) -> set[str]:
        lines = re.findall(rf"stablehlo\.{operation} .*", program)
        return {re.findall(r"x?(\w+)>", line)[-1].split("x")[-1] for line in lines}

    assert dtypes("dot_general") == {"bf16"}
    for name in ("exponential", "rsqrt", "log"):
        assert dtypes(name) == {"f32"}, name


@pytest.mark.parametrize("fill", [MaskFill.EXCLUDED, MaskFill.MINUS_1E20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_row_without_keys_is_finite_in_16_bits(dtype: str, fill: MaskFill):
    """float16 ends at 65504: a fill of -1e20 would be an infinity, and the row NaN."""
    q, k, v = (
        jnp.asarray(np.random.default_rng(i).normal(size=(1, 3, 2, 4)), dtype) for i in range(3)
    )
    mask = jnp.asarray([[[[True, True, True], [False, True, False], [False, False, False]]]])
    mixed, weights = (
        np.asarray(array, np.float64) for array in attend(q, k, v, mask, scale=0.5, fill=fill)
    )
    assert np.isfinite(mixed).all() and np.isfinite(weights).all()
    assert (weights[0, :, 1] == [0, 1, 0]).all() and np.ptp(weights[0, :, 2]) == 0
