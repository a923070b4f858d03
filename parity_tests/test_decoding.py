"""Greedy decoding against the plainest PyTorch loop there is: no cache, argmax, token by token."""

import numpy as np
import pytest
import torch

import jax_transformer as jt
from parity_tests.cases import CASES
from parity_tests.twins import Pair, as_torch, pair


def torch_greedy(both: Pair, max_length: int) -> np.ndarray:
    config = both.config
    source = as_torch(both.source)
    target = torch.full((len(source), 1), config.bos_id)
    done = torch.zeros(len(source), dtype=torch.bool)
    for _ in range(max_length):
        with torch.no_grad():
            token = both.torch(source, target)[:, -1].argmax(-1)
        token[done] = config.target_pad_id
        done |= token == config.eos_id
        target = torch.cat([target, token[:, None]], dim=1)
    return target[:, 1:].numpy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_token_for_token(case):
    lengths = set()
    for seed in range(3):
        both = pair(case.config, seed=seed, batch=4, source=9)
        ours = np.asarray(jt.generate.greedy(both.flax, both.source, max_length=12))
        np.testing.assert_array_equal(ours, torch_greedy(both, 12))
        lengths |= set((ours != case.config.target_pad_id).sum(axis=1).tolist())
    assert len(lengths) > 1 or 12 in lengths, "rows of several lengths, or full ones, make this test mean something"
