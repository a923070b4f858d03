"""The checkpoints of a run: the one to continue from, the best, those to keep and to average."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_transformer.runtime import distributed
from jax_transformer.storage import checkpoint, run_folder, saving
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.storage.run_folder import RunFolder, best_first
from jax_transformer.training.options import AverageOf, Criterion, TrainOptions

if TYPE_CHECKING:
    from jax_transformer.training.step import TrainState

Figures = Mapping[int, Mapping[str, Any]]
"""The validation figures of steps."""


def newest_intact(folder: RunFolder) -> Checkpoint | None:
    """Return the checkpoint to continue from, None if there is none; the first process decides.

    Newer checkpoints, which are damaged, are named and quarantined. Raises CheckpointError if there
    are checkpoints and none is intact.
    """
    if not distributed.first():
        step = distributed.from_first("checkpoint", None)
        return None if step is None else checkpoint.open(folder.checkpoints, step, verified=True)
    saving.remove_unfinished(folder.checkpoints)
    saved, errors = run_folder.newest_intact(folder.checkpoints)
    step = 0 if saved is None else saved.step
    for newer, error in zip(reversed(checkpoint.steps(folder.checkpoints)), errors, strict=False):
        quarantined = run_folder.quarantine(folder.checkpoints, newer)
        distributed.say(
            f"warning: {error}; renamed to {quarantined.name}; continuing from step {step}"
        )
    distributed.from_first("checkpoint", None if saved is None else saved.step)
    return saved


def finished(options: TrainOptions, folder: RunFolder) -> bool:
    """Return True if the last step or the end of patience was reached, and the average is saved."""
    last = folder.last_step()
    validations = folder.validations()
    if last is None or last not in validations:  # the last validation may have been cut short
        return False
    if last < options.steps and not stops_early(options, validations):
        return False
    return not options.average or last in checkpoint.steps(folder.averaged)


def since_best(figures: Figures, by: Criterion) -> int:
    """Return the number of validations after the best one."""
    return sum(step > best_first(figures, by.value)[0] for step in figures) if figures else 0


def stops_early(options: TrainOptions, figures: Figures) -> bool:
    """Return True if there were as many validations without a new best as ``patience`` allows."""
    return 0 < options.patience <= since_best(figures, options.best_by)


def to_average(options: TrainOptions, figures: Figures) -> list[int]:
    """Return the steps whose weights are averaged at the end, in ascending order."""
    order = (
        best_first(figures, options.best_by.value)
        if options.average_of is AverageOf.BEST
        else sorted(figures, reverse=True)
    )
    return sorted(order[: options.average])


def to_keep(options: TrainOptions, figures: Figures, steps: Sequence[int]) -> set[int]:
    """Return the checkpoints to keep: the newest, the last and best validated ones, and candidates
    for the average.

    A checkpoint that a signal caused between validations is removed at the next save, so an
    interrupted run ends with the same files as an uninterrupted one.
    """
    last = sorted(figures)[-options.keep :]
    best = best_first(figures, options.best_by.value)[: options.keep_best]
    return {max(steps), *last, *best, *to_average(options, figures)}


def mean_weights(folder: RunFolder, steps: list[int], like: "TrainState") -> dict[str, np.ndarray]:
    """Return the mean of the validated weights of ``steps`` (Vaswani et al. 2017, section 6.1).

    It is computed in float64 and rounded once; ``like`` gives shapes and dtypes.
    """
    group = "ema" if like.ema else "params"
    abstract = {group: getattr(like, group)}
    total: dict[str, Any] = {}
    for each in steps:
        opened = checkpoint.open(folder.checkpoints, each, verified=not distributed.first())
        distributed.barrier("checkpoint to average")  # none is loaded that is damaged
        weights = like._replace(**opened.load(abstract, partial=True)).weights
        total = {
            name: distributed.on_host(weights[name]).astype(np.float64) + total.get(name, 0)
            for name in like.trained
        }
    return {
        name: np.ascontiguousarray((array / len(steps)).astype(weights[name].dtype))
        for name, array in total.items()
    }
