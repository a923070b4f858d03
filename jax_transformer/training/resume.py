"""A run that is opened: its folder, created or continued and locked; its checkpoints, of which it
continues from one; and what changed since it was stopped: options, versions and devices."""

import contextlib
import dataclasses
import enum
import itertools
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_transformer.config import codec
from jax_transformer.errors import CheckpointError, ConfigError, InputError, LockedError
from jax_transformer.runtime import distributed
from jax_transformer.storage import atomic, checkpoint, run_folder, saving
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.storage.run_folder import RunFolder, best_first
from jax_transformer.training.optimizer import FROM_SCRATCH
from jax_transformer.training.options import (
    AverageOf,
    Criterion,
    Resume,
    TrainOptions,
    read_options,
)

if TYPE_CHECKING:
    from jax_transformer.training.step import TrainState

RUNS = Path("runs")
Figures = Mapping[int, Mapping[str, Any]]
"""The validation figures of steps."""

# These do not affect the result, or it is content that counts, which its hash checks
FREE = frozenset(
    "run resume log_every samples tensorboard wandb compilation_cache keep "
    "data.train_source data.train_target data.valid_source data.valid_target "
    "data.train data.valid data.prepared data.dataset data.dataset_config data.train_split "
    "data.valid_split data.source_field data.target_field data.tokenizer "
    "data.target_tokenizer".split()
)
# The run continues with a warning: it may not end where the uninterrupted one would
WARNED = frozenset(
    "steps eval_every eval_pairs keep_best best_by patience average average_of devices "
    "mesh.fsdp mesh.tensor loss_chunks model.matmul_precision model.attention_backend "
    "model.remat model.scan_layers".split()
)


# The folder


@contextmanager
def open_run(options: TrainOptions) -> Iterator[RunFolder]:
    """Open the folder to train in, locked; several processes share the one of the first.

    It is the named one, or the newest unfinished one of the same options, or a new number under
    runs/. Raises ConfigError if the named folder holds a run of other options, or something else,
    or ``options.resume`` forbids to continue it; CheckpointError if it demands a run to continue
    and there is none; LockedError if another process is training the named run.
    """
    with ExitStack() as stack:
        path = None
        if distributed.first():
            choose = _numbered if options.run is None else _named
            folder = choose(options, stack)
            atomic.remove_unfinished(folder.path)
            run_folder.verify_metrics(folder.path)
            if options.resume is Resume.MUST and folder.last_step() is None:
                raise CheckpointError(
                    f"{folder.path}: holds no checkpoint to continue from, as --resume must demands"
                )
            path = str(folder.path)
        folder = RunFolder(Path(distributed.from_first("run folder", path)))
        if not folder.path.is_dir():
            raise ConfigError(
                f"{folder.path.absolute()}: process {distributed.index()} does not see the folder "
                "that process 0 has opened; give a --run that all processes share"
            )
        yield folder


def _named(options: TrainOptions, stack: ExitStack) -> RunFolder:
    folder = RunFolder(Path(options.run or ""))
    run_folder.verify(folder.path)
    missing = _missing(folder.path)
    if folder.train_config.exists():
        if options.resume is Resume.NEVER:
            raise ConfigError(
                f"{folder.path} holds a run already, and --resume never forbids to continue it; "
                "give another --run"
            )
        refused, _ = option_changes(options, read_options(folder))
        if refused:
            raise ConfigError(
                f"{folder.path} is a run of other options: {', '.join(refused)}; give another --run"
            )
    elif folder.path.exists() and not (folder.path.is_dir() and _is_empty(folder.path)):
        raise ConfigError(f"{folder.path} exists and is not a run folder; give another --run")
    elif not (parent := (folder.path, *missing)[-1].absolute().parent).is_dir():
        raise ConfigError(f"cannot create {folder.path}: {parent} is a file")
    elif options.resume is Resume.MUST:
        raise CheckpointError(f"{folder.path}: no such run to continue, as --resume must demands")
    stack.enter_context(run_folder.lock(folder.path))
    stack.callback(_remove_empty, folder.path, missing)
    return folder


def _numbered(options: TrainOptions, stack: ExitStack) -> RunFolder:
    name = "phrases" if options.data.builtin else "text"
    earlier = sorted(RUNS.glob(f"{name}-[0-9][0-9][0-9]"))
    if options.resume is not Resume.NEVER:
        for path in reversed(earlier):
            if _can_continue(options, RunFolder(path)):
                with contextlib.suppress(LockedError):  # another process is training it
                    stack.enter_context(run_folder.lock(path))
                    return RunFolder(path)
    if options.resume is Resume.MUST:
        raise CheckpointError(
            f"{RUNS}: no unfinished run of these options to continue, as --resume must demands"
        )
    for number in itertools.count(int(earlier[-1].name.rsplit("-", 1)[1]) + 1 if earlier else 1):
        path = RUNS / f"{name}-{number:03d}"
        missing = _missing(path)
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # created by another run in the meantime
            continue
        stack.enter_context(run_folder.lock(path))
        stack.callback(_remove_empty, path, missing)
        return RunFolder(path)
    raise AssertionError("unreachable")


