"""Runner of the mutation campaign, in memory.

pytest collects the tests once; each fault is put into the code of a process forked from there.

Nothing is written to the tree: the code of the changed functions is exchanged in the fork, and the
tests run as they were collected. A copy of the tree has it for the processes that they start.
"""

import contextlib
import importlib
import itertools
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from campaigns.mutants import compare, faults
from campaigns.mutants.faults import ROOT, USUAL, Mutant
from campaigns.mutants.seed import seed
from parity_tests.compiling import FLAGS

LIMIT = 600  # seconds a fault may take
KILLED, SURVIVED, BROKEN, SLOW = "killed", "SURVIVED", "BROKEN", "TOO SLOW"
FOLDERS = "jax_transformer torch_reference parity_tests campaigns benchmarks tools docs".split()
OPTIONS = (
    *("-o", "addopts=--import-mode=importlib --strict-config"),
    *("-p", "no:xdist", "-p", "no:cacheprovider", "-q", "--no-header", "-s"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
    *("-m", ""),  # slow tests run too if a fault names them, whatever PYTEST_ADDOPTS says
)


@dataclass
class Result:
    """The outcome of a fault."""

    name: str
    verdict: str
    error: str
    """The error of the test that failed, in one line."""
    test: str = ""
    """The node id of that test."""
    named: str | None = None
    """The module that the comparison named."""
    figure: float | None = None
    """Largest difference of its output, or of the models' if it named none, in float64."""
    seconds: float = 0.0


class Seeder:
    """A pytest plugin that replaces the test loop.

    It forks once per fault and runs the tests that reach the fault until one fails.
    """

    def __init__(self, mutants: Sequence[Mutant], report: Callable[[Result], None]):
        self.mutants, self.report = mutants, report
        self.failure: tuple[str, str, bool] | None = None
        self.passed = 0

    def pytest_runtestloop(self, session: Any) -> bool:
        from jax._src import xla_bridge

        # A test file may create an array when it is imported: JAX's threads do not survive a fork
        forks = not xla_bridge.backends_are_initialized()
        for mutant in self.mutants if forks else self.mutants[:1]:
            with _restored(Path(mutant.file)):
                self.report(
                    _forked(lambda mutant=mutant: self.result(session, mutant), mutant)
                    if forks
                    else self.result(session, mutant)
                )
        return True

    def result(self, session: Any, mutant: Mutant) -> Result:
        """The result of a fault that is seeded in this process."""
        began, named, figure = time.monotonic(), None, None
        try:
            seed(mutant)
            # Also for the processes that tests start
            Path(mutant.file).write_text(faults.applied(mutant), encoding="utf-8")
            if mutant.module is not None or mutant.case != USUAL:
                named, figure = compare.tried(mutant)
            if absent := faults.not_among(mutant.tests, [item.nodeid for item in session.items]):
                raise LookupError(f"no such test: {', '.join(absent)}")
            for node, item in itertools.product(mutant.tests, session.items):
                if self.failure is None and faults.names(node, item.nodeid):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            verdict, error, test = self._verdict()
        except Exception:
            verdict, error, test = BROKEN, traceback.format_exc().strip().rpartition("\n")[2], ""
        seconds = round(time.monotonic() - began, 1)
        return Result(mutant.name, verdict, error, test, named, figure, seconds)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is None:
            self.passed += call.when == "call"
        elif self.failure is None:
            from _pytest.outcomes import Failed

            from jax_transformer.errors import Refusal

            counts = isinstance(call.excinfo.value, AssertionError | Failed | Refusal)
            # The engine's own refusal of a table that does not cover the model is a ValueError
            counts = counts or "the weight table does not cover" in str(call.excinfo.value)
            text = f"{call.excinfo.typename}: {call.excinfo.value}".partition("\n")[0]
            self.failure = item.nodeid, text, counts and call.when in ("setup", "call")

    def _verdict(self) -> tuple[str, str, str]:
        if self.failure is not None:
            node, text, counts = self.failure
            return KILLED if counts else BROKEN, text, node
        if not self.passed:
            return BROKEN, "no test ran", ""
        return SURVIVED, f"{self.passed} tests passed", ""


@contextlib.contextmanager
def _restored(file: Path) -> Iterator[None]:
    """Undo what the block writes into a file of the copied tree."""
    text, times = file.read_bytes(), file.stat()
    try:
        yield
    finally:
        file.write_bytes(text)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _forked(work: Callable[[], Result], mutant: Mutant) -> Result:
    """The result of ``work`` in a fork, whose output is discarded."""
    pid, read = _child(lambda write: os.write(write, json.dumps(asdict(work())).encode()))
    began = time.monotonic()
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() - began > LIMIT:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(read)
            return Result(mutant.name, SLOW, f"over {LIMIT} s", seconds=LIMIT)
        time.sleep(0.05)
    with os.fdopen(read, "rb") as file:
        text = file.read()
    if not text:
        return Result(mutant.name, BROKEN, "the process died")
    return Result(**json.loads(text))


def _child(work: Callable[[int], object]) -> tuple[int, int]:
    """Fork a process whose output is discarded, and that ends after ``work`` with a pipe's end for
    writing. Returns its number, and the other end.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            work(write)
        finally:
            os._exit(0)
    os.close(write)
    return pid, read


def prepare(folder: Path) -> None:
    """Copy the tree to ``folder/tree``, so that changes to it do not affect the campaign."""
    tree = folder / "tree"
    for name in filter(lambda name: (ROOT / name).exists(), FOLDERS):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "train.py"):
        shutil.copy(ROOT / name, tree)


def settings(cache: Path) -> None:
    """Set the suite's own flags and a shared compilation cache; call it before jax is imported."""
    os.environ |= {
        "XLA_FLAGS": FLAGS,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    modules = "jax torch transformers flax.nnx flax.linen optax pytest orbax.checkpoint"
    for name in modules.split():
        importlib.import_module(name)


def control(todo: Sequence[Mutant], tree: Path) -> int:
    """Run the tests that the faults name, without a fault: pytest's exit code, 0 if all pass."""
    import pytest

    _enter(tree)
    nodes = dict.fromkeys(node for mutant in todo for node in mutant.tests)
    # Grouped by file, so that the fixtures of a file are made once
    return int(pytest.main([*OPTIONS, *sorted(nodes, key=lambda node: node.partition("::")[0])]))


def _enter(tree: Path) -> None:
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]


def results(todo: Sequence[Mutant], tree: Path) -> Iterator[Result]:
    """Yield results as they come, from one process at a time.

    Faults that the same test files reach share their collection.
    """
    _enter(tree)
    for group in groups(todo):
        while group:
            done = set()
            for result in _collected(group):
                done.add(result.name)
                yield result
            if not done:
                done.add(group[0].name)
                yield Result(group[0].name, BROKEN, "its tests could not be collected")
            group = [mutant for mutant in group if mutant.name not in done]


def groups(todo: Sequence[Mutant]) -> list[list[Mutant]]:
    """The faults that the same test files reach, together."""
    grouped: dict[tuple[str, ...], list[Mutant]] = {}
    for mutant in todo:
        grouped.setdefault(files(mutant), []).append(mutant)
    return list(grouped.values())


def files(mutant: Mutant) -> tuple[str, ...]:
    """The test files that reach a fault."""
    return tuple(sorted({node.partition("::")[0] for node in mutant.tests}))


def _collected(group: Sequence[Mutant]) -> Iterator[Result]:
    """Yield the results of a process that collects the tests of a group."""

    def run(write: int) -> None:
        import pytest

        def report(result: Result) -> None:
            os.write(write, json.dumps(asdict(result)).encode() + b"\n")

        # Whole files: a missing test breaks its own fault, not the collection
        pytest.main([*OPTIONS, *files(group[0])], plugins=[Seeder(group, report)])

    pid, read = _child(run)
    with os.fdopen(read, encoding="utf-8") as lines:
        for line in lines:
            yield Result(**json.loads(line))
    os.waitpid(pid, 0)
