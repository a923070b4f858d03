"""Interrupt training at many points and compare each result bit for bit with an uninterrupted run.

See docs/reliability.md.

``python benchmarks/interruptions.py --kills 200 --terms 50 --damages 500``; exit code 1 if
any promise is broken. Linux.
"""

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["JAX_PLATFORMS"] = "cpu"  # as in the children

from benchmarks import interruptions_chains, interruptions_damage, interruptions_runs
from benchmarks.interruptions_chains import Chain, Reference
from benchmarks.interruptions_damage import Finding
from benchmarks.interruptions_runs import COMMON, PHASES, SETTINGS, Sandbox
from benchmarks.interruptions_verdict import Outcome

KINDS = ("kills", "terms", "failures")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def record_references(work: Path, compiled: Path, processes: int) -> list[Reference]:
    """A run of each setting, done twice; exits if the two differ.

    The first compiles everything, the second finds it compiled.
    """
    flags, references = interruptions_runs.write_text(work), []
    for name, options in SETTINGS.items():
        runs = []
        for turn in ("cold", "warm"):
            sandbox = Sandbox(
                work / f"whole-{name}-{turn}",
                [*flags, *COMMON.split(), *options.split()],
                compiled,
                processes,
            )
            sandbox.folder.mkdir()
            result = sandbox.start()
            if result.code:
                raise SystemExit(
                    f"the uninterrupted run ends with exit code {result.code}:\n"
                    f"{result.err[-2000:]}"
                )
            runs.append(Reference.from_run(name, sandbox, result))
        differing = interruptions_runs.differences(sandbox.run, runs[0].contents)
        if differing:
            raise SystemExit(f"two uninterrupted runs differ: {'; '.join(differing[:5])}")
        references.append(runs[1])
    return references


def chains(
    options: argparse.Namespace, references: list[Reference], work: Path, compiled: Path
) -> Iterator[Chain]:
    """All chains, or the one of ``--only``."""
    for kind in KINDS:
        for number, count in enumerate(
            interruptions_chains.lengths(getattr(options, kind), options.seed, kind)
        ):
            if options.only in (None, f"{kind}-{number}"):
                yield Chain(
                    kind,
                    number,
                    options.seed,
                    count,
                    references[number % len(references)],
                    work,
                    compiled,
                    options.processes,
                )


