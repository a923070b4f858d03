"""Which checkpoints are best, which stay, and when a run has gone long enough without a new best. Pure functions of figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax_transformer.storage.run_folder import best_first
from jax_transformer.training.options import AverageOf, Criterion, TrainOptions

Figures = Mapping[int, Mapping[str, Any]]
"""The validation figures of steps."""


def ranked(figures: Figures, by: Criterion) -> list[int]:
    """The steps, best first; of equals the earlier."""
    return best_first(figures, by.value)


def since_best(figures: Figures, by: Criterion) -> int:
    """How many validations came after the best one."""
    return sum(step > ranked(figures, by)[0] for step in figures) if figures else 0


def stops_early(options: TrainOptions, figures: Figures) -> bool:
    """Whether the options' patience is at its end."""
    return 0 < options.patience <= since_best(figures, options.best_by)


def to_average(options: TrainOptions, figures: Figures) -> list[int]:
    """The steps whose weights are averaged at the end, ascending."""
    order = (
        ranked(figures, options.best_by)
        if options.average_of is AverageOf.BEST
        else sorted(figures, reverse=True)
    )
    return sorted(order[: options.average])


def to_keep(options: TrainOptions, figures: Figures, steps: Sequence[int]) -> set[int]:
    """The checkpoints that stay: the newest, the last and the best validated ones, and while the run goes on those that may be averaged.

    What a signal made between validations goes with the next save, so an interrupted run ends with the folder of an uninterrupted one.
    """
    last = sorted(figures)[-options.keep :]
    best = ranked(figures, options.best_by)[: options.keep_best]
    return {max(steps), *last, *best, *to_average(options, figures)}
