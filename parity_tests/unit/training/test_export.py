"""The train step and the decoding loops are lowered for CPU, GPU and TPU without them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.config import Activation, TransformerConfig
from jax_transformer.data.batches import Batch
from jax_transformer.generate import prepare
from jax_transformer.nn import blocks
from jax_transformer.training import optimizer, step
from jax_transformer.training.optimizer import OptimizerOptions
from parity_tests import preset_names
from parity_tests.unit import helpers
from parity_tests.unit.training.test_step import strict_off

PLATFORMS = ("cpu", "cuda", "tpu")
IDS = jax.ShapeDtypeStruct((2, 6), jnp.int32)


def export(function: Callable[..., Any], *arguments: Any) -> None:
    exported = strict_off(jax.export.export(function, platforms=PLATFORMS))(*arguments)
    assert exported.platforms == PLATFORMS
    text = str(exported.mlir_module())
    assert "custom_call" not in text, "a call that not every platform has"


def export_step(config: TransformerConfig) -> None:
    params = transformer.flatten(transformer.abstract(config))
    tx = optimizer.make(OptimizerOptions(), 10)
    state = jax.eval_shape(lambda params: step.state_of(params, {}, tx), params)
    key = jax.eval_shape(lambda: jax.random.key(0))
    export(step.make_step(config, tx, 0.1).one, state, Batch(IDS, IDS, IDS), key)


def export_search(config: TransformerConfig, search: Callable[..., Any], **options: Any) -> None:
    split = prepare.split(transformer.abstract(config))

    def run(arrays: list[jax.Array], source: jax.Array) -> Any:
        return search(split._replace(arrays=arrays), source, max_length=5, **options)

    export(jax.jit(run), split.arrays, IDS)


def test_the_other_searches_are_lowered_for_every_platform():
    config = helpers.tiny(num_layers=1)
    export_search(config, jt.generate.greedy)
    export_search(config, functools.partial(jt.generate.sample, key=jax.random.key(0)), top_k=3)


@pytest.mark.parametrize("dtype", [None, pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("preset", preset_names.different_quick(preset_names.TEXT))
def test_step_and_searches_are_lowered_for_every_platform(preset, dtype):
    """Greedy search and sampling take the same steps as beam search, and are checked once."""
    config = helpers.tiny(preset, num_layers=1, compute_dtype=dtype)
    export_step(config)
    export_search(config, jt.generate.beam, beam_size=2)


def test_a_call_of_python_is_noticed(monkeypatch):
    """A GPU or a TPU would wait for the host at every layer."""

    def on_the_host(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.maximum(x, 0), shape, x)

    monkeypatch.setitem(blocks.ACTIVATIONS, Activation.RELU, on_the_host)
    with pytest.raises((AssertionError, NotImplementedError, ValueError), match="call"):
        # Of other sizes, as the loop of the sizes above has been traced
        export_search(helpers.tiny(num_layers=1, d_ff=28), jt.generate.greedy)
