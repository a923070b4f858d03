"""Damages and negative controls of interruptions.py: faults are noticed, the comparison can
fail."""

import argparse
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import interruptions_controls, interruptions_runs, interruptions_verdict
from benchmarks.interruptions_chains import Reference
from benchmarks.interruptions_runs import EVAL_EVERY, LOG_EVERY, RUN, STEPS, Place
from jax_transformer.errors import CheckpointError
from jax_transformer.storage import checkpoint

THROUGH_TRAIN = 12  # damages that a whole run meets
STOPPED_AT = (
    STEPS - EVAL_EVERY - LOG_EVERY - 1
)  # between two lines of metrics and two validations: a line is half measured


@dataclass
class Found:
    """One damage or control, and what was not as promised."""

    what: str
    where: str
    met: bool = False
    """Whether a run met it."""
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        return f"{self.what} ({self.where}): {'WRONG: ' + '; '.join(self.wrong) if self.wrong else 'as promised'}"


# Damages


class Damage:
    """A way to damage the checkpoints of a folder.

    Called with the folder and the step, it returns the damaged steps and a description.
    """

    def __init__(self, random_source: random.Random):
        self.random = random_source

    def kinds(self) -> list[Callable[[Path, int], tuple[set[int], str]]]:
        return [
            self.flip,
            self.truncate,
            self.append,
            self.zero,
            self.delete,
            self.add,
            self.swap_within,
            self.swap_between,
            self.swap_folders,
        ]

    def flip(self, folder: Path, step: int) -> tuple[set[int], str]:
        path, content = self._file(folder, step)
        place = self.random.randrange(len(content) * 8)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        return {step}, f"bit {place} of {path.name}"

    def truncate(self, folder: Path, step: int) -> tuple[set[int], str]:
        path, content = self._file(folder, step)
        size = self.random.randrange(len(content))
        path.write_bytes(content[:size])
        return {step}, f"{path.name} cut to {size} bytes"

    def append(self, folder: Path, step: int) -> tuple[set[int], str]:
        path, content = self._file(folder, step)
        more = self.random.randbytes(self.random.randint(1, 100))
        path.write_bytes(content + more)
        return {step}, f"{len(more)} bytes behind {path.name}"

    def zero(self, folder: Path, step: int) -> tuple[set[int], str]:
        path, content = self._file(folder, step)
        start = self.random.randrange(len(content))
        lost = bytes(len(content[start : start + 512]))
        if content[start : start + 512] == lost:
            return self.flip(folder, step)
        content[start : start + 512] = lost
        path.write_bytes(content)
        return {step}, f"{len(lost)} zeros in {path.name}"

    def delete(self, folder: Path, step: int) -> tuple[set[int], str]:
        path = self.random.choice(_files(folder / str(step)))
        path.unlink()
        return {step}, f"{path.name} deleted"

    def add(self, folder: Path, step: int) -> tuple[set[int], str]:
        beside = self.random.choice(_files(folder / str(step)))
        (beside.parent / "more").write_bytes(self.random.randbytes(8))
        return {step}, f"a file beside {beside.name}"

    def swap_within(self, folder: Path, step: int) -> tuple[set[int], str]:
        one, _ = self._file(folder, step)
        return {step}, self._swap(one, self._other(one, _files(folder / str(step))))

    def swap_between(self, folder: Path, step: int) -> tuple[set[int], str]:
        other = self._another(folder, step)
        one, _ = self._file(folder, step)
        return {step, other}, self._swap(one, self._other(one, _files(folder / str(other))))

    def swap_folders(self, folder: Path, step: int) -> tuple[set[int], str]:
        other, aside = self._another(folder, step), folder / "aside"
        for source, destination in (
            (str(step), "aside"),
            (str(other), str(step)),
            ("aside", str(other)),
        ):
            (folder / source).rename(folder / destination)
        assert not aside.exists()
        return {step, other}, f"folders {step} and {other} swapped"

    def _file(self, folder: Path, step: int) -> tuple[Path, bytearray]:
        path = self.random.choice(
            [path for path in _files(folder / str(step)) if path.stat().st_size]
        )
        return path, bytearray(path.read_bytes())

    def _another(self, folder: Path, step: int) -> int:
        return self.random.choice([other for other in checkpoint.steps(folder) if other != step])

    def _other(self, one: Path, files: list[Path]) -> Path:
        return self.random.choice([path for path in files if path.read_bytes() != one.read_bytes()])

    def _swap(self, one: Path, two: Path) -> str:
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        return f"{one.parent.name}/{one.name} and {two.parent.name}/{two.name} swapped"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damages(
    options: argparse.Namespace, whole: Reference, work: Path, compiled: Path
) -> Iterator[Found]:
    """Damage the checkpoints of a finished run ``count`` times, then resume from a few of them."""
    run, choose = (
        Place(work / f"whole-{whole.name}-warm", whole.arguments, compiled).run,
        random.Random(f"{options.seed} damages"),
    )
    kinds = Damage(choose).kinds()
    for number in range(options.damages):
        copy = work / "damaged"
        shutil.copytree(run / "checkpoints", copy)
        yield noticed(kinds[number % len(kinds)], copy, choose.choice(checkpoint.steps(copy)))
        shutil.rmtree(copy)
    if options.damages:
        stopped = stop(whole, work, compiled)
        for number in range(THROUGH_TRAIN):
            source = stopped if number % 3 else run.parent
            yield met(
                kinds[number % 7],
                whole,
                source,
                Place(work / f"met-{number}", whole.arguments, compiled),
            )
        yield all_damaged(kinds[0], stopped, Place(work / "all-damaged", whole.arguments, compiled))


