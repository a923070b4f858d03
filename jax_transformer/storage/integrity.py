"""Damage to the files of a run is noticed here, before any of them is used.

Checkpoints of version 0.1 recorded nothing about the files next to them, so the files of a run
that has only such checkpoints are not checked.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_transformer.errors import CheckpointError, InputError, Refusal
from jax_transformer.storage import checkpoint, checksums, run_files

_SHOWN = 6
"""Problems that a message names; all are in the error's details."""


def verify(run: Path) -> None:
    """Raise InputError naming the first file, of all that SHA256SUMS lists or should list, that
    is damaged, missing or added.
    """
    if any(problems(run)):  # twice: a run that starts may be replacing its options just now
        for problem in problems(run):
            raise InputError(problem)


def verify_metrics(run: Path) -> None:
    """Raise InputError if metrics.jsonl does not begin as the checkpoints record."""
    for problem in metrics_problems(run):
        raise InputError(problem)


def verify_all(run: Path) -> None:
    """Raise an error that names every file of the run that is damaged, missing or added:
    CheckpointError if one is of a checkpoint, otherwise InputError.
    """
    damaged = list(_checkpoint_problems(run))
    small = list(problems(run)) and list(problems(run))  # twice, as in `verify`
    named = [*small, *metrics_problems(run), *damaged]
    if named:
        more = [f"and {len(named) - _SHOWN} more, which --json lists"] * (len(named) > _SHOWN)
        error = (CheckpointError if damaged else InputError)("; ".join(named[:_SHOWN] + more))
        error.details = tuple(named)
        raise error


def problems(run: Path) -> Iterator[str]:
    """Name every file that is damaged, missing or added."""
    path = run / checksums.NAME
    try:
        sums = checksums.read(run)
    except InputError as error:
        yield f"{error}: put it back as it was"
        return
    if sums:
        for change in checksums.changed(run, sums):
            yield (
                f"{change}: put it back as it was; if you meant the change, correct "
                f"{checksums.NAME} with sha256sum"
            )
        for name in run_files.LISTED:
            if name not in sums and (run / name).exists() and not _may_be_added(name, sums):
                yield f"{run / name}: is not in {checksums.NAME}, so it was added: remove it"
    elif path.exists() or any("run" in about for about in _manifests(run)):
        yield f"{path}: missing or empty, and the run was saved with it: put it back"


def _may_be_added(name: str, sums: checksums.Sums) -> bool:
    """Return True for what a converted run does not have: often its tokenizer is copied there."""
    groups = (run_files.TRAINING, run_files.TOKENIZER, run_files.HUGGINGFACE)
    group = next((group for group in groups if name in group), ())
    listed = any(each in sums for each in group)
    return bool(group) and not listed and run_files.DATA not in sums


def metrics_problems(run: Path) -> Iterator[str]:
    """Say that metrics.jsonl is damaged, if it does not begin as a checkpoint records."""
    path = run / run_files.METRICS
    recorded = [about["metrics"] for about in _manifests(run) if "metrics" in about]
    content = path.read_bytes() if path.is_file() else b""
    for each in recorded:
        if hashlib.sha256(content[: each["bytes"]]).hexdigest() != each["sha256"]:
            state = "damaged or edited" if path.is_file() else "missing"
            yield (
                f"{path}: {state} (its first {each['bytes']:,} bytes are not those that a "
                "checkpoint was saved with): put it back as it was, or begin another run with "
                f"--init {run}"
            )
            return


def _checkpoint_problems(run: Path) -> Iterator[str]:
    """Name every file of the checkpoints, averaged ones too, that is damaged."""
    with contextlib.suppress(InputError):  # of SHA256SUMS, which `problems` names
        for name in run_files.CHECKPOINTS:
            for step in checkpoint.steps(run / name):
                yield from checkpoint.problems(run / name, step)


def _manifests(run: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the manifests that can be read."""
    for name in run_files.CHECKPOINTS:
        for step in checkpoint.steps(run / name):
            with contextlib.suppress(Refusal):
                yield checkpoint.read_manifest(run / name, step)