def _can_continue(options: TrainOptions, folder: RunFolder) -> bool:
    """Return True if the folder holds an unfinished run of the same options that can be read.

    Warns of a folder that holds a checkpoint and cannot be read, with the file that is damaged.
    """
    try:
        run_folder.verify(folder.path)
        refused, warned = option_changes(options, read_options(folder))
        return not refused and not warned and not finished(options, folder)
    except InputError as error:
        if folder.last_step() is not None:
            print(f"warning: {error}; this run is not continued", file=sys.stderr)
        return False


def _is_empty(path: Path) -> bool:
    """Return True if a folder holds only locks and temporary files of a killed process."""
    return not any(path.glob("[!.]*"))


def _missing(path: Path) -> list[Path]:
    """Return the folders that do not exist yet, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _remove_empty(path: Path, created: list[Path]) -> None:
    """Remove the folders that were created for a run that was then refused, while it is locked."""
    if path.is_dir() and _is_empty(path):
        for name in run_folder.LOCK_FILES:
            (path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty after all
            for folder in created:
                folder.rmdir()


# Its checkpoints: the one to continue from, the best, those to keep and to average


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
    order = sorted(figures, reverse=True)
    if options.average_of is AverageOf.BEST:
        order = best_first(figures, options.best_by.value)
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


# Options of a resumed run


def option_changes(now: TrainOptions, before: TrainOptions) -> tuple[list[str], list[str]]:
    """Return the changed options that are refused, and those that get a warning.

    Each is ``name (before -> now)``.
    """
    changed = differences(with_recorded_rate(now, before), before)
    refused = [text for name, text in changed.items() if name not in FREE | WARNED]
    return refused, [text for name, text in changed.items() if name in WARNED]


def with_recorded_rate(now: TrainOptions, before: TrainOptions) -> TrainOptions:
    """Return the options with what they leave out of the learning rate as the run began with it.

    Version 0.1 had the defaults of random weights with ``init`` too; such a run keeps them.
    """
    old, new = before.optimizer.rate._asdict(), now.optimizer.rate._asdict()
    recorded = {
        name: old[name]
        for name in now.rate_left_out
        if now.init is not None and new[name] != old[name] == FROM_SCRATCH._asdict()[name]
    }
    if not recorded:
        return now
    return dataclasses.replace(now, optimizer=dataclasses.replace(now.optimizer, **recorded))


def differences(now: TrainOptions, before: TrainOptions) -> dict[str, str]:
    """Return the options that differ by dotted name, each as ``name (before -> now)``."""
    new, old = (codec.flat(dataclasses.asdict(options)) for options in (now, before))
    return {
        name: f"{name} ({_shown(name, old[name])} -> {_shown(name, new[name])})"
        for name in new
        if new[name] != old[name]
    }


def _shown(name: str, value: Any) -> str:
    if name == "devices" and value == 0:
        return "all"
    return repr(value.value if isinstance(value, enum.Enum) else value)


def recorded_options(options: TrainOptions, folder: RunFolder) -> TrainOptions:
    """Return the options with the learning rate that a run of version 0.1 began with; say so."""
    if not folder.train_config.exists():
        return options
    recorded = with_recorded_rate(options, read_options(folder))
    if recorded.optimizer.rate != options.optimizer.rate:
        distributed.say(
            f"{folder.path}: keeps the learning rate that it began with, version 0.1's default"
        )
    return recorded


def warn_of_changes(options: TrainOptions, folder: RunFolder, saved: Checkpoint) -> None:
    """Name the options, versions and devices that changed since the run was stopped."""
    _, changed = option_changes(options, read_options(folder))
    changed += environment_changes(environment(), dict(saved.about))
    if changed:
        distributed.say(
            f"warning: changed since this run was stopped: {', '.join(changed)}; "
            "the result will not be bit for bit that of an uninterrupted run"
        )


def environment() -> dict[str, Any]:
    """Return everything outside the run folder that a bit-exact continuation depends on.

    Versions, device, number of cores, and XLA's flags.
    """
    import jax

    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {"python": platform.python_version()} | {name: version(name) for name in names}
    machine = {
        "device": jax.devices()[0].device_kind,
        "number of devices": jax.device_count(),
        "cores": distributed.cores(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    return {"versions": versions, "machine": machine}


def environment_changes(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return the differences between two :func:`environment`, each as ``name before -> now``."""
    changed = []
    for group in ("versions", "machine"):
        old = before.get(group, {})
        changed += [
            f"{name} {'unset' if old.get(name) == '' else old.get(name)} -> {value or 'unset'}"
            for name, value in now[group].items()
            if old.get(name, value if old else None) != value  # earlier versions record fewer
        ]
    return changed
