"""The twins themselves: lesson10's against torch.nn.Transformer, and fresh weights."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.architectures import registry, twins
from jax_transformer.architectures.huggingface import HuggingFaceFamily
from jax_transformer.architectures.huggingface_config import from_config
from jax_transformer.errors import ConfigError
from jax_transformer.nn.embeddings import sinusoids
from jax_transformer.weights import rules
from parity_tests import cases, levels, preset_names
from parity_tests.cases import ODD
from parity_tests.levels import assert_close, assert_same_distributions
from parity_tests.marks import quick_if
from parity_tests.twins import as_torch, pair
from parity_tests.unit import helpers
from torch_reference.lesson10 import TranslationTransformer


@pytest.mark.parametrize(
    "name", [quick_if(name in preset_names.ALL, name) for name in jt.preset_names()]
)
def test_every_preset_has_the_names_and_shapes_of_its_twin_at_full_size(name):
    config = jt.preset(name)
    with torch.device("meta"):
        module = twins.twin(config)
    shapes = rules.torch_shapes(jt.convert.weight_table(config), transformer.shapes(config))
    assert {name: tuple(each.shape) for name, each in module.state_dict().items()} == shapes


RATES = {name: {name} for name in ("embedding_dropout", "activation_dropout")}
RATES["attention_dropout"] = {f"{stack}_attention_dropout" for stack in ("encoder", "decoder")}
RATES |= {name.replace("_", ".", 1): {name} for name in RATES["attention_dropout"]}


@pytest.mark.parametrize("name", ["encoder.attention_dropout", "decoder.attention_dropout"])
def test_a_rate_of_0_for_one_stack_is_refused_by_its_name(name):
    with pytest.raises(ConfigError, match=rf"^{name}: .* has one rate, dropout=0.1"):
        twins.twin(jt.preset("bart", **{name: 0.0}))


@pytest.mark.parametrize("name", registry.built_in())
def test_a_twin_is_given_every_rate_or_refuses_it_by_name(name):
    known = registry.resolve(name)
    configs = [preset.config for preset in known.presets.values()]
    config = configs[0] if configs else from_config({"model_type": name})
    for field, arguments in RATES.items():
        changed = config.with_sizes(**{field: 0.37})
        try:
            if isinstance(known, HuggingFaceFamily):
                options = twins._huggingface_arguments(known, changed)[0][1]
            else:
                options = known.reference_arguments(changed)[1]
        except ConfigError as error:
            assert field in str(error).rpartition(": ")[0], error
            continue
        taken = {key for key, value in options.items() if value == 0.37}
        # "Transformer" (2023-06-05) faithfully has no other rate
        assert taken in ({field}, arguments) or (name, taken) == ("blog2023", {"dropout"}), field


NOT_COMPUTED = {"dropout_masks", "bos_id", "eos_id", "init", "encoder.init", "decoder.init"}


OWN = [name for name in registry.built_in() if registry.resolve(name).reference_arguments]


@pytest.mark.parametrize("name", OWN)
def test_a_twin_is_given_every_field_or_refuses_it_by_name(name):
    known, seen = registry.resolve(name), set()
    for preset in known.presets.values():
        arguments = known.reference_arguments(preset.config)
        for field, changed in helpers.with_one_field_changed(preset.config):
            seen.add(field)
            try:
                ignored = known.reference_arguments(changed) == arguments
            except ConfigError as error:
                # another width changes sizes that are given as multiples of it
                assert f"{field}=" in str(error) or field == "d_model", error
                continue
            faithful = (name, field) == ("blog2023", "dropout")  # of rates that it has not
            assert ignored == (field in NOT_COMPUTED) or faithful, field
    assert len(seen) > 75


def test_fields_that_say_only_how_to_compute_matter_to_no_twin():
    config = jt.preset("lesson10", d_model=16, num_layers=1, remat="full", scan_layers=True)
    assert twins.twin(config).state_dict().keys() == twins.twin(config.portable).state_dict().keys()


class Document(nn.Module):
    """Lesson10's code as torch's own layers compute it: sequence first."""

    def __init__(self, twin: TranslationTransformer, config):
        super().__init__()
        sizes = config.d_model, config.num_heads, config.encoder.layers, config.decoder.layers
        self.stock = nn.Transformer(*sizes, config.d_ff, dropout=0.0).double()
        stacks = ("encoder.", "decoder.")
        own = {name: x for name, x in twin.state_dict().items() if name.startswith(stacks)}
        # the document's key set is stock's, plus four modules around it
        self.stock.load_state_dict(own, strict=True)
        self.twin = twin

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        twin, scale = self.twin, math.sqrt(self.stock.d_model)
        source_padding, target_padding = src == twin.src_pad_idx, tgt == twin.tgt_pad_idx
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        out = self.stock(
            twin.pos_enc(twin.src_emb(src.T) * scale),
            twin.pos_enc(twin.tgt_emb(tgt.T) * scale),
            tgt_mask=future,
            src_key_padding_mask=source_padding,
            tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=source_padding if twin.repaired else None,
        )
        return twin.linear(out.transpose(0, 1))


@pytest.mark.parametrize("preset", ["lesson10", "lesson10_repaired"])
def test_lesson10_is_the_stock_transformer(preset: str):
    both = pair(jt.preset(preset, **ODD))
    document = Document(both.torch, both.config).eval()
    with torch.no_grad():
        expected = document(as_torch(both.source), as_torch(both.target))
    ours, twin = both.logits()
    assert_close((twin, expected), 1e-12, "twin")
    assert_close((ours, expected), 1e-12, "flax")


def test_lesson10_has_exactly_the_documents_parameters():
    """d 512, 6+6 layers, vocabularies 10000: torch.nn.Transformer's and four modules'."""
    with torch.device("meta"):
        state = TranslationTransformer().state_dict()
        stock = nn.Transformer(512, 8, 6, 6, 2048).state_dict()
    around = {"src_emb.weight": (10_000, 512), "tgt_emb.weight": (10_000, 512)}
    around |= {"pos_enc.pe": (100, 1, 512)} | cases.shapes_of(("linear", 512, 10_000))
    expected = {name: tuple(value.shape) for name, value in stock.items()} | around
    assert {name: tuple(value.shape) for name, value in state.items()} == expected


def test_the_documents_position_table():
    """Within 7e-6 of the exact table, as float32 arithmetic gives it, and kept unchanged."""
    sizes = dict(d_model=64, nhead=2, num_encoder_layers=1, num_decoder_layers=1)
    twin = TranslationTransformer(src_vocab_size=11, tgt_vocab_size=11, **sizes)
    assert 0 < np.abs(twin.pos_enc.pe[:, 0].numpy() - sinusoids(100, 64)).max() < 2e-5


NARROW: dict[str, Any] = dict(vocab_size=400, num_layers=1, d_model=64, num_heads=4)
FRESH: dict[str, dict[str, Any]] = {
    "lesson10": NARROW | dict(d_ff=256),
    "from_scratch": NARROW | dict(vocab_size=256, max_length=256),
    "part2_encoder": NARROW | dict(d_ff=256),
    "blog2023": NARROW,
    **dict.fromkeys(
        ("deep_dive", "deep_dive_repaired"),
        NARROW | dict(num_heads=2, head_dim=64, d_ff=256, max_length=100),
    ),
}
XAVIER = math.sqrt(6 / (4 * 64))
LARGEST = {
    "attention.qkv.weight": 1 / 8,
    "attention.qkv.bias": 1 / 8,
    "fnn.linear2.weight": 1 / 16,
    "self_attn.in_proj_weight": XAVIER,
}
"""Largest numbers of fresh arrays by the ends of their names: of part 2's layers, as
``torch.nn.Linear`` draws them, and of stock layers.
"""


@pytest.mark.parametrize("preset", FRESH)
def test_fresh_weights_follow_torchs_distributions(preset: str):
    """Each tensor has the same mean, spread and bounds, not the same draws."""
    config = jt.preset(preset, **FRESH[preset])
    ours = jt.convert.to_torch(jt.Transformer(config, rngs=nnx.Rngs(0)))
    torch.manual_seed(0)
    theirs = twins.twin(config).state_dict()
    if preset.startswith("deep_dive"):  # linear layers uniform, embeddings normal
        largest = {name: 0.3 if "embedding" in name else 0.02 for name in theirs}
        assert_same_distributions(ours, theirs, deviations=8, largest=largest.__getitem__)
    else:
        assert_same_distributions(ours, theirs)
    for name, array in ours.items():
        for end, most in LARGEST.items():
            if name.endswith(end):
                assert np.abs(array).max() == pytest.approx(most, rel=0.05), name
        if name.endswith("position_embed.pe"):
            np.testing.assert_allclose(array, theirs[name], rtol=0, atol=1e-7, err_msg=name)


def test_fresh_weights_of_vaswani_have_the_bounds_that_it_states():
    config = jt.preset("vaswani2017_base", **NARROW, d_ff=256)
    ours = jt.convert.to_torch(jt.Transformer(config, rngs=nnx.Rngs(0)))
    assert ours["tgt_emb.weight"].std() == pytest.approx(64**-0.5, rel=0.05)
    packed = [array for name, array in ours.items() if name.endswith("in_proj_weight")]
    assert len(packed) == 3
    for array in packed:
        assert np.abs(array).max() == pytest.approx(XAVIER, rel=0.05)


# Source padding


SEEING = ["deep_dive", "part2_encoder", "blog2023"]
OTHERS = [*(f"{name}_repaired" for name in SEEING), "from_scratch"]


# One document that hides padding, as its repaired form also does, and one that is repaired
QUICK = [*SEEING, "part2_encoder_repaired", "from_scratch"]


@pytest.mark.parametrize("name", [quick_if(n in QUICK, n) for n in (*SEEING, *OTHERS)])
def test_more_source_padding_changes_only_what_sees_it(name: str):
    """Three more pads after every line: the logits or, where lengths are equal, the memory."""
    both = pair(cases.config_of(name).with_sizes(source_pad_id=5, target_pad_id=6))
    wider = np.pad(both.source, ((0, 0), (0, 3)), constant_values=both.config.source_pad_id)

    def run(source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not both.config.equal_lengths:
            return both.logits(source)
        with torch.no_grad():
            ours, theirs = levels.arrays(levels.encoder(replace(both, source=source)))
        return ours[:, :7], theirs[:, :7]

    before, after = run(both.source), run(wider)
    assert_close(before, 1e-12)
    assert_close(after, 1e-12)
    for one, other in zip(before, after, strict=True):
        moved = np.abs(one - other).max()
        assert moved > 1e-2 if name in SEEING else moved < 1e-12
