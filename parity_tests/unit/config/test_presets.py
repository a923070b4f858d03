"""Every preset at its documented size has its document's number of parameters."""

import contextlib
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.architectures import base, registry
from jax_transformer.errors import ConfigError
from jax_transformer.nn.embeddings import Frozen
from parity_tests.marks import quick_if

TOTALS = {
    "deep_dive": 226_984_970,
    "lesson10": 59_612_944,
    "from_scratch": 59_610_896,
    "part2_encoder": 32_639_152,
    "blog2023": 15_101_712,
    "vaswani2017_base": 63_082_496,  # the paper says 65 million
    "small": 1_182_208,
}

FROZEN = {
    **dict.fromkeys(("blog2023", "blog2023_repaired"), 2 * 100 * 256),
    "deep_dive": 63_019_008,
    "deep_dive_repaired": 50_414_592,
    **dict.fromkeys(("lesson10", "lesson10_repaired"), 2 * 100 * 512),
    **dict.fromkeys(("part2_encoder", "part2_encoder_repaired"), 40 * 512),
}
"""Parameters of position tables and unused blocks."""


# test_reference.py compares every preset's shapes at full size with its twin's
@pytest.mark.parametrize(
    "name", [quick_if(name in (*TOTALS, "t5", "whisper_tiny"), name) for name in jt.preset_names()]
)
def test_every_preset_is_built_at_full_size_from_abstract_shapes(name):
    before = {id(array) for array in jax.live_arrays()}
    model = transformer.abstract(jt.preset(name))
    assert sum(array.nbytes for array in jax.live_arrays() if id(array) not in before) < 10_000
    leaves = {
        kind: [v.get_value() for _, v in nnx.to_flat_state(nnx.state(model, kind))]
        for kind in (nnx.Param, Frozen)
    }
    assert len(jax.tree.leaves(nnx.state(model))) == sum(map(len, leaves.values()))
    for arrays in leaves.values():
        assert all(
            isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == np.float32 for leaf in arrays
        )
    sizes = tuple(sum(leaf.size for leaf in arrays) for arrays in leaves.values())
    if total := TOTALS.get(name.removesuffix("_repaired")):
        assert sizes == (total - FROZEN.get(name, 0), FROZEN.get(name, 0))


def test_an_architecture_is_found_by_its_own_name_only():
    for known in registry.architectures():
        name = known.name
        others = {name.upper(), name.replace("-", "_"), name.replace("_", "-"), f"{name}s"}
        assert registry.find(name) is known
        assert {registry.find(other) for other in others - {name}} == {None}, name
    # Modules next to theirs
    assert {registry.find(name) for name in ("base", "twins", "registry", "huggingface")} == {None}


@pytest.mark.parametrize("name", jt.preset_names())
def test_a_preset_names_its_source_in_one_line(name):
    source = registry.presets()[name].source
    assert "\n" not in source and source.endswith(".") and len(source) > 40
    assert name.endswith("_repaired") or ("Faithful:" in source) == (
        f"{name}_repaired" in jt.preset_names()
    )


def test_a_twin_s_refusal_names_what_differs_from_the_nearer_preset():
    presets = [registry.presets()[name] for name in ("deep_dive", "deep_dive_repaired")]
    for preset in presets:
        config = replace(preset.config, norm_epsilon=0.5)
        with pytest.raises(ConfigError, match=r"^norm_epsilon=0.5: [^;]* has only 1e-0\d$"):
            base.is_repaired(config, *presets, "embedding_dropout")
        for stack in ("encoder", "decoder"):
            for rate in (0.1, 0.3):
                first, *others = getattr(preset.config, stack).branches
                branches = (replace(first, dropout=rate), *others)
                changed = replace(getattr(preset.config, stack), branches=branches)
                config = replace(preset.config, dropout=0.1, **{stack: changed})
                refused = pytest.raises(ConfigError, match=rf"^{stack}\.branches=.*dropout=0\.3")
                with contextlib.nullcontext() if rate == 0.1 else refused:
                    base.is_repaired(config, *presets, "embedding_dropout")
    rates = ("dropout", "attention_dropout", "activation_dropout")
    for rate in (0.05, 0.9):
        other = replace(config, **dict(zip(rates, (0.1, 0.1, rate), strict=True)))
        message = rf"^activation_dropout={rate}: .* has one rate, dropout=0.1"
        with pytest.raises(ConfigError, match=message):
            base.one_rate(other, *rates)


@pytest.mark.parametrize("name", ["deep_dive", "from_scratch"])
def test_a_twin_of_one_depth_refuses_stacks_that_differ(name):
    for encoder, decoder in ((2, 3), (3, 2)):
        config = jt.preset(name, **{"encoder.layers": encoder, "decoder.layers": decoder})
        named = rf"^encoder\.layers={encoder} and decoder\.layers={decoder}: .* has one depth$"
        with pytest.raises(ConfigError, match=named):
            registry.resolve(name).reference_arguments(config)
