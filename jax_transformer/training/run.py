"""The run that a process trains: its folder, opened or created and locked; the options that changed
since it began; the checkpoints that it keeps and averages; and requests to stop it."""

import contextlib
import dataclasses
import enum
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jax_transformer.errors import CheckpointError, ConfigError, InputError, LockedError, Preempted
from jax_transformer.runtime import distributed, signals
from jax_transformer.storage import checkpoint, integrity, run_folder
from jax_transformer.storage.run_folder import RunFolder, best_first
from jax_transformer.training.optimizer_options import FROM_SCRATCH
from jax_transformer.training.options import (
    AverageOf,
    Criterion,
    Resume,
    TrainOptions,
    read_options,
)

Figures = Mapping[int, Mapping[str, Any]]
"""The validation figures of steps."""
RUNS = Path("runs")

# These do not affect the result, or it is content that counts, which its hash checks
FREE = frozenset(
    "run resume log_every samples tensorboard wandb compilation_cache keep "
    "data.train_source data.train_target data.valid_source data.valid_target "
    "data.train data.valid data.dataset data.dataset_config data.train_split data.valid_split "
    "data.source_field data.target_field data.tokenizer data.target_tokenizer".split()
)
# The run continues with a warning: it may not end where the uninterrupted one would
WARNED = frozenset(
    "steps eval_every eval_pairs keep_best best_by patience average average_of devices "
    "mesh.fsdp mesh.tensor loss_chunks model.attention_backend model.remat "
    "model.scan_layers".split()
)


# The folder


@contextmanager
def open_run(options: TrainOptions) -> Iterator[RunFolder]:
    """The folder to train in, locked; several processes share the one of the first.

    It is the named one, or the newest unfinished one of the same options, or a new number under
    runs/.

    Raises:
        ConfigError: the named folder holds a run of other options, or something else, or
            ``options.resume`` forbids to continue it.
        CheckpointError: ``options.resume`` demands a run to continue, and there is none.
        LockedError: another process is training the named run.
    """
    with ExitStack() as stack:
        path = str(_opened(options, stack).path) if distributed.first() else None
        folder = RunFolder(Path(distributed.from_first("run folder", path)))
        if not folder.path.is_dir():
            raise ConfigError(
                f"{folder.path.absolute()}: process {distributed.index()} does not see the folder "
                "that process 0 has opened; give a --run that all processes share"
            )
        yield folder


def _opened(options: TrainOptions, stack: ExitStack) -> RunFolder:
    """The folder, locked until ``stack`` is closed."""
    folder = _named(options, stack) if options.run is not None else _numbered(options, stack)
    folder.remove_unfinished()
    integrity.verify_metrics(folder.path)
    if options.resume is Resume.MUST and folder.last_step() is None:
        raise CheckpointError(
            f"{folder.path}: holds no checkpoint to continue from, as --resume must demands"
        )
    return folder


def _named(options: TrainOptions, stack: ExitStack) -> RunFolder:
    folder = RunFolder(Path(options.run or ""))
    integrity.verify(folder.path)
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
    elif folder.path.exists() and (not folder.path.is_dir() or _visible(folder.path)):
        raise ConfigError(f"{folder.path} exists and is not a run folder; give another --run")
    elif not (parent := _nearest_parent(folder.path)).is_dir():
        raise ConfigError(f"cannot create {folder.path}: {parent} is a file")
    elif options.resume is Resume.MUST:
        raise CheckpointError(f"{folder.path}: no such run to continue, as --resume must demands")
    stack.callback(_remove_empty, folder.path, _missing(folder.path))
    stack.enter_context(run_folder.lock(folder.path))
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
        stack.callback(_remove_empty, path, missing)
        stack.enter_context(run_folder.lock(path))
        return RunFolder(path)
    raise AssertionError("unreachable")


def _can_continue(options: TrainOptions, folder: RunFolder) -> bool:
    """True if the folder holds an unfinished run of the same options that can be read.

    Warns of a folder that holds a checkpoint and cannot be read, with the file that is damaged.
    """
    try:
        integrity.verify(folder.path)
        refused, warned = option_changes(options, read_options(folder))
        return not refused and not warned and not finished(options, folder)
    except InputError as error:
        if folder.last_step() is not None:
            print(f"warning: {error}; this run is not continued", file=sys.stderr)
        return False


def finished(options: TrainOptions, folder: RunFolder) -> bool:
    """True if the last step or the end of patience was reached, and the average is saved."""
    last = folder.last_step()
    validations = folder.validations()
    if last is None or last not in validations:  # the last validation may have been cut short
        return False
    if last < options.steps and not stops_early(options, validations):
        return False
    return not options.average or last in checkpoint.steps(folder.averaged)


