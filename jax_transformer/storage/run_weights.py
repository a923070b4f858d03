"""The checkpoints of a run that ``--weights`` may mean, in order of preference."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jax_transformer.errors import CheckpointError, ConfigError
from jax_transformer.storage import checkpoint
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.storage.run_folder import RunFolder

CHOICES = "auto, averaged, best, last, or the number of a step"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be meant: ``root/step``."""

    root: Path
    step: int
    name: str
    """Why it is one: ``averaged``, ``best``, ``last`` or the step's number."""


def candidates(folder: RunFolder, weights: str) -> Iterator[Candidate]:
    """The checkpoints that ``weights`` may mean, first choice first.

    ``auto`` is averaged weights if the run has made some, then its best checkpoint, then its last
    one. Raises ConfigError for a word that is none of :data:`CHOICES`.
    """
    if weights not in ("auto", "averaged", "best", "last") and not weights.isdecimal():
        raise ConfigError(f"weights={weights!r} is not one of {CHOICES}")
    steps, averaged = checkpoint.steps(folder.checkpoints), checkpoint.steps(folder.averaged)
    best = folder.best_first() if folder.train_config.exists() else []
    if weights.isdecimal():
        chosen = [step for step in steps if step == int(weights)]
        yield from (Candidate(folder.checkpoints, step, weights) for step in chosen)
    if weights in ("auto", "averaged"):
        yield from (Candidate(folder.averaged, step, "averaged") for step in reversed(averaged))
    most = None if weights == "auto" else 1
    if weights in ("auto", "best"):
        yield from (Candidate(folder.checkpoints, step, "best") for step in best[:most])
    if weights in ("auto", "last"):
        rest = [step for step in reversed(steps) if weights == "last" or step not in best]
        yield from (Candidate(folder.checkpoints, step, "last") for step in rest[:most])


def open(folder: RunFolder, weights: str = "auto") -> tuple[Candidate, Checkpoint]:
    """The first intact checkpoint that ``weights`` may mean, verified; damaged ones before it are
    named on stderr.

    Raises CheckpointError if there is none.
    """
    damage: CheckpointError | None = None
    for candidate in candidates(folder, weights):
        if damage is not None:
            print(f"warning: {damage}; the checkpoint before it is used", file=sys.stderr)
        try:
            return candidate, checkpoint.open(candidate.root, candidate.step)
        except CheckpointError as error:
            damage = error
    asked = "" if weights == "auto" else f" for --weights {weights}"
    raise damage or CheckpointError(f"{folder.checkpoints}: holds no checkpoint{asked}")
