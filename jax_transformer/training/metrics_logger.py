"""The metrics of a run: collected without waiting for the device, written to metrics.jsonl and the
trackers, and shown as a progress bar or as lines on stderr."""

import math
import os
import sys
import time
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jax_transformer.errors import NonFiniteLossError
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import optimizer
from jax_transformer.training.options import TrainOptions
from jax_transformer.training.trackers import Trackers


class MetricsLogger:
    """Writes the lines of metrics.jsonl after step ``began``."""

    def __init__(
        self,
        options: TrainOptions,
        folder: RunFolder,
        began: int,
        unrecorded: list[dict[str, float]],
    ):
        self.folder = folder
        self.learning_rate = optimizer.schedule(options.optimizer, options.steps)
        self.trackers = Trackers(folder, options)
        self.progress = Progress(began, options.steps)
        self.pending: list[dict[str, jax.Array]] = []
        """Metrics of the last steps, perhaps not computed yet."""
        self.values = unrecorded
        """Metrics of the steps since the last line. A checkpoint keeps them, so that a resumed run
        writes the same next line."""
        self.restart_clock()

    def restart_clock(self) -> None:
        """Do not count the time since the last line as training time."""
        self.since = time.monotonic()

    def not_finite(self, name: str, step: int, value: float) -> NonFiniteLossError:
        """The error for a loss or gradient norm that is infinite or NaN."""
        return NonFiniteLossError(
            f"the {name} of step {step} is {value}; "
            f"the checkpoints in {self.folder.checkpoints} are untouched"
        )

    def wait(self, now: int) -> None:
        """Wait for the pending steps.

        Raises NonFiniteLossError if one of them has a loss or gradient that is not finite.
        """
        values = [
            {name: value.item() for name, value in metrics.items()}
            for metrics in jax.device_get(self.pending)
        ]
        self.pending = []
        for i, value in enumerate(values):
            for name in ("loss", "gradient_norm"):
                if not math.isfinite(value[name]):
                    step = now - len(values) + i + 1
                    raise self.not_finite(name.replace("_", " "), step, value[name])
        self.values += values

    def flush(self, now: int) -> None:
        """Wait for the pending steps, check them, write and show the line of step ``now``."""
        self.wait(now)
        values, self.values = self.values, []
        tokens = np.array([value["tokens"] for value in values])
        entry = {
            "step": now,
            "loss": float(np.average([value["loss"] for value in values], weights=tokens)),
            "gradient_norm": float(values[-1]["gradient_norm"]),
            "learning_rate": float(self.learning_rate(now - 1)),
            "tokens_per_second": float(tokens.sum() / (time.monotonic() - self.since)),
        }
        self.add(entry)
        self.restart_clock()
        self.progress.show(entry)

    def add(self, entry: dict[str, Any]) -> None:
        """Write a line."""
        self.folder.add_metrics(entry)
        self.trackers.add(entry)

    def sync(self) -> None:
        """Flush metrics.jsonl to the disk."""
        if self.folder.metrics.exists():
            with open(self.folder.metrics, "rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """End the progress bar and the trackers."""
        self.progress.close()
        self.trackers.close()


class Progress:
    """Step, loss, speed and time left on stderr: a bar on a terminal, otherwise plain lines."""

    def __init__(self, start: int, steps: int):
        self.bar = (
            tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )
        self.start, self.step, self.steps, self.began = start, start, steps, time.monotonic()

    def advance(self) -> None:
        """Count a step that has been started."""
        self.step += 1
        if self.bar is not None:
            self.bar.update()

    def show(self, entry: dict[str, Any]) -> None:
        """Show a training line of metrics.jsonl."""
        speed = f"{entry['tokens_per_second']:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {entry['loss']:.3f}, {speed}")
            return
        per_step = (time.monotonic() - self.began) / max(1, self.step - self.start)
        minutes, seconds = divmod(round(per_step * (self.steps - self.step)), 60)
        self.say(
            f"step {entry['step']}/{self.steps}  loss {entry['loss']:.3f}  {speed}  "
            f"{minutes}:{seconds:02} left"
        )

    def say(self, message: str) -> None:
        """Print a line."""
        if self.bar is not None:
            self.bar.write(message, file=sys.stderr)
        else:
            print(message, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.close()
