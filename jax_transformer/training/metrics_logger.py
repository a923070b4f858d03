"""The metrics of a run: collected without waiting for the device, written to metrics.jsonl and to
experiment trackers, and shown as a progress bar or as lines on stderr."""

import dataclasses
import importlib.util
import json
import math
import operator
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from jax_transformer.errors import ConfigError, NonFiniteLossError
from jax_transformer.runtime import distributed
from jax_transformer.storage import atomic
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.training.options import TrainOptions

if TYPE_CHECKING:
    import jax

EXTRAS = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The module that each option needs; the option is also the name of its extra."""
FLUSH_SECONDS = 5
"""Seconds until a line is visible in TensorBoard."""


class MetricsLogger:
    """Writes the lines of metrics.jsonl after step ``began``."""

    def __init__(
        self,
        options: TrainOptions,
        folder: RunFolder,
        schedule: Callable[[int], Any],
        began: int,
        unrecorded: list[dict[str, float]],
    ):
        self.folder, self.schedule = folder, schedule
        self.trackers: list[TensorBoard | WeightsAndBiases] = []
        if (options.tensorboard or options.wandb) and distributed.first():
            self.trackers = trackers(folder, options)
        self.progress = Progress(began, options.steps)
        self.pending: list[dict[str, jax.Array]] = []
        """Metrics of the last steps, perhaps not computed yet."""
        self.values = unrecorded
        """Metrics of the steps since the last line. A checkpoint keeps them, so that a resumed run
        writes the same next line."""
        self.since = time.monotonic()
        """Begin of the training time of the next line."""

    def not_finite(self, name: str, step: int, value: float) -> NonFiniteLossError:
        """Return the error for a loss or gradient norm that is infinite or NaN."""
        return NonFiniteLossError(
            f"the {name} of step {step} is {value}; "
            f"the checkpoints in {self.folder.checkpoints} are untouched"
        )

    def wait(self, now: int) -> None:
        """Wait for the pending steps.

        Raises NonFiniteLossError if one of them has a loss or gradient that is not finite.
        """
        import jax

        pending, self.pending = jax.device_get(self.pending), []
        pending = jax.tree.map(operator.methodcaller("item"), pending)
        for step, values in enumerate(pending, now - len(pending) + 1):
            for name in ("loss", "gradient_norm"):
                if not math.isfinite(values[name]):
                    raise self.not_finite(name.replace("_", " "), step, values[name])
            self.values.append(values)

    def flush(self, now: int) -> None:
        """Wait for the pending steps, check them, write and show the line of step ``now``."""
        self.wait(now)
        values, self.values = self.values, []
        series: dict[str, list[float]] = {}
        for value in values:
            for name, number in value.items():
                series.setdefault(name, []).append(number)
        tokens, means = np.array(series["tokens"]), {}
        for name in ("loss", "nll_loss"):
            # A step that version 0.1 made has no nll_loss
            if len(series.get(name, ())) == len(values):
                means[name] = float(np.average(series[name], weights=tokens))
        entry = {
            "step": now,
            **means,
            "gradient_norm": float(series["gradient_norm"][-1]),
            "learning_rate": float(self.schedule(now - 1)),
            "tokens_per_second": float(tokens.sum() / (time.monotonic() - self.since)),
        }
        self.add(entry)
        self.since = time.monotonic()
        self.progress.show(entry)

    def add(self, entry: dict[str, Any]) -> None:
        if distributed.first():
            self.folder.add_metrics(entry)
        for tracker in self.trackers:
            tracker.add(entry["step"], scalars(entry))
        distributed.barrier("metrics")  # a disk that is full ends all of them

    def sync(self) -> None:
        if distributed.first() and self.folder.metrics.exists():
            atomic.sync(self.folder.metrics)

    def close(self) -> None:
        if self.progress.bar is not None:
            self.progress.bar.close()
        for tracker in self.trackers:
            tracker.close()


class Progress:
    """Step, loss, speed and time left on stderr: a bar on a terminal, otherwise plain lines. Only
    the first of several processes shows them.
    """

    def __init__(self, start: int, steps: int):
        self.bar: tqdm | None = None
        if sys.stderr.isatty() and distributed.first():
            self.bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True)
        self.start, self.steps, self.began = start, steps, time.monotonic()
        self.step = start
        """The last step that has been started."""

    def show(self, entry: dict[str, Any]) -> None:
        speed = f"{entry['tokens_per_second']:,.0f} tokens/s"
        loss, nll_loss = f"loss {entry['loss']:.3f}", entry.get("nll_loss", entry["loss"])
        if nll_loss != entry["loss"]:
            loss += f" ({nll_loss:.3f} without label smoothing)"
        if self.bar is not None:
            self.bar.set_postfix_str(f"{loss}, {speed}")
            return
        per_step = (time.monotonic() - self.began) / max(1, self.step - self.start)
        left = tqdm.format_interval(per_step * (self.steps - self.step))
        self.say(f"step {entry['step']}/{self.steps}  {loss}  {speed}  {left} left")

    def say(self, message: str) -> None:
        if self.bar is not None:
            self.bar.write(message, file=sys.stderr)
        else:
            distributed.say(message)


# Trackers


def check_trackers(options: TrainOptions) -> None:
    """Raise ConfigError if the package of a requested tracker is not installed."""
    for name, module in EXTRAS.items():
        if not getattr(options, name):
            continue
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # no origin: a folder of that name in the cwd
            raise ConfigError(
                f"{name} needs the package {module}: pip install 'jax-seq2seq[{name}]'"
            )


def trackers(folder: RunFolder, options: TrainOptions) -> "list[TensorBoard | WeightsAndBiases]":
    """Return a run's trackers. Raises ConfigError if a package is missing, or refuses to start."""
    check_trackers(options)
    started: list[TensorBoard | WeightsAndBiases] = []
    if options.tensorboard:
        started.append(TensorBoard(folder))
    if options.wandb:
        started.append(WeightsAndBiases(folder, options))
    return started


