"""A configuration goes to JSON and back unchanged, refuses what it does not know, and checks itself with the numbers in the message."""

import dataclasses
import json
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_transformer as jt
from jax_transformer import presets
from jax_transformer.config import Activation, Branch, Init, Layout, Mask, NormPlacement, Part, Positions, Residual, StackConfig, Tying
from jax_transformer.errors import ConfigError
from parity_tests.unit import helpers

LESSON10 = jt.preset("lesson10")
NAMES = ["lesson10", "lesson10_repaired", "vaswani2017_base", "small"]


def typed(value):
    """The value with every type spelled out: a StrEnum equals its string and a list its tuple's JSON, which ``==`` would let pass."""
    if dataclasses.is_dataclass(value):
        return type(value), [typed(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return type(value), [typed(item) for item in value] if isinstance(value, tuple) else value


def one_of(kind):
    return st.sampled_from(list(kind))


rates = st.floats(0, 1, exclude_max=True)


def random_branches(draw, parts: list[Part], residuals: list[Residual]):
    chosen = draw(st.permutations(parts))
    groups = [chosen[:1], chosen[1:]] if draw(st.booleans()) else [[part] for part in chosen]
    return tuple(Branch(tuple(group), draw(one_of(residuals)), draw(st.none() | rates)) for group in groups)


def random_config(draw):
    """Built outside of hypothesis' strategies: the type checker that the tests run under draws random numbers of its own."""
    heads, vocab = draw(st.integers(1, 9)), draw(st.integers(4, 10**6))
    stacks = {
        "encoder": ([Part.SELF, Part.FFN], [Residual.INPUT], [Mask.SOURCE_PADDING], []),
        "decoder": ([Part.SELF, Part.CROSS, Part.FFN], list(Residual), [Mask.TARGET_PADDING, Mask.CAUSAL], [Mask.SOURCE_PADDING]),
    }
    made = {
        name: StackConfig(
            draw(st.integers(1, 99)),
            random_branches(draw, parts, residuals),
            draw(one_of(Positions)),
            draw(one_of(Activation)),
            draw(st.booleans()),
            tuple(draw(st.permutations(self_mask))[: draw(st.integers(0, len(self_mask)))]),
            tuple(cross_mask[: draw(st.integers(0, 1))]),
        )
        for name, (parts, residuals, self_mask, cross_mask) in stacks.items()
    }
    free = ("score_scale", "embedding_scale", "dropout_site", "dropout_masks", "norm_placement", "init", "layout", "tying")
    enums = {field.name: draw(one_of(type(field.default))) for field in dataclasses.fields(LESSON10) if field.name in free}
    numbers = {name: draw(rates) for name in ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout")}
    numbers |= {name: draw(st.booleans()) for name in ("bias", "output_bias")}
    return jt.TransformerConfig(
        source_vocab_size=vocab,
        target_vocab_size=vocab,
        d_model=2 * heads * draw(st.integers(1, 9)),
        num_heads=heads,
        d_ff=draw(st.integers(1, 10**12)),
        max_length=draw(st.integers(1, 10**6)),
        **made,
        **enums,
        **numbers,
        head_dim=draw(st.none() | st.integers(1, 99)),
        norm_epsilon=draw(st.floats(0, 1, exclude_min=True)),
        compute_dtype=draw(st.none() | st.sampled_from(["bfloat16", "float16", "float32", "float64"])),
        source_pad_id=draw(st.integers(0, 3)),
        target_pad_id=draw(st.integers(0, 1)),
        bos_id=draw(st.integers(0, 3)),
        eos_id=draw(st.integers(2, 3)),
    )


def round_trip(config):
    text = config.to_json()
    back = jt.TransformerConfig.from_json(text)
    assert back == config and typed(back) == typed(config) and hash(back) == hash(config)
    assert back.to_json() == text


@pytest.mark.parametrize("name", NAMES)
def test_presets_make_the_round_trip_through_json(name):
    round_trip(jt.preset(name))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.data())
def test_any_configuration_makes_the_round_trip_through_json(data):
    round_trip(random_config(data.draw))


def test_json_is_plain_and_complete():
    data = json.loads(LESSON10.to_json())
    assert list(data) == [field.name for field in dataclasses.fields(LESSON10)]
    assert data["decoder"]["self_mask"] == ["target_padding", "causal"] and data["norm_placement"] == "post" and data["head_dim"] is None
    assert type(jt.TransformerConfig.from_json(json.dumps(data | {"dropout": 0})).dropout) is float  # other writers write 0.0 as 0


def edited(path: str, value) -> str:
    """lesson10's JSON with one place changed, or removed where the value is ``...``."""
    data = json.loads(LESSON10.to_json())
    *owners, leaf = [int(key) if key.isdigit() else key for key in path.split("/")]
    owner = data
    for key in owners:
        owner = owner[key]
    if value is ...:
        del owner[leaf]
    else:
        owner[leaf] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("d_modle", 8, "unknown key 'd_modle' (did you mean 'd_model'?)"),
        ("zzz", 8, "unknown key 'zzz'"),
        ("encoder/layer", 8, "unknown key 'encoder.layer' (did you mean 'layers'?)"),
        ("decoder/branches/1/residuals", "input", "unknown key 'decoder.branches[1].residuals' (did you mean 'residual'?)"),
        ("d_model", ..., "missing key 'd_model'"),
        ("decoder/layers", ..., "missing key 'decoder.layers'"),
        ("encoder/branches/0/parts", ..., "missing key 'encoder.branches[0].parts'"),
        ("d_model", "512", "d_model must be int, not '512'"),
        ("d_model", 512.0, "d_model must be int, not 512.0"),
        ("d_model", True, "d_model must be int, not True"),
        ("d_model", None, "d_model must be int, not None"),
        ("head_dim", "64", "head_dim must be int, not '64'"),
        ("dropout", "0.1", "dropout must be float, not '0.1'"),
        ("bias", 1, "bias must be bool, not 1"),
        ("compute_dtype", 16, "compute_dtype must be str, not 16"),
        ("encoder", [], "encoder must be an object, not list"),
        ("encoder/layers", "6", "encoder.layers must be int, not '6'"),
        ("encoder/branches", {}, "encoder.branches must be a list, not {}"),
        ("decoder/branches/2", "ffn", "decoder.branches[2] must be an object, not str"),
        ("encoder/self_mask", "causal", "encoder.self_mask must be a list, not 'causal'"),
        ("norm_placement", "pre-norm", "norm_placement='pre-norm' is not one of post, pre (did you mean 'pre'?)"),
        ("norm_placement", "PRE", "norm_placement='PRE' is not one of post, pre"),
        ("norm_placement", ["pre"], "norm_placement=['pre'] is not one of post, pre (did you mean 'pre'?)"),
        ("encoder/activation", "geluu", "encoder.activation='geluu' is not one of relu, gelu, gelu_tanh (did you mean 'gelu'?)"),
        (
            "decoder/branches/0/parts/0",
            "self_atention",
            "decoder.branches[0].parts[0]='self_atention' is not one of self_attention, cross_attention, feed_forward"
            " (did you mean 'self_attention'?)",
        ),
    ],
)
def test_json_is_refused_by_the_dotted_name_of_the_key(path, value, message):
    with pytest.raises(ConfigError) as error:
        jt.TransformerConfig.from_json(edited(path, value))
    assert str(error.value) == message


