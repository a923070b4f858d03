"""Random configurations of every family: to transformers and back, and every attribute acts."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import transformers

import jax_transformer as jt
from jax_transformer.architectures import huggingface, huggingface_config, registry, t5
from jax_transformer.architectures.huggingface_config import from_config, to_config
from jax_transformer.errors import InputError
from jax_transformer.weights import rules
from parity_tests import huggingface as models
from parity_tests import published
from parity_tests.levels import assert_close
from parity_tests.marks import quick_if

FAMILIES = huggingface.families()
SYNONYMS = ("activation_function", "dense_act_fn", "feed_forward_proj")
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish")
# Sizes that are odd where they may be, and no two alike, so that exchanged ones show
SIZES = dict(d_model=(12, 24, 36), d_kv=(5, 7), d_ff=(17, 23), max_position_embeddings=(21,))
SIZES |= dict(layers=(1, 2), heads=(1, 2, 3, 6), ffn_dim=(11, 13, 19), vocab_size=(31, 37))


def drawn(name: str, seed: int) -> dict[str, Any]:
    """Return an attribute of each kind that the family reads, at random."""
    draw = np.random.default_rng([seed, *name.encode()])
    family, values = FAMILIES[name], {}
    for key, default in (family.defaults | family.derived).items():
        kinds = [kind for kind in SIZES if key == kind or key.endswith(f"_{kind}")]
        if kinds:
            values[key] = int(draw.choice(SIZES[kinds[0]]))
        elif isinstance(default, bool):
            values[key] = bool(draw.integers(2))
        elif isinstance(default, float):
            values[key] = round(float(draw.uniform(0.01, 0.4)), 3)
        elif key in ("activation_function", "dense_act_fn"):
            values[key] = str(draw.choice(ACTIVATIONS))
        elif key.endswith("_token_id"):
            values[key] = int(draw.integers(20))
    ids = [key for key in values if key.endswith("_token_id")]
    values |= dict(zip(ids, map(int, draw.permutation(20)), strict=False))
    values |= {"max_source_positions": 15, "max_target_positions": 21, "num_mel_bins": 5}
    values |= {"relative_attention_num_buckets": int(draw.choice((6, 8, 10)))}
    values |= {"relative_attention_max_distance": 11, "local_radius": 3, "global_block_size": 4}
    values["encoder_attention_type"] = str(draw.choice(("local", "transient-global")))
    plain = values.get("dense_act_fn", "relu")
    values["feed_forward_proj"] = f"gated-{plain}" if values.get("is_gated_act") else plain
    if "num_layers" in values:  # transformers sizes its cache by the encoder's layers
        values["num_decoder_layers"] = values["num_layers"]
    other = {31: 37, 37: 31}
    if name == "marian":
        size, shared = values["vocab_size"], values["share_encoder_decoder_embeddings"]
        values["decoder_vocab_size"] = size if shared else other[size]
    if name == "fsmt":
        size, shared = values["src_vocab_size"], values["tie_word_embeddings"]
        values["tgt_vocab_size"] = size if shared else other[size]
    known = {*family.defaults, *family.derived}
    return {key: value for key, value in values.items() if key in known}


@pytest.mark.proves("logits")
@pytest.mark.parametrize(
    ("name", "seed"), [quick_if(seed == 1, name, seed) for seed in (1, 2, 3) for name in FAMILIES]
)
def test_a_random_model_goes_there_and_back(name, seed, monkeypatch, in_float64):
    case = models.Case(name, drawn(name, seed))
    monkeypatch.setitem(models.CASES, "random", case)
    theirs = models.module("random", seed=seed)
    config = from_config(json.loads(theirs.config.to_json_string()))
    state = theirs.state_dict()
    for copied, of in rules.aliases(registry.weight_table(config)).items():
        state[copied].copy_(state[of])  # transformers ties nothing if the output is not tied
    ours = jt.convert.from_torch(state, config)
    both = models.exact_positions(models.Pair(theirs, config, ours))
    source, target = models.batch(both.config, rows=2, source=15, target=9)
    assert_close((both.ours(source, target), both.logits(source, target)), 1e-12)
    data = json.loads(both.theirs.config.to_json_string())
    assert to_config(both.config, data) == data
    again = case.classes[0](**to_config(both.config)).to_dict()
    values = both.theirs.config.to_dict()
    differ = {key for key in case.values if again.get(key) != values.get(key)}
    assert differ <= {"bos_token_id", *SYNONYMS} and from_config(again) == from_config(values)


def another(name: str, value: Any) -> Any:
    """Return another value that an attribute may have: heads divide the width, ids fit."""
    match value:
        case bool():
            return not value
        case float():
            return value / 2 or 0.25
        case int():
            if name in ("d_model", "vocab_size"):
                return 2 * value
            more = 17 if name.endswith("_id") else value + 1 + ("buckets" in name)
            return value // 2 if "heads" in name else more
        case str():
            spans = {"local": "transient-global", "transient-global": "local"}
            return spans.get(value, "silu" if value != "silu" else "relu")
    return 3


@pytest.mark.parametrize("name", FAMILIES)
def test_every_attribute_of_the_class_acts_or_is_refused_or_has_a_reason(name):
    """Nothing of a file is read and then not used, or used for another field."""
    family = FAMILIES[name]
    unused = {*huggingface_config.IGNORED, *huggingface_config.GENERATION, *family.ignored}
    own = family.defaults | models.Case(name, {}).classes[0]().to_dict() | {"model_type": name}
    own |= {key: value for key, value in family.defaults.items() if own[key] is None}
    more = {"scale_decoder_outputs": True, "dense_act_fn": "gelu", "is_gated_act": False}
    more = {key: value for key, value in more.items() if key in family.derived}
    before = huggingface_config.flat(from_config(own))
    heads = {"encoder.head_dim", "decoder.head_dim"}
    for key in {**own, **more}.keys() - unused - {"model_type", "architectures", *family.aliases}:
        # What feed_forward_proj implies wins over it
        implied = ("dense_act_fn", "is_gated_act") if key == "feed_forward_proj" else ()
        data = {name: value for name, value in own.items() if name not in implied}
        other = another(key, own.get(key, more.get(key)))
        try:
            after = huggingface_config.flat(from_config(data | {key: other}))
        except InputError as error:  # an attribute of one value, or two that belong together
            one = key in {*family.fixed, *huggingface_config.FIXED} and f"{key}=" in str(error)
            assert one or "one vocabulary" in str(error), (key, str(error))
            continue
        changed = {field for field in after if after[field] != before[field]}
        assert changed or key == "bos_token_id", f"{key}={other!r} changes nothing"
        if key in before:
            rate = {"embedding_dropout"} if key == "dropout" else set()
            assert (changed - heads, after[key]) == ({key} | rate, other), key
        stack = key.partition("_")[0]
        if f"{stack}.layers" in before and not key.endswith(("_type", "_token_id")):
            assert {field.partition(".")[0] for field in changed} == {stack}, key


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_and_aliases_are_those_of_the_class(name):
    family, kind = FAMILIES[name], models.Case(name, {}).classes[0]
    assert kind.attribute_map == family.aliases
    theirs, ours = kind().to_dict(), family.defaults
    derived = {"num_decoder_layers", "decoder_vocab_size"}  # from other attributes
    if isinstance(family, t5.T5Family) and "decoder_start_token_id" not in theirs:
        derived.add("decoder_start_token_id")  # see the family's defaults
    absent = object()
    present = {key: theirs.get(key, None if ours[key] is None else absent) for key in ours}
    assert {key for key, value in ours.items() if present[key] != value} <= derived


def test_generation_defaults_are_known_by_name():
    known = {*huggingface_config.IGNORED, *huggingface_config.GENERATION}
    assert set(transformers.GenerationConfig._get_default_generation_params()) <= known


def test_the_preset_of_marian_is_the_published_model():
    ours, theirs = registry.preset("marian"), from_config(published.read("opus_mt"))
    ours = dataclasses.replace(ours, padding_frozen=False)
    assert huggingface_config.flat(ours) == huggingface_config.flat(theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_has_every_change(name):
    """A changed model keeps its file but for what changed, under every name that the file uses."""
    family = FAMILIES[name]
    data = {"model_type": name, "transformers_version": "4.2"} | drawn(name, 1)
    data |= {alias: data[own] for alias, own in family.aliases.items() if own in data}
    assert to_config(from_config(data), data) == data
    for seed in (2, 3):
        other = {"model_type": name} | drawn(name, seed)
        if family.tensors_decide_tie:
            other["tie_word_embeddings"] = data["tie_word_embeddings"] = True
        for original in (data, {"model_type": name}):
            back = to_config(from_config(other), original)
            assert from_config(back) == from_config(other)
        back = to_config(from_config(other), data)
        assert back["transformers_version"] == "4.2" and back.keys() >= data.keys()
        for alias, own in family.aliases.items():
            assert back.get(alias) == back.get(own) or alias not in data
