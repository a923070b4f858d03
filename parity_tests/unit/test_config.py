"""A configuration goes to JSON and back unchanged, refuses what it does not know, and checks itself with the numbers in the message."""

import dataclasses
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_transformer as jt
from jax_transformer import presets
from jax_transformer.config import (
    Activation,
    Branch,
    HeadMerge,
    Init,
    Layout,
    Mask,
    Mixing,
    NormPlacement,
    Part,
    PositionIndex,
    Positions,
    PositionsAt,
    Residual,
    Sinusoids,
    StackConfig,
    Tying,
)
from jax_transformer.config.model import position_row
from jax_transformer.errors import ConfigError

LESSON10 = jt.preset("lesson10")
NAMES = jt.preset_names()
DOCUMENTS = ["deep_dive", "lesson10", "from_scratch", "part2_encoder", "blog2023"]


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
            branches := random_branches(draw, parts, residuals),
            idle=tuple(Branch((part,)) for part in draw(st.lists(one_of(Part), max_size=2))),
            positions=draw(one_of(Positions)),
            positions_at=draw(one_of(PositionsAt)) if any(Part.FFN in branch.parts for branch in branches) else PositionsAt.EMBEDDING,
            position_index=draw(one_of(PositionIndex)),
            position_exponent=draw(st.floats(0, 3, exclude_min=True)),
            activation=draw(one_of(Activation)),
            mixing=draw(one_of(Mixing)),
            head_merge=draw(one_of(HeadMerge)),
            attention_dropout=draw(st.none() | rates),
            init=draw(st.none() | one_of(Init)),
            final_norm=draw(st.booleans()),
            self_mask=tuple(draw(st.permutations(self_mask))[: draw(st.integers(0, len(self_mask)))]),
            cross_mask=tuple(cross_mask[: draw(st.integers(0, 1))]),
        )
        for name, (parts, residuals, self_mask, cross_mask) in stacks.items()
    }
    free = ("score_scale", "embedding_scale", "dropout_site", "dropout_masks", "norm_placement", "init", "layout", "tying", "mask_fill")
    enums = {field.name: draw(one_of(type(field.default))) for field in dataclasses.fields(LESSON10) if field.name in free}
    numbers = {name: draw(rates) for name in ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout")}
    numbers |= {name: draw(st.booleans()) for name in ("bias", "output_bias")}
    return jt.TransformerConfig(
        source_vocab_size=vocab,
        target_vocab_size=vocab,
        d_model=2 * heads * draw(st.integers(1, 9)),
        num_heads=heads,
        d_ff=draw(st.integers(1, 10**12)),
        max_length=draw(st.integers(2, 10**6)),
        **made,
        **enums,
        **numbers,
        head_dim=draw(st.none() | st.integers(1, 99)),
        attention_bias=draw(st.none() | st.booleans()),
        embedding_dropouts=draw(st.integers(1, 3)),
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
        ("encoder/activation", "geluu", "encoder.activation='geluu' is not one of relu, gelu, gelu_tanh, silu (did you mean 'gelu'?)"),
        ("decoder/mixing", "sum", "decoder.mixing='sum' is not one of weighted, summed (did you mean 'summed'?)"),
        ("encoder/head_merge", "rawr", "encoder.head_merge='rawr' is not one of concatenated, raw (did you mean 'raw'?)"),
        ("mask_fill", "exclude", "mask_fill='exclude' is not one of excluded, minus_infinity, minus_1e20 (did you mean 'excluded'?)"),
        ("encoder/positions_at", "ffn", "encoder.positions_at='ffn' is not one of embedding, feed_forward"),
        ("encoder/position_index", "rank", "encoder.position_index='rank' is not one of order, truncated_cosine, not_padding"),
        ("encoder/attention_dropout", "0.1", "encoder.attention_dropout must be float, not '0.1'"),
        ("encoder/init", "xavir", "encoder.init='xavir' is not one of torch, torch_transformer, xavier (did you mean 'xavier'?)"),
        ("attention_bias", 0, "attention_bias must be bool, not 0"),
        ("embedding_dropouts", 1.5, "embedding_dropouts must be int, not 1.5"),
        ("decoder/idle", [{"part": ["feed_forward"]}], "unknown key 'decoder.idle[0].part' (did you mean 'parts'?)"),
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


def stack(name: str, **changes) -> dict:
    """lesson10's encoder or decoder with fields changed."""
    return {name: dataclasses.replace(getattr(LESSON10, name), **changes)}


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
    (stack("encoder", attention_dropout=1.0), "encoder.attention_dropout=1.0 must be at least 0 and below 1"),
    (stack("decoder", attention_dropout=-0.5), "decoder.attention_dropout=-0.5 must be at least 0 and below 1"),
    (stack("decoder", attention_dropout=float("nan")), "decoder.attention_dropout=nan must be at least 0 and below 1"),
    (dict(embedding_dropouts=0), "embedding_dropouts=0 must be at least 1"),
    (dict(embedding_dropouts=-2), "embedding_dropouts=-2 must be at least 1"),
    *((stack(name, position_exponent=0.0), f"{name}.position_exponent=0.0 must be above 0 and finite") for name in ("encoder", "decoder")),
    (stack("encoder", position_exponent=-1.0), "encoder.position_exponent=-1.0 must be above 0 and finite"),
    (stack("encoder", position_exponent=float("nan")), "encoder.position_exponent=nan must be above 0 and finite"),
    (stack("decoder", position_exponent=float("inf")), "decoder.position_exponent=inf must be above 0 and finite"),
    *(
        (
            dict(max_length=1, **stack(name, position_index=PositionIndex.TRUNCATED_COSINE)),
            f"max_length=1 must be at least 2: {name}.position_index='truncated_cosine' reads row 1",
        )
        for name in ("encoder", "decoder")
    ),
    (stack("encoder", idle=(Branch((Part.SELF, Part.FFN)),)), "encoder.idle: an idle branch has one part"),
    (stack("decoder", idle=(Branch((Part.FFN,)), Branch(()))), "decoder.idle: an idle branch has one part"),
    (
        stack("encoder", positions_at=PositionsAt.FEED_FORWARD, branches=NO_CROSS),
        "encoder.positions_at='feed_forward': its blocks have no feed-forward",
    ),
    (
        stack("decoder", positions_at=PositionsAt.FEED_FORWARD, branches=CROSS_ONLY, idle=(Branch((Part.FFN,)),)),
        "decoder.positions_at='feed_forward': its blocks have no feed-forward",
    ),
    *(
        (stack(name, **{field: value}), f"{name}.{field}={value} must be at least {least}")
        for name, field, value, least in (("encoder", "num_heads", 0, 1), ("decoder", "d_ff", -1, 1), ("encoder", "position_offset", -1, 0))
    ),
    (stack("decoder", num_heads=7), "d_model=512 is not divisible by decoder.num_heads=7"),
    (
        stack("encoder", positions=Positions.RELATIVE, relative_buckets=7),
        "encoder.relative_buckets=7 must be a multiple of 2, at least 4",
    ),
    (stack("decoder", positions=Positions.RELATIVE, relative_buckets=1), "decoder.relative_buckets=1 must be a multiple of 1, at least 2"),
    (
        stack("decoder", positions=Positions.RELATIVE_PER_BLOCK, relative_max_distance=16),
        "decoder.relative_max_distance=16 must be over the 16 distances that have a bucket of their own",
    ),
    (
        stack("encoder", positions=Positions.RELATIVE, branches=(Branch((Part.FFN,)),)),
        "encoder.positions='relative': its blocks have no self-attention",
    ),
    (
        dict(d_model=2, num_heads=1, **stack("encoder", sinusoids=Sinusoids.TENSOR2TENSOR)),
        "d_model=2 must be at least 4: the first and the last of tensor2tensor's wavelengths differ",
    ),
    (
        dict(tying=Tying.EMBEDDINGS, target_vocab_size=7),
        "tying='embeddings' needs one vocabulary: source_vocab_size=10000, target_vocab_size=7",
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
        ("leson10", {}, f"unknown preset 'leson10' (did you mean 'lesson10'?); known: {', '.join(NAMES)}"),
        ("deepdive", {}, f"unknown preset 'deepdive' (did you mean 'deep_dive'?); known: {', '.join(NAMES)}"),
        ("bert", {}, f"unknown preset 'bert'; known: {', '.join(NAMES)}"),
        ("lesson10", dict(d_modle=8), "unknown configuration field 'd_modle' (did you mean 'd_model'?)"),
        ("lesson10", dict(layers=8), "unknown configuration field 'layers' (did you mean 'num_layers'?)"),
        ("lesson10", {"encoder.activaton": "relu"}, "unknown configuration field 'encoder.activaton' (did you mean 'encoder.activation'?)"),
        ("lesson10", dict(qqq=8), "unknown configuration field 'qqq'"),
        ("blog2023", dict(attn_bias=True), "unknown configuration field 'attn_bias' (did you mean 'attention_bias'?)"),
        ("deep_dive", {"decoder.idl": ()}, "unknown configuration field 'decoder.idl' (did you mean 'decoder.idle'?)"),
    ],
)
def test_preset_refuses_unknown_names_with_the_nearest(name, sizes, message):
    with pytest.raises(ConfigError) as error:
        jt.preset(name, **sizes)
    assert str(error.value) == message


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_takes_the_same_field_names(name):
    """A preset is no form of its own: any field of the configuration may be given to any of them, and a misspelt one to none."""
    changed = jt.preset(name, num_layers=1, vocab_size=97, **{"decoder.attention_dropout": 0.25, "encoder.activation": "gelu_tanh"})
    assert (changed.encoder.layers, changed.decoder.layers, changed.source_vocab_size, changed.target_vocab_size) == (1, 1, 97, 97)
    assert changed.decoder.attention_dropout == 0.25 and changed.encoder.activation is Activation.GELU_TANH
    with pytest.raises(ConfigError, match=r"^unknown configuration field 'd_modle' \(did you mean 'd_model'\?\)$"):
        jt.preset(name, d_modle=8)
    with pytest.raises(ConfigError, match=rf"^unknown preset '{name}x' \(did you mean '{name}'\?\)"):
        jt.preset(f"{name}x")


def test_presets_are_values():
    assert set(NAMES) <= set(jt.preset_names())
    configs = [jt.preset(name) for name in jt.preset_names()]
    assert len(set(configs)) == len(configs) and {jt.preset("small"): 1}[jt.preset("small")] == 1
    assert all(entry.source for entry in presets.PRESETS.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        configs[0].d_model = 3


# What follows from a configuration


def test_the_rule_of_positions_says_how_long_a_sequence_may_be():
    rows = [position_row(PositionIndex.TRUNCATED_COSINE, i) for i in range(101)]
    assert rows == [1] + 49 * [0] + [-1] + 49 * [0] + [1]
    assert [position_row(PositionIndex.ORDER, i) for i in (0, 7, 50)] == [0, 7, 50]
    deep = {length: jt.preset("deep_dive", max_length=length).longest for length in (2, 49, 50, 51, 100, 1000)}
    assert deep == {2: 2, 49: 49, 50: 50, 51: 50, 100: 50, 1000: 50}
    for name in NAMES:
        config = jt.preset(name)
        assert config.longest == (50 if name == "deep_dive" else config.max_length)
    for name in ("encoder", "decoder"):  # one stack is enough, and a table that is not there has no rows to lack
        one = LESSON10.with_sizes(**{f"{name}.position_index": "truncated_cosine"})
        assert one.longest == 50 and one.with_sizes(**{f"{name}.positions": "none"}).longest == 100


def test_sides_must_be_equally_long_where_the_memory_is_a_residual():
    assert [name for name in NAMES if jt.preset(name).equal_lengths] == ["blog2023"]
    branches = LESSON10.decoder.branches
    for k, branch in enumerate(branches):
        memory = dataclasses.replace(branch, residual=Residual.MEMORY)
        assert LESSON10.with_sizes(**{"decoder.branches": (*branches[:k], memory, *branches[k + 1 :])}).equal_lengths


UNCACHEABLE = [
    ({"decoder.self_mask": ()}, "its self-attention is not causal"),
    ({"decoder.self_mask": ("target_padding",)}, "its self-attention is not causal"),
    ({"decoder.mixing": "summed"}, "its self-attention sums the values of all tokens, those to come among them"),
    ({"decoder.head_merge": "raw"}, "its attention merges heads across positions"),
    ({"decoder.head_merge": "raw", "decoder.branches": CROSS_ONLY}, "its attention merges heads across positions"),
    ({"decoder.branches": (*NO_CROSS, *NO_CROSS, *CROSS_ONLY)}, "its blocks attend to themselves twice"),
    ({"decoder.branches": (Branch((Part.SELF, Part.CROSS, Part.SELF)),)}, "its blocks attend to themselves twice"),
    ({"decoder.branches": (*NO_CROSS, Branch((Part.CROSS,), Residual.MEMORY))}, "it adds the memory position by position"),
    ({"decoder.branches": CROSS_ONLY, "decoder.self_mask": ()}, None),  # without self-attention nothing is to be masked
    ({"decoder.branches": CROSS_ONLY, "decoder.mixing": "summed"}, None),
    ({"decoder.branches": (*NO_CROSS, *CROSS_ONLY, *CROSS_ONLY)}, None),
    ({"encoder.mixing": "summed", "encoder.head_merge": "raw", "encoder.self_mask": ()}, None),
    ({"decoder.positions_at": "feed_forward", "decoder.position_index": "truncated_cosine"}, None),
]


@pytest.mark.parametrize(("changes", "reason"), UNCACHEABLE)
def test_why_keys_and_values_cannot_be_kept(changes, reason):
    assert LESSON10.uncacheable is None
    assert LESSON10.with_sizes(**changes).uncacheable == reason


def test_of_the_presets_one_alone_cannot_keep_keys_and_values():
    assert {name: jt.preset(name).uncacheable for name in NAMES if jt.preset(name).uncacheable} == {"blog2023": UNCACHEABLE[2][1]}


# The documents' numbers


@pytest.mark.parametrize("name", NAMES)
def test_a_size_that_is_not_given_keeps_the_document_s_rule(name):
    """Where a document has a size as so many times d_model, another d_model brings it along; a size that is given is taken."""
    config, document = jt.preset(name, d_model=16, num_heads=2), name.removesuffix("_repaired")
    wide = 16 if document == "deep_dive" else 8
    fixed = {"lesson10": 2048, "vaswani2017_base": 2048, "part2_encoder": 1264, "small": 512}
    assert (config.head_width, config.d_ff) == (wide, fixed.get(document, 64))
    given = jt.preset(name, d_model=16, num_heads=2, head_dim=5, d_ff=7)
    assert (given.head_width, given.d_ff) == (5, 7)
    assert jt.preset(name, d_model=np.int64(16), num_heads=2) == config


def test_a_model_size_that_is_no_number_is_refused_by_name():
    for value in ("16", 16.0, True, None):
        with pytest.raises(ConfigError, match=rf"^d_model must be int, not {value!r}$"):
            jt.preset("deep_dive", d_model=value)


def test_lesson10_has_the_document_s_numbers():
    numbers = (LESSON10.source_vocab_size, LESSON10.target_vocab_size, LESSON10.d_model, LESSON10.num_heads, LESSON10.d_ff)
    assert numbers == (10_000, 10_000, 512, 8, 2048)
    assert (LESSON10.encoder.layers, LESSON10.decoder.layers, LESSON10.max_length) == (6, 6, 100)
    assert (LESSON10.source_pad_id, LESSON10.target_pad_id, LESSON10.dropout) == (1, 1, 0.1)
    assert (LESSON10.layout, LESSON10.init, LESSON10.norm_placement) == (Layout.LESSON10, Init.TORCH_TRANSFORMER, NormPlacement.POST)
    assert LESSON10.decoder.cross_mask == () and jt.preset("lesson10_repaired").decoder.cross_mask == (Mask.SOURCE_PADDING,)
    assert dataclasses.replace(LESSON10, decoder=jt.preset("lesson10_repaired").decoder) == jt.preset("lesson10_repaired")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_repair_changes_no_size(document):
    faithful, repaired = jt.preset(document), jt.preset(f"{document}_repaired")
    assert faithful != repaired and faithful.layout is repaired.layout is Layout(document)
    sizes = ("source_vocab_size", "target_vocab_size", "d_model", "num_heads", "head_dim", "d_ff", "max_length")
    assert all(getattr(faithful, size) == getattr(repaired, size) for size in sizes)
    assert (faithful.encoder.layers, faithful.decoder.layers) == (repaired.encoder.layers, repaired.decoder.layers)