def test_all_missing_keys_are_named_at_once_and_other_text_is_refused():
    with pytest.raises(ConfigError, match=r"^missing key 'source_vocab_size', 'target_vocab_size', 'd_model', 'num_heads', 'd_ff'"):
        jt.TransformerConfig.from_json("{}")
    with pytest.raises(ConfigError, match=r"^the configuration must be an object, not list$"):
        jt.TransformerConfig.from_json("[]")
    with pytest.raises(ConfigError, match=r"^not JSON: .*line 1 column 2"):
        jt.TransformerConfig.from_json("{d_model: 3}")


CROSS_ONLY, NO_CROSS = (Branch((Part.CROSS,)),), (Branch((Part.SELF,)),)
INVALID = [
    (dict(source_vocab_size=0), "source_vocab_size=0 must be at least 1"),
    (dict(target_vocab_size=-3), "target_vocab_size=-3 must be at least 1"),
    (dict(num_heads=0), "num_heads=0 must be at least 1"),
    (dict(d_ff=-1), "d_ff=-1 must be at least 1"),
    (dict(max_length=0), "max_length=0 must be at least 1"),
    (dict(head_dim=0), "head_dim=0 must be at least 1"),
    (dict(encoder=dataclasses.replace(LESSON10.encoder, layers=0)), "encoder.layers=0 must be at least 1"),
    (dict(decoder=dataclasses.replace(LESSON10.decoder, layers=-2)), "decoder.layers=-2 must be at least 1"),
    (dict(d_model=500), "d_model=500 is not divisible by num_heads=8"),
    (dict(d_model=513, num_heads=27), "d_model=513 is odd; sinusoidal positions come in pairs"),
    (dict(tying=Tying.ALL, source_vocab_size=7), "tying='all' needs one vocabulary: source_vocab_size=7, target_vocab_size=10000"),
    (dict(compute_dtype="fp16"), "compute_dtype='fp16' is not one of bfloat16, float16, float32, float64"),
    (dict(dropout=1.0), "dropout=1.0 must be at least 0 and below 1"),
    (dict(attention_dropout=-0.1), "attention_dropout=-0.1 must be at least 0 and below 1"),
    (dict(activation_dropout=2.0), "activation_dropout=2.0 must be at least 0 and below 1"),
    (dict(embedding_dropout=float("nan")), "embedding_dropout=nan must be at least 0 and below 1"),
    (
        dict(decoder=dataclasses.replace(LESSON10.decoder, branches=(*NO_CROSS, Branch((Part.CROSS,), dropout=1.5)))),
        "decoder.branches[1].dropout=1.5 must be at least 0 and below 1",
    ),
    (dict(norm_epsilon=0.0), "norm_epsilon=0.0 must be above 0"),
    (dict(norm_epsilon=float("nan")), "norm_epsilon=nan must be above 0"),
    (dict(source_pad_id=10_000), "source_pad_id=10000 is outside the vocabulary of 10000"),
    (dict(target_pad_id=-1), "target_pad_id=-1 is outside the vocabulary of 10000"),
    (dict(bos_id=5, target_vocab_size=5), "bos_id=5 is outside the vocabulary of 5"),
    (dict(eos_id=-7), "eos_id=-7 is outside the vocabulary of 10000"),
    (dict(eos_id=1), "target_pad_id and eos_id are both 1"),
    (
        dict(encoder=dataclasses.replace(LESSON10.encoder, branches=())),
        "encoder.branches: every block needs a branch, and every branch a part",
    ),
    (
        dict(decoder=dataclasses.replace(LESSON10.decoder, branches=(*CROSS_ONLY, Branch(())))),
        "decoder.branches: every block needs a branch, and every branch a part",
    ),
    (
        dict(encoder=dataclasses.replace(LESSON10.encoder, branches=CROSS_ONLY)),
        "encoder.branches: cross_attention belongs in every decoder block and in no encoder block",
    ),
    (
        dict(decoder=dataclasses.replace(LESSON10.decoder, branches=NO_CROSS)),
        "decoder.branches: cross_attention belongs in every decoder block and in no encoder block",
    ),
    (
        dict(encoder=dataclasses.replace(LESSON10.encoder, branches=(Branch((Part.FFN,), Residual.MEMORY),))),
        "encoder.branches: the residual 'memory' is the encoder's output and belongs in the decoder",
    ),
    (
        dict(encoder=dataclasses.replace(LESSON10.encoder, self_mask=(Mask.CAUSAL,))),
        "encoder.self_mask: 'causal' has no meaning there (it knows source_padding)",
    ),
    (
        dict(encoder=dataclasses.replace(LESSON10.encoder, cross_mask=(Mask.SOURCE_PADDING,))),
        "encoder.cross_mask: 'source_padding' has no meaning there (it knows none)",
    ),
    (
        dict(decoder=dataclasses.replace(LESSON10.decoder, self_mask=(Mask.SOURCE_PADDING,))),
        "decoder.self_mask: 'source_padding' has no meaning there (it knows causal, target_padding)",
    ),
    (
        dict(decoder=dataclasses.replace(LESSON10.decoder, cross_mask=(Mask.CAUSAL,))),
        "decoder.cross_mask: 'causal' has no meaning there (it knows source_padding)",
    ),
]


