"""A configuration round-trips through JSON, and unknown keys are refused by their dotted name."""

import dataclasses
import enum
import json
import re
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import jax_transformer as jt
from jax_transformer.config import (
    Activation,
    Branch,
    HeadMerge,
    Init,
    Mask,
    Mixing,
    Part,
    PositionIndex,
    Positions,
    PositionsAt,
    Residual,
    StackConfig,
)
from jax_transformer.errors import ConfigError
from parity_tests import preset_names

LESSON10 = jt.preset("lesson10")
NAMES = preset_names.ALL


def typed(value):
    """Return the value with its types: a StrEnum equals its string, a tuple's JSON is a list."""
    if dataclasses.is_dataclass(value):
        return type(value), [
            typed(getattr(value, field.name)) for field in dataclasses.fields(value)
        ]
    return type(value), [typed(item) for item in value] if isinstance(value, tuple) else value


def one_of(kind):
    return st.sampled_from(list(kind))


rates = st.floats(0, 1, exclude_max=True)


def random_branches(draw, parts: list[Part], residuals: list[Residual]):
    chosen = draw(st.permutations(parts))
    groups = [chosen[:1], chosen[1:]] if draw(st.booleans()) else [[part] for part in chosen]
    return tuple(
        Branch(tuple(group), draw(one_of(residuals)), draw(st.none() | rates)) for group in groups
    )


def random_config(draw):
    """Not a hypothesis strategy: the tests' type checker draws random numbers as well."""
    heads, vocab = draw(st.integers(1, 9)), draw(st.integers(4, 10**6))
    stacks = {
        "encoder": ([Part.SELF, Part.FFN], [Residual.INPUT], [Mask.SOURCE_PADDING], []),
        "decoder": (
            [Part.SELF, Part.CROSS, Part.FFN],
            list(Residual),
            [Mask.TARGET_PADDING, Mask.CAUSAL],
            [Mask.SOURCE_PADDING],
        ),
    }
    stacks = {
        name: StackConfig(
            draw(st.integers(1, 99)),
            branches := random_branches(draw, parts, residuals),
            unused=tuple(Branch((part,)) for part in draw(st.lists(one_of(Part), max_size=2))),
            positions=draw(one_of(Positions)),
            positions_at=draw(one_of(PositionsAt))
            if any(Part.FFN in branch.parts for branch in branches)
            else PositionsAt.EMBEDDING,
            position_index=draw(one_of(PositionIndex)),
            position_exponent=draw(st.floats(0, 3, exclude_min=True)),
            activation=draw(one_of(Activation)),
            mixing=draw(one_of(Mixing)),
            head_merge=draw(one_of(HeadMerge)),
            attention_dropout=draw(st.none() | rates),
            init=draw(st.none() | one_of(Init)),
            final_norm=draw(st.booleans()),
            self_mask=tuple(
                draw(st.permutations(self_mask))[: draw(st.integers(0, len(self_mask)))]
            ),
            cross_mask=tuple(cross_mask[: draw(st.integers(0, 1))]),
        )
        for name, (parts, residuals, self_mask, cross_mask) in stacks.items()
    }
    free = (
        "score_scale embedding_scale dropout_site dropout_masks norm_placement init tying mask_fill"
    ).split()
    enums = {
        field.name: draw(one_of(type(field.default)))
        for field in dataclasses.fields(LESSON10)
        if field.name in free
    }
    numbers = {
        name: draw(rates)
        for name in ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout")
    }
    numbers |= {name: draw(st.booleans()) for name in ("bias", "output_bias")}
    return jt.TransformerConfig(
        source_vocab_size=vocab,
        target_vocab_size=vocab,
        d_model=2 * heads * draw(st.integers(1, 9)),
        num_heads=heads,
        d_ff=draw(st.integers(1, 10**12)),
        max_length=draw(st.integers(2, 10**6)),
        **stacks,
        **enums,
        **numbers,
        head_dim=draw(st.none() | st.integers(1, 99)),
        attention_bias=draw(st.none() | st.booleans()),
        embedding_dropouts=draw(st.integers(1, 3)),
        norm_epsilon=draw(st.floats(0, 1, exclude_min=True)),
        compute_dtype=draw(
            st.none() | st.sampled_from(["bfloat16", "float16", "float32", "float64"])
        ),
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
def test_presets_round_trip_through_json(name):
    round_trip(jt.preset(name))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.data())
