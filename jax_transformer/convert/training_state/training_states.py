"""``convert --training``: weights, optimizer state, schedule and position in the data, between run
folders and checkpoints of PyTorch loops.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.config import TransformerConfig
from jax_transformer.convert.models import ModelDescription
from jax_transformer.convert.planning import Request
from jax_transformer.errors import ConfigError, DifferentError, InputError, Refusal
from jax_transformer.formats import registry as formats
from jax_transformer.formats.base import Format
from jax_transformer.storage import atomic, pt, run_folder
from jax_transformer.storage.pt import writer
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.storage.tensors import same
from jax_transformer.training.options import read_options

if TYPE_CHECKING:
    from jax_transformer.training.step import TrainState


@dataclass(frozen=True)
class ConvertedTraining:
    """A finished conversion of a training state."""

    source: str
    destination: str
    step: int
    arrays: int
    """Number of weights and moments."""
    numbers: int

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.source} -> {self.destination}: step {self.step}, {self.arrays} arrays of "
            f"weights and moments, {self.numbers:,} numbers"
        )
        checked = "with moments, counts and the schedule's position"
        yield f"checked: there and back bit for bit, {checked}"

    def to_data(self) -> dict[str, Any]:
        return dict(vars(self))


def convert(request: Request) -> ConvertedTraining:
    """Convert a training state. Raises ConfigError unless source and destination are a PyTorch
    training checkpoint and a run with the same options.
    """
    excluded = {
        "--config, --preset and --set": request.description != ModelDescription(),
        "--dtype": request.dtype is not None,
        "--key": request.key is not None,
        "--strip-prefix, --ignore and --rename": request.names != NameChanges(),
        "--no-check": not request.check,
    }
    for flag, is_given in excluded.items():
        if is_given:
            raise ConfigError(f"{flag}: not with --training, which converts a run as it is")
    source, target = Path(request.source), Path(request.destination)
    before, after = formats.of(source), formats.to_write(target)
    if before.name == "pt" and not after.is_file:
        return _into_run(source, target, after, force=request.force)
    if after.name == "pt" and not before.is_file:
        formats.check_free(after, target, force=request.force)
        return _out_of_run(source, target, before, request.weights)
    raise ConfigError(f"{source} -> {target}: --training is between a run and a PyTorch file")


def _folder(path: Path, format: Format) -> tuple[RunFolder, int | None]:
    """Return the run, and the step if the path is a single checkpoint."""
    folder = RunFolder(path) if format.name == "run" else RunFolder(path.absolute().parent.parent)
    if not folder.train_config.is_file():
        raise InputError(
            f"{folder.path}: not a run that can be resumed ({folder.train_config.name} is missing)"
        )
    run_folder.verify(folder.path)
    return folder, int(path.name) if format.name == "step" else None


def _into_run(source: Path, target: Path, format: Format, *, force: bool) -> ConvertedTraining:
    from jax_transformer.convert.training_state import torch_checkpoint
    from jax_transformer.storage import checkpoint

    folder, expected_step = _folder(target, format)
    # Lock before options and state are read: a run that is training would save a newer step
    with run_folder.lock(folder.path):
        options, config = read_options(folder), parsed(folder.config, TransformerConfig.from_json)
        saved = pt.read(source)
        if not isinstance(saved, dict):
            raise InputError(f"{source}: holds a {type(saved).__name__}, not a training checkpoint")
        try:
            state = torch_checkpoint.from_checkpoint(saved, options, config)
        except Refusal as error:
            raise type(error)(f"{source}: {error}") from None
        step = int(state.step)
        path = folder.checkpoints / str(step)
        if expected_step not in (None, step):
            raise ConfigError(f"{path.with_name(str(expected_step))}: {source} is of step {step}")
        newest = max(checkpoint.steps(folder.checkpoints), default=step)
        if newest > step:
            raise InputError(
                f"{folder.checkpoints}: holds step {newest}, from which the run would resume "
                f"instead of {step}"
            )
        if path.exists() and not force:
            raise InputError(f"{path}: exists already, and is not overwritten without --force")
        names = torch_checkpoint.module_parameters(saved["model"], config)
        _check(saved, torch_checkpoint.to_checkpoint(state, options, config, names), source)
        path = torch_checkpoint.save(folder, state)
        _check_same(torch_checkpoint.load(folder, step), state, path)
        return _outcome(str(source), str(path), state)


def _out_of_run(source: Path, target: Path, format: Format, weights: str) -> ConvertedTraining:
    from jax_transformer.architectures import twins
    from jax_transformer.convert.training_state import torch_checkpoint
    from jax_transformer.storage import checkpoint

    folder, step = _folder(source, format)
    if format.name == "run":
        if weights not in ("auto", "last") and not weights.isdecimal():
            raise ConfigError(
                f"--weights {weights}: a run resumes from its last checkpoint or from a step"
            )
        steps = checkpoint.steps(folder.checkpoints)
        step = int(weights) if weights.isdecimal() else max(steps, default=None)
        if step not in steps:
            missing = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise InputError(f"{folder.checkpoints}: holds no {missing}")
    assert step is not None
    state = torch_checkpoint.load(folder, step)
    options, config = read_options(folder), parsed(folder.config, TransformerConfig.from_json)
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the order of a PyTorch module's parameters, by which torch.optim numbers them, is not "
            "known without PyTorch: install it"
        )
    names = twins.parameter_names(config)
    saved = torch_checkpoint.to_checkpoint(state, options, config, names)
    with atomic.file(target) as temporary:
        writer.save(temporary, saved, target=target)
        read_back = torch_checkpoint.from_checkpoint(pt.read(temporary), options, config)
        _check_same(read_back, state, target)
    return _outcome(f"{folder.path} (step {step})", str(target), state)


def _check(saved: Mapping[str, Any], converted: Mapping[str, Any], source: Path) -> None:
    """Raise DifferentError unless weights and moments come back bit for bit."""
    for part in ("model", "optimizer"):
        after = dict(pt.leaves(converted[part]))
        wrong = [
            name
            for name, array in pt.leaves(saved[part])
            if isinstance(array, np.ndarray)
            and array.ndim
            and not (isinstance(after.get(name), np.ndarray) and same(array, after[name]))
        ]
        if wrong:
            raise DifferentError(
                f"{source}: {part}.{', '.join(wrong)} do not come back bit for bit; nothing was "
                "changed"
            )


def _check_same(one: "TrainState", other: "TrainState", path: Path) -> None:
    import jax

    for (key_path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True
    ):
        if not same(np.asarray(a), np.asarray(b)):
            raise DifferentError(f"{path}: {jax.tree_util.keystr(key_path)} reads back different")


def _outcome(source: str, destination: str, state: "TrainState") -> ConvertedTraining:
    import jax

    leaves = jax.tree.leaves((state.params, state.frozen, state.opt_state))
    sizes = [leaf.size for leaf in leaves if leaf.ndim]
    return ConvertedTraining(source, destination, int(state.step), len(sizes), sum(sizes))
