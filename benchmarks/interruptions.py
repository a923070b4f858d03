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
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import interruptions_chains, interruptions_damage, interruptions_runs
from benchmarks.interruptions_chains import Chain, Reference
from benchmarks.interruptions_damage import Finding
from benchmarks.interruptions_fork import ForkServer
from benchmarks.interruptions_runs import BEFORE_OPTIONS, COMMON, PHASES, SETTINGS, SHARDED, Sandbox
from benchmarks.interruptions_verdict import Outcome
from jax_transformer.storage import atomic

KINDS = ("kills", "terms", "failures")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def references_of(
    options: argparse.Namespace, work: Path, compiled: Path, server: ForkServer
) -> list[Reference]:
    """The references of the work folder; they are recorded if it is new."""
    path = work / f"references-{options.processes}.json"
    if not path.exists():
        references = record_references(work, compiled, options.processes, server)
        atomic.write_text(path, json.dumps([dataclasses.asdict(each) for each in references]))
    return [Reference(**fields) for fields in json.loads(path.read_text())]


def record_references(
    work: Path, compiled: Path, processes: int, server: ForkServer
) -> list[Reference]:
    """A run of each setting, done twice; exits if the two differ.

    The first compiles everything, in interpreters of its own; the second finds it compiled, in
    forked processes.
    """
    flags, references = interruptions_runs.write_text(work), []
    for name, settings in SETTINGS.items():
        if processes > 1 and name == SHARDED:
            settings += f" --mesh.fsdp {processes}"
        runs = []
        for turn, forks in (("cold", None), ("warm", server)):
            folder = interruptions_runs.reference_folder(work, processes, name, turn)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            arguments = [*flags, *COMMON.split(), *settings.split()]
            sandbox = Sandbox(folder, arguments, compiled, processes, forks)
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
        early = {phase: runs[0].durations[phase] for phase in BEFORE_OPTIONS}
        references.append(dataclasses.replace(runs[1], durations=runs[1].durations | early))
    return references


def chains(
    options: argparse.Namespace,
    references: list[Reference],
    work: Path,
    compiled: Path,
    server: ForkServer,
) -> list[Chain]:
    """All chains, or the one of ``--only``; the kinds take turns."""
    chains = []
    for kind in KINDS:
        counts = interruptions_chains.lengths(getattr(options, kind), options.seed, kind)
        for number, count in enumerate(counts):
            reference = references[number % len(references)]
            if options.only in (None, f"{kind}-{number}"):
                chain = Chain(
                    kind,
                    number,
                    options.seed,
                    count,
                    reference,
                    work,
                    compiled,
                    options.processes,
                    server,
                )
                chains.append((number / len(counts), chain))
    return [chain for _, chain in sorted(chains, key=lambda each: each[0])]


def interrupt(
    options: argparse.Namespace,
    references: list[Reference],
    work: Path,
    compiled: Path,
    server: ForkServer,
) -> list[Outcome]:
    """Run the chains that ``--results`` does not have yet, ``--jobs`` at a time."""
    done = recorded(options)
    todo = [
        chain
        for chain in chains(options, references, work, compiled, server)
        if (chain.kind, chain.number) not in done
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        for chain in as_completed([pool.submit(chain.outcomes) for chain in todo]):
            outcomes = chain.result()
            for outcome in outcomes:
                verdict = "NOT EQUAL" if outcome.wrong else "equal"
                log(
                    f"{outcome.kind}-{outcome.chain}: {outcome.what} in phase {outcome.phase}:"
                    f" {verdict}"
                )
            if outcomes:
                done[outcomes[0].kind, outcomes[0].chain] = outcomes
                record(options, outcomes)
    return [outcome for _, outcomes in sorted(done.items()) for outcome in outcomes]


# The file of results: a line for each interruption


def run_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options that decide the chains of a campaign."""
    counts = {kind: getattr(options, kind) for kind in KINDS}
    return {**counts, "seed": options.seed, "processes": options.processes}


def recorded(options: argparse.Namespace) -> dict[tuple[str, int], list[Outcome]]:
    """The interruptions of earlier starts of the same campaign, by chain."""
    done: dict[tuple[str, int], list[Outcome]] = {}
    if options.results is not None and options.results.exists():
        for line in options.results.read_text().splitlines():
            content = json.loads(line)
            if content.pop("of") == run_of(options):
                outcome = Outcome(**content)
                done.setdefault((outcome.kind, outcome.chain), []).append(outcome)
    return done


def record(options: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Append a chain to the results."""
    if options.results is not None:
        lines = [{"of": run_of(options), **dataclasses.asdict(outcome)} for outcome in outcomes]
        with open(options.results, "a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


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
        help="a folder to work in, which is kept (default: a temporary one)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="append a line for each interruption, and go on after those that are there",
    )
    return parser.parse_args()


def campaign(options: argparse.Namespace, work: Path) -> int:
    """Run everything and return the exit code."""
    began = time.monotonic()
    compiled = work / "compiled"
    server = ForkServer(interruptions_runs.environment(compiled))
    try:
        references = references_of(options, work, compiled, server)
        outcomes = interrupt(options, references, work, compiled, server)
    finally:
        server.close()
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
    os.environ["JAX_PLATFORMS"] = "cpu"  # as in the children, before JAX is imported
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        return campaign(options, options.work.absolute())
    work = Path(tempfile.mkdtemp(prefix="interruptions-"))
    code = campaign(options, work)
    print(f"broken promises: see {work}" if code else "all as promised", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
