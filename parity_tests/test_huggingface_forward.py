"""Every hidden state, attention and logit of the families, in float64 and in float32."""

import functools
import importlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_transformer as jt
from jax_transformer.architectures import huggingface, t5, twins
from jax_transformer.config import AttentionSpan, EmbeddingNormOf
from jax_transformer.convert import conversion
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.nn.embeddings import RelativeBias, relative_buckets
from jax_transformer.weights import torch_bridge
from parity_tests.huggingface import (
    CASES,
    PARAMETERS,
    REPEATED,
    Pair,
    batch,
    exact_positions,
    inputs,
    pair,
)
from parity_tests.levels import assert_close, error
from parity_tests.marks import quick_if

BOUNDS = {"float64": 1e-12, "float32": 1e-5}
POSITIONS = ("marian", "bart", "m2m_100", "fsmt")  # one family for each kind of position table
DISTANCES = tuple(
    name for name, family in huggingface.families().items() if isinstance(family, t5.T5Family)
)


@functools.lru_cache(maxsize=2)
def model_pair(name: str, dtype: str) -> Pair:
    both = pair(name, dtype=getattr(torch, dtype))
    return exact_positions(both) if dtype == "float64" else both


def theirs(both: Pair, source: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
    """Return transformers' outputs: stacks' inputs, blocks' outputs, attention weights."""
    arguments = inputs(both.config, source) | {"decoder_input_ids": torch.from_numpy(target)}
    with torch.no_grad():
        out = both.theirs(**arguments, output_hidden_states=True, output_attentions=True)
    named = {
        "encoder hidden": out.encoder_hidden_states,
        "decoder hidden": out.decoder_hidden_states,
        "encoder attention": out.encoder_attentions,
        "decoder attention": out.decoder_attentions,
        "cross attention": out.cross_attentions,
    }
    outputs = {f"{kind} {i}": x for kind, each in named.items() for i, x in enumerate(each)}
    arrays = {name: value.numpy() for name, value in (outputs | {"logits": out.logits}).items()}
    return {name: without_padding(both, source, name, value) for name, value in arrays.items()}


def without_padding(both: Pair, source: np.ndarray, name: str, value: np.ndarray) -> np.ndarray:
    """Return an output of an encoder with local attention with zeros at padding, which nothing
    reads: transformers attends to all of the window there, and we to nothing. Weights by blocks
    (b, n, h, q, k) become weights by queries. Other outputs are unchanged.
    """
    full = both.config.encoder.attention_span is AttentionSpan.FULL
    if full or not name.startswith("encoder"):
        return value
    valid = source != both.config.source_pad_id
    if value.ndim == 5:
        value = np.moveaxis(value, 1, 2).reshape(len(value), value.shape[2], -1, value.shape[-1])
        value = value[:, :, : source.shape[1]]
    keep = valid[..., None] if value.ndim == 3 else valid[:, None, :, None]
    return np.where(keep, value, 0)


def ours(both: Pair, source: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of the Flax model, under the same names."""
    capture = nnx.capture(both.ours, nnx.Intermediate, method_outputs=nnx.Intermediate)
    (logits, attention), captured = capture(source, target, return_attention=True)
    leaves = nnx.to_flat_state(captured)
    inner = {".".join(map(str, path)): leaf.get_value() for path, leaf in leaves}
    outputs = {"logits": logits}
    for number, stack in enumerate(("encoder", "decoder")):
        layers, relative = getattr(both.config, stack).layers, both.config.architecture in DISTANCES
        last = ["embedding_norm", "positions"]
        if getattr(both.config, stack).embedding_norm_of is EmbeddingNormOf.TOKENS:
            last.reverse()
        calls = [f"{stack}.{module}.__call__" for module in last]
        begins = [inner[name][0] for name in calls if name in inner]
        blocks = [inner[f"{stack}.blocks.{i}.__call__"][0].x for i in range(layers)]
        blocks[-1] = inner.get(f"{stack}.final_norm.__call__", blocks[-1:])[0]
        states = [inner["target_embedding.__call__"][number] if relative else begins[0], *blocks]
        outputs |= {f"{stack} hidden {i}": x for i, x in enumerate(states)}
    for kind, weights in zip(("encoder", "decoder", "cross"), attention, strict=True):
        outputs |= {f"{kind} attention {i}": w for i, w in enumerate(weights)}
    arrays = {name: np.asarray(value) for name, value in outputs.items()}
    return {name: without_padding(both, source, name, value) for name, value in arrays.items()}


# float64 tests the algorithm of every family, float32 two in the suite (only M2M100 has its own
# position table), and all under `-m slow`
QUICK = {"float64": set(CASES) - set(REPEATED), "float32": {"m2m_100", "t5"}}
RUN = [quick_if(name in QUICK[dtype], name, dtype) for dtype in BOUNDS for name in CASES]


@pytest.mark.proves("logits")
@pytest.mark.parametrize(("name", "dtype"), RUN)
def test_every_hidden_state_attention_and_logit(name: str, dtype: str, request):
    if dtype == "float64":
        request.getfixturevalue("in_float64")
    both = model_pair(name, dtype)
    source, target = batch(both.config)
    reference, actual = theirs(both, source, target), ours(both, source, target)
    layers = both.config.encoder.layers, both.config.decoder.layers
    assert actual.keys() == reference.keys()
    assert len(actual) == 1 + (layers[0] + 1) + (layers[1] + 1) + layers[0] + 2 * layers[1]
    for key, value in reference.items():
        assert actual[key].dtype == value.dtype == np.dtype(dtype), key
        assert_close((actual[key], value), BOUNDS[dtype], key)


@pytest.mark.proves("logits")
@pytest.mark.parametrize(
    ("name", "length"),
    [quick_if(n == 33 or name == "fsmt", name, n) for name in POSITIONS for n in (1, 33)],
)
def test_every_length_up_to_the_end_of_the_position_tables_agrees(
    name: str, length: int, in_float64
):
    both = model_pair(name, "float64")
    assert both.config.longest == 33
    source, target = batch(both.config, rows=2, source=length, target=length)
    assert_close((both.ours(source, target), both.logits(source, target)), 1e-12)
    with pytest.raises(InputError, match="34 tokens long, over max_length=33"):
        both.ours(*batch(both.config, source=34, target=1))


@pytest.mark.proves("logits")
@pytest.mark.parametrize("name", ["t5", "umt5", "longt5 global"])
def test_distances_far_beyond_the_last_bucket_agree(name: str, in_float64):
    both = model_pair(name, "float64")
    source, target = batch(both.config, rows=2, source=70, target=60)
    assert both.config.encoder.relative_max_distance < 20
    assert_close((both.ours(source, target), both.logits(source, target)), 1e-12)


@pytest.mark.parametrize("prefix", ["T5", "MT5", "UMT5"])
@pytest.mark.parametrize(
    "count, longest", [(32, 128), (8, 12), (8, 5), (14, 33), (64, 1000), (32, 100_000)]
)
def test_every_distance_up_to_100_000_has_the_same_bucket(prefix: str, count: int, longest: int):
    name = prefix.lower()
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    attention, distances = getattr(modeling, f"{prefix}Attention"), torch.arange(100_001)
    for directions in (1, 2):
        settings = {"bidirectional": directions == 2, "num_buckets": count, "max_distance": longest}
        if prefix == "UMT5":  # UMT5's is a method that reads these from its module
            own = types.SimpleNamespace(
                relative_attention_num_buckets=count,
                relative_attention_max_distance=longest,
                is_decoder=directions == 1,
            )
            expected = attention._relative_position_bucket(own, -distances)
        else:
            expected = attention._relative_position_bucket(-distances, **settings)
        known = relative_buckets(longest + 1, count // directions, longest)  # the model's table
        actual = known[np.minimum(distances.numpy(), longest)]
        np.testing.assert_array_equal(actual, expected.numpy())


def test_the_last_bucket_begins_at_the_longest_distance():
    module: Any = types.SimpleNamespace(max_distance=5, directions=1, dtype=None)
    module.embedding = jnp.arange(8.0)[:, None]  # so the bias is the bucket
    bias = RelativeBias.of_distances(module, -jnp.arange(8)[None, None])
    assert bias.ravel().tolist() == [0, 1, 2, 3, 4, 7, 7, 7]


@pytest.mark.slow
def test_the_comparison_detects_each_family_s_own_numbers(in_float64):
    """Negative controls: faults of earlier ports far exceed the bounds."""
    faults = {
        "marian": (
            {"encoder.sinusoids": "interleaved"},
            {"embedding_scale": "none"},
            {"encoder.activation": "relu"},
        ),
        "bart": ({"norm_epsilon": 1e-6}, {"encoder.activation": "gelu_tanh"}),
        "m2m_100": ({"decoder.position_index": "order"}, {"decoder.sinusoids": "halves"}),
        "t5": (
            {"logit_scale": "none"},
            {"score_scale": "head_dim"},
            {"encoder.relative_max_distance": 13},
            {"norm_epsilon": 1e-5},
        ),
        "longt5 global": ({"encoder.local_radius": 5},),
    }
    for name, changes in faults.items():
        both = model_pair(name, "float64")
        source, target = batch(both.config)
        logits = both.logits(source, target)
        assert error((both.ours(source, target), logits)) < 1e-12
        for change in changes:
            if "encoder.sinusoids" in change:
                change |= {"encoder.positions": "sinusoidal", "decoder.positions": "sinusoidal"}
            wrong = _with(both, change)
            assert error((wrong(source, target), logits)) > 1e-7, (name, change)


def _with(both: Pair, changes: dict) -> jt.Transformer:
    config = both.config.with_sizes(**changes)
    arrays = jt.transformer.flatten(both.ours)
    shapes = jt.transformer.flatten(jt.transformer.abstract(config))
    return jt.transformer.unflatten(config, {name: arrays[name] for name in shapes})


def test_sixteen_bit_models_compute_in_sixteen_bits():
    """NumPy has no bfloat16 of its own: the bits are passed, and come back unchanged."""
    theirs, config, model = pair("t5 v1.1", dtype=torch.bfloat16)
    assert {value.dtype.name for value in jax.tree.leaves(nnx.state(model))} == {"bfloat16"}
    back = jt.convert.to_torch(model)
    for name, tensor in theirs.state_dict().items():
        bits = torch_bridge.to_tensor(back[name]).view(torch.int16)
        assert torch.equal(bits, tensor.view(torch.int16)), name
    source, target = batch(config)
    assert model(source, target).dtype.name == "bfloat16"


@pytest.mark.parametrize("name", PARAMETERS)
def test_transformers_own_class_is_the_twin(name: str, monkeypatch):
    """The optimizer's order of parameters is the module's, without frozen positions."""
    both = model_pair(name, "float64")
    twin = twins.twin(both.config)
    assert sorted(twin.state_dict()) == sorted(both.theirs.state_dict())
    assert type(twin).__name__ == type(both.theirs).__name__
    trained = [name for name, p in both.theirs.named_parameters() if p.requires_grad]
    assert twins.parameter_names(both.config) == trained
    source, target = batch(both.config)
    state = {key: value.numpy() for key, value in both.theirs.state_dict().items()}
    table = jt.convert.weight_table(both.config)
    rates = dict.fromkeys(("activation_dropout", "encoder.attention_dropout"), 0.3)
    dropping = both.config.with_sizes(**rates)  # transformers' modules have fewer rates
    outputs = twins.outputs(dropping, state, source, target, conversion._blocks(both.config, table))
    assert len(outputs) == 1 + both.config.encoder.layers + both.config.decoder.layers
    assert_close((both.ours(source, target), outputs["logits"]), 1e-12)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("embedding_dropout", 0.05), ("embedding_dropout", 0.2), ("encoder.attention_dropout", 0.1)],
)
def test_a_rate_that_a_module_of_transformers_does_not_have_is_refused(name: str, rate: float):
    with pytest.raises(ConfigError, match=rf"^{name}.* has one rate, dropout=0\.1$"):
        twins.twin(jt.preset("bart", **{name: rate}))