def interrupt(
    options: argparse.Namespace, references: list[Reference], work: Path, compiled: Path
) -> list[Outcome]:
    """Run the chains, ``--jobs`` at a time."""
    with ThreadPoolExecutor(options.jobs) as pool:
        started = [
            pool.submit(chain.outcomes) for chain in chains(options, references, work, compiled)
        ]
        for chain in as_completed(started):
            for outcome in chain.result():
                verdict = "NOT EQUAL" if outcome.wrong else "equal"
                log(
                    f"{outcome.kind}-{outcome.chain}: {outcome.what} in phase {outcome.phase}:"
                    f" {verdict}"
                )
    return [outcome for chain in started for outcome in chain.result()]


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# Report


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield a table: interruptions by phase, and the number of runs that did not end equal."""
    yield "| phase | " + " | ".join(KINDS) + " | not equal |"
    yield "|---" * (len(KINDS) + 2) + "|"
    for phase in (*PHASES, "all"):
        here = [outcome for outcome in outcomes if phase in (outcome.phase, "all")]
        counts = [sum(outcome.kind == kind for outcome in here) for kind in KINDS]
        wrong = sum(bool(outcome.wrong) for outcome in here)
        yield f"| {phase} | {' | '.join(map(str, counts))} | {wrong or 'none'} |"


def remarks(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield figures that the table does not have."""
    calls = [
        outcome
        for outcome in outcomes
        if outcome.kind == "kills" and outcome.what.startswith("kill at ")
    ]
    harmless = sum(outcome.harmless for outcome in outcomes)
    unhandled = [outcome for outcome in outcomes if outcome.by_default]
    yield f"Of the kills, {len(calls)} replaced a system call, the others by the clock."
    yield f"{harmless} failed calls were harmless: the run went on to its end."
    yield (
        f"{len(unhandled)} signals met no handler: the options were not read yet, the run was over,"
        " or it was the second signal."
    )
    stops = [
        outcome.seconds
        for outcome in outcomes
        if outcome.kind == "terms" and not outcome.by_default
    ]
    if stops:
        median = sorted(stops)[len(stops) // 2]
        yield (
            f"From a signal to the end of the process it took {median:.1f} s (median),"
            f" {max(stops):.1f} s at most."
        )


def reproduction(outcomes: list[Outcome], options: argparse.Namespace) -> Iterator[str]:
    """Yield the faults, chain by chain, and the command that reproduces each."""
    for name in dict.fromkeys(
        f"{outcome.kind}-{outcome.chain}" for outcome in outcomes if outcome.wrong
    ):
        here = [outcome for outcome in outcomes if f"{outcome.kind}-{outcome.chain}" == name]
        yield f"\n{name}: " + ", ".join(f"{outcome.what} in {outcome.phase}" for outcome in here)
        yield from (
            f"  {line}" for line in next(outcome.wrong for outcome in here if outcome.wrong)[:8]
        )
        counts = " ".join(f"--{kind} {getattr(options, kind)}" for kind in KINDS)
        yield (
            f"  again: python benchmarks/interruptions.py --seed {options.seed} {counts}"
            f" --damages 0 --only {name}"
        )


def machine() -> dict[str, Any]:
    """The machine and the versions."""
    versions = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
    }
    return {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, count, text in (
        ("kills", 200, "SIGKILLs"),
        ("terms", 50, "SIGTERMs and Ctrl-Cs"),
        ("failures", 50, "system calls that fail"),
        ("damages", 500, "damaged checkpoints"),
    ):
        parser.add_argument(f"--{name}", type=int, default=count, help=text)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--processes", type=int, default=1, help="processes of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", metavar="KIND-NUMBER", help="one chain, as kills-17, of the same counts"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument(
        "--work",
        type=Path,
        help="a new folder to work in, which is kept (default: a temporary one)",
    )
    return parser.parse_args()


def campaign(options: argparse.Namespace, work: Path) -> int:
    """Run everything and return the exit code."""
    began = time.monotonic()
    compiled = work / "compiled"
    references = record_references(work, compiled, options.processes)
    outcomes = interrupt(options, references, work, compiled)
    controls: list[Finding] = []
    damages: list[Finding] = []
    if options.only is None and options.processes == 1:
        parts: list[tuple[list[Finding], Callable]] = [
            (controls, interruptions_damage.controls),
            (damages, interruptions_damage.damages),
        ]
        for findings, part in parts:
            for finding in part(options, references[0], work, compiled):
                findings.append(finding)
                log(finding.line())
    wrong = any(outcome.wrong for outcome in outcomes) or any(
        finding.wrong for finding in controls + damages
    )
    missing = (
        sum(getattr(options, kind) for kind in KINDS) - len(outcomes) if options.only is None else 0
    )
    lines = [
        *table(outcomes),
        "",
        *remarks(outcomes),
        *interruptions_damage.summary(controls, damages),
        *reproduction(outcomes, options),
    ]
    if missing:
        lines.append(f"{missing} interruptions did not happen: their runs ended before")
    print("\n".join(lines))
    if options.json:
        parts_json = {"interruptions": outcomes, "controls": controls, "damages": damages}
        content = {
            name: [dataclasses.asdict(each) for each in records]
            for name, records in parts_json.items()
        }
        minutes = round((time.monotonic() - began) / 60, 1)
        options.json.write_text(
            json.dumps(
                {**machine(), "seed": options.seed, "minutes": minutes, "report": lines, **content},
                indent=1,
            )
            + "\n"
        )
    return 1 if wrong or missing else 0


def main() -> int:
    options = parse()
    if options.work is not None:
        options.work.mkdir(parents=True)
        return campaign(options, options.work.absolute())
    work = Path(tempfile.mkdtemp(prefix="interruptions-"))
    code = campaign(options, work)
    print(f"broken promises: see {work}" if code else "all as promised", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
