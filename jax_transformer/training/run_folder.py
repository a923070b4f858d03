"""The folder of a run: which one to use, what lies in it, and a trained model out of it."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flax import nnx

from jax_transformer import codec, transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import CheckpointError, ConfigError, InputError
from jax_transformer.nn.positions import Frozen
from jax_transformer.training.options import TrainOptions
from jax_transformer.transformer import Transformer

RUNS = Path("runs")
T = TypeVar("T")


@dataclass(frozen=True)
class RunFolder:
    """Names of what lies in a run folder."""

    path: Path

    config = property(lambda self: self.path / "config.json")
    train_config = property(lambda self: self.path / "train_config.json")
    tokenizer = property(lambda self: self.path / "tokenizer.json")
    data = property(lambda self: self.path / "data.json")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    checkpoints = property(lambda self: self.path / "checkpoints")

    def options(self) -> TrainOptions:
        """The options that the run was started with."""
        return _parsed(self.train_config, lambda text: codec.from_json(TrainOptions, text))

    def last_step(self) -> int | None:
        """The step of the newest checkpoint, None without one."""
        from jax_transformer.training import checkpoint

        return max(checkpoint.steps(self.checkpoints), default=None)

    def write(self, path: Path, text: str) -> None:
        """Write one of the files, whole or not at all."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)

    def keep_metrics(self, step: int) -> None:
        """Drop the lines of metrics.jsonl behind ``step``: the run goes on from there."""
        lines = self.metrics.read_text().split("\n")[:-1] if self.metrics.exists() else []  # behind the last newline: what was cut off
        self.write(self.metrics, "".join(line + "\n" for line in lines if json.loads(line)["step"] <= step))

    def add_metrics(self, entry: dict[str, Any]) -> None:
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def choose(options: TrainOptions) -> RunFolder:
    """The folder to train in: the named one, the newest unfinished one of the same options, or a new number under runs/.

    Raises ConfigError where the named folder holds a run of other options or something that is no run.
    """
    if options.run is not None:
        folder = RunFolder(Path(options.run))
        if folder.train_config.exists():
            differences = options.differences(folder.options())
            if differences:
                raise ConfigError(f"{folder.path} is a run of other options: {', '.join(differences)}; give another --run")
        elif folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
            raise ConfigError(f"{folder.path} exists and is not a run folder")
        elif not next(parent for parent in folder.path.absolute().parents if parent.exists()).is_dir():
            raise ConfigError(f"{folder.path} cannot be made: a file is in its way")
        return folder
    name = "phrases" if options.data.builtin else "text"
    earlier = sorted(RUNS.glob(f"{name}-[0-9][0-9][0-9]"))
    for path in reversed(earlier):
        folder = RunFolder(path)
        if _is_of(options, folder) and (folder.last_step() or 0) < options.steps:
            return folder
    number = int(earlier[-1].name.rsplit("-", 1)[1]) + 1 if earlier else 1
    return RunFolder(RUNS / f"{name}-{number:03d}")


@dataclass(frozen=True)
class TrainedRun:
    """What translating needs."""

    model: Transformer
    tokenizer: Tokenizer
    widths: tuple[int, ...]
    """The widths that batches were padded to in training."""
    step: int


def load_model(path: str | Path) -> tuple[Transformer, int]:
    """The model of a folder's newest checkpoint, in the dtypes that it was saved in, and the checkpoint's step.

    Raises InputError where ``path`` is no run folder, CheckpointError where it holds no intact checkpoint.
    """
    import jax

    from jax_transformer.training import checkpoint

    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        raise InputError(f"{folder.path}: no such run folder")
    config = _parsed(folder.config, TransformerConfig.from_json)
    step = folder.last_step()
    if step is None:
        raise CheckpointError(f"{folder.checkpoints}: holds no checkpoint")
    dtypes = {name: dtype for name, (_, dtype) in checkpoint.described(folder.checkpoints, step).items()}
    if "float64" in dtypes.values() and not jax.config.read("jax_enable_x64"):
        raise CheckpointError(f"{folder.checkpoints / str(step)} holds float64 and JAX is in 32-bit mode: set JAX_ENABLE_X64=1")
    skeleton = transformer.abstract(config)
    like = {
        group: {
            name: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(f"{group}/{name}", leaf.dtype))
            for name, leaf in transformer.flatten(skeleton, kind).items()
        }
        for group, kind in (("params", nnx.Param), ("carried", Frozen))
    }
    saved = checkpoint.load(folder.checkpoints, step, like, partial=True)
    return transformer.unflatten(config, saved["params"] | saved["carried"]), step


def save_model(model: Transformer, path: str | Path) -> None:
    """A new folder that :func:`load_model` reads: the configuration, and the weights as the checkpoint of step 0."""
    from jax_transformer.training import checkpoint

    folder = RunFolder(Path(path))
    folder.path.mkdir(parents=True)
    groups = {"params": transformer.flatten(model, nnx.Param), "carried": transformer.flatten(model, Frozen)}
    checkpoint.save(folder.checkpoints, 0, groups, keep=1, about={})
    folder.write(folder.config, model.config.to_json())


def load_run(path: str | Path) -> TrainedRun:
    """All that translating needs, from a run folder. Raises as :func:`load_model`."""
    folder = RunFolder(Path(path))
    model, step = load_model(path)
    return TrainedRun(model, Tokenizer.load(folder.tokenizer), _parsed(folder.data, lambda text: tuple(json.loads(text)["widths"])), step)


def load(path: str | Path) -> tuple[Transformer, Tokenizer | None]:
    """The model and the tokenizer of a folder; None for the tokenizer of converted weights, which have none."""
    tokenizer = RunFolder(Path(path)).tokenizer
    return load_model(path)[0], Tokenizer.load(tokenizer) if tokenizer.exists() else None


def _is_of(options: TrainOptions, folder: RunFolder) -> bool:
    """Whether the folder holds a run of these options; one whose options cannot be read does not."""
    try:
        return not options.differences(folder.options())
    except InputError:
        return False


def _parsed(path: Path, parse: Callable[[str], T]) -> T:
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
