"""The attention backends are held to the one that is written out, in float32 and bfloat16."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.config import MaskFill, Mixing
from jax_transformer.data.batches import Batch
from jax_transformer.errors import ConfigError
from jax_transformer.nn.attention import attend
from jax_transformer.nn.fused_attention import fused_attend
from jax_transformer.training import step
from parity_tests.unit.helpers import batch, furthest, random_arrays, random_model, tiny


@pytest.fixture(autouse=True)
def _standard_promotion():
    """For 16 bits ``jax.nn.dot_product_attention`` needs it, its gradient too."""
    with jax.numpy_dtype_promotion("standard"):
        yield


SDPA = dict(attention_backend="sdpa")
BOUNDS = {"float32": 2e-6, "bfloat16": 2e-2}


def heads(rows: int, queries: int, keys: int, dtype: str, count: int = 2) -> list[jax.Array]:
    random = np.random.default_rng(queries + keys)
    shapes = [(rows, n, count, 4) for n in (queries, keys, keys)]
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("sizes", [(3, 5, 7, 2), (2, 1, 1, 1), (2, 6, 6, 3)])
def test_outputs_and_gradients_are_those_of_attend(sizes, dtype):
    """With ragged masks, and a row that may see no key, whose output is 0."""
    rows, queries, keys, count = sizes
    arrays = heads(rows, queries, keys, dtype, count)
    mask = np.arange(keys)[None, None, None] < np.arange(rows)[:, None, None, None] * 2
    mask = jnp.asarray(np.broadcast_to(mask, (rows, 1, queries, keys)))
    factors = jnp.asarray(np.random.default_rng(9).normal(size=arrays[0].shape), "float32")

    def total(function, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed = function(*arrays)
        return (mixed.astype("float32") * factors).sum(), mixed

    def written_out(*arrays: jax.Array) -> jax.Array:
        return attend(*arrays, mask, scale=0.3)[0]

    (plain, fused) = (
        jax.value_and_grad(partial(total, each), (0, 1, 2), has_aux=True)(*arrays)
        for each in (written_out, partial(fused_attend, mask=mask, scale=0.3))
    )
    assert fused[0][1].dtype == dtype and not np.asarray(fused[0][1])[0].any()
    assert furthest(fused[0][1], plain[0][1]) < BOUNDS[dtype]
    for have, want in zip(fused[1], plain[1], strict=True):
        assert furthest(have, want) < 4 * BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_loss_is_that_of_the_exact_backend(dtype):
    config = tiny("vaswani2017_base", num_layers=1, dropout=0.2, attention_dropout=0.0)
    config = config.with_sizes(compute_dtype=dtype)
    arrays = {k: jnp.asarray(a, "float32") for k, a in random_arrays(config).items()}
    source, target = batch(config)
    pair, key = Batch(source, target, target), jax.random.key(0)
    plain, fused = (
        float(jax.jit(partial(step.loss_sum, config=each))(arrays, {}, pair, dropout=key)[0])
        for each in (config, config.with_sizes(**SDPA))
    )
    assert fused == pytest.approx(plain, rel=BOUNDS[dtype])


def test_cached_steps_have_the_logits_of_a_complete_pass():
    config = tiny("vaswani2017_base", num_layers=1, attention_dropout=0.0)
    source, _ = batch(config)
    plain, fused = (
        jt.generate.greedy(random_model(each, dtype="float32"), source, max_length=5)
        for each in (config, config.with_sizes(**SDPA))
    )
    assert np.array_equal(plain, fused)


REFUSED = {
    "summed mixing": (dict(name="blog2023"), r"decoder.mixing='summed' is no product"),
    "relative positions": (dict(name="t5"), r"encoder.positions='relative' is a bias of the"),
    "weights that are dropped": (
        dict(name="vaswani2017_base", attention_dropout=0.1),
        r"attention_dropout=0.1 drops attention weights$",
    ),
    "weights that one stack drops": (
        {"name": "vaswani2017_base", "attention_dropout": 0.0, "encoder.attention_dropout": 0.2},
        r"encoder.attention_dropout=0.2 drops",
    ),
    "another fill": (dict(name="deep_dive"), r"mask_fill='minus_1e20' gives queries"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_it_cannot_compute_is_refused_with_the_reason(case):
    changes, reason = REFUSED[case]
    tiny(**changes)
    with pytest.raises(ConfigError, match=rf"attention_backend='sdpa' cannot compute .*{reason}"):
        tiny(**changes, **SDPA)


def test_every_preset_is_computed_or_refused_for_the_reasons_above():
    """Without dropout of the weights, which is the user's choice."""
    for name in jt.preset_names():
        config = tiny(name, attention_dropout=0.0)
        stacks = [config.encoder, config.decoder]
        dropped = {f"{s}.attention_dropout": 0.0 for s in ("encoder", "decoder")}
        supported = (
            config.mask_fill is MaskFill.EXCLUDED
            and all(stack.mixing is Mixing.WEIGHTED for stack in stacks)
            and not any(stack.positions.value.startswith("relative") for stack in stacks)
        )
        if supported:
            config.with_sizes(**SDPA, **dropped)
        else:
            with pytest.raises(ConfigError, match="cannot compute this model"):
                config.with_sizes(**SDPA, **dropped)


def test_attention_weights_and_float64_are_refused():
    config = tiny("vaswani2017_base", num_layers=1, attention_dropout=0.0, **SDPA)
    ids = batch(config)
    with pytest.raises(ConfigError, match=r"returns no attention weights: use .*'xla'"):
        random_model(config)(*ids, return_attention=True)
    with pytest.raises(ConfigError, match="softmax in float32, and the model is float64"):
        jax.eval_shape(lambda: random_model(config)(*ids))


def test_a_model_s_record_does_not_name_its_backend():
    config = tiny("vaswani2017_base", attention_dropout=0.0)
    assert config.with_sizes(**SDPA).portable == config
    assert transformer.shapes(config.with_sizes(**SDPA)) == transformer.shapes(config)
