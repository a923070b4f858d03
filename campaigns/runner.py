"""Campaigns run in processes that keep their caches from case to case."""

import argparse
import contextlib
import importlib
import itertools
import multiprocessing
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from campaigns import report
from campaigns.case import Campaign, Case
from campaigns.report import Record

CAMPAIGNS = {
    "checkpoint-damages": "campaigns.interruptions.campaign:DAMAGES",
    "controls": "campaigns.interruptions.campaign:CONTROLS",
    "conversion-kills": "campaigns.interruptions.conversion_kills:CONVERSION_KILLS",
    "crash-controls": "campaigns.crashes.controls:CONTROLS",
    "crashes": "campaigns.crashes.campaign:CRASHES",
    "damages": "campaigns.damages.campaign:DAMAGES",
    "failures": "campaigns.interruptions.failures:FAILURES",
    "fuzz": "campaigns.fuzzing.campaign:FUZZ",
    "kills": "campaigns.interruptions.campaign:KILLS",
    "mutants": "campaigns.mutants.campaign:MUTANTS",
    "power-loss": "campaigns.crashes.campaign:POWER_LOSS",
    "preparation-kills": "campaigns.interruptions.preparation_kills:PREPARATION_KILLS",
    "resumes": "campaigns.interruptions.resumes:RESUMES",
    "round-trips": "campaigns.round_trips:ROUND_TRIPS",
    "signals": "campaigns.interruptions.campaign:SIGNALS",
}
"""The module and attribute of each campaign."""
LONGEST = 1200.0
"""Seconds after which a case counts as hung."""


def find(name: str) -> Campaign:
    """The campaign of a registered name, or of ``module:attribute``."""
    module, _, attribute = CAMPAIGNS.get(name, name).partition(":")
    return getattr(importlib.import_module(module), attribute)


# In a worker


def work(name: str, shared: Path, connection: Connection) -> None:
    """Answer numbers with their outcomes until the connection is closed."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with contextlib.suppress(EOFError):
        while True:
            seed, number, scratch = connection.recv()
            connection.send(outcomes(name, shared, scratch, seed, number))


def outcomes(name: str, shared: Path, scratch: Path, seed: int, number: int) -> list[Case]:
    """The outcomes of a case; an exception is a broken promise."""
    try:
        scratch.mkdir(parents=True)
        return list(find(name).cases(shared, scratch, seed, number))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return [Case("campaign", "failed", f"{type(error).__name__}: {error}", (text,))]


def prepared(name: str, folder: Path, connection: Connection) -> None:
    """Prepare a campaign, and send an error or an empty text."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        temporary = folder.with_name(f"{folder.name}.preparing")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        find(name).prepare(temporary)
        temporary.rename(folder)
        connection.send("")
    except BaseException as error:
        connection.send("".join(traceback.format_exception(error)))


# The runner


class Worker:
    """A process that keeps its caches from case to case; a new one begins after its death."""

    def __init__(self, name: str, shared: Path):
        self.name, self.shared = name, shared
        self._process: multiprocessing.process.BaseProcess | None = None

    def __call__(self, seed: int, number: int, scratch: Path) -> list[Case]:
        if self._process is None:
            self._process, self._connection = started(work, self.name, self.shared)
        self._connection.send((seed, number, scratch))
        try:
            if self._connection.poll(LONGEST):
                return self._connection.recv()
            end = f"no end within {LONGEST:.0f} s"
        except (EOFError, ConnectionError):
            self._process.join()
            end = f"the process died (exit code {self._process.exitcode})"
        self.close()
        return [Case("campaign", "died", end, (end,))]

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._process = None


def started(
    target: Callable[..., None], name: str, folder: Path
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """A new process of Python that runs ``target(name, folder, connection)``."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(name, folder, theirs), daemon=False)
    process.start()
    theirs.close()
    return process, ours


def prepare(name: str, folder: Path) -> None:
    """Prepare a campaign in a process of its own, unless an earlier start has done it."""
    if folder.exists():
        return
    process, connection = started(prepared, name, folder)
    try:
        error = connection.recv()
    except EOFError:
        error = "the process died"
    process.join()
    if error:
        raise SystemExit(f"{name} cannot be prepared:\n{error}")


class Run:
    """A campaign that runs: its results are appended to a file as they come."""

    def __init__(self, name: str, options: argparse.Namespace, work: Path):
        self.name, self.options, self.work = name, options, work
        earlier = report.recorded(options.results) if options.results is not None else []
        self.records = [
            record for record in earlier if (record.campaign, record.seed) == (name, options.seed)
        ]
        self._lock = threading.Lock()
        self._until = time.monotonic() + 60 * options.minutes if options.minutes else None
        self._left = self._numbers()

    def _numbers(self) -> Iterator[int]:
        """The numbers that have no result yet."""
        if self.options.only is not None:
            yield self.options.only
            return
        done = {record.number for record in self.records}
        count = self.options.count
        if count is None:
            campaign = find(self.name)
            count = campaign.nightly if self.options.nightly else campaign.small
        for number in itertools.count() if self._until else range(count):
            if self._until and time.monotonic() > self._until:
                return
            if number not in done:
                yield number

    def __call__(self) -> list[Record]:
        prepare(self.name, self.work / self.name)
        with ThreadPoolExecutor(self.options.jobs) as threads:
            for ended in [threads.submit(self._work) for _ in range(self.options.jobs)]:
                ended.result()
        return self.records

    def _work(self) -> None:
        worker = Worker(self.name, self.work / self.name)
        try:
            while (number := self._next()) is not None:
                scratch = self.work / f"{self.name}-{self.options.seed}-{number}"
                shutil.rmtree(scratch, ignore_errors=True)
                began = time.monotonic()
                cases = worker(self.options.seed, number, scratch)
                self._record(number, round(time.monotonic() - began, 3), cases)
                if any(case.wrong for case in cases):
                    self._keep(scratch)
                shutil.rmtree(scratch, ignore_errors=True)
        finally:
            worker.close()

    def _next(self) -> int | None:
        with self._lock:
            return next(self._left, None)

    def _record(self, number: int, seconds: float, cases: Sequence[Case]) -> None:
        seed = self.options.seed
        records = [Record(self.name, seed, number, seconds, case) for case in cases]
        with self._lock:
            self.records += records
            if self.options.results is not None:
                with open(self.options.results, "a", encoding="utf-8") as file:
                    file.write("".join(record.to_json() + "\n" for record in records))
            for record in records:
                if record.case.wrong:
                    print(f"{self.name} {number}: {record.case.what}", file=sys.stderr, flush=True)

    def _keep(self, scratch: Path) -> None:
        if scratch.is_dir() and any(scratch.iterdir()):
            copy = self.options.keep / scratch.name
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(scratch, copy, symlinks=True)
