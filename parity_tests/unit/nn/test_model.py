"""The model: visibility in a call, refusals, dtypes and arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.errors import ConfigError
from jax_transformer.nn import stacks
from jax_transformer.nn.embeddings import Frozen
from parity_tests.unit import helpers
from parity_tests.unit.helpers import batch, furthest, random_arrays, random_model, tiny, unchecked

CONFIG = tiny("lesson10_repaired")
SOURCE, TARGET = batch(CONFIG)


@pytest.fixture(scope="module")
def model() -> transformer.Transformer:
    return random_model(CONFIG)


# Visibility of tokens


@pytest.mark.parametrize("name", ["lesson10", "small"])
def test_a_token_changes_no_earlier_logits(name):
    config = tiny(name)
    model, (source, target) = random_model(config), batch(config)
    before = np.asarray(model(source, target))
    for j in range(target.shape[1]):
        for token in (config.target_pad_id, (target[0, j] + 1) % config.target_vocab_size):
            other = target.copy()
            other[0, j] = token
            after = np.asarray(model(source, other))
            assert (after[0, :j] == before[0, :j]).all() and (after[1:] == before[1:]).all()
            assert token == target[0, j] or furthest(after[0, j], before[0, j]) > 1e-6


def with_more_padding(config: jt.TransformerConfig, source: np.ndarray) -> np.ndarray:
    return np.concatenate([source, np.full((len(source), 2), config.source_pad_id)], axis=1)


@pytest.mark.parametrize("name", ["lesson10", "lesson10_repaired", "vaswani2017_base", "small"])
def test_source_padding_is_seen_by_no_encoder_and_one_decoder(name):
    """The faithful lesson10's attends to padding, so a batch's padding changes translations."""
    config = tiny(name)
    model, (source, target) = random_model(config), batch(config)
    more = with_more_padding(config, source)
    assert furthest(model.encode(more)[:, :7], model.encode(source)) < 1e-12
    moved = furthest(model(more, target), model(source, target))
    assert moved > 1e-3 if name == "lesson10" else moved < 1e-12


def test_attention_weights_are_those_of_every_layer_and_head(model):
    logits, attention = model(SOURCE, TARGET, return_attention=True)
    assert furthest(logits, model(SOURCE, TARGET)) == 0
    layers, heads = CONFIG.decoder.layers, CONFIG.num_heads
    for weights, shape in (
        (attention.encoder, (7, 7)),
        (attention.decoder, (5, 5)),
        (attention.cross, (5, 7)),
    ):
        assert [w.shape for w in weights] == [(3, heads, *shape)] * layers
        for w in weights:
            assert np.abs(np.asarray(w).sum(axis=-1) - 1).max() < 1e-12
            assert (np.asarray(w) >= 0).all()
        flat = np.moveaxis(np.stack([np.asarray(w) for w in weights]), 2, 1)
        flat = flat.reshape(layers * heads, -1)
        assert all(furthest(flat[i], flat[j]) > 1e-3 for i in range(len(flat)) for j in range(i))
    padding = np.broadcast_to((CONFIG.source_pad_id == SOURCE)[:, None, None, :], (3, heads, 5, 7))
    future = np.triu(np.ones((5, 5), bool), 1) | (CONFIG.target_pad_id == TARGET)[:, None, None, :]
    for cross, own in zip(attention.cross, attention.decoder, strict=True):
        assert (np.asarray(cross)[padding] == 0).all() and (np.asarray(cross)[~padding] > 0).all()
        assert (np.asarray(own)[np.broadcast_to(future, own.shape)] == 0).all()


def test_encode_equals_the_memory_of_a_call(model, monkeypatch):
    seen = []

    def spy(self, x, context, *rest, **options):
        seen.append(context.memory)
        return stacks.Stack.__call__(self, x, context, *rest, **options)

    monkeypatch.setattr(stacks.Decoder, "__call__", spy)
    for rngs in (None, jax.random.key(3)):
        model(SOURCE, TARGET, rngs=rngs)
        memory = model.encode(SOURCE, rngs=rngs)
        assert memory.shape == (3, 7, CONFIG.d_model) and furthest(memory, seen.pop()) == 0


# Randomness


def test_a_call_without_rngs_is_deterministic(model):
    logits, key = model(SOURCE, TARGET), jax.random.key(1)
    assert furthest(model(SOURCE, TARGET), logits) == 0
    dropped = model(SOURCE, TARGET, rngs=key)
    assert furthest(dropped, logits) > 1e-3
    assert furthest(model(SOURCE, TARGET, rngs=key), dropped) == 0
    assert furthest(model(SOURCE, TARGET, rngs=jax.random.fold_in(key, 1)), dropped) > 1e-3
    rngs = nnx.Rngs(dropout=5)
    first, second = model(SOURCE, TARGET, rngs=rngs), model(SOURCE, TARGET, rngs=rngs)
    assert furthest(first, second) > 1e-3  # the stream advances
    assert furthest(first, model(SOURCE, TARGET, rngs=nnx.Rngs(dropout=5).dropout())) == 0


# Ids of other types; test_inputs.py has what is refused


def test_ids_of_any_integer_type_and_library_give_the_same(model):
    logits = model(SOURCE, TARGET)
    for convert in (lambda ids: ids.astype(np.int8), lambda ids: jnp.asarray(ids, jnp.int32)):
        assert furthest(model(convert(SOURCE), convert(TARGET)), logits) == 0
    with unchecked():
        assert furthest(model(SOURCE.astype(np.uint16), TARGET.astype(np.uint8)), logits) == 0
        assert furthest(model(list(SOURCE), TARGET.tolist()), logits) == 0


# Arrays and their dtypes

LEARNED = {f"{stack}.positions": "learned" for stack in ("encoder", "decoder")}


def test_arithmetic_is_in_the_dtype_of_the_parameters_unless_configured():
    ids = SOURCE[:, :5]
    random = random_arrays(CONFIG, dtype="bfloat16")

    def in_dtype(dtype: str, config: jt.TransformerConfig = CONFIG) -> transformer.Transformer:
        arrays = {name: jnp.asarray(array).astype(dtype) for name, array in random.items()}
        return transformer.unflatten(config, arrays)

    half = in_dtype("bfloat16")
    logits, attention = half(ids, ids, return_attention=True)
    weights = [each for kind in attention for each in kind]
    assert {str(x.dtype) for x in (logits, half.encode(ids), *weights)} == {"bfloat16"}
    for dtype in ("bfloat16", "float64"):
        computed = in_dtype("float32", tiny(compute_dtype=dtype))(ids, ids)
        assert computed.dtype == dtype and furthest(computed, in_dtype(dtype)(ids, ids)) == 0
    exact = in_dtype("float64")(ids, ids)
    assert 1e-3 < furthest(logits, exact) < 0.3  # bfloat16 everywhere: only its rounding shows


def test_flatten_and_unflatten_are_inverse(model):
    arrays = transformer.flatten(model)
    assert "encoder.blocks.0.self_attention.query.kernel" in arrays
    assert "decoder.blocks.1.residuals.2.norm.bias" in arrays
    again = transformer.unflatten(CONFIG, arrays)
    same = transformer.flatten(again)
    assert same.keys() == arrays.keys() and all(same[name] is x for name, x in arrays.items())
    for kind in (nnx.Param, Frozen):
        assert transformer.flatten(again, kind).keys() == transformer.flatten(model, kind).keys()
    odd = {name.replace("output.bias", "output.offset"): array for name, array in arrays.items()}
    message = r"^these arrays do not fit the configuration: output.bias, output.offset$"
    with pytest.raises(ConfigError, match=message):
        transformer.unflatten(CONFIG, odd)
    for one in ({}, arrays | {"more": arrays["output.bias"]}):
        wrong = "more" if one else "decoder.blocks.0.cross_attention.key.bias, "
        with pytest.raises(ConfigError, match=f"do not fit the configuration: {wrong}"):
            transformer.unflatten(CONFIG, one)


@pytest.mark.parametrize("name", ["deep_dive", "part2_encoder", "t5", "whisper_tiny"])
def test_shapes_of_many_layers_are_those_of_the_model_in_its_order(name, monkeypatch):
    config, kinds = tiny(name, encoder_layers=11, decoder_layers=3), (nnx.Variable, Frozen)
    expected = [[*transformer.shapes(config, of=kind).items()] for kind in kinds]
    monkeypatch.setattr(transformer, "_MANY_LAYERS", 13)
    assert [[*transformer.shapes(config, of=kind).items()] for kind in kinds] == expected


def test_abstract_shapes_equal_a_model_s_and_are_not_shared_between_callers():
    config = tiny("deep_dive", num_layers=1)
    real, first = jt.Transformer(config, rngs=nnx.Rngs(0)), transformer.abstract(config)
    shapes = [
        {name: (leaf.shape, leaf.dtype) for name, leaf in transformer.flatten(model).items()}
        for model in (real, first)
    ]
    assert shapes[0] == shapes[1] and nnx.graphdef(real) == nnx.graphdef(first)
    kernel = first.encoder.blocks[0].self_attention.query.kernel
    kernel.set_value(jax.ShapeDtypeStruct((1,), jnp.float16))
    again, model = (
        each.encoder.blocks[0].self_attention.query.kernel.get_value().shape
        for each in (transformer.abstract(config), real)
    )
    assert again == model == (12, model[1])


def test_stored_positions_are_frozen(model):
    frozen = {"encoder.positions.table", "decoder.positions.table"}
    parameters = transformer.flatten(model, nnx.Param).keys()
    assert transformer.flatten(model, Frozen).keys() == frozen and not parameters & frozen
    assert parameters | frozen == transformer.flatten(model).keys()
    for config, expected in ((tiny(**LEARNED), frozen), (tiny("vaswani2017_base"), set())):
        variables = helpers.skeleton(config)[1]
        assert {name for name in variables if "positions" in name} == expected
        assert all(type(variable) is nnx.Param for _, variable in variables.values())
