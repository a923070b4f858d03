"""Damages to the checkpoints of a run: each is noticed, in the checkpoint that has it."""

import functools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from campaigns.case import Case
from campaigns.damages.damage import Damage, files
from campaigns.interruptions import comparison, verdicts
from campaigns.interruptions.chains import Reference
from campaigns.interruptions.processes import Sandbox
from campaigns.interruptions.tiny_run import EVAL_EVERY, LOG_EVERY, RUN, STEPS
from jax_transformer.errors import CheckpointError
from jax_transformer.storage import checkpoint, run_folder

THROUGH_TRAIN = 40  # one damage of so many is met by a run that resumes
ALL_DAMAGED = 10 * THROUGH_TRAIN  # and in one of so many every checkpoint is damaged
# Between two lines of metrics and two validations, so that a line is half measured
STOPPED_AT = STEPS - EVAL_EVERY - LOG_EVERY - 1


def _case(group: str, what: str, wrong: list[str]) -> Case:
    return Case(group, "not noticed" if wrong else "noticed", what, tuple(wrong))


# Damages


class CheckpointDamage(Damage):
    """Ways to damage the checkpoints of a folder.

    Each is called with the folder and the step, and returns the damaged steps and a description.
    """

    def kinds(self) -> list[Callable[[Path, int], tuple[set[int], str]]]:
        of_files = (self.flip, self.truncate, self.append, self.zero, self.delete)
        return [
            *(self._of_a_file(damage) for damage in of_files),
            self.add_file,
            self.swap_within,
            self.swap_between,
            self.swap_folders,
        ]

    def _of_a_file(self, damage: Callable[[Path], str]) -> Callable:
        @functools.wraps(damage)
        def damaged(folder: Path, step: int) -> tuple[set[int], str]:
            return {step}, damage(self._file(folder, step))

        return damaged

    def add_file(self, folder: Path, step: int) -> tuple[set[int], str]:
        return {step}, self.add(self._file(folder, step).with_name("more"))

    def swap_within(self, folder: Path, step: int) -> tuple[set[int], str]:
        one = self._file(folder, step)
        return {step}, self.swap(one, self._other(one, files(folder / str(step))))

    def swap_between(self, folder: Path, step: int) -> tuple[set[int], str]:
        other, one = self._another(folder, step), self._file(folder, step)
        return {step, other}, self.swap(one, self._other(one, files(folder / str(other))))

    def swap_folders(self, folder: Path, step: int) -> tuple[set[int], str]:
        other, aside = self._another(folder, step), folder / "aside"
        (folder / str(step)).rename(aside)
        (folder / str(other)).rename(folder / str(step))
        aside.rename(folder / str(other))
        return {step, other}, f"folders {step} and {other} swapped"

    def _file(self, folder: Path, step: int) -> Path:
        return self.random.choice(
            [path for path in files(folder / str(step)) if path.stat().st_size]
        )

    def _another(self, folder: Path, step: int) -> int:
        return self.random.choice([other for other in checkpoint.steps(folder) if other != step])

    def _other(self, one: Path, others: list[Path]) -> Path:
        return self.random.choice(
            [path for path in others if path.read_bytes() != one.read_bytes()]
        )


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in files(folder) if not path.name.startswith(".")}


def damaged(
    finished: Path, reference: Reference, folder: Path, compiled: Path, seed: int, number: int
) -> Case:
    """Damage a copy of a finished run's checkpoints, or those of a run that then resumes."""
    random_source = random.Random(f"{seed} damages {number}")
    kinds = CheckpointDamage(random_source).kinds()
    if number % THROUGH_TRAIN:
        copy = folder / "damaged"
        shutil.copytree(finished / RUN / "checkpoints", copy)
        step = random_source.choice(checkpoint.steps(copy))
        return refused(kinds[number % len(kinds)], copy, step)
    source = finished if number % 3 else stop(reference, folder, compiled)
    sandbox = Sandbox(folder / "met", reference.arguments, compiled)
    if number % ALL_DAMAGED == 0:
        return all_damaged(kinds[0], source, sandbox)
    return resumed(random_source.choice(kinds[:7]), reference, source, sandbox)


def refused(damage: Callable, folder: Path, step: int) -> Case:
    """Damage one checkpoint: only it is refused, and the newest of the others is chosen."""
    before = checkpoint.steps(folder)
    damaged, where = damage(folder, step)
    wrong = []
    for each in before:
        try:
            checkpoint.open(folder, each)
            if each in damaged:
                wrong.append(f"{each} is damaged and was accepted")
        except CheckpointError as error:
            if each not in damaged:
                wrong.append(f"{each} is intact and was refused: {error}")
            elif str(folder / str(each)) not in str(error):
                wrong.append(f"the damaged checkpoint is not named: {error}")
    intact = max(set(before) - damaged, default=None)
    try:
        opened = run_folder.newest_intact(folder)[0]
        newest = None if opened is None else opened.step
    except CheckpointError:
        newest = None
    if newest != intact:
        wrong.append(f"the newest intact checkpoint is {intact}, not {newest}")
    return _case("opened", f"{damage.__name__}: {where}", wrong)


def stop(reference: Reference, work: Path, compiled: Path) -> Path:
    """The folder of a run that SIGTERM stopped between two validations and two lines of metrics."""
    sandbox = Sandbox(work / "stopped", reference.arguments, compiled)
    sandbox.create()
    result = sandbox.start(updates=STOPPED_AT)
    if result.code != 75 or max(checkpoint.steps(sandbox.run / "checkpoints")) % EVAL_EVERY == 0:
        raise RuntimeError(
            f"SIGTERM at step {STOPPED_AT} did not stop the run there: exit code {result.code}\n"
            f"{result.err[-2000:]}"
        )
    return sandbox.folder


def resumed(damage: Callable, reference: Reference, source: Path, sandbox: Sandbox) -> Case:
    """Damage the newest checkpoint of a run and resume.

    The next start names and keeps it, continues from the one before, and ends with an equal run.
    """
    shutil.copytree(source, sandbox.folder)
    folder = sandbox.run / "checkpoints"
    newest = max(checkpoint.steps(folder))
    _, where = damage(folder, newest)
    result = sandbox.start()
    wrong = verdicts.clean_end(result)
    if f"warning: {RUN}/checkpoints/{newest}/" not in result.err:
        wrong.append(f"the damaged checkpoint {newest} is not named\n{result.err[-1000:]}")
    aside = folder / f"damaged-{newest}"
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        wrong.append(f"the damaged checkpoint {newest} was not quarantined")
    wrong = wrong or comparison.differences(sandbox.run, reference.contents)
    if not wrong:
        shutil.rmtree(sandbox.folder)
    return _case("met by a run", f"{damage.__name__}, then train: {source.name}: {where}", wrong)


def all_damaged(damage: Callable, source: Path, sandbox: Sandbox) -> Case:
    """Damage every checkpoint: the run is refused and not changed."""
    shutil.copytree(source, sandbox.folder)
    folder = sandbox.run / "checkpoints"
    for step in checkpoint.steps(folder):
        damage(folder, step)
    before = _contents(sandbox.run)
    result, wrong = sandbox.start(), []
    if result.code != CheckpointError.exit_code or result.err.count("\n") != 1:
        wrong.append(f"exit code {result.code}, {result.err[-1000:]}")
    if before != _contents(sandbox.run):
        wrong.append("the folder was changed")
    return _case("met by a run", f"{damage.__name__}, then train: every checkpoint", wrong)
