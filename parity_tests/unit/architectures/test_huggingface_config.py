"""config.json of the Hugging Face families: attributes read, ignored, and refused by name."""

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer.architectures import huggingface as families
from jax_transformer.architectures import huggingface_config as attributes
from jax_transformer.architectures import huggingface_state as states
from jax_transformer.architectures import registry
from jax_transformer.architectures.huggingface_config import from_config, to_config
from jax_transformer.config import (
    Activation,
    AttentionSpan,
    EmbeddingScale,
    LogitScale,
    Positions,
    Tying,
)
from jax_transformer.convert import models
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.generate import transformers_config
from jax_transformer.weights import rules
from parity_tests import published

STACKS = ("encoder", "decoder")
# From the hub, with attributes that older versions of transformers wrote
OPUS = published.read("opus_mt")
FLAN = published.read("flan_t5")


def test_an_opus_mt_model():
    config = from_config(OPUS)
    assert (config.architecture, config.max_length) == ("marian", 512)
    assert (config.tying, config.logits_bias) == (Tying.ALL, True)
    assert config.source_vocab_size == config.target_vocab_size == 58101
    assert (config.source_pad_id, config.bos_id, config.eos_id) == (58100, 58100, 0)
    assert config.encoder.activation is Activation.SILU
    assert config.embedding_scale is EmbeddingScale.SQRT_D_MODEL
    assert config.longest == 512 and config.encoder.positions is Positions.SINUSOIDAL_STORED


def test_a_flan_t5_model_has_no_longest_sequence_and_does_not_scale():
    config = from_config(FLAN)
    assert config.encoder.activation is Activation.GELU_TANH and config.encoder.gated
    assert config.tying is Tying.EMBEDDINGS and config.logit_scale is LogitScale.NONE
    assert config.longest > 10_000
    plain = from_config({"model_type": "t5", "feed_forward_proj": "gelu"}).encoder
    assert plain.activation is Activation.GELU and not plain.gated


# From the files of transformers 3.4
BLENDERBOT = published.read("blenderbot")


def test_published_blenderbots_have_norms_where_their_files_say():
    names = ("normalize_before", "add_final_layer_norm", "normalize_embedding")

    def blenderbot(kind: str, variant: str, *values: bool) -> jt.TransformerConfig:
        own = {"model_type": kind, "layernorm_variant": variant}
        return from_config(BLENDERBOT | own | dict(zip(names, values, strict=True)))

    large = blenderbot("blenderbot", "prelayernorm", True, True, False)
    small = blenderbot("blenderbot-small", "xlm", False, False, True)
    norms = [
        (stack.embedding_norm, stack.embedding_norm_of.value, stack.final_norm)
        for config in (large, small)
        for stack in (config.encoder, config.decoder)
    ]
    assert norms == [*[(False, "sum", True)] * 2, (True, "sum", False), (True, "tokens", False)]
    assert (large.norm_placement.value, small.norm_placement.value) == ("pre", "post")
    with pytest.raises(InputError, match=r"do_blenderbot_90_layernorm=False: .* only True is"):
        from_config({"model_type": "blenderbot-small", "do_blenderbot_90_layernorm": False})


# As fairseq's models of WMT 2019 were ported, with attributes of that time
WMT19 = published.read("wmt19_fsmt")


def test_a_published_fsmt_model():
    """Its positions are in no published file, and computed with zeros for padding."""
    config = from_config(WMT19)
    assert (config.source_vocab_size, config.target_vocab_size) == (31232, 31640)
    assert config.tying is Tying.NONE and not config.logits_bias and config.bos_id == 2
    own = {f"{stack}.{name}": None for stack in STACKS for name in ("num_heads", "d_ff")}
    sizes = dict(d_model=8, num_heads=2, d_ff=4, num_layers=1, max_length=9)
    small = config.with_sizes(**sizes, **own)
    shapes = rules.torch_shapes(jt.convert.weight_table(small), jt.transformer.shapes(small))
    tables = {f"model.{stack}.embed_positions.weight" for stack in STACKS}
    state = {name: np.zeros(shapes[name], np.float32) for name in shapes if name not in tables}
    completed = states.complete(state, small)
    assert completed.keys() - state.keys() == tables
    table = completed["model.encoder.embed_positions.weight"]
    angles = np.arange(11)[:, None] / 10_000.0 ** (np.arange(4) / 3)
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    expected[1] = 0
    np.testing.assert_allclose(table, expected, atol=1e-7)
    assert to_config(config, WMT19) == WMT19
    with pytest.raises(InputError, match=r"tie_word_embeddings|one vocabulary: source_vocab_size"):
        from_config(WMT19 | {"tie_word_embeddings": True})


