"""The campaign ``mutants``: a test notices each seeded fault, and the comparison names its module.

Each fault gets a process of its own, forked from one that has collected the tests, and runs only
the tests that reach it. Killed means that a comparison in a test failed, or that the package
refused its input; a test that cannot be collected, or fails with any other error, is broken. See
docs/mutants.md.
"""

import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from campaigns.case import Campaign, Case
from campaigns.mutants import faults, run
from campaigns.mutants.faults import Mutant
from campaigns.mutants.run import KILLED, Result


@functools.cache
def groups() -> list[list[Mutant]]:
    """The faults; those that the same test files reach share their collection."""
    return run.groups(faults.listed())


@functools.cache
def own_tree(shared: Path) -> Path:
    """A copy of the tree for this process alone.

    Faults are written into it: what another process imports or starts must not have them.
    """
    run.settings(shared / "cache")
    own = shared / f"tree-{os.getpid()}"
    return Path(shutil.copytree(shared / "tree", own))


def cases(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """The faults of a group."""
    del scratch, seed
    for group in groups()[number : number + 1]:
        by_name = {mutant.name: mutant for mutant in group}
        for result in run.results(group, own_tree(shared)):
            yield case_of(result, by_name[result.name])


def case_of(result: Result, mutant: Mutant) -> Case:
    """A result as an outcome, which is as promised if a test killed the fault and the comparison
    named its module."""
    wrong = [] if result.verdict == KILLED else [f"{result.verdict}: {result.error}"]
    if mutant.module not in (None, result.named):
        wrong.append(f"{result.named} is named, not {mutant.module}")
    about = faults.area_of(result.name).about
    return Case(about, result.verdict, result.name, tuple(wrong), facts=asdict(result))


MUTANTS = Campaign(
    "each seeded fault turns a test red, and the comparison names its module",
    prepare=run.prepare,
    cases=cases,
    small=len(groups()),
    nightly=len(groups()),
)
