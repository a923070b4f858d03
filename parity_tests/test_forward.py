"""Every level of the ladder for every case, in float64 and in float32."""

import functools

import numpy as np
import pytest
import torch

import jax_transformer as jt
from parity_tests.bounds import BOUNDS, RATIO
from parity_tests.cases import CASES, DOCUMENTS, ODD, Case
from parity_tests.levels import LEVELS, arrays, assert_close, error, levels, logits
from parity_tests.marks import quick_if
from parity_tests.twins import Pair, as_torch, pair, ragged, ragged_target

DTYPES = (torch.float64, torch.float32)


@functools.lru_cache(maxsize=1)
def pair_of(case: Case, dtype: torch.dtype) -> Pair:
    return pair(case.config, dtype)


LADDER = [
    (case, dtype, level) for case in CASES for dtype in DTYPES for level in levels(case.config)
]


# float64 tests the algorithm of every case, float32 the arithmetic of every architecture: that of
# its variants and sizes is the same operations
IN_FLOAT32 = (
    "lesson10",
    "deep_dive",
    "from_scratch",
    "part2_encoder",
    "blog2023",
    "torch.nn post-norm",
)


def extra(case: Case, dtype: torch.dtype) -> bool:
    """True if a rung is only under ``-m slow``, as a repaired document's square sizes are."""
    return "repaired square" in case.name or (
        dtype is torch.float32 and case.name not in IN_FLOAT32
    )


@pytest.mark.parametrize(
    ("case", "dtype", "level"),
    [quick_if(not extra(rung[0], rung[1]), *rung) for rung in LADDER],
    ids=[f"{case}-{str(dtype)[-7:]}-{level}" for case, dtype, level in LADDER],
)
def test_level(case: Case, dtype: torch.dtype, level: str):
    with torch.no_grad():
        assert_close(
            LEVELS[level](pair_of(case, dtype)),
            BOUNDS[str(dtype).removeprefix("torch.")][level],
            level,
        )


# A repaired document differs from the faithful one in no property of lengths: under `-m slow`
@pytest.mark.parametrize("name", [quick_if("repaired" not in n, n) for n in [*DOCUMENTS, "small"]])
def test_every_length(name: str):
    """Each length has shapes, and so programs, of its own: three lengths cover source and target
    that are shorter, equal and longer, of one token and up to the end of the position tables.
    """
    sizes = dict(vocab_size=13, d_model=6, num_heads=2, num_layers=1, max_length=3)
    config = jt.preset(name, **sizes)
    both = pair(config)
    for length in range(1, config.max_length + 1):
        source = ragged(config.source_vocab_size, config.source_pad_id, 2, length, seed=length)
        target = ragged_target(
            config,
            2,
            length if config.equal_lengths else config.max_length + 1 - length,
            seed=length,
        )
        with torch.no_grad():
            assert_close(
                (both.flax(source, target), both.torch(as_torch(source), as_torch(target))),
                1e-12,
                f"length {length}",
            )


def test_float32_logits_at_full_size():
    """With 6+6 layers and d 512, as in the document, the sum of all rounding stays below 5e-6."""
    both = pair(jt.preset("lesson10", vocab_size=101), torch.float32, source=23, target=19)
    with torch.no_grad():
        assert error(logits(both)) <= 5e-6


@pytest.mark.parametrize("name", ["lesson10", "small"])
def test_bfloat16_errors_are_close_to_pytorch_s(name: str):
    """Errors against float64, the median of several models: a rounding's sign is chance."""
    (case,) = (case for case in CASES if case.name == name)
    errors = []
    for seed in range(5):
        both = pair(case.config, torch.bfloat16, seed=seed)
        with torch.no_grad():
            ours, theirs = (np.asarray(array, np.float64) for array in arrays(logits(both)))
            exact = both.torch.double()(as_torch(both.source), as_torch(both.target)).numpy()
        errors.append([np.abs(each - exact).max() / np.abs(exact).max() for each in (ours, theirs)])
    mine, reference = np.median(errors, axis=0)
    assert 1e-4 < reference < 0.1, "bfloat16 shows"
    assert mine <= RATIO * reference, f"{mine:.2e}, PyTorch {reference:.2e}"


def test_cross_attention_weights_of_every_layer():
    both = pair(jt.preset("lesson10", **ODD))
    _, attention = both.flax(both.source, both.target, return_attention=True)
    with torch.no_grad():
        both.torch(as_torch(both.source), as_torch(both.target))
    for i, (ours, theirs) in enumerate(
        zip(attention.cross, both.torch.decoder.attention_weights, strict=True)
    ):
        assert_close((ours.mean(axis=1), theirs), 1e-12, f"layer {i}")


def test_a_row_without_visible_keys_gets_zero_and_never_nan():
    """An empty source line and an empty target, masked as in lesson10, in both frameworks."""
    both = pair(jt.preset("lesson10_repaired", **ODD))
    both.source[2], both.target[1] = both.config.source_pad_id, both.config.target_pad_id
    with torch.no_grad():
        ours, theirs = logits(both)
    assert np.isfinite(np.asarray(ours)).all()
    assert_close((ours, theirs), 1e-12)


def test_the_ladder_detects_known_faults():
    """Negative controls: the faults that reached users elsewhere are far over the bounds."""
    both = pair(jt.preset("lesson10", **ODD))
    for changes in (
        dict(norm_epsilon=1e-6),
        {"decoder.activation": "gelu"},
        dict(score_scale="d_model"),
        dict(embedding_scale="none"),
    ):
        other = jt.convert.from_torch(
            both.torch.state_dict(), jt.preset("lesson10", **ODD, **changes)
        )
        with torch.no_grad():
            assert (
                error(
                    (
                        other(both.source, both.target),
                        both.torch(as_torch(both.source), as_torch(both.target)),
                    )
                )
                > 1e-7
            ), changes