@pytest.mark.parametrize("family", ["m2m_100", "fsmt"])
def test_counted_positions_begin_after_the_row_of_padding(family):
    for pad in (0, 1, 5):
        config = from_config({"model_type": family, "pad_token_id": pad})
        assert config.encoder.position_offset == config.decoder.position_offset == pad + 1


def test_a_published_longt5_model():
    config = from_config(
        FLAN
        | {"model_type": "longt5", "architectures": ["LongT5ForConditionalGeneration"]}
        | {"encoder_attention_type": "transient-global", "local_radius": 127, "n_positions": 4096}
    )
    assert config.encoder.attention_span is AttentionSpan.TRANSIENT_GLOBAL
    assert (config.encoder.local_radius, config.encoder.global_block_size) == (127, 16)
    assert config.decoder.attention_span is AttentionSpan.FULL
    with pytest.raises(InputError, match="encoder_attention_type='full' is not local or transient"):
        from_config({"model_type": "longt5", "encoder_attention_type": "full"})


EMBEDDED, HEADED = ("shared.weight",), ("shared.weight", "lm_head.weight")
UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("changes", "names", "equal", "tying", "scaled"),
    [
        ({}, None, None, Tying.ALL, True),  # T5 version 1
        ({}, HEADED, True, Tying.ALL, True),  # from a .bin file
        ({}, HEADED, False, Tying.EMBEDDINGS, True),
        ({}, HEADED, None, Tying.ALL, True),
        *(({}, (name,), False, Tying.ALL, True) for name in HEADED),  # one of the two
        (UNTIED, None, None, Tying.EMBEDDINGS, False),  # version 1.1
        (UNTIED, HEADED, None, Tying.EMBEDDINGS, False),
        (UNTIED, HEADED, True, Tying.ALL, False),
        (UNTIED, EMBEDDED, None, Tying.ALL, False),  # transformers 5 ties missing tensors
        # as transformers 5 writes version 1.1
        ({"scale_decoder_outputs": False}, HEADED, False, Tying.EMBEDDINGS, False),
        (UNTIED | {"scale_decoder_outputs": True}, EMBEDDED, None, Tying.ALL, True),
    ],
)
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_the_output_layer_of_t5(family, changes, names, equal, tying, scaled):
    same = None if equal is None else lambda one, other: equal
    config = from_config({"model_type": family} | changes, names=names, same=same)
    assert config.tying is tying
    assert config.logit_scale is (LogitScale.INVERSE_SQRT_D_MODEL if scaled else LogitScale.NONE)


def test_the_names_of_a_file_of_weights_decide_as_those_of_a_folder(tmp_path):
    path, data = tmp_path / "config.json", {"model_type": "t5"} | UNTIED
    path.write_text(json.dumps(data))
    for names in (HEADED, EMBEDDED):
        assert models.read_config(path, names) == from_config(data, names=names)
    assert models.read_config(path, HEADED) != models.read_config(path, EMBEDDED)


def test_mt5_never_scales():
    for tied in (True, False):
        config = from_config({"model_type": "mt5", "tie_word_embeddings": tied}, names=HEADED)
        assert config.logit_scale is LogitScale.NONE


def test_published_umt5_have_relative_positions_in_every_block():
    config = from_config(
        FLAN
        | {
            "model_type": "umt5",
            "architectures": ["UMT5ForConditionalGeneration"],
            "scalable_attention": True,
        }
    )
    assert config == from_config(FLAN | {"model_type": "umt5", "architectures": None})


def test_the_output_layer_of_the_others():
    bart, names = {"model_type": "bart"}, ("model.shared.weight", "lm_head.weight")
    assert from_config(bart).tying is from_config(bart, names=names).tying is Tying.ALL
    assert from_config(bart, names=names, same=lambda one, other: False).tying is Tying.EMBEDDINGS
    actual = from_config(bart | {"tie_word_embeddings": False}, names=names[:1]).tying
    assert actual is Tying.EMBEDDINGS
    two = {"model_type": "marian", "decoder_vocab_size": 58102}
    two["share_encoder_decoder_embeddings"] = False
    assert from_config(two).tying is Tying.OUTPUT
    assert from_config(two | {"tie_word_embeddings": False}).tying is Tying.NONE
    assert from_config(two).target_vocab_size == 58102


@pytest.mark.parametrize("shared", [True, False])
def test_the_output_of_marian_is_compared_with_the_decoder_s_embedding(shared):
    tensor = f"model.{'shared' if shared else 'decoder.embed_tokens'}.weight"
    data = {"model_type": "marian", "share_encoder_decoder_embeddings": shared}
    for equal in (True, False):
        compared = []

        def same(*pair: str, equal: bool = equal, compared: list = compared) -> bool:
            compared.append(pair)
            return equal

        config = from_config(data, names={tensor, "lm_head.weight"}, same=same)
        assert config.tying.tied_output == equal and compared == [("lm_head.weight", tensor)]


