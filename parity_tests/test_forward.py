"""Every level of the ladder for every case, in float64 and in float32."""

import functools

import numpy as np
import pytest
import torch

import jax_transformer as jt
from parity_tests.bounds import BOUNDS, RATIO
from parity_tests.cases import CASES, DOCUMENTS, ODD, Case, config_of
from parity_tests.levels import LEVELS, assert_close, error, levels
from parity_tests.marks import quick_if
from parity_tests.twins import Pair, as_torch, pair, ragged, ragged_target

DTYPES = (torch.float64, torch.float32)


@functools.lru_cache(maxsize=1)
def pair_of(case: Case, dtype: torch.dtype) -> Pair:
    return pair(case.config, dtype)


LADDER = [
    (case, dtype, level) for case in CASES for dtype in DTYPES for level in levels(case.config)
]


# float64 tests the algorithm of every case, float32 the arithmetic of three: that of the others is
# the same operations. test_every_gradient has the loss of every case
IN_FLOAT32 = "lesson10", "from_scratch", "blog2023"
SQUARES = "lesson10 square", "from_scratch square"  # the others in their logits


def extra(case: Case, dtype: torch.dtype, level: str) -> bool:
    """True if a rung is only under ``-m slow``, as a repaired document's square sizes are."""
    narrow = dtype is torch.float32 and case.name not in IN_FLOAT32
    square = "square" in case.name and case.name not in SQUARES and level != "logits"
    loss = level == "loss" and case.name not in IN_FLOAT32
    return "repaired square" in case.name or narrow or square or loss


@pytest.mark.parametrize(
    ("case", "dtype", "level"),
    [quick_if(not extra(*rung), *rung) for rung in LADDER],
    ids=[f"{case}-{str(dtype)[-7:]}-{level}" for case, dtype, level in LADDER],
)
def test_level(case: Case, dtype: torch.dtype, level: str):
    bound = BOUNDS[str(dtype).removeprefix("torch.")][level]
    with torch.no_grad():
        assert_close(LEVELS[level](pair_of(case, dtype)), bound, level)


# The others differ in no property of lengths: under `-m slow`
LENGTHS = ("lesson10", "blog2023", "deep_dive")


@pytest.mark.parametrize("name", [quick_if(n in LENGTHS, n) for n in [*DOCUMENTS, "small"]])
def test_every_length(name: str):
    """Each length has shapes, and so programs, of its own: three lengths cover source and target
    that are shorter, equal and longer, of one token and up to the end of the position tables.
    """
    sizes = dict(vocab_size=13, d_model=6, num_heads=2, num_layers=1, max_length=3)
    config = jt.preset(name, **sizes)
    both = pair(config)
    for length in range(1, config.max_length + 1):
        source = ragged(config.source_vocab_size, config.source_pad_id, 2, length, seed=length)
        other = length if config.equal_lengths else config.max_length + 1 - length
        target = ragged_target(config, 2, other, seed=length)
        assert_close(both.logits(source, target), 1e-12, f"length {length}")


def test_float32_logits_at_full_size():
    """With 6+6 layers and d 512, as in the document, the sum of all rounding stays below 5e-6."""
    both = pair(jt.preset("lesson10", vocab_size=101), torch.float32, source=23, target=19)
    assert error(both.logits()) <= 5e-6


PRODUCTS = [("lesson10", "medium"), ("lesson10", "highest"), ("small", "medium")]


@pytest.mark.parametrize(
    ("name", "products"), [quick_if(each == PRODUCTS[0], *each) for each in PRODUCTS]
)
def test_bfloat16_errors_are_close_to_pytorch_s(name: str, products: str):
    """Errors against float64, the median of several models: a rounding's sign is chance."""
    config, errors = config_of(name).with_sizes(matmul_precision=products), []
    for seed in range(5):
        both = pair(config, torch.bfloat16, seed=seed)
        ours, theirs = (np.asarray(array, np.float64) for array in both.logits())
        with torch.no_grad():
            exact = both.torch.double()(as_torch(both.source), as_torch(both.target)).numpy()
        errors.append([np.abs(each - exact).max() / np.abs(exact).max() for each in (ours, theirs)])
    mine, reference = np.median(errors, axis=0)
    assert 1e-4 < reference < 0.1, "bfloat16 shows"
    assert mine <= RATIO * reference, f"{mine:.2e}, PyTorch {reference:.2e}"


def test_cross_attention_weights_of_every_layer():
    both = pair(jt.preset("lesson10", **ODD))
    _, attention = both.flax(both.source, both.target, return_attention=True)
    both.logits()
    layers = zip(attention.cross, both.torch.decoder.attention_weights, strict=True)
    for i, (ours, theirs) in enumerate(layers):
        assert_close((ours.mean(axis=1), theirs), 1e-12, f"layer {i}")


MEANS = ("from_scratch", "deep_dive_repaired")


@pytest.mark.parametrize(
    "name", ["lesson10_repaired", "part2_encoder", "part2_encoder_repaired", *MEANS]
)
def test_a_row_without_visible_keys_gets_zero_or_the_mean_and_never_nan(name: str):
    """An empty source line, and for lesson10 a target, in both frameworks: where the fill is -1e20
    at every key, a softmax of equal numbers is uniform.
    """
    both = pair(config_of(name))
    both.source[2] = both.config.source_pad_id
    if name == "lesson10_repaired":
        both.target[1] = both.config.target_pad_id
    ours, theirs = both.logits()
    assert np.isfinite(ours).all()
    assert_close((ours, theirs), 1e-12)
    if name in MEANS:
        _, attention = both.flax(both.source, both.target, return_attention=True)
        for weights in (*attention.encoder, *attention.cross):
            np.testing.assert_allclose(weights[2], 1 / 7, rtol=1e-12)
            assert not np.asarray(weights)[1, :, :, 5:].any(), "a row with tokens"


def test_the_ladder_detects_known_faults():
    """Negative controls: the faults that reached users elsewhere are far over the bounds."""
    both = pair(jt.preset("lesson10", **ODD))
    _, theirs = both.logits()
    for changes in (
        dict(norm_epsilon=1e-6),
        {"decoder.activation": "gelu"},
        dict(score_scale="d_model"),
        dict(embedding_scale="none"),
    ):
        config = jt.preset("lesson10", **ODD, **changes)
        other = jt.convert.from_torch(both.torch.state_dict(), config)
        assert error((other(both.source, both.target), theirs)) > 1e-7, changes
