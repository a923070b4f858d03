"""A configuration round-trips through JSON, and unknown keys are refused by their dotted name."""

import contextlib
import dataclasses
import enum
import json
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import jax_transformer as jt
from jax_transformer.config import Branch, Part
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


def random_value(draw, kind: Any) -> Any:
    """Draw a value of a field's type."""
    if isinstance(kind, types.UnionType):
        one, other = typing.get_args(kind)
        if draw(st.booleans()):
            return None if other is type(None) else -draw(st.floats(0, 1e9))
        return random_value(draw, one)
    if typing.get_origin(kind) is tuple:
        count = draw(st.integers(0, 3))
        return tuple(random_value(draw, typing.get_args(kind)[0]) for _ in range(count))
    if dataclasses.is_dataclass(kind):
        return changed(draw, Branch((Part.FFN,)) if kind is Branch else LESSON10.encoder)
    if issubclass(kind, enum.Enum):
        return draw(st.sampled_from(list(kind)))
    if kind is str:
        return draw(st.sampled_from(["bfloat16", "float16", "float32", "float64", "t5"]))
    return draw({bool: st.booleans(), int: st.integers(0, 10**6), float: st.floats(0, 3)}[kind])


def changed(draw, value: Any) -> Any:
    """Draw any field of a dataclass anew, unless it is refused.

    Not a hypothesis strategy: the tests' type checker draws random numbers as well.
    """
    for name, kind in typing.get_type_hints(type(value)).items():
        if typing.get_origin(kind) is typing.ClassVar or not draw(st.booleans()):
            continue
        nested = dataclasses.is_dataclass(kind)
        new = changed(draw, getattr(value, name)) if nested else random_value(draw, kind)
        with contextlib.suppress(ConfigError):
            value = dataclasses.replace(value, **{name: new})
    return value


def round_trip(config):
    text = config.to_json()
    back = jt.TransformerConfig.from_json(text)
    assert back == config and typed(back) == typed(config) and hash(back) == hash(config)
    assert back.to_json() == text


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.data())
def test_any_configuration_round_trips_through_json(data):
    round_trip(changed(data.draw, jt.preset(data.draw(st.sampled_from(NAMES)))))


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
        ("encoder/branches/0/parts", ..., "missing key 'encoder.branches[0].parts'"),
        ("d_model", "512", "d_model must be int, not '512'"),
        ("head_dim", "64", "head_dim must be int, not '64'"),
        ("dropout", "0.1", "dropout must be float, not '0.1'"),
        ("dropout", 2**53, "dropout must be float, not 9007199254740992"),
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
    first = "'source_vocab_size', 'target_vocab_size', 'd_model', 'num_heads', 'd_ff'"
    with pytest.raises(ConfigError, match=f"^missing key {first}"):
        jt.TransformerConfig.from_json("{}")
    with pytest.raises(ConfigError, match=r"^the configuration must be an object, not list$"):
        jt.TransformerConfig.from_json("[]")
    with pytest.raises(ConfigError, match=r"^not JSON: .*line 1 column 2"):
        jt.TransformerConfig.from_json("{d_model: 3}")