def test_decoding_starts_with_bos_by_default():
    assert from_config({"model_type": "mbart"}).bos_id == 0
    assert from_config({"model_type": "mbart", "decoder_start_token_id": 7}).bos_id == 7
    with pytest.raises(InputError, match=r"^config\.json: decoder_start_token_id must be given"):
        from_config({"model_type": "marian", "decoder_start_token_id": None})
    ids = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
    with pytest.raises(InputError, match=" and ".join(ids)):
        from_config(dict.fromkeys(ids) | {"model_type": "marian"})


def of(model_type: Any, **attributes: Any) -> dict[str, Any]:
    return {"model_type": model_type} | attributes


REFUSED = {
    "model_type='bert' is none of the families bart, ": of("bert"),
    "model_type='m2m100' is none of the families": of("m2m100"),
    "model_type=['t5'] is none of the families": of(["t5"]),
    (
        "normalize_before=True: a model of the family bart with that is not supported, only False"
        " is"
    ): of("bart", normalize_before=True),
    "add_final_layer_norm=False": of("mbart", add_final_layer_norm=False),
    "add_final_layer_norm=True": of("bart", add_final_layer_norm=True),
    "static_position_embeddings=True": of("bart", static_position_embeddings=True),
    "extra_pos_embeddings=0": of("bart", extra_pos_embeddings=0),
    "normalize_embedding=True": of("marian", normalize_embedding=True),
    "quantization_config={'bits': 4}": of("t5", quantization_config={"bits": 4}),
    "auto_map=": of("t5", auto_map={"AutoModel": "code.Model"}),
    "is_decoder=True": of("t5", is_decoder=True),
    "per_layer_config=": of("t5", per_layer_config={"0": {"d_ff": 3}}),
    "tie_encoder_decoder=True": of("bart", tie_encoder_decoder=True),
    "pruned_heads=": of("bart", pruned_heads={"0": [1]}),
    "unknown attribute 'd_modle' (did you mean 'd_model'?)": of("bart", d_modle=3),
    "scalable_attention=False": of("umt5", scalable_attention=False),
    "unknown attribute 'scalable_attention'": of("mt5", scalable_attention=True),
    "unknown attribute 'scale_decoder_outputs'": of("mt5", scale_decoder_outputs=True),
    "d_model='1024' is not a whole number": of("bart", d_model="1024"),
    "d_model=True is not a whole number": of("bart", d_model=True),
    "d_model=None is not a whole number": of("bart", d_model=None),
    "dropout='0' is not a number": of("bart", dropout="0"),
    "scale_embedding=1 is not true or false": of("bart", scale_embedding=1),
    "eos_token_id=[2, 3] is not the id of one token": of("bart", eos_token_id=[2, 3]),
    "num_hidden_layers=12 and encoder_layers=6 are two names": of(
        "bart", encoder_layers=6, num_hidden_layers=12
    ),
    "activation 'tanh' is not one of relu, gelu, gelu_new": of("bart", activation_function="tanh"),
    "feed_forward_proj='gate-gelu' is neither an activation nor gated- and one": of(
        "t5", feed_forward_proj="gate-gelu"
    ),
    "d_model=1001 is not divisible by encoder.num_heads=16": of("bart", d_model=1001),
    (
        "architectures has 'BartForSequenceClassification', which is not one of"
        " BartForConditionalGeneration, BartModel"
    ): of("bart", architectures=["BartForSequenceClassification"]),
}


