"""Our tables of attributes beside the configuration classes of the transformers that is installed: a new attribute there fails here."""

import json

import pytest
import torch
import transformers

from jax_transformer.architectures import attributes
from jax_transformer.architectures.huggingface_config import from_config, to_config
from jax_transformer.config import Layout
from parity_tests.huggingface import CASES

CLASSES = {
    layout: getattr(transformers, f"{attributes.classes(layout)[1].removesuffix('Model')}Config")
    for layout in attributes.LAYOUTS
}


@pytest.mark.parametrize("layout", CLASSES)
def test_every_attribute_of_the_class_is_handled(layout: Layout):
    known = (
        set(attributes.DEFAULTS[layout])
        | set(attributes.fixed(layout))
        | set(attributes.IGNORED)
        | set(attributes.GENERATION)
    )
    known |= set(attributes.OTHER_NAMES[layout]) | {
        "model_type",
        "architectures",
        "scale_decoder_outputs",
        "dense_act_fn",
        "is_gated_act",
    }
    assert set(CLASSES[layout]().to_dict()) <= known
    assert not list(attributes.problems(layout, CLASSES[layout]().to_dict()))


@pytest.mark.parametrize("layout", CLASSES)
def test_what_a_file_does_not_name_is_what_the_class_says(layout: Layout):
    theirs, ours = CLASSES[layout]().to_dict(), attributes.DEFAULTS[layout]
    derived = {"num_decoder_layers", "decoder_vocab_size"}  # which the class fills in from others
    if layout is Layout.T5:
        derived.add("decoder_start_token_id")  # see the table
    missing = object()
    differ = {
        name
        for name in ours
        if theirs.get(name, None if ours[name] is None else missing) != ours[name]
    }
    assert differ <= derived


@pytest.mark.parametrize("layout", CLASSES)
def test_the_second_names_are_the_class_s(layout: Layout):
    assert CLASSES[layout].attribute_map == attributes.OTHER_NAMES[layout]


def test_the_defaults_of_decoding_are_known_by_name():
    assert (
        set(transformers.GenerationConfig._get_default_generation_params())
        - set(attributes.IGNORED)
        <= attributes.GENERATION
    )


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_writes_comes_back_and_what_we_write_it_reads(name: str, tmp_path):
    case = CASES[name]
    kind, model = case.classes
    assert model.__name__ == attributes.classes(case.layout)[0]
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
    assert differ <= {
        "_name_or_path",
        "bos_token_id",
    }  # whence it was read, and a token that nothing begins with here
    again.save_pretrained(tmp_path)
    assert from_config(json.loads((tmp_path / "config.json").read_text())) == config
