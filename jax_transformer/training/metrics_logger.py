"""What a run measures: collected without waiting for it, and written to metrics.jsonl and the boards now and then."""

import math
import os
import time
from typing import Any

import jax
import numpy as np

from jax_transformer.errors import NonFiniteLossError
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import optimizer
from jax_transformer.training.options import TrainOptions
from jax_transformer.training.trackers import Trackers


class MetricsLogger:
    """The lines of metrics.jsonl from a step on."""

    def __init__(
        self,
        options: TrainOptions,
        folder: RunFolder,
        began: int,
        unrecorded: list[dict[str, float]],
    ):
        self.folder, self.rates = folder, optimizer.schedule(options.optimizer, options.steps)
        self.boards = Trackers(folder, options)
        self.pending: list[dict[str, jax.Array]] = []
        """What the last steps measured, perhaps not computed yet."""
        self.values = unrecorded
        """Of the steps since the last line; a checkpoint keeps them, so that a resumed run writes the same next line."""
        self.restart_clock()

    def restart_clock(self) -> None:
        """What happened since the last line is not training time."""
        self.since = time.monotonic()

    def not_finite(self, what: str, where: int, value: float) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"the {what} of step {where} is {value}; the checkpoints in {self.folder.checkpoints} are untouched"
        )

    def wait(self, now: int) -> None:
        """Wait for the pending steps. Raises NonFiniteLossError where one of them has a loss or gradient that is not finite."""
        values = [
            {name: value.item() for name, value in measured.items()}
            for measured in jax.device_get(self.pending)
        ]
        self.pending = []
        for i, value in enumerate(values):
            for name in ("loss", "gradient_norm"):
                if not math.isfinite(value[name]):
                    raise self.not_finite(
                        name.replace("_", " "), now - len(values) + i + 1, value[name]
                    )
        self.values += values

    def flush(self, now: int) -> dict[str, Any]:
        """Wait for the pending steps, check their losses, write and return the line of step ``now``."""
        self.wait(now)
        values, self.values = self.values, []
        tokens = np.array([value["tokens"] for value in values])
        entry = {
            "step": now,
            "loss": float(np.average([value["loss"] for value in values], weights=tokens)),
            "gradient_norm": float(values[-1]["gradient_norm"]),
            "learning_rate": float(self.rates(now - 1)),
            "tokens_per_second": float(tokens.sum() / (time.monotonic() - self.since)),
        }
        self.add(entry)
        self.restart_clock()
        return entry

    def add(self, entry: dict[str, Any]) -> None:
        """Write a line."""
        self.folder.add_metrics(entry)
        self.boards.add(entry)

    def sync(self) -> None:
        """Have what was written on the disk."""
        if self.folder.metrics.exists():
            with open(self.folder.metrics, "rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        self.boards.close()