@pytest.mark.parametrize("message", REFUSED, ids=[message[:50] for message in REFUSED])
def test_refused_attributes_are_named(message):
    with pytest.raises(InputError) as error:
        from_config(REFUSED[message])
    assert str(error.value).startswith("config.json: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_attribute_of_one_value_may_be_null():
    null = dict.fromkeys((*attributes.FIXED, "normalize_before", "static_position_embeddings"))
    assert from_config({"model_type": "bart", **null}) == from_config({"model_type": "bart"})


def test_all_problems_are_one_error():
    with pytest.raises(InputError, match=r"colour.*normalize_before.*d_model"):
        from_config({"model_type": "bart", "colour": 1, "normalize_before": True, "d_model": 0.5})


@pytest.mark.parametrize("name", ["MarianModel", "TFMarianMTModel", "FlaxMarianMTModel"])
def test_architectures_whose_weights_make_the_whole_model(name):
    assert from_config(OPUS | {"architectures": [name]}) == from_config(OPUS)
    for family in families.families().values():
        assert family.base_class in family.classes


@pytest.mark.parametrize("data", [OPUS, FLAN], ids=["opus", "flan"])
def test_an_exported_config_equals_the_original_except_for_changes(data):
    config = from_config(data)
    assert to_config(config, data) == data
    rates = dict(dropout=0.3, embedding_dropout=0.3)
    changed = config.with_sizes(**rates, encoder_layers=2)
    back = to_config(changed, data)
    differ = {name: back[name] for name in back if back[name] != data.get(name)}
    if data is OPUS:
        assert differ == {"dropout": 0.3, "encoder_layers": 2, "num_hidden_layers": 2}
    else:
        assert differ == {"dropout_rate": 0.3, "num_layers": 2}
        # T5 has one rate
        changed = dataclasses.replace(changed, attention_dropout=0.3, activation_dropout=0.3)
    assert from_config(back) == changed


def test_an_exported_t5_says_of_its_output_layer_what_the_original_said():
    data = FLAN | {"tie_word_embeddings": True}
    config = from_config(data, names=HEADED, same=lambda one, other: False)
    assert config.tying is Tying.EMBEDDINGS and to_config(config, data) == data


def test_a_model_of_no_family_cannot_be_exported():
    expected = r"architecture 'lesson10' is not a Hugging Face family: only models of bart, "
    with pytest.raises(ConfigError, match=expected):
        to_config(jt.preset("lesson10"))
    config = from_config({"model_type": "bart"})
    for changes, message in (
        (dict(norm_epsilon=1e-6), "norm_epsilon=1e-06: bart of transformers has 1e-05"),
        (dict(norm_placement="pre"), "norm_placement=pre"),
        ({"decoder.activation": "relu"}, "decoder.activation=relu: bart of transformers has gelu"),
        ({"encoder.positions": "sinusoidal"}, "encoder.positions=sinusoidal"),
        (dict(target_pad_id=5), "target_pad_id=5"),
        (dict(head_dim=3), "encoder.head_dim=3"),
    ):
        with pytest.raises(ConfigError, match=f"^this model is none of the family: .*{message}"):
            to_config(config.with_sizes(**changes))


def test_training_settings_do_not_prevent_an_export():
    config = from_config({"model_type": "bart"})
    stack = {"encoder.attention_dropout": 0.2, "decoder.init": "torch_transformer"}
    here = config.with_sizes(embedding_dropout=0.3, init="torch", compute_dtype="bfloat16", **stack)
    here = here.with_sizes(dropout_masks="threefry", padding_frozen=not here.padding_frozen)
    here = here.with_sizes(remat="full", scan_layers=True, matmul_precision="medium")
    assert to_config(here) == to_config(config)


def test_families_without_a_last_position_have_a_usual_length():
    for name, longest in (("t5", 512), ("mt5", 512), ("umt5", 512), ("longt5", 4096)):
        config = from_config({"model_type": name})
        assert registry.usual_length(config) == longest < config.longest
        assert registry.usual_length(config.with_sizes(max_length=700)) == 700
    for name in ("bart", "pegasus"):
        config = from_config({"model_type": name, "max_position_embeddings": 77})
        assert registry.usual_length(config) == config.longest == 77


@pytest.mark.parametrize("sizes", [dict(source_vocab_size=41, target_vocab_size=53), {}])
def test_last_ids_are_the_last_of_their_own_vocabulary(sizes):
    preset = registry.find_preset("marian")
    asked = sizes | dict(tying="output")
    config = dataclasses.replace(preset, config=preset.config.with_sizes(tying="output"))
    config = config.with_sizes(**asked) if sizes else preset.with_sizes(d_model=64)
    source, target = sizes.get("source_vocab_size", 58101), sizes.get("target_vocab_size", 58101)
    assert (config.source_pad_id, config.target_pad_id) == (source - 1, target - 1)
    assert (config.bos_id, config.eos_id) == (target - 1, 0)


def test_codes_of_published_languages_have_two_or_three_letters():
    codes = families.published_codes()
    assert {"en", "de", "ceb", "ast", "ilo"} <= codes and len(codes) > 100
    assert {len(code) for code in codes} == {2, 3}


def test_generation_defaults_in_a_config_json_are_read():
    unread = attributes.GENERATION - transformers_config.KNOWN
    # a task's text, and the old name of a forced first token
    assert unread == {"prefix", "force_bos_token_to_be_generated"}


def test_every_attribute_is_handled_once_with_a_reason():
    assert all(len(reason.split()) > 3 for reason in attributes.IGNORED.values())
    for family in families.families().values():
        assert all(len(reason.split()) > 3 for reason in family.ignored.values())
        sets = [
            set(family.defaults),
            # A family may ignore what has one value in the others
            (set(attributes.FIXED) - set(family.ignored)) | set(family.fixed),
            {*attributes.IGNORED, *family.ignored},
            set(attributes.GENERATION),
        ]
        for one, other in itertools.combinations(sets, 2):
            assert not one & other, (family.model_type, one & other)
    tokens = {f"{role}_token_id": 3 for role in ("sep", "cls", "mask", "unk")}
    assert from_config({"model_type": "bart"} | tokens) == from_config({"model_type": "bart"})