def scalars(entry: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line by their names in trackers: ``train/loss``, ``valid/bleu``,
    ``averaged/bleu`` and so on."""
    group = "averaged" if "weights" in entry else "valid" if "valid_loss" in entry else "train"
    return {
        f"{group}/{name.removeprefix('valid_')}": value
        for name, value in entry.items()
        if name != "step" and isinstance(value, int | float)
    }


class TensorBoard:
    """Event files in RUN/tensorboard, by tensorboardX."""

    def __init__(self, folder: RunFolder):
        from tensorboardX import SummaryWriter  # here, as it imports torch where torch is installed

        self._make, self._path = SummaryWriter, folder.path / "tensorboard"
        self._writer: Any = None

    def add(self, step: int, values: dict[str, float]) -> None:
        if self._writer is None:  # a new event file
            earlier = len(list(self._path.iterdir())) if self._path.exists() else 0
            # TensorBoard no longer shows the events of earlier files from this step on: a resumed
            # run measures them again. One that is resumed for a validation keeps the training line
            # of that step
            void = step if any(name.startswith("train/") for name in values) else step + 1
            self._writer = self._make(
                str(self._path),
                purge_step=void if earlier else None,
                flush_secs=FLUSH_SECONDS,
                filename_suffix=f".{earlier}",
            )
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run in a project of Weights & Biases; its id is in RUN/wandb.json, for a resumed run.

    Steps that are repeated after a crash are equal bit for bit, so it does no harm that Weights &
    Biases keeps the first values.
    """

    def __init__(self, folder: RunFolder, options: TrainOptions):
        import wandb

        path = folder.path / "wandb.json"
        known = {"id": parsed(path, lambda text: json.loads(text)["id"])} if path.exists() else {}
        try:
            self._run = wandb.init(
                project=options.wandb,
                dir=str(folder.path),
                name=folder.path.name,
                config=dataclasses.asdict(options),
                resume="allow",
                **known,
            )
        except wandb.Error as error:
            raise ConfigError(f"wandb={options.wandb}: {' '.join(str(error).split())}") from None
        atomic.write_text(path, json.dumps({"project": options.wandb, "id": self._run.id}) + "\n")

    def add(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()