@pytest.mark.parametrize(("changes", "message"), INVALID, ids=[message[:40] for _, message in INVALID])
def test_every_check_says_the_numbers(changes, message):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(LESSON10, **changes)
    assert str(error.value) == message


def test_sizes_that_the_checks_must_let_pass():
    assert jt.preset("lesson10", d_model=500, head_dim=7).head_width == 7
    none = {"encoder.positions": "none", "decoder.positions": "learned"}
    assert jt.preset("lesson10", d_model=27, num_heads=9, **none).head_width == 3


def test_with_sizes_knows_its_shorthands():
    both = LESSON10.with_sizes(num_layers=3)
    assert (both.encoder.layers, both.decoder.layers) == (3, 3)
    one = LESSON10.with_sizes(encoder_layers=2)
    assert (one.encoder.layers, one.decoder.layers) == (2, 6) and one == LESSON10.with_sizes(**{"encoder.layers": 2})
    two = LESSON10.with_sizes(decoder_layers=2)
    assert (two.encoder.layers, two.decoder.layers) == (6, 2)
    vocab = LESSON10.with_sizes(vocab_size=77)
    assert (vocab.source_vocab_size, vocab.target_vocab_size) == (77, 77)
    pads = LESSON10.with_sizes(pad_id=0)
    assert (pads.source_pad_id, pads.target_pad_id, LESSON10.source_pad_id) == (0, 0, 1)
    gelu = LESSON10.with_sizes(**{"encoder.activation": "gelu"}, norm_placement="pre", dropout=0)
    assert typed(gelu.encoder.activation) == (Activation, Activation.GELU) and gelu.decoder.activation is Activation.RELU
    assert gelu.norm_placement is NormPlacement.PRE and gelu.with_sizes() == gelu
    assert dataclasses.replace(gelu, norm_placement=NormPlacement.POST, dropout=0.1, encoder=LESSON10.encoder) == LESSON10
    stack = dataclasses.replace(LESSON10.encoder, branches=(Branch((Part.FFN,)),))
    assert LESSON10.with_sizes(encoder=stack).encoder == stack
    with pytest.raises(ConfigError, match=r"^d_model=9 is not divisible by num_heads=8$"):
        LESSON10.with_sizes(d_model=9)
    with pytest.raises(ConfigError, match=r"^encoder.layers must be int, not '3'$"):
        LESSON10.with_sizes(num_layers="3")


