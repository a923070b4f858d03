"""The folder of a run: configuration, options, metrics, checkpoints in order of preference, damage
to any of them, and the lock that lets one process at a time write to it. Checkpoints of version 0.1
recorded nothing about the files next to them, so those of a run that has only such are not checked.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from jax_transformer.errors import CheckpointError, ConfigError, InputError, LockedError, Refusal
from jax_transformer.storage import atomic, checkpoint, run_files
from jax_transformer.storage.checkpoint import Checkpoint

T = TypeVar("T")
LOCK_FILES = _LOCK, _HOLDER = ".lock", ".holder.json"
LOSS = "valid_loss"
"""The only validation figure for which lower is better."""
_SHOWN = 6
"""Problems that a message names; all are in the error's details."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files in a run folder."""

    path: Path

    config = property(lambda self: self.path / run_files.CONFIG)
    train_config = property(lambda self: self.path / run_files.TRAIN_CONFIG)
    data = property(lambda self: self.path / run_files.DATA)
    metrics = property(lambda self: self.path / run_files.METRICS)
    curves = property(lambda self: self.path / "curves.png")
    checkpoints = property(lambda self: self.path / "checkpoints")
    averaged = property(lambda self: self.path / "averaged")

    def train_options(self) -> dict[str, Any]:
        """Return the stored options that the run began with. Raises InputError with its name."""
        return parsed(self.train_config, lambda text: dict(json.loads(text)))

    def best_first(self) -> list[int]:
        """Return the steps of validated checkpoints, best first by the run's ``best_by`` figure."""
        figures = self.figures()
        criterion = self.train_options().get("best_by", "bleu")
        for entry in figures.values():
            if criterion not in entry:
                raise InputError(
                    f"{self.train_config}: best_by={criterion!r} is not a validation figure"
                )
        return best_first(figures, criterion)

    def last_step(self) -> int | None:
        """Return the step of the newest checkpoint; None if there is none."""
        return max(checkpoint.steps(self.checkpoints), default=None)

    def entries(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, without a last one that was cut off.

        The file is synced before each checkpoint is saved. A loss of power may leave anything after
        that, so the lines end before the first one that is not an entry. Raises InputError if that
        one was there when the newest checkpoint was saved.
        """
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        entries: list[dict[str, Any]] = []
        later, bad = [], 0
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                is_entry = isinstance(entry["step"], int)
            except (ValueError, KeyError, TypeError, RecursionError):
                is_entry = False
            if not is_entry:
                bad = bad or number
            elif bad:
                later.append(entry["step"])
            else:
                entries.append(entry)
        if bad:
            last = self.last_step() or 0
            validated = any(entry["step"] == last and LOSS in entry for entry in entries)
            if (last in self.figures() and not validated) or any(step <= last for step in later):
                raise InputError(f"{self.metrics}: line {bad} is not an object with a step")
        return entries

    def validations(self) -> dict[int, dict[str, Any]]:
        """Return the figures of each validation by its step, without averaged weights' figures."""
        validations = {}
        for entry in self.entries():
            if "valid_loss" in entry and "weights" not in entry:
                validations[entry["step"]] = entry
        return validations

    def figures(self) -> dict[int, dict[str, Any]]:
        """Return the validation figures of the checkpoints that have some, by their steps."""
        figures = {}
        for step in checkpoint.steps(self.checkpoints):
            with contextlib.suppress(CheckpointError):  # damage is reported when it is loaded
                if entry := checkpoint.read_manifest(self.checkpoints, step).get("figures"):
                    figures[step] = entry
        return figures

    def keep_metrics(self, step: int, *, validated: bool, averaged: bool) -> None:
        """Drop what metrics.jsonl got since a checkpoint or its average was saved; version 0.1 did
        not record that: later steps go, and validations of ``step`` that it does not have.
        """
        covered = None
        with contextlib.suppress(CheckpointError):
            about = checkpoint.read_manifest(self.averaged if averaged else self.checkpoints, step)
            covered = about.get("metrics", {}).get("bytes")
        if covered is not None:
            content = self.metrics.read_bytes() if self.metrics.exists() else b""
            atomic.write_bytes(self.metrics, content[:covered])
            return
        saved = {False: validated, True: averaged}  # True: averaged weights were validated
        text = ""
        for entry in self.entries():
            if entry["step"] < step or (
                entry["step"] == step and ("valid_loss" not in entry or saved["weights" in entry])
            ):
                text += json.dumps(entry) + "\n"
        atomic.write_text(self.metrics, text)

    def add_metrics(self, entry: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        with atomic.naming(self.metrics), open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def best_first(figures: Mapping[int, Mapping[str, Any]], criterion: str) -> list[int]:
    """Return steps by their validation figures, best first: the lowest loss, or the highest score.
    Of equal scores the one with the lowest loss, then the earlier first.
    """
    sign = 1 if criterion == LOSS else -1
    ranks = [(sign * entry[criterion], entry[LOSS], step) for step, entry in figures.items()]
    return [step for *_, step in sorted(ranks)]


def parsed(path: Path, parse: Callable[[str], T]) -> T:
    """Parse a file of the run folder with ``parse``. Raises InputError naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path.parent}: not a run folder ({path.name} is missing)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    try:
        return parse(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: {error}") from None


CHOICES = "auto, averaged, best, last, or the number of a step"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint ``root/step`` that a choice of weights may refer to."""

    root: Path
    step: int
    name: str
    """The choice that refers to it: ``averaged``, ``best``, ``last`` or the step's number."""


def candidates(folder: RunFolder, weights: str) -> Iterator[Candidate]:
    """Yield the checkpoints that ``weights`` may refer to, preferred ones first: ``auto`` is
    averaged weights, then the best, then the last. Raises ConfigError for anything but
    :data:`CHOICES`.
    """
    if weights not in ("auto", "averaged", "best", "last") and not weights.isdecimal():
        raise ConfigError(f"weights={weights!r} is not one of {CHOICES}")
    steps, averaged = checkpoint.steps(folder.checkpoints), checkpoint.steps(folder.averaged)
    best = folder.best_first() if folder.train_config.exists() else []
    if weights.isdecimal() and int(weights) in steps:
        yield Candidate(folder.checkpoints, int(weights), weights)
    if weights in ("auto", "averaged"):
        for step in reversed(averaged):
            yield Candidate(folder.averaged, step, "averaged")
    most = None if weights == "auto" else 1
    if weights in ("auto", "best"):
        for step in best[:most]:
            yield Candidate(folder.checkpoints, step, "best")
    if weights in ("auto", "last"):
        rest = [step for step in reversed(steps) if weights == "last" or step not in best]
        for step in rest[:most]:
            yield Candidate(folder.checkpoints, step, "last")


def open_weights(folder: RunFolder, weights: str = "auto") -> tuple[Candidate, Checkpoint]:
    """Open the first intact checkpoint that ``weights`` may refer to; damaged ones before it are
    named on stderr. Raises CheckpointError if there is none.
    """
    damage: CheckpointError | None = None
    for candidate in candidates(folder, weights):
        if damage is not None:
            next_choice = f"step {candidate.step} ({candidate.name}) is tried instead"
            print(f"warning: {damage}; {next_choice}", file=sys.stderr)
        try:
            return candidate, checkpoint.open(candidate.root, candidate.step)
        except CheckpointError as error:
            damage = error
    choice = "" if weights == "auto" else f" for --weights {weights}"
    raise damage or CheckpointError(f"{folder.checkpoints}: holds no checkpoint{choice}")


def newest_intact(folder: Path) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """Open the newest checkpoint that is intact; also return the errors of the newer ones. Raises
    CheckpointError naming the newest if none is intact.
    """
    damage: list[CheckpointError] = []
    for step in reversed(checkpoint.steps(folder)):
        try:
            return checkpoint.open(folder, step), damage
        except CheckpointError as error:
            damage.append(error)
    if damage:
        older = f"; nor is any of the {len(damage) - 1} before it intact" if damage[1:] else ""
        raise CheckpointError(f"{damage[0]}{older}")
    return None, []


def quarantine(folder: Path, step: int) -> Path:
    """Rename a damaged checkpoint to ``damaged-STEP``, no longer listed; return the new path."""
    path, number = folder / f"damaged-{step}", 1
    while path.exists():
        number += 1
        path = folder / f"damaged-{step}.{number}"
    os.rename(folder / str(step), path)
    return path


# Damage


def verify(run: Path) -> None:
    """Raise InputError naming the first file that SHA256SUMS shows damaged, missing or added."""
    if any(problems(run)):  # twice: a run that starts may be replacing its options just now
        for problem in problems(run):
            raise InputError(problem)


def verify_metrics(run: Path) -> None:
    """Raise InputError if metrics.jsonl does not begin as the checkpoints record."""
    path, manifests = run / run_files.METRICS, list(_manifests(run))
    content = path.read_bytes() if path.is_file() else b""
    for about in manifests:
        recorded = about.get("metrics")
        size = recorded["bytes"] if recorded else 0
        if recorded and hashlib.sha256(content[:size]).hexdigest() != recorded["sha256"]:
            state = "damaged or edited" if path.is_file() else "missing"
            raise InputError(
                f"{path}: {state} (its first {size:,} bytes are not those that a checkpoint was "
                f"saved with): put it back as it was, or begin another run with --init {run}"
            )


def verify_all(run: Path) -> None:
    """Raise an error that names all damage of the run: CheckpointError if any is a checkpoint's."""
    damaged = []
    with contextlib.suppress(InputError):  # of SHA256SUMS, which `problems` names
        for name in run_files.CHECKPOINTS:
            for step in checkpoint.steps(run / name):
                damaged += checkpoint.problems(run / name, step)
    named = list(problems(run)) and list(problems(run))  # twice, as in `verify`
    try:
        verify_metrics(run)
    except InputError as of_metrics:
        named.append(str(of_metrics))
    named += damaged
    if named:
        more = [f"and {len(named) - _SHOWN} more, which --json lists"] * (len(named) > _SHOWN)
        error = (CheckpointError if damaged else InputError)("; ".join(named[:_SHOWN] + more))
        error.details = tuple(named)
        raise error


def problems(run: Path) -> Iterator[str]:
    """Name every file that is damaged, missing or added."""
    path = run / run_files.SHA256SUMS
    try:
        sums = run_files.read_sums(run)
    except InputError as error:
        yield f"{error}: put it back as it was"
        return
    if sums:
        for change in run_files.changed(run, sums):
            yield (
                f"{change}: put it back as it was; if you meant the change, correct "
                f"{run_files.SHA256SUMS} with sha256sum"
            )
        for name in run_files.LISTED:
            if name not in sums and (run / name).exists() and not _may_be_added(name, sums):
                yield f"{run / name}: is not in {run_files.SHA256SUMS}, so it was added: remove it"
    else:
        listed = path.exists()
        for about in _manifests(run):
            listed = listed or "run" in about
        if listed:
            yield f"{path}: missing or empty, and the run was saved with it: put it back"


def _may_be_added(name: str, sums: run_files.Sums) -> bool:
    """Return True for what a converted run does not have: often its tokenizer is copied there."""
    groups = (run_files.TRAINING, run_files.TOKENIZER, run_files.HUGGINGFACE)
    group = next((group for group in groups if name in group), ())
    listed = any(each in sums for each in group)
    return bool(group) and not listed and run_files.DATA not in sums


def _manifests(run: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the manifests that can be read."""
    for name in run_files.CHECKPOINTS:
        for step in checkpoint.steps(run / name):
            with contextlib.suppress(Refusal):
                yield checkpoint.read_manifest(run / name, step)


# The lock


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the lock, which ends with the process. Raises LockedError naming who has it."""
    import filelock

    folder.mkdir(parents=True, exist_ok=True)
    acquired = filelock.FileLock(folder / _LOCK)
    try:
        acquired.acquire(timeout=0)
    except filelock.Timeout:
        raise LockedError(
            f"{folder} is in use by {_holder(folder)}; wait for it, stop it, or give another folder"
        ) from None
    try:
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": started}
        with atomic.naming(folder / _HOLDER):
            (folder / _HOLDER).write_text(json.dumps(holder) + "\n", encoding="utf-8")
        yield
    finally:
        with contextlib.suppress(OSError):  # it counts only while the lock is held
            (folder / _HOLDER).unlink(missing_ok=True)
        acquired.release()


def _holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / _HOLDER).read_text(encoding="utf-8"))
        return f"process {holder['process']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # the holder has not written its name yet
        return "another process"