def test_any_configuration_round_trips_through_json(data):
    round_trip(random_config(data.draw))


def test_json_is_plain_and_complete():
    data = json.loads(LESSON10.to_json())
    assert list(data) == [field.name for field in dataclasses.fields(LESSON10)]
    assert data["decoder"]["self_mask"] == ["target_padding", "causal"]
    assert data["norm_placement"] == "post"
    assert data["head_dim"] is None
    # other JSON writers write 0.0 as 0
    assert type(jt.TransformerConfig.from_json(json.dumps(data | {"dropout": 0})).dropout) is float


def edited(path: str, value) -> str:
    """lesson10's JSON with one key changed, or removed where the value is ``...``."""
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
        (
            "decoder/branches/1/residuals",
            "input",
            "unknown key 'decoder.branches[1].residuals' (did you mean 'residual'?)",
        ),
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
        ("norm_placement", "PRE", "norm_placement='PRE' is not one of post, pre"),
        (
            "norm_placement",
            ["pre"],
            "norm_placement=['pre'] is not one of post, pre (did you mean 'pre'?)",
        ),
        ("encoder/attention_dropout", "0.1", "encoder.attention_dropout must be float, not '0.1'"),
        ("attention_bias", 0, "attention_bias must be bool, not 0"),
        ("embedding_dropouts", 1.5, "embedding_dropouts must be int, not 1.5"),
        (
            "decoder/unused",
            [{"part": ["feed_forward"]}],
            "unknown key 'decoder.unused[0].part' (did you mean 'parts'?)",
        ),
    ],
)
def test_json_is_refused_by_the_dotted_name_of_the_key(path, value, message):
    with pytest.raises(ConfigError) as error:
        jt.TransformerConfig.from_json(edited(path, value))
    assert str(error.value) == message


def enums(value: Any, path: str = "") -> Iterator[tuple[str, type[enum.Enum]]]:
    """Yield the path and the class of every member of an enum in a configuration."""
    if isinstance(value, enum.Enum):
        yield path.removeprefix("/"), type(value)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from enums(item, f"{path}/{i}")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from enums(getattr(value, field.name), f"{path}/{field.name}")


def test_a_value_of_no_enum_is_refused_with_all_values_and_the_nearest():
    schemes = {f"{stack}.init": "xavier" for stack in ("encoder", "decoder")}
    for path, kind in enums(LESSON10.with_sizes(**schemes)):
        name = re.sub(r"/(\d+)", r"[\1]", path).replace("/", ".")
        for member in kind:
            wrong, known = f"{member.value}q", ", ".join(each.value for each in kind)
            with pytest.raises(ConfigError) as error:
                jt.TransformerConfig.from_json(edited(path, wrong))
            near = f"(did you mean {member.value!r}?)"
            assert str(error.value) == f"{name}={wrong!r} is not one of {known} {near}"


def test_all_missing_keys_are_named_at_once_and_other_text_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^missing key 'source_vocab_size', 'target_vocab_size', 'd_model', 'num_heads', "
        r"'d_ff'",
    ):
        jt.TransformerConfig.from_json("{}")
    with pytest.raises(ConfigError, match=r"^the configuration must be an object, not list$"):
        jt.TransformerConfig.from_json("[]")
    with pytest.raises(ConfigError, match=r"^not JSON: .*line 1 column 2"):
        jt.TransformerConfig.from_json("{d_model: 3}")