def test_with_sizes_takes_what_python_has_for_these_fields():
    assert LESSON10.with_sizes(d_model=np.int64(16)) == LESSON10.with_sizes(d_model=16)
    branches = (Branch((Part.FFN,)), Branch((Part.SELF,)))
    assert LESSON10.with_sizes(**{"encoder.branches": branches}).encoder.branches == branches


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("leson10", {}, "unknown preset 'leson10' (did you mean 'lesson10'?); known: lesson10, lesson10_repaired"),
        ("bert", {}, "unknown preset 'bert'; known: lesson10"),
        ("lesson10", dict(d_modle=8), "unknown configuration field 'd_modle' (did you mean 'd_model'?)"),
        ("lesson10", dict(layers=8), "unknown configuration field 'layers' (did you mean 'num_layers'?)"),
        ("lesson10", {"encoder.activaton": "relu"}, "unknown configuration field 'encoder.activaton' (did you mean 'encoder.activation'?)"),
        ("lesson10", dict(qqq=8), "unknown configuration field 'qqq'"),
    ],
)
def test_preset_refuses_unknown_names_with_the_nearest(name, sizes, message):
    with pytest.raises(ConfigError) as error:
        jt.preset(name, **sizes)
    assert str(error.value).startswith(message) and (str(error.value) == message or "known:" in message)


def test_presets_are_values():
    assert set(NAMES) <= set(jt.preset_names())
    configs = [jt.preset(name) for name in jt.preset_names()]
    assert len(set(configs)) == len(configs) and {jt.preset("small"): 1}[jt.preset("small")] == 1
    assert all(entry.source for entry in presets.PRESETS.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        configs[0].d_model = 3


def test_the_paper_s_base_model_has_63_million_parameters():
    assert sum(map(math.prod, helpers.shapes(jt.preset("vaswani2017_base", vocab_size=37_000)).values())) == 63_082_496


def test_lesson10_has_the_document_s_numbers():
    numbers = (LESSON10.source_vocab_size, LESSON10.target_vocab_size, LESSON10.d_model, LESSON10.num_heads, LESSON10.d_ff)
    assert numbers == (10_000, 10_000, 512, 8, 2048)
    assert (LESSON10.encoder.layers, LESSON10.decoder.layers, LESSON10.max_length) == (6, 6, 100)
    assert (LESSON10.source_pad_id, LESSON10.target_pad_id, LESSON10.dropout) == (1, 1, 0.1)
    assert (LESSON10.layout, LESSON10.init, LESSON10.norm_placement) == (Layout.LESSON10, Init.TORCH_TRANSFORMER, NormPlacement.POST)
    assert LESSON10.decoder.cross_mask == () and jt.preset("lesson10_repaired").decoder.cross_mask == (Mask.SOURCE_PADDING,)
    assert dataclasses.replace(LESSON10, decoder=jt.preset("lesson10_repaired").decoder) == jt.preset("lesson10_repaired")
