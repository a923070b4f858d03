"""The folder of a run: configuration, options, metrics and checkpoints."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jax_transformer.errors import CheckpointError, InputError
from jax_transformer.storage import atomic, checkpoint

T = TypeVar("T")
LOSS = "valid_loss"
"""The one validation figure of which less is better."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files in a run folder."""

    path: Path

    config = property(lambda self: self.path / "config.json")
    train_config = property(lambda self: self.path / "train_config.json")
    tokenizer = property(lambda self: self.path / "tokenizer.json")
    data = property(lambda self: self.path / "data.json")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    curves = property(lambda self: self.path / "curves.png")
    checkpoints = property(lambda self: self.path / "checkpoints")
    averaged = property(lambda self: self.path / "averaged")

    def train_options(self) -> dict[str, Any]:
        """The options that the run was started with, as they are in the file. Raises InputError
        naming it.
        """
        return parsed(self.train_config, lambda text: dict(json.loads(text)))

    def best_first(self) -> list[int]:
        """Steps of the checkpoints that were validated, best first by the figure that the run's
        ``best_by`` names.
        """
        options = self.train_options() if self.train_config.exists() else {}
        figures = self.figures()
        criterion = options.get("best_by", "bleu")
        if any(criterion not in entry for entry in figures.values()):
            raise InputError(f"{self.train_config}: best_by={criterion!r} is no validation figure")
        return best_first(figures, criterion)

    def last_step(self) -> int | None:
        """The step of the newest checkpoint, None without one."""
        return max(checkpoint.steps(self.checkpoints), default=None)

    def remove_unfinished(self) -> None:
        """Remove files that a killed process was writing. The caller holds the folder's lock."""
        atomic.remove_unfinished(self.path)

    def entries(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without a last one that was cut off."""
        lines = (
            self.metrics.read_text(encoding="utf-8").split("\n")[:-1]
            if self.metrics.exists()
            else []
        )
        return [
            _parsed_line(line, f"{self.metrics}: line {number}")
            for number, line in enumerate(lines, 1)
        ]

    def validations(self) -> dict[int, dict[str, Any]]:
        """The figures of each validation by its step; not those of averaged weights."""
        return {
            entry["step"]: entry
            for entry in self.entries()
            if "valid_loss" in entry and "weights" not in entry
        }

    def figures(self) -> dict[int, dict[str, Any]]:
        """The validation figures of the checkpoints that have some, by their steps."""
        figures = {}
        for step in checkpoint.steps(self.checkpoints):
            with contextlib.suppress(CheckpointError):  # damage is reported when it is loaded
                figures[step] = checkpoint.read_manifest(self.checkpoints, step).get("figures")
        return {step: entry for step, entry in figures.items() if entry}

    def keep_metrics(self, step: int, *, validated: bool, averaged: bool) -> None:
        """Drop the lines of metrics.jsonl after ``step``, and the validations of ``step`` that its
        checkpoint does not hold.
        """
        saved = {False: validated, True: averaged}  # by whether the validated weights were averaged

        def keep(entry: dict[str, Any]) -> bool:
            return entry["step"] < step or (
                entry["step"] == step and ("valid_loss" not in entry or saved["weights" in entry])
            )

        atomic.write_text(
            self.metrics,
            "".join(json.dumps(entry) + "\n" for entry in self.entries() if keep(entry)),
        )

    def add_metrics(self, entry: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def best_first(figures: Mapping[int, Mapping[str, Any]], criterion: str) -> list[int]:
    """Steps by their validation figures, best first: the lowest loss, or the highest score. Of
    equals the earlier first.
    """
    sign = 1 if criterion == LOSS else -1
    return sorted(figures, key=lambda step: (sign * figures[step][criterion], step))


def _parsed_line(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        if isinstance(entry["step"], int):
            return entry
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{where} is not an object with a step")


def parsed(path: Path, parse: Callable[[str], T]) -> T:
    """Parse a file of the run folder with ``parse``. Raises InputError naming the file."""
    text = _text(path)
    try:
        return parse(text)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path.parent}: not a run folder ({path.name} is missing)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
