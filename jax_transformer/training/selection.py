"""The choice of checkpoints: the best, those to keep and to average, and early stopping.

Pure functions of validation figures.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax_transformer.storage.run_folder import best_first
from jax_transformer.training.options import AverageOf, Criterion, TrainOptions

Figures = Mapping[int, Mapping[str, Any]]
"""The validation figures of steps."""


def ranked(figures: Figures, by: Criterion) -> list[int]:
    """The steps, best first; the earlier first among equals."""
    return best_first(figures, by.value)


def since_best(figures: Figures, by: Criterion) -> int:
    """The number of validations after the best one."""
    return sum(step > ranked(figures, by)[0] for step in figures) if figures else 0


def stops_early(options: TrainOptions, figures: Figures) -> bool:
    """True if there were as many validations without a new best as ``patience`` allows."""
    return 0 < options.patience <= since_best(figures, options.best_by)


def to_average(options: TrainOptions, figures: Figures) -> list[int]:
    """The steps whose weights are averaged at the end, in ascending order."""
    order = (
        ranked(figures, options.best_by)
        if options.average_of is AverageOf.BEST
        else sorted(figures, reverse=True)
    )
    return sorted(order[: options.average])


def to_keep(options: TrainOptions, figures: Figures, steps: Sequence[int]) -> set[int]:
    """The checkpoints to keep: the newest, the last and best validated ones, and candidates for the
    average.

    A checkpoint that a signal caused between validations is removed at the next save, so an
    interrupted run ends with the same files as an uninterrupted one.
    """
    last = sorted(figures)[-options.keep :]
    best = ranked(figures, options.best_by)[: options.keep_best]
    return {max(steps), *last, *best, *to_average(options, figures)}
