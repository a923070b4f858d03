"""Presets are configurations: sizes by name, derived properties, and the documents' numbers."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer.architectures import registry
from jax_transformer.config import (
    Activation,
    Branch,
    Init,
    Mask,
    NormPlacement,
    Part,
    PositionIndex,
    Residual,
)
from jax_transformer.config.fields import position_row
from jax_transformer.errors import ConfigError
from jax_transformer.inference import translation
from parity_tests import preset_names
from parity_tests.unit.config.test_config import typed

LESSON10 = jt.preset("lesson10")
NAMES = preset_names.ALL
KNOWN = ", ".join(jt.preset_names())
DOCUMENTS = [name for name in NAMES if f"{name}_repaired" in NAMES]
CROSS_ONLY, NO_CROSS = (Branch((Part.CROSS,)),), (Branch((Part.SELF,)),)


@pytest.mark.parametrize("name", ["../architectures/blog2023", "registry", "blog2023.py", "", "x"])
def test_what_names_no_architecture_is_none(name):
    assert registry.find(name) is None


def test_with_sizes_knows_its_shorthands():
    for name, layers in (("num", (3, 3)), ("encoder", (2, 6)), ("decoder", (6, 2))):
        config = LESSON10.with_sizes(**{f"{name}_layers": min(layers)})
        assert (config.encoder.layers, config.decoder.layers) == layers
    assert LESSON10.with_sizes(encoder_layers=2) == LESSON10.with_sizes(**{"encoder.layers": 2})
    vocab, pads = LESSON10.with_sizes(vocab_size=77), LESSON10.with_sizes(pad_id=0)
    assert (vocab.source_vocab_size, vocab.target_vocab_size) == (77, 77)
    assert (pads.source_pad_id, pads.target_pad_id, LESSON10.source_pad_id) == (0, 0, 1)
    gelu = LESSON10.with_sizes(**{"encoder.activation": "gelu"}, norm_placement="pre", dropout=0)
    assert typed(gelu.encoder.activation) == (Activation, Activation.GELU)
    assert gelu.decoder.activation is Activation.RELU
    assert gelu.norm_placement is NormPlacement.PRE and gelu.with_sizes() == gelu
    before = {"encoder.activation": "relu", "norm_placement": "post", "dropout": 0.1}
    assert gelu.with_sizes(**before) == LESSON10
    stack = dataclasses.replace(LESSON10.encoder, branches=(Branch((Part.FFN,)),))
    assert LESSON10.with_sizes(encoder=stack).encoder == stack
    with pytest.raises(ConfigError, match=r"^d_model=9 is not divisible by num_heads=8$"):
        LESSON10.with_sizes(d_model=9)
    with pytest.raises(ConfigError, match=r"^encoder.layers must be int, not '3'$"):
        LESSON10.with_sizes(num_layers="3")


def test_names_of_version_0_1_are_accepted(capsys):
    deep_dive = jt.preset("deep_dive")
    old = deep_dive.to_json().replace('"architecture"', '"layout"').replace('"unused"', '"idle"')
    assert '"layout"' in old and '"idle"' in old
    assert jt.TransformerConfig.from_json(old) == deep_dive and capsys.readouterr().err == ""
    assert LESSON10.with_sizes(layout="torch_nn").architecture == "torch_nn"
    assert capsys.readouterr().err == "layout is now called architecture\n"
    changed = deep_dive.with_sizes(**{"decoder.idle": ()})
    assert changed == deep_dive.with_sizes(**{"decoder.unused": ()})
    assert capsys.readouterr().err == "decoder.idle is now called decoder.unused\n"


def test_with_sizes_accepts_python_types():
    assert LESSON10.with_sizes(d_model=np.int64(16)) == LESSON10.with_sizes(d_model=16)
    branches = (Branch((Part.FFN,)), Branch((Part.SELF,)))
    assert LESSON10.with_sizes(**{"encoder.branches": branches}).encoder.branches == branches


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("leson10", {}, f"unknown preset 'leson10' (did you mean 'lesson10'?); known: {KNOWN}"),
        ("deepdive", {}, f"unknown preset 'deepdive' (did you mean 'deep_dive'?); known: {KNOWN}"),
        ("gpt-neox", {}, f"unknown preset 'gpt-neox'; known: {KNOWN}"),
        (
            "lesson10",
            dict(d_modle=8),
            "unknown configuration field 'd_modle' (did you mean 'd_model'?)",
        ),
        (
            "lesson10",
            {"encoder.activaton": "relu"},
            "unknown configuration field 'encoder.activaton' (did you mean 'encoder.activation'?)",
        ),
    ],
)
def test_preset_refuses_unknown_names_with_the_nearest(name, sizes, message):
    with pytest.raises(ConfigError) as error:
        jt.preset(name, **sizes)
    assert str(error.value) == message


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_takes_the_same_field_names(name):
    sizes = {"decoder.attention_dropout": 0.25, "encoder.activation": "gelu_tanh"}
    changed = jt.preset(name, num_layers=1, vocab_size=97, d_model=24, num_heads=3, **sizes)
    assert changed.head_width == (24 if name.startswith("deep_dive") else 8)
    assert changed.encoder.layers == changed.decoder.layers == 1
    assert changed.source_vocab_size == changed.target_vocab_size == 97
    assert changed.decoder.attention_dropout == 0.25
    assert changed.encoder.activation is Activation.GELU_TANH
    message = rf"^unknown preset '{name}x' \(did you mean '{name}'\?\)"
    with pytest.raises(ConfigError, match=message):
        jt.preset(f"{name}x")


def test_presets_are_values():
    assert set(NAMES) <= set(jt.preset_names())
    configs = [jt.preset(name) for name in jt.preset_names()]
    assert len(set(configs)) == len(configs) and {jt.preset("small"): 1}[jt.preset("small")] == 1
    assert all(entry.source for entry in registry.presets().values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        configs[0].d_model = 3


# Derived properties


def test_the_position_rule_limits_the_length():
    rows = [position_row(PositionIndex.TRUNCATED_COSINE, i) for i in range(101)]
    assert rows == [1] + 49 * [0] + [-1] + 49 * [0] + [1]
    assert [position_row(PositionIndex.ORDER, i) for i in (0, 7, 50)] == [0, 7, 50]
    longest = {2: 2, 49: 49, 50: 50, 51: 50, 100: 50, 1000: 50}
    assert {n: jt.preset("deep_dive", max_length=n).longest for n in longest} == longest
    for name in NAMES:
        config = jt.preset(name)
        assert config.longest == (50 if name == "deep_dive" else config.max_length)
    # one stack is enough, and a missing table cannot be too short
    for name in ("encoder", "decoder"):
        one = LESSON10.with_sizes(**{f"{name}.position_index": "truncated_cosine"})
        assert one.longest == 50 and one.with_sizes(**{f"{name}.positions": "none"}).longest == 100


def test_a_stack_has_a_row_for_each_of_its_positions():
    for config, rows in (
        (LESSON10.with_sizes(max_length=7), (7, 7)),
        (jt.preset("whisper_tiny", mel_frames=12, max_length=7), (6, 7)),
    ):
        assert (config.rows(config.encoder), config.rows(config.decoder)) == rows


def test_sides_must_be_equally_long_if_the_memory_is_a_residual():
    assert [name for name in NAMES if jt.preset(name).equal_lengths] == ["blog2023"]
    branches = LESSON10.decoder.branches
    for k, branch in enumerate(branches):
        memory = dataclasses.replace(branch, residual=Residual.MEMORY)
        changed = (*branches[:k], memory, *branches[k + 1 :])
        assert LESSON10.with_sizes(**{"decoder.branches": changed}).equal_lengths


SUMS = "its self-attention sums the values of all tokens, those to come among them"
MERGES = "its attention merges heads across positions"
TWICE = "its blocks attend to themselves twice"
MEMORY = "it adds the memory position by position"
UNCACHEABLE = [
    ({"decoder.self_mask": ()}, "its self-attention is not causal"),
    ({"decoder.self_mask": ("target_padding",)}, "its self-attention is not causal"),
    ({"decoder.mixing": "summed"}, SUMS),
    ({"decoder.head_merge": "raw"}, MERGES),
    ({"decoder.head_merge": "raw", "decoder.branches": CROSS_ONLY}, MERGES),
    ({"decoder.branches": (*NO_CROSS, *NO_CROSS, *CROSS_ONLY)}, TWICE),
    ({"decoder.branches": (Branch((Part.SELF, Part.CROSS, Part.SELF)),)}, TWICE),
    ({"decoder.branches": (*NO_CROSS, Branch((Part.CROSS,), Residual.MEMORY))}, MEMORY),
    # without self-attention there is no mask
    ({"decoder.branches": CROSS_ONLY, "decoder.self_mask": ()}, None),
    ({"decoder.branches": CROSS_ONLY, "decoder.mixing": "summed"}, None),
    ({"decoder.branches": (*NO_CROSS, *CROSS_ONLY, *CROSS_ONLY)}, None),
    ({"encoder.mixing": "summed", "encoder.head_merge": "raw", "encoder.self_mask": ()}, None),
    ({"decoder.positions_at": "feed_forward", "decoder.position_index": "truncated_cosine"}, None),
]


@pytest.mark.parametrize(("changes", "reason"), UNCACHEABLE)
def test_the_reasons_against_a_kv_cache_are_named(changes, reason):
    assert LESSON10.uncacheable is None
    assert LESSON10.with_sizes(**changes).uncacheable == reason


def test_one_preset_cannot_use_a_kv_cache():
    reasons = {name: jt.preset(name).uncacheable for name in NAMES}
    assert {name: reason for name, reason in reasons.items() if reason} == {"blog2023": SUMS}


@pytest.mark.parametrize(("name", "equal_lengths"), [("lesson10", False), ("blog2023", True)])
def test_a_command_says_that_it_decodes_without_a_kv_cache(
    name, equal_lengths, monkeypatch, capsys
):
    config = jt.preset(name)
    fake = object.__new__(translation.Translator)
    vars(fake)["model"] = SimpleNamespace(config=config)
    monkeypatch.setattr(translation.Translator, "from_opened", lambda *_, **__: fake)
    assert translation.load(None) is fake
    printed = capsys.readouterr().err
    assert (f"whole decoder again at each token, because {SUMS}" in printed) == (name == "blog2023")
    assert ("at most as many tokens as its padded source" in printed) == equal_lengths
    assert bool(printed) == (config.uncacheable is not None)


# The documents' numbers


@pytest.mark.parametrize("name", NAMES)
def test_an_omitted_size_follows_the_document_s_rule(name):
    """A size that the document has as a multiple of d_model follows it, unless it is set."""
    config, document = jt.preset(name, d_model=16, num_heads=2), name.removesuffix("_repaired")
    sizes = dict.fromkeys(("lesson10", "vaswani2017_base"), (8, 2048)) | {"small": (8, 512)}
    sizes |= dict.fromkeys(("blog2023", "from_scratch"), (8, 64))
    sizes |= {"deep_dive": (16, 64), "part2_encoder": (8, 1264)}
    ours = config.head_width, config.d_ff
    assert ours == sizes.get(document, ours)
    configured = jt.preset(name, d_model=16, num_heads=2, head_dim=5, d_ff=7)
    assert (configured.head_width, configured.d_ff) == (5, 7)
    assert jt.preset(name, d_model=np.int64(16), num_heads=2) == config


def test_a_size_that_is_no_number_is_refused_by_name():
    for value in ("16", 16.0, True, None):
        with pytest.raises(ConfigError, match=rf"^d_model must be int, not {value!r}$"):
            jt.preset("deep_dive", d_model=value)


def test_lesson10_has_the_document_s_numbers():
    names = "source_vocab_size target_vocab_size d_model num_heads d_ff".split()
    assert [getattr(LESSON10, name) for name in names] == [10_000, 10_000, 512, 8, 2048]
    assert (LESSON10.encoder.layers, LESSON10.decoder.layers, LESSON10.max_length) == (6, 6, 100)
    assert (LESSON10.source_pad_id, LESSON10.target_pad_id, LESSON10.dropout) == (1, 1, 0.1)
    assert (LESSON10.architecture, LESSON10.init) == ("lesson10", Init.TORCH_TRANSFORMER)
    assert LESSON10.norm_placement == NormPlacement.POST
    assert LESSON10.decoder.cross_mask == ()
    repaired = jt.preset("lesson10_repaired")
    assert repaired.decoder.cross_mask == (Mask.SOURCE_PADDING,)
    assert dataclasses.replace(LESSON10, decoder=repaired.decoder) == repaired


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_repair_changes_no_size(document):
    faithful, repaired = jt.preset(document), jt.preset(f"{document}_repaired")
    assert faithful != repaired and faithful.architecture == repaired.architecture == document
    sizes = "source_vocab_size target_vocab_size d_model num_heads head_dim d_ff max_length".split()
    assert all(getattr(faithful, size) == getattr(repaired, size) for size in sizes)
    assert faithful.encoder.layers == repaired.encoder.layers
    assert faithful.decoder.layers == repaired.decoder.layers
