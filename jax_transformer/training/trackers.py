"""The lines of metrics.jsonl on boards as well, where the options ask for them: TensorBoard, and Weights & Biases."""

import dataclasses
import importlib.util
import json
from typing import Any

from jax_transformer.errors import ConfigError
from jax_transformer.storage import atomic
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.training.options import TrainOptions

EXTRAS = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""The option, which is also the name of the extra, and the module that it needs."""
FLUSH_SECONDS = 5
"""How long a line may wait until TensorBoard can see it."""


class Trackers:
    """Every board that the options ask for; none is fine too."""

    def __init__(self, folder: RunFolder, options: TrainOptions):
        """Raises ConfigError where a board's package is not installed or refuses."""
        check(options)
        self._boards: list[TensorBoard | WeightsAndBiases] = []
        if options.tensorboard:
            self._boards.append(TensorBoard(folder))
        if options.wandb:
            self._boards.append(WeightsAndBiases(folder, options))

    def add(self, entry: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        for board in self._boards:
            board.add(entry["step"], scalars(entry))

    def close(self) -> None:
        """Have everything written and sent."""
        for board in self._boards:
            board.close()


def check(options: TrainOptions) -> None:
    """Raises ConfigError where a board is asked for whose package is not installed."""
    for name, module in EXTRAS.items():
        found = importlib.util.find_spec(module) if getattr(options, name) else None
        if getattr(options, name) and (
            found is None or found.origin is None
        ):  # without origin: a folder of that name in the working directory
            raise ConfigError(
                f"{name} needs the package {module}: pip install 'jax-transformer[{name}]'"
            )


def scalars(entry: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line under the names that they have on a board, as ``train/loss``, ``valid/loss``, ``valid/bleu`` and ``averaged/bleu``."""
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
        """A writer to one more event file. What earlier files have from step ``void`` on is no longer shown: a resumed run measures it again.

        A run that is resumed for a validation only keeps the training line of that step.
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
    """A run in a project of Weights & Biases; its id is in RUN/wandb.json, so that a resumed run goes on there.

    Steps that are made a second time after a crash are the same bit for bit, so it does no harm that Weights & Biases keeps the first.
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
