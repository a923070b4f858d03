"""The folder that a run trains in: found or made, and locked while it trains."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jax_transformer.errors import CheckpointError, ConfigError, LockedError, Refusal
from jax_transformer.storage import checkpoint, lock
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import resume, selection
from jax_transformer.training.options import Resume, TrainOptions, read_options

RUNS = Path("runs")


@contextmanager
def claim(options: TrainOptions) -> Iterator[RunFolder]:
    """The folder to train in, locked: the named one, else the newest unfinished one of the same options, else a new number under runs/.

    Raises ConfigError where the named folder holds a run of other options or something that is no run, or where ``options.resume`` forbids
    what is there; CheckpointError where there is nothing to resume and it must be; LockedError where the named run is being trained.
    """
    with ExitStack() as held:
        folder = _named(options, held) if options.run is not None else _numbered(options, held)
        folder.remove_unfinished()
        if options.resume is Resume.MUST and folder.last_step() is None:
            raise CheckpointError(
                f"{folder.path}: holds no checkpoint to go on from, and --resume must asks for one"
            )
        yield folder


def _named(options: TrainOptions, held: ExitStack) -> RunFolder:
    folder = RunFolder(Path(options.run or ""))
    if folder.train_config.exists():
        if options.resume is Resume.NEVER:
            raise ConfigError(
                f"{folder.path} holds a run already, and --resume never forbids to go on with it; give another --run"
            )
        refused, _ = resume.changes(options, read_options(folder))
        if refused:
            raise ConfigError(
                f"{folder.path} is a run of other options: {', '.join(refused)}; give another --run"
            )
    elif folder.path.exists() and (not folder.path.is_dir() or _visible(folder.path)):
        raise ConfigError(f"{folder.path} exists and is not a run folder")
    elif not next(parent for parent in folder.path.absolute().parents if parent.exists()).is_dir():
        raise ConfigError(f"{folder.path} cannot be made: a file is in its way")
    elif options.resume is Resume.MUST:
        raise CheckpointError(f"{folder.path}: no such run, and --resume must asks for one")
    held.callback(_leave_nothing_empty, folder.path, _missing(folder.path))
    held.enter_context(lock.hold(folder.path))
    return folder


def _numbered(options: TrainOptions, held: ExitStack) -> RunFolder:
    name = "phrases" if options.data.builtin else "text"
    earlier = sorted(RUNS.glob(f"{name}-[0-9][0-9][0-9]"))
    if options.resume is not Resume.NEVER:
        for path in reversed(earlier):
            if _goes_on(options, RunFolder(path)):
                with contextlib.suppress(LockedError):  # it is being trained: not ours
                    held.enter_context(lock.hold(path))
                    return RunFolder(path)
    if options.resume is Resume.MUST:
        raise CheckpointError(
            f"{RUNS}: no unfinished run of these options, and --resume must asks for one"
        )
    for number in itertools.count(int(earlier[-1].name.rsplit("-", 1)[1]) + 1 if earlier else 1):
        path = RUNS / f"{name}-{number:03d}"
        missing = _missing(path)
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another run was quicker
            continue
        held.callback(_leave_nothing_empty, path, missing)
        held.enter_context(lock.hold(path))
        return RunFolder(path)
    raise AssertionError("numbers do not end")


def _goes_on(options: TrainOptions, folder: RunFolder) -> bool:
    """Whether the folder holds an unfinished run of the same options; one that cannot be read does not."""
    try:
        refused, named = resume.changes(options, read_options(folder))
        return not refused and not named and not finished(options, folder)
    except Refusal:
        return False


def finished(options: TrainOptions, folder: RunFolder) -> bool:
    """Whether nothing is left to do: the last step or the end of patience was reached, and the average, where asked for, is made."""
    last = folder.last_step()
    if last is None or not (
        last >= options.steps or selection.stops_early(options, folder.validations())
    ):
        return False
    return not options.average or last in checkpoint.steps(folder.averaged)


def _visible(path: Path) -> list[str]:
    """What lies in a folder beside locks and what a killed process was writing."""
    return [name for name in os.listdir(path) if not name.startswith(".")]


def _missing(path: Path) -> list[Path]:
    """The folders that are yet to be made, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _leave_nothing_empty(path: Path, made: list[Path]) -> None:
    """Remove the folders that were made for a run which then was refused."""
    if path.is_dir() and not _visible(path):
        for name in lock.FILES:
            (path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is in it
            for folder in made:
                folder.rmdir()
