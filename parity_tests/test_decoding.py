"""Decoding against the plainest PyTorch there is: no cache, no batch of beams, hypotheses in lists.

Token for token, in float64.
"""

import itertools

import numpy as np
import pytest
import torch

import jax_transformer as jt
from parity_tests.cases import CASES
from parity_tests.twins import Pair, as_torch, pair
from torch_reference import decoding

PLACES = 8
SEARCHES = [(1, 0.6), (2, 0.0), (4, 1.0), (5, 2.5)]  # beam size and length penalty
# What rounding may change: scores that close are told apart by luck
NEAR = 1e-10


SEARCHED = [
    case for case in CASES if not case.name.endswith("square")
]  # a search cannot tell a square size


def reader(both: Pair) -> decoding.Model:
    """The twin; where both sides must be equally long, it reads the target padded to the source's
    length.
    """
    if not both.config.equal_lengths:
        return both.torch

    def model(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        padded = torch.full_like(source, both.config.target_pad_id)
        padded[:, : target.shape[1]] = target
        return both.torch(source, padded)[:, : target.shape[1]]

    return model


@pytest.mark.parametrize("case", SEARCHED, ids=str)
def test_greedy_token_for_token(case):
    lengths, ids = (
        set(),
        {"bos": case.config.bos_id, "eos": case.config.eos_id, "pad": case.config.target_pad_id},
    )
    for seed in range(3):
        both = pair(case.config, seed=seed, batch=4, source=9)
        ours = np.asarray(jt.generate.greedy(both.flax, both.source, max_length=12))
        theirs = decoding.greedy(
            reader(both), as_torch(both.source), 9 if case.config.equal_lengths else 12, **ids
        )
        np.testing.assert_array_equal(ours, theirs.numpy())
        lengths |= set((ours != case.config.target_pad_id).sum(axis=1).tolist())
    assert len(lengths) > 1 or 12 in lengths, (
        "rows of several lengths, or full ones, make this test mean something"
    )


def likely_end(both: Pair) -> int:
    """A token that some hypotheses end with early and others never: the third that the first row
    says greedily, if it is not padding.
    """
    config = both.config
    ids = {"bos": config.bos_id, "eos": config.eos_id, "pad": config.target_pad_id}
    token = int(decoding.greedy(reader(both), as_torch(both.source[:1]), 3, **ids)[0, 2])
    return config.eos_id if token == config.target_pad_id else token


# Each with one search, so that each search meets a quarter of them; what decides tokens one by one
# is compared for every case above
BEAMS = [
    "deep_dive",
    "lesson10",
    "from_scratch",
    "part2_encoder",
    "blog2023",
    "blog2023_repaired",
    "vaswani2017_base",
    "small",
]


@pytest.mark.parametrize(
    ("case", "search"),
    list(zip([case for case in CASES if case.name in BEAMS], itertools.cycle(SEARCHES))),
    ids=str,
)
def test_beam_token_for_token(case, search):
    (size, alpha), config = search, case.config
    both = pair(config, batch=3, source=9)
    end, ties, ended = likely_end(both), 0, 0
    tokens, scores = jt.generate.n_best(
        both.flax,
        both.source,
        size,
        beam_size=size,
        max_length=PLACES,
        length_penalty=alpha,
        eos_id=end,
    )
    for row, source in enumerate(as_torch(both.source)):
        found = decoding.beam(reader(both), source, size, PLACES, alpha, bos=config.bos_id, eos=end)
        ties += found.margin < NEAR
        for ours, score, theirs in zip(
            np.asarray(tokens)[row], np.asarray(scores)[row], found.best, strict=True
        ):
            assert ours.tolist() == theirs.tokens + [config.target_pad_id] * (
                PLACES - len(theirs.tokens)
            ), f"row {row}: {found}"
            assert abs(score - theirs.score) <= 1e-12 * max(1, abs(theirs.score)), (
                f"row {row}: {found}"
            )
            ended += theirs.tokens[-1] == end
    assert ties == 0, f"{ties} searches were decided by less than {NEAR}"
    assert ended > 0, "no hypothesis ended"
