"""Our tables of attributes against transformers' classes, whose new attributes fail here."""

import json

import pytest
import torch
import transformers

from jax_transformer.architectures import huggingface, huggingface_config, t5
from jax_transformer.architectures.huggingface import HuggingFaceFamily
from jax_transformer.architectures.huggingface_config import from_config, to_config
from parity_tests.huggingface import CASES

FAMILIES = huggingface.families()


def config_class(family: HuggingFaceFamily) -> type:
    return getattr(transformers, f"{family.base_class.removesuffix('Model')}Config")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_attribute_of_the_class_is_handled(name: str):
    family = FAMILIES[name]
    known = {
        *family.defaults,
        *family.derived,
        *family.fixed,
        *family.ignored,
        *family.aliases,
        *huggingface_config.FIXED,
        *huggingface_config.IGNORED,
        *huggingface_config.GENERATION,
        "model_type",
        "architectures",
    }
    attributes = config_class(family)().to_dict()
    # T5's class has this attribute; the others compute as T5 does with it
    assert set(attributes) <= known | {"scale_decoder_outputs"}
    assert not list(huggingface_config.problems(family, attributes))


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_the_class(name: str):
    family = FAMILIES[name]
    theirs, ours = config_class(family)().to_dict(), family.defaults
    # the class derives them from other attributes
    derived = {"num_decoder_layers", "decoder_vocab_size"}
    if isinstance(family, t5.T5Family) and "decoder_start_token_id" not in theirs:
        derived.add("decoder_start_token_id")  # see the family's defaults
    missing = object()
    differ = {
        attribute
        for attribute in ours
        if theirs.get(attribute, None if ours[attribute] is None else missing) != ours[attribute]
    }
    assert differ <= derived


@pytest.mark.parametrize("name", FAMILIES)
def test_aliases_are_those_of_the_class(name: str):
    assert config_class(FAMILIES[name]).attribute_map == FAMILIES[name].aliases


def test_generation_defaults_are_known_by_name():
    assert (
        set(transformers.GenerationConfig._get_default_generation_params())
        - set(huggingface_config.IGNORED)
        <= huggingface_config.GENERATION
    )


@pytest.mark.parametrize("name", CASES)
def test_configurations_round_trip_with_transformers(name: str, tmp_path):
    case = CASES[name]
    kind, model = case.classes
    assert model.__name__ == case.family.model_class
    with torch.device("meta"):
        settings = kind(**case.values)
    settings.architectures = [model.__name__]
    settings.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    config = from_config(data)
    assert to_config(config, data) == data
    (tmp_path / "config.json").write_text(json.dumps(to_config(config)))
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(again) is kind
    differ = {key for key, value in settings.to_dict().items() if again.to_dict().get(key) != value}
    # the path that it was read from, and an unused start token
    assert differ <= {"_name_or_path", "bos_token_id"}
    again.save_pretrained(tmp_path)
    assert from_config(json.loads((tmp_path / "config.json").read_text())) == config
