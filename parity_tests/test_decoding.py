"""Decoding, token for token in float64, against a PyTorch loop with hypotheses in lists."""

import itertools

import numpy as np
import pytest
import torch

import jax_transformer as jt
from parity_tests.cases import CASES
from parity_tests.marks import quick_if
from parity_tests.twins import Pair, as_torch, pair
from torch_reference import decoding

LENGTH = 8
SEARCHES = [(1, 0.6), (2, 0.0), (4, 1.0), (5, 2.5)]  # beam size and length penalty
# Scores closer than this are ordered by rounding
NEAR = 1e-10


# square sizes add nothing to a search
SEARCHED = [case for case in CASES if not case.name.endswith("square")]


def reader(both: Pair) -> decoding.Model:
    """Return a call of the twin, which pads targets if both sides must be equally long."""
    if not both.config.equal_lengths:
        return both.torch

    def model(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        padded = torch.full_like(source, both.config.target_pad_id)
        padded[:, : target.shape[1]] = target
        return both.torch(source, padded)[:, : target.shape[1]]

    return model


# Neither an activation, an epsilon, biases, the place of the norm nor sizes change what a cache
# holds, one case has uneven stacks, and two repaired documents stand for the others: `-m slow`
SLOW = (
    "torch.nn activation gelu",
    "torch.nn layer_norm_eps 1e-3",
    "torch.nn bias=False",
    "from_scratch as wide inside",
    "part2_encoder uneven stacks",
    *("from_scratch_repaired", "lesson10_repaired", "part2_encoder_repaired"),
    *("blog2023 with biases", "torch.nn norm_first", "torch.nn tied output"),
)


@pytest.mark.parametrize(
    "case", [quick_if(case.name not in SLOW, case) for case in SEARCHED], ids=str
)
def test_greedy_token_for_token(case):
    lengths = set()
    ids = {"bos": case.config.bos_id, "eos": case.config.eos_id, "pad": case.config.target_pad_id}
    length = 9 if case.config.equal_lengths else 12
    for seed in range(3):
        both = pair(case.config, seed=seed, batch=4, source=9)
        ours = np.asarray(jt.generate.greedy(both.flax, both.source, max_length=12))
        theirs = decoding.greedy(reader(both), as_torch(both.source), length, **ids)
        np.testing.assert_array_equal(ours, theirs.numpy())
        lengths |= set((ours != case.config.target_pad_id).sum(axis=1).tolist())
    assert len(lengths) > 1 or 12 in lengths, (
        "rows of several lengths, or full ones, make this test mean something"
    )


def likely_end(both: Pair) -> int:
    """Return a token that ends some hypotheses early and others never."""
    config = both.config
    ids = {"bos": config.bos_id, "eos": config.eos_id, "pad": config.target_pad_id}
    token = int(decoding.greedy(reader(both), as_torch(both.source[:1]), 3, **ids)[0, 2])
    return config.eos_id if token == config.target_pad_id else token


# One search per case, so that each search has a quarter of the cases; greedy decoding above covers
# every case
BEAMS = (
    "deep_dive lesson10 from_scratch part2_encoder blog2023 blog2023_repaired "
    "vaswani2017_base small"
).split()


@pytest.mark.parametrize(
    ("case", "search"),
    list(zip([case for case in CASES if case.name in BEAMS], itertools.cycle(SEARCHES))),
    ids=str,
)
def test_beam_token_for_token(case, search):
    (size, alpha), config = search, case.config
    both = pair(config, batch=3, source=9)
    end, ties, ended = likely_end(both), 0, 0
    options = dict(beam_size=size, max_length=LENGTH, length_penalty=alpha, eos_id=end)
    tokens, scores = map(np.asarray, jt.generate.n_best(both.flax, both.source, size, **options))
    special = dict(bos=config.bos_id, eos=end)
    for row, source in enumerate(as_torch(both.source)):
        search = decoding.beam(reader(both), source, size, LENGTH, alpha, **special)
        ties += search.margin < NEAR
        for ours, score, theirs in zip(tokens[row], scores[row], search.hypotheses, strict=True):
            padding = [config.target_pad_id] * (LENGTH - len(theirs.tokens))
            assert ours.tolist() == theirs.tokens + padding, f"row {row}: {search}"
            bound = 1e-12 * max(1, abs(theirs.score))
            assert abs(score - theirs.score) <= bound, f"row {row}: {search}"
            ended += theirs.tokens[-1] == end
    assert ties == 0, f"{ties} searches were decided by less than {NEAR}"
    assert ended > 0, "no hypothesis ended"
