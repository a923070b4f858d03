"""Greedy decoding and beam search without a cache: one row at a time, hypotheses in lists.

A model is any callable that gives logits (b, t, v) for ids (b, s) and (b, t). Log-probabilities are
summed in float64.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Model = Callable[[Tensor, Tensor], Tensor]


class Hypothesis(NamedTuple):
    """Tokens without the start token."""

    tokens: list[int]
    score: float
    """The log-probability of an unfinished hypothesis, the score of a finished one."""


class SearchResult(NamedTuple):
    """The hypotheses of one row, best first."""

    hypotheses: list[Hypothesis]
    margin: float
    """The smallest difference of scores that decided anything; below rounding, luck decided."""


def penalty(length: int, alpha: float) -> float:
    """The length penalty of Wu et al. 2016, equation 14; the length includes the end token."""
    return ((5 + length) / 6) ** alpha


@torch.no_grad()
def greedy(
    model: Model, source: Tensor, max_length: int, *, bos: int, eos: int, pad: int
) -> Tensor:
    """Ids (b, n) of the most likely tokens, padded after each row's end token."""
    target = torch.full((len(source), 1), bos)
    done = torch.zeros(len(source), dtype=torch.bool)
    for _ in range(max_length):
        token = model(source, target)[:, -1].argmax(-1)
        token[done] = pad
        done |= token == eos
        target = torch.cat([target, token[:, None]], dim=1)
    return target[:, 1:]


@torch.no_grad()
def beam(
    model: Model, source: Tensor, size: int, max_length: int, alpha: float, *, bos: int, eos: int
) -> SearchResult:
    """The ``size`` best hypotheses of one source row (s,), finished ones first.

    Each step takes the 2·size most likely continuations: those that end are finished, and the first
    ``size`` others go on. The search ends when no unfinished hypothesis can beat the worst of
    ``size`` finished ones.
    """
    live, finished, margins = [Hypothesis([], 0.0)], [], [float("inf")]
    length = 0
    while length < max_length:
        length += 1
        grown = sorted(_continuations(model, source, live, bos), key=_by_score)
        margins += _gaps(grown, 2 * size)
        best = grown[: 2 * size]
        ended = [
            Hypothesis(h.tokens, h.score / penalty(length, alpha))
            for h in best
            if h.tokens[-1] == eos
        ]
        finished = sorted(finished + ended, key=_by_score)
        margins += _gaps(finished, size)
        finished = finished[:size]
        live = [h for h in best if h.tokens[-1] != eos][:size]
        if len(finished) == size:
            hope = live[0].score / penalty(max_length, alpha)
            margins.append(abs(hope - finished[-1].score))
            if hope <= finished[-1].score:
                break
    unfinished = [Hypothesis(h.tokens, h.score / penalty(length, alpha)) for h in live]
    return SearchResult((finished + unfinished)[:size], min(margins))


def _continuations(
    model: Model, source: Tensor, live: list[Hypothesis], bos: int
) -> list[Hypothesis]:
    """Every hypothesis followed by every token."""
    target = torch.tensor([[bos, *h.tokens] for h in live])
    logits = model(source.expand(len(live), -1), target)[:, -1]
    log_probs = logits.double().log_softmax(-1).tolist()
    return [
        Hypothesis([*h.tokens, v], h.score + row[v])
        for h, row in zip(live, log_probs, strict=True)
        for v in range(len(row))
    ]


def _by_score(hypothesis: Hypothesis) -> float:
    return -hypothesis.score


def _gaps(ranked: list[Hypothesis], count: int) -> list[float]:
    """The differences between neighbours in rank, down to the first that is not kept."""
    return [a.score - b.score for a, b in pairwise(ranked[: count + 1])]
