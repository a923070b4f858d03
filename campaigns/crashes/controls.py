"""Controls of the crash campaigns: recordings with a fault, each of which must be noticed."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from campaigns.case import Campaign, Case
from campaigns.crashes import campaign, recordings
from campaigns.crashes.campaign import Moment, Part
from campaigns.crashes.recordings import Recording
from campaigns.crashes.states import Names, Operation, Sync
from campaigns.interruptions.tiny_run import RUN

Operations = list[Operation]
ALL = Part("", 0, 1, 0)
"""All moments of a recording."""


def without_syncs(recording: Recording, *, folders: bool, files: bool) -> Recording:
    """Leave out the fsyncs of folders, of files, or both."""
    state, operations = recording.start.copy(), []
    for operation in recording.operations:
        state.apply(operation)
        folder = isinstance(operation, Sync) and operation.number in state.folders
        if not isinstance(operation, Sync) or not (folders if folder else files):
            operations.append(operation)
    return dataclasses.replace(recording, operations=tuple(operations))


def names_first(recording: Recording) -> Recording:
    """Rename files and folders to their visible names as soon as they are created."""
    renames: dict[int | None, Operations] = {}
    for operation in recording.operations:
        if isinstance(operation, Names) and len(operation.changes) > 1:
            (_, name), number = operation.changes[-1]
            if not name.startswith("."):
                renames.setdefault(number, []).append(operation)
    moved = {id(operation) for each in renames.values() for operation in each}
    operations: Operations = []
    for operation in recording.operations:
        if id(operation) not in moved:
            operations.append(operation)
            if isinstance(operation, Names) and len(operation.changes) == 1:
                operations += renames.get(operation.changes[0][1], [])
    return dataclasses.replace(recording, operations=tuple(operations))


def wrong_step(recording: Recording) -> Iterator[Moment]:
    """Yield states after the end, without the newest checkpoint."""
    end = recording.start.after(recording.operations).tree()
    promise = campaign.promises(recording)[-1]
    tree = {
        path: content
        for path, content in end.items()
        if not f"{path}/".startswith(f"{RUN}/checkpoints/{promise.newest}/")
    }
    yield "the end without the newest checkpoint", tree, promise


def lost(recording: Recording, *, folders: bool, files: bool) -> Iterator[Moment]:
    """Losses of power of a recording without fsyncs."""
    return campaign.lost(
        without_syncs(recording, folders=folders, files=files), ALL, random.Random(0)
    )


def killed(recording: Recording) -> Iterator[Moment]:
    """Kills of a recording with visible names from the start."""
    return campaign.killed(names_first(recording), ALL, random.Random(0))


FAULTS: dict[str, Callable[[Recording], Iterator[Moment]]] = {
    "no fsync": partial(lost, folders=True, files=True),
    "no fsync of files": partial(lost, folders=False, files=True),
    "no fsync of folders": partial(lost, folders=True, files=False),
    "names before data": killed,
    "the newest checkpoint is gone": wrong_step,
}


def cases(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """Yield whether a fault in a recording is noticed; recordings take turns."""
    faults, names = list(FAULTS), list(recordings.lengths(shared))
    fault, name = faults[number % len(faults)], names[number // len(faults) % len(names)]
    judge = campaign.judge_of(shared, name)
    if FAULTS[fault] is wrong_step and not judge.recording.trains:
        return
    looked = 0
    for what, tree, promise in FAULTS[fault](judge.recording):
        looked += 1
        if wrong := judge(tree, promise, restart=False)[1]:
            yield Case(fault, "noticed", f"{name}, {what}: {wrong[0][:200]}")
            return
    text = f"{name}: none of {looked} states was noticed"
    yield Case(fault, "not noticed", text, (text,))


CONTROLS = Campaign(
    "recordings with a fault, each of which must be noticed",
    recordings.make,
    cases,
    small=10,
    nightly=len(FAULTS) * 26,
)