def _visible(path: Path) -> list[str]:
    """The files of a folder except locks and temporary files of a killed process."""
    return [name for name in os.listdir(path) if not name.startswith(".")]


def _nearest_parent(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())


def _missing(path: Path) -> list[Path]:
    """The folders that do not exist yet, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _remove_empty(path: Path, created: list[Path]) -> None:
    """Remove the folders that were created for a run that was then refused."""
    if path.is_dir() and not _visible(path):
        for name in run_folder.LOCK_FILES:
            (path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty after all
            for folder in created:
                folder.rmdir()


# Options of a resumed run


def option_changes(now: TrainOptions, before: TrainOptions) -> tuple[list[str], list[str]]:
    """The changed options that are refused, and those that get a warning.

    Each is ``name (before -> now)``.
    """
    changed = differences(with_recorded_rate(now, before), before)
    refused = [text for name, text in changed.items() if name not in FREE | WARNED]
    return refused, [text for name, text in changed.items() if name in WARNED]


def with_recorded_rate(now: TrainOptions, before: TrainOptions) -> TrainOptions:
    """The options with what they leave out of the learning rate as the run began with it.

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
    """The options that differ by dotted name, each as ``name (before -> now)``."""
    new, old = _flat(dataclasses.asdict(now)), _flat(dataclasses.asdict(before))
    return {
        name: f"{name} ({_shown(name, old[name])} -> {_shown(name, new[name])})"
        for name in new
        if new[name] != old[name]
    }


def _shown(name: str, value: Any) -> str:
    if name == "devices" and value == 0:
        return "all"
    return repr(value.value if isinstance(value, enum.Enum) else value)


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return flat


# Checkpoints: the best, those to keep and to average, and the end by patience


def ranked(figures: Figures, by: Criterion) -> list[int]:
    """The steps, best first; among equal scores that of the lower loss, then the earlier."""
    return best_first(figures, by.value)


def since_best(figures: Figures, by: Criterion) -> int:
    """The number of validations after the best one."""
    return sum(step > ranked(figures, by)[0] for step in figures) if figures else 0


def stops_early(options: TrainOptions, figures: Figures) -> bool:
    """True if there were as many validations without a new best as ``patience`` allows."""
    return 0 < options.patience <= since_best(figures, options.best_by)


def to_average(options: TrainOptions, figures: Figures) -> list[int]:
    """The steps whose weights are averaged at the end, in ascending order."""
    order = (
        ranked(figures, options.best_by)
        if options.average_of is AverageOf.BEST
        else sorted(figures, reverse=True)
    )
    return sorted(order[: options.average])


def to_keep(options: TrainOptions, figures: Figures, steps: Sequence[int]) -> set[int]:
    """The checkpoints to keep: the newest, the last and best validated ones, and candidates for the
    average.

    A checkpoint that a signal caused between validations is removed at the next save, so an
    interrupted run ends with the same files as an uninterrupted one.
    """
    last = sorted(figures)[-options.keep :]
    best = ranked(figures, options.best_by)[: options.keep_best]
    return {max(steps), *last, *best, *to_average(options, figures)}


# Requests to stop


class Stop:
    """A request to stop, which a run looks for after every step."""

    def __init__(self) -> None:
        self.asked = False
        self._at_once: str | None = None

    def request(self) -> None:
        """Ask the run to stop. Raises Preempted inside :meth:`at_once`."""
        self.asked = True
        if self._at_once is not None:
            raise Preempted(self._at_once)

    @contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """Let a request end the work immediately, with this message: there is nothing to save."""
        self._at_once = message
        try:
            if self.asked:
                raise Preempted(message)
            yield
            if self.asked:  # the exception was lost, for example in a finalizer
                raise Preempted(message)
        except Exception as error:
            # A library may have made another of it: jaxlib a ValueError, if it was comparing
            # static arguments
            if self.asked and not isinstance(error, Preempted):
                raise Preempted(message) from error
            raise
        finally:
            self._at_once = None

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Inside :meth:`at_once`: let a request end the work after this block and not within it.

        It is for what several processes do together, and wait for each other in.
        """
        message, self._at_once = self._at_once, None
        try:
            yield
        finally:
            self._at_once = message
        if message is not None and self.asked:
            raise Preempted(message)


@contextmanager
def stop_requests() -> Iterator[Stop]:
    """A Stop that SIGTERM and Ctrl-C request; a second signal has its usual effect."""
    stop = Stop()
    with signals.handled(stop.request, raising=Preempted, once=True):  # `at_once` raises it again
        yield stop