def noticed(damage: Callable, folder: Path, step: int) -> Found:
    """Damage one checkpoint: only it is refused, and the newest of the others is chosen."""
    before = checkpoint.steps(folder)
    damaged, where = damage(folder, step)
    found = Found(damage.__name__, where)
    for each in before:
        try:
            checkpoint.open(folder, each)
            if each in damaged:
                found.wrong.append(f"{each} is damaged and passes")
        except CheckpointError as error:
            if each not in damaged:
                found.wrong.append(f"{each} is whole and is refused: {error}")
            elif str(folder / str(each)) not in str(error):
                found.wrong.append(f"the damaged checkpoint is not named: {error}")
    intact = max(set(before) - damaged, default=None)
    try:
        newest = checkpoint.newest_intact(folder)[0]
    except CheckpointError:
        newest = None
    if newest != intact:
        found.wrong.append(f"the newest intact one is said to be {newest}, and is {intact}")
    return found


def stop(whole: Reference, work: Path, compiled: Path) -> Path:
    """The folder of a run that SIGTERM stopped between two validations and two lines of metrics."""
    place = Place(work / "stopped", whole.arguments, compiled)
    place.folder.mkdir()
    ended = place.start(updates=STOPPED_AT)
    if ended.code != 75 or max(checkpoint.steps(place.run / "checkpoints")) % EVAL_EVERY == 0:
        raise SystemExit(
            f"SIGTERM at step {STOPPED_AT} did not stop the run there: exit code {ended.code}\n{ended.err[-2000:]}"
        )
    return place.folder


def met(damage: Callable, whole: Reference, source: Path, place: Place) -> Found:
    """Damage the newest checkpoint of a run and resume.

    The next start names and keeps it, continues from the one before, and ends with an equal run.
    """
    shutil.copytree(source, place.folder)
    folder = place.run / "checkpoints"
    newest = max(checkpoint.steps(folder))
    _, where = damage(folder, newest)
    found = Found(f"{damage.__name__}, then train", f"{source.name}: {where}", met=True)
    ended = place.start()
    found.wrong = interruptions_verdict.clean_end(ended)
    if f"warning: {RUN}/checkpoints/{newest}/" not in ended.err:
        found.wrong.append(f"the damaged checkpoint {newest} is not named\n{ended.err[-1000:]}")
    aside = folder / f"damaged-{newest}"
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        found.wrong.append(f"the damaged checkpoint {newest} was not set aside")
    found.wrong += [] if found.wrong else interruptions_runs.differences(place.run, whole.left)
    if not found.wrong:
        shutil.rmtree(place.folder)
    return found


def all_damaged(damage: Callable, source: Path, place: Place) -> Found:
    """Damage every checkpoint: the run is refused and left as it is."""
    shutil.copytree(source, place.folder)
    folder = place.run / "checkpoints"
    for step in checkpoint.steps(folder):
        damage(folder, step)
    before = {
        path: path.read_bytes() for path in _files(place.run) if not path.name.startswith(".")
    }
    ended, found = (
        place.start(),
        Found(f"{damage.__name__}, then train", "every checkpoint", met=True),
    )
    if ended.code != CheckpointError.exit_code or ended.err.count("\n") != 1:
        found.wrong.append(f"exit code {ended.code}, {ended.err[-1000:]}")
    if before != {
        path: path.read_bytes() for path in _files(place.run) if not path.name.startswith(".")
    }:
        found.wrong.append("the folder was changed")
    return found


# Controls


def controls(
    options: argparse.Namespace, whole: Reference, work: Path, compiled: Path
) -> Iterator[Found]:
    """A stopped run goes on rightly and ends equal; going on wrongly in one way, it must not."""
    del options
    (work / "controls").mkdir()
    source = stop(whole, work / "controls", compiled)
    for name in (None, *interruptions_controls.CONTROLS):
        place = Place(
            work / "controls" / (name or "none").replace(" ", "-"), whole.arguments, compiled
        )
        shutil.copytree(source, place.folder)
        ended = place.start(control=name)
        differing = interruptions_runs.differences(place.run, whole.left)
        found = Found(name or "nothing wrong", f"{len(differing)} differences")
        found.wrong = interruptions_verdict.clean_end(ended)
        if bool(differing) != bool(name):
            found.wrong.append("; ".join(differing[:5]) or "the comparison does not notice it")
        yield found


def summary(controls: list[Found], damages: list[Found]) -> Iterator[str]:
    """Lines for the end of the campaign's report."""
    yield ""
    yield from (f"Control: {found.line()}" for found in controls)
    for met, promise in ((False, "were noticed"), (True, "that a run met had the promised end")):
        here = [found for found in damages if found.met is met]
        yield f"{sum(not found.wrong for found in here)} of {len(here)} damages {promise}."
    yield from (f"  {found.line()}" for found in damages if found.wrong)
