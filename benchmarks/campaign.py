"""Run campaigns: numbered cases, each of which must end as the documentation promises.

``python benchmarks/campaign.py damages fuzz --count 1000 --jobs 2 --results results.jsonl``

Every case is decided by the seed and its number, and can be repeated with ``--only NUMBER``. A
results file has a line of JSON for each outcome; a campaign that was stopped goes on after them.
Without names all campaigns run. The exit code is 1 if a promise was broken.
"""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CAMPAIGNS = {
    "checkpoint-damages": "benchmarks.interruptions:DAMAGES",
    "conversion-kills": "benchmarks.conversion_kills:CONVERSION_KILLS",
    "controls": "benchmarks.interruptions:CONTROLS",
    "crash-controls": "benchmarks.crash_controls:CONTROLS",
    "crashes": "benchmarks.crashes:CRASHES",
    "damages": "benchmarks.damages:CAMPAIGN",
    "failures": "benchmarks.failures:FAILURES",
    "fuzz": "benchmarks.fuzz:CAMPAIGN",
    "kills": "benchmarks.interruptions:KILLS",
    "mutants": "benchmarks.mutants:CAMPAIGN",
    "power-loss": "benchmarks.crashes:POWER_LOSS",
    "resumes": "benchmarks.resumes:RESUMES",
    "round-trips": "benchmarks.round_trips:CAMPAIGN",
    "signals": "benchmarks.interruptions:SIGNALS",
}
"""The module and attribute of each campaign."""
LONGEST = 1200.0
"""Seconds after which a case counts as hung."""


@dataclass(frozen=True)
class Case:
    """One outcome of a numbered case."""

    group: str
    """The row of the table, as ``save`` or ``pt``."""
    outcome: str
    """The column of the table, as ``equal`` or ``exit code 3``."""
    what: str = ""
    """The damage, interruption or input, to read and to repeat."""
    wrong: tuple[str, ...] = ()
    """The broken promises; none if the case ended as promised."""
    count: int = 1
    """The kills, damages or inputs that this stands for."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Other figures, as JSON."""


@dataclass(frozen=True)
class Campaign:
    """Numbered cases and what they share."""

    about: str
    prepare: Callable[[Path], None]
    """Writes what all cases share into an empty folder, once."""
    cases: Callable[[Path, Path, int, int], Iterable[Case]]
    """The outcomes of a case, by the shared folder, an empty folder of its own, the seed and the
    number."""
    small: int
    """The number of cases of a short campaign, which is the default."""
    nightly: int


@dataclass(frozen=True)
class Record:
    """A line of the results."""

    campaign: str
    seed: int
    number: int
    seconds: float
    case: Case

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Record":
        fields = json.loads(line)
        case = fields.pop("case")
        return cls(**fields, case=Case(**case | {"wrong": tuple(case["wrong"])}))


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
        earlier = recorded(options.results) if options.results is not None else []
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
        campaign = find(self.name)
        count = self.options.count
        if count is None:
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


def recorded(path: Path) -> list[Record]:
    """The lines of a results file; a last one that was cut off is removed."""
    if not path.exists():
        return []
    complete, _, rest = path.read_text().rpartition("\n")
    if rest:
        path.write_text(f"{complete}\n" if complete else "")
    return [Record.from_json(line) for line in complete.splitlines()]


# Report


def table(records: Sequence[Record]) -> Iterator[str]:
    """Yield the outcomes by group, and the number of those that broke a promise."""
    counts: Counter[tuple[str, str]] = Counter()
    for record in records:
        for group in (record.case.group, "all"):
            counts[group, record.case.outcome] += record.case.count
            counts[group, "not as promised"] += bool(record.case.wrong)
    groups = dict.fromkeys(record.case.group for record in records)
    columns = [*dict.fromkeys(record.case.outcome for record in records), "not as promised"]
    yield "| | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for group in (*groups, "all") if len(groups) > 1 else groups:
        cells = [
            f"{counts[group, column]:,}" if counts[group, column] else "–" for column in columns
        ]
        yield f"| {group} | {' | '.join(cells)} |"


def findings(records: Sequence[Record]) -> Iterator[str]:
    """Yield each broken promise, and the command that repeats its case."""
    for record in records:
        if record.case.wrong:
            yield f"\n{record.campaign} {record.number}: {record.case.what}"
            yield from (f"  {line}" for text in record.case.wrong for line in text.splitlines())
            yield (
                f"  again: python benchmarks/campaign.py {record.campaign}"
                f" --seed {record.seed} --only {record.number}"
            )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="campaigns: " + ", ".join(CAMPAIGNS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="campaigns (default: all)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--count", type=int, help="numbered cases of each campaign")
    size.add_argument("--minutes", type=float, help="minutes of each campaign, instead of a count")
    size.add_argument("--nightly", action="store_true", help="as many cases as a night allows")
    size.add_argument("--only", type=int, metavar="NUMBER", help="one case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--results", type=Path, help="file of results, a line of JSON for each")
    parser.add_argument("--work", type=Path, help="folder to work in, which is kept")
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("runs/campaigns"),
        help="folder for findings (%(default)s)",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in CAMPAIGNS and ":" not in name]
    if unknown:
        parser.error(f"{unknown[0]}: is not one of {', '.join(CAMPAIGNS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    broken = False
    with contextlib.ExitStack() as stack:
        work = options.work
        if work is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="campaign-")))
        for name in options.names or CAMPAIGNS:
            began = time.monotonic()
            records = Run(name, options, work.absolute())()
            minutes = (time.monotonic() - began) / 60
            print(f"\n{name}, seed {options.seed}: {find(name).about} ({minutes:.1f} minutes)\n")
            print("\n".join([*table(records), *findings(records)]), flush=True)
            broken = broken or any(record.case.wrong for record in records)
    return 1 if broken else 0


if __name__ == "__main__":
    from benchmarks import campaign  # the module that campaigns import, not a second copy of it

    sys.exit(campaign.main())
