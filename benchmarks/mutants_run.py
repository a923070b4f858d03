"""One fault in a process of its own: the file changed in a copy of the tree, the tests that reach it, the comparison, and what came of it."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.mutants_fault import ROOT, USUAL, Mutant, applied

LIMIT = 300  # seconds a fault may take
KILLED, SURVIVED, BROKEN, SLOW = "killed", "SURVIVED", "BROKEN", "TOO SLOW"
FOLDERS = ("jax_transformer", "torch_reference", "parity_tests", "benchmarks", "docs")


@dataclass
class Result:
    """What became of a fault."""

    name: str
    page: str
    verdict: str
    how: str
    """The error of the test that failed, in a line."""
    test: str
    """Which one."""
    named: str | None
    """The module that the comparison named."""
    figure: float | None
    """By how much its output, or the models' where it named none, is off in float64."""
    seconds: float


class Watcher:
    """A pytest plugin that keeps the first failure and tells whether anything ran."""

    def __init__(self) -> None:
        self.failure: tuple[str, str, bool] | None = None
        self.passed = 0

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


def tested(mutant: Mutant) -> tuple[str, str, str]:
    """Verdict, error and test. Runs in the copy."""
    import pytest

    watcher = Watcher()
    # No shape checks: a fault is to be told by its numbers, not by its types
    options = [
        "-o",
        "addopts=--import-mode=importlib --strict-config",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-q",
        "-x",
        "--no-header",
    ]
    code = pytest.main([*options, "-W", "ignore::pytest.PytestAssertRewriteWarning", *mutant.tests], plugins=[watcher])
    if watcher.failure is not None:
        node, text, counts = watcher.failure
        return KILLED if counts else BROKEN, text, node
    return (
        (SURVIVED, f"{watcher.passed} tests passed", "") if code == 0 and watcher.passed else (BROKEN, f"pytest ended with {int(code)}", "")
    )


def compared(mutant: Mutant) -> tuple[str | None, float | None]:
    """The module that the comparison of the faulty model with its twin names, and how far its output is off. Runs in the copy."""
    import jax
    import torch

    from jax_transformer import parity

    jax.config.update("jax_enable_x64", True)
    torch.set_num_threads(1)
    flax, module, batch, call = _pair(mutant.case)
    report = parity.compare(flax, module, batch, gradients=mutant.backward, call_torch=call)
    found = report.first_gradient_fault if report.result.agrees else report.first_fault
    measured = report.result
    if found is not None and not report.result.agrees and found.output is not None:
        measured = found.output
    elif found is not None:
        measured = next(m for m in (found.input_gradient, *found.parameters.values()) if m is not None and not m.agrees)
    return None if report.agrees or found is None else found.ours, measured.wide.max_abs


def _pair(name: str) -> tuple[Any, Any, tuple, Any]:
    from parity_tests import cases, twins

    for case in cases.CASES:
        if case.name == name:
            both = twins.pair(case.config)
            return both.flax, both.torch, (both.source, both.target), None
    from parity_tests import huggingface

    _in_float64()
    family = huggingface.exact_positions(huggingface.pair(name))
    pad = family.config.source_pad_id

    def call(model: Any, source: Any, target: Any) -> Any:
        return model(input_ids=source, attention_mask=(source != pad).long(), decoder_input_ids=target).logits

    return family.ours, family.theirs, huggingface.batch(family.config), call


def _in_float64() -> None:
    """T5's norm in the dtype of its input, as parity_tests.huggingface.in_float64 has it."""
    import torch

    for family, prefix in (("t5", "T5"), ("mt5", "MT5"), ("umt5", "UMT5")):
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")

        def norm(self: Any, x: Any) -> Any:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

        getattr(modeling, f"{prefix}LayerNorm").forward = norm


def child(page: str, mutant: Mutant, folder: Path) -> None:
    """The whole of one fault in a forked process; its result is a file in ``folder``."""
    began, tree = time.monotonic(), folder / "tree"
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "benchmarks")))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    named, figure, error = None, None, ""
    if mutant.module is not None or mutant.case != USUAL:
        try:
            named, figure = compared(mutant)
        except Exception as e:  # a model that refuses its weights cannot be compared
            error = f"not compared: {type(e).__name__}"
    try:
        verdict, how, test = tested(mutant)
    except BaseException:
        verdict, how, test = BROKEN, traceback.format_exc(limit=1), ""
    result = Result(mutant.name, page, verdict, how, test, named or error or None, figure, round(time.monotonic() - began, 1))
    (folder / "result.json").write_text(json.dumps(asdict(result)), encoding="utf-8")


def prepare(folder: Path) -> None:
    """A copy of the tree, and one cache of compiled programs for all faults."""
    tree = folder / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "train.py"):
        shutil.copy(ROOT / name, tree)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "jax_transformer", "torch_reference"], cwd=tree, check=True)


def run(page: str, mutant: Mutant, folder: Path) -> Result:
    """Seed the fault in the copy, fork, wait, and put the file back as it was."""
    path = folder / "tree" / mutant.file
    before = path.read_text(encoding="utf-8")
    try:
        path.write_text(applied(mutant, folder / "tree"), encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            stale.unlink()
        pid = os.fork()
        if pid == 0:
            log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                child(page, mutant, folder)
            finally:
                os._exit(0)
        return _wait(pid, page, mutant, folder)
    finally:
        path.write_text(before, encoding="utf-8")


def _wait(pid: int, page: str, mutant: Mutant, folder: Path) -> Result:
    deadline, result = time.monotonic() + LIMIT, folder / "result.json"
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return Result(mutant.name, page, SLOW, f"over {LIMIT} s", "", None, None, LIMIT)
        time.sleep(0.05)
    if not result.exists():
        return Result(mutant.name, page, BROKEN, (folder / "log.txt").read_text(errors="replace")[-200:], "", None, None, 0.0)
    found = Result(**json.loads(result.read_text(encoding="utf-8")))
    result.unlink()
    return found


def settings(cache: Path) -> None:
    """Before jax is imported: the suite's own flags, and compiled programs kept between the processes."""
    sys.dont_write_bytecode = True
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ |= {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for name in ("jax", "torch", "transformers", "flax.nnx", "flax.linen", "optax", "pytest", "orbax.checkpoint"):
        importlib.import_module(name)


def campaign(todo: list[tuple[str, Mutant]], folder: Path, jobs: int) -> Iterator[Result]:
    """Results as they come: ``jobs`` processes, each with a copy of the tree of its own."""
    free: SimpleQueue[Path] = SimpleQueue()
    for number in range(jobs):
        prepare(folder / str(number))
        free.put(folder / str(number))

    def one(page: str, mutant: Mutant) -> Result:
        place = free.get()
        try:
            return run(page, mutant, place)
        finally:
            free.put(place)

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(one, page, mutant) for page, mutant in todo]):
            yield done.result()
