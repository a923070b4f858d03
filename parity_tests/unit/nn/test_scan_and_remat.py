"""A loop over layers and recomputed activations: the same numbers, masks and names."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.config import DropoutMasks, Remat
from jax_transformer.data.batches import Batch
from jax_transformer.errors import ConfigError
from jax_transformer.nn.dropout import KeyedDropout
from jax_transformer.training import step
from parity_tests.marks import quick_if
from parity_tests.unit.helpers import batch, furthest, random_arrays, random_model, tiny
from parity_tests.unit.nn.test_dropout import Halved

KEY = jax.random.key(5)
RATES = dict(dropout=0.3, attention_dropout=0.2, activation_dropout=0.1, embedding_dropout=0.1)
WINDOWS = {"encoder.local_radius": 1, "encoder.global_block_size": 2}
POSITIONS = ("encoder.positions", "decoder.positions")
MODELS = {
    "post-norm": dict(name="lesson10"),
    "pre-norm, tied": dict(name="vaswani2017_base", norm_placement="pre"),
    "deep_dive: a branch that is never computed": dict(name="deep_dive"),
    "part2_encoder: positions in the feed-forward": dict(name="part2_encoder"),
    "blog2023: the memory as residual, summed weights": dict(name="blog2023"),
    "T5: one table of relative positions a stack": dict(name="t5"),
    "LongT5: windows and sums": {"name": "longt5"} | WINDOWS,
    "UMT5: one table a block": {"name": "t5"} | dict.fromkeys(POSITIONS, "relative_per_block"),
}
SCAN = dict(scan_layers=True)
WAYS = {"scan": SCAN, "remat": dict(remat="full"), "both": SCAN | dict(remat="full")}
MINIMAL = {"minimal": dict(remat="minimal"), "scan, minimal": SCAN | dict(remat="minimal")}


def some(names: Iterable[str], *usual: str) -> list:
    """The names as parameters, of which those that do not begin with these words are slow."""
    return [quick_if(name.split(":")[0] in usual, name) for name in names]


def config_of(model: str, **changes) -> transformer.TransformerConfig:
    return tiny(**(MODELS[model] | RATES | dict(d_model=6, d_ff=5) | changes))


def loss_of(config: transformer.TransformerConfig, arrays: dict) -> jax.Array:
    source, target = batch(config, source=5)
    return step.loss_sum(arrays, {}, Batch(source, target, target[::-1]), config, 0.1, KEY)[0]


def arrays_of(config: transformer.TransformerConfig) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in random_arrays(config).items()}


@pytest.mark.parametrize("model", some(MODELS, "LongT5"))
def test_the_loss_is_that_of_the_unrolled_model(model):
    """With dropout at every site, so that masks of another layer would change it."""
    config = config_of(model)
    plain, scanned = (
        jax.jit(partial(loss_of, each))(arrays_of(config))
        for each in (config, config.with_sizes(**SCAN))
    )
    np.testing.assert_allclose(scanned, plain, rtol=1e-12)


@cache
def loss_and_gradients(config: transformer.TransformerConfig) -> tuple[jax.Array, dict]:
    return jax.jit(jax.value_and_grad(partial(loss_of, config)))(arrays_of(config))


@pytest.mark.parametrize("way", some(WAYS | MINIMAL, "both"))
def test_loss_and_gradients_are_those_of_the_unrolled_model(way):
    config = config_of("post-norm")
    value, gradients = loss_and_gradients(config)
    other, others = loss_and_gradients(config.with_sizes(**(WAYS | MINIMAL)[way]))
    np.testing.assert_allclose(other, value, rtol=1e-12)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        scale = max(1.0, float(jnp.abs(gradient).max()))
        assert furthest(others[name], gradient) < 1e-12 * scale, name


@pytest.mark.parametrize("kind", list(DropoutMasks))
def test_a_traced_layer_has_the_masks_of_its_number(kind):
    root = KeyedDropout(KEY, kind).scope("encoder")
    for i in range(3):
        expected = root.scope(f"blocks.{i}").scope("output").keep((4, 7), 0.5)
        traced = jax.jit(lambda j: root.layer("blocks", j, 3).scope("output").keep((4, 7), 0.5))
        assert (traced(jnp.asarray(i, jnp.int32)) == expected).all()


def test_a_deeper_scanned_model_is_no_longer_program():
    def lines(layers: int, **way) -> int:
        config = config_of("post-norm", num_layers=layers, **way)
        program = jax.jit(partial(loss_of, config)).lower(arrays_of(config))
        return len(program.as_text().splitlines())

    assert lines(4) > 1.7 * lines(2)
    assert lines(4, **SCAN) < 1.3 * lines(2, **SCAN)


def test_minimal_computes_only_attention_s_own_products_again():
    """The products of scores and of mixing, which have no weights, and not those that have."""

    def products(remat: str) -> int:
        config = config_of("post-norm", remat=remat)
        gradient = jax.grad(partial(loss_of, config))
        return str(jax.make_jaxpr(gradient)(arrays_of(config))).count("dot_general[")

    layers, attentions = 2, 3  # self-attention of both stacks, and cross-attention
    none, minimal, full = map(products, ("none", "minimal", "full"))
    assert minimal - none == 2 * attentions * layers
    assert full - none == (8 + 14) * layers, "every product of an encoder's and a decoder's block"


def test_attention_weights_of_a_scanned_model_are_those_of_each_layer():
    config = config_of("post-norm")
    ids = batch(config)
    plain, scanned = (
        random_model(each)(*ids, return_attention=True)
        for each in (config, replace(config, scan_layers=True, remat=Remat.FULL))
    )
    assert len(scanned[1].cross) == 2
    for have, want in zip(jax.tree.leaves(scanned), jax.tree.leaves(plain), strict=True):
        assert furthest(have, want) == 0


def test_decoding_is_that_of_the_unrolled_model():
    config = config_of("pre-norm, tied")
    source, _ = batch(config)
    plain, scanned = (
        jt.generate.greedy(random_model(each), source, max_length=5)
        for each in (config, config.with_sizes(**WAYS["both"]))
    )
    assert np.array_equal(plain, scanned)


def test_masks_by_path_cannot_be_scanned():
    config = config_of("post-norm", **SCAN)
    with pytest.raises(ConfigError, match=r"masks of Halved .* scan_layers=False"):
        random_model(config).encode(batch(config)[0], rngs=Halved())


def test_blocks_of_different_dtypes_cannot_be_scanned():
    config = config_of("post-norm", **SCAN)
    arrays = arrays_of(config)
    name = "encoder.blocks.1.feed_forward.up.bias"
    arrays[name] = arrays[name].astype("float32")
    with pytest.raises(ConfigError, match=r"blocks.1.feed_forward.up.bias is float32 of shape"):
        transformer.unflatten(config, arrays).encode(batch(config)[0])


def test_neither_is_recorded_with_a_model():
    config = config_of("post-norm")
    assert config.with_sizes(**WAYS["both"]).portable == config
