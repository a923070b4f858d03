"""Experiment trackers: the lines of metrics.jsonl in TensorBoard and Weights & Biases as well."""

import dataclasses
import importlib.util
import json
from typing import Any

from jax_transformer.errors import ConfigError
from jax_transformer.storage import atomic
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.training.options import TrainOptions

EXTRAS = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The module that each option needs; the option is also the name of its extra."""
FLUSH_SECONDS = 5
"""Seconds until a line is visible in TensorBoard."""


class Trackers:
    """All trackers of a run, perhaps none."""

    def __init__(self, folder: RunFolder, options: TrainOptions):
        """Raise ConfigError if a tracker's package is not installed or refuses to start."""
        check(options)
        self._trackers: list[TensorBoard | WeightsAndBiases] = []
        if options.tensorboard:
            self._trackers.append(TensorBoard(folder))
        if options.wandb:
            self._trackers.append(WeightsAndBiases(folder, options))

    def add(self, entry: dict[str, Any]) -> None:
        """Log one line of metrics.jsonl."""
        for tracker in self._trackers:
            tracker.add(entry["step"], scalars(entry))

    def close(self) -> None:
        """Write and send everything that is pending."""
        for tracker in self._trackers:
            tracker.close()


def check(options: TrainOptions) -> None:
    """Raise ConfigError if the package of a requested tracker is not installed."""
    for name, module in EXTRAS.items():
        if not getattr(options, name):
            continue
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # no origin: a folder of that name in the cwd
            raise ConfigError(
                f"{name} needs the package {module}: pip install 'jax-seq2seq[{name}]'"
            )


def scalars(entry: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by their names in trackers: ``train/loss``, ``valid/bleu``,
    ``averaged/bleu`` and so on."""
    group = "averaged" if "weights" in entry else "valid" if "valid_loss" in entry else "train"
    numbers = {
        name: value
        for name, value in entry.items()
        if name != "step" and isinstance(value, int | float)
    }
    return {f"{group}/{name.removeprefix('valid_')}": value for name, value in numbers.items()}


class TensorBoard:
    """Event files in RUN/tensorboard, by tensorboardX."""

    def __init__(self, folder: RunFolder):
        from tensorboardX import SummaryWriter  # here, as it imports torch where torch is installed

        self._make, self._path = SummaryWriter, folder.path / "tensorboard"
        self._writer: Any = None

    def add(self, step: int, values: dict[str, float]) -> None:
        if self._writer is None:
            self._writer = self._open(
                step if any(name.startswith("train/") for name in values) else step + 1
            )
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _open(self, void: int) -> Any:
        """A writer to a new event file.

        TensorBoard no longer shows the events of earlier files from step ``void`` on: a resumed run
        measures them again. A run that is resumed for a validation keeps the training line of that
        step.
        """
        earlier = len(list(self._path.iterdir())) if self._path.exists() else 0
        purge = void if earlier else None
        return self._make(
            str(self._path),
            purge_step=purge,
            flush_secs=FLUSH_SECONDS,
            filename_suffix=f".{earlier}",
        )

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
