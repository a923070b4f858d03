"""Interrupt training at many points and compare each result bit for bit with an uninterrupted run.

See docs/reliability.md.

``python benchmarks/interruptions.py --kills 200 --terms 50 --damages 500``; exit code 1 where
anything is not as promised. Linux.
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
from benchmarks.interruptions_damage import Found
from benchmarks.interruptions_runs import COMMON, PHASES, SETTINGS, Place
from benchmarks.interruptions_verdict import Outcome

KINDS = ("kills", "terms", "failures")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def references(work: Path, compiled: Path) -> list[Reference]:
    """A run of each setting, done twice; exits if the two differ.

    The first compiles everything, the second finds it compiled.
    """
    flags, found = interruptions_runs.write_text(work), []
    for name, options in SETTINGS.items():
        ends = []
        for turn in ("cold", "warm"):
            place = Place(
                work / f"whole-{name}-{turn}", [*flags, *COMMON.split(), *options.split()], compiled
            )
            place.folder.mkdir()
            ended = place.start()
            if ended.code:
                raise SystemExit(
                    f"the uninterrupted run ends with exit code {ended.code}:\n{ended.err[-2000:]}"
                )
            ends.append(Reference.of(name, place, ended))
        differing = interruptions_runs.differences(place.run, ends[0].left)
        if differing:
            raise SystemExit(f"two uninterrupted runs differ: {'; '.join(differing[:5])}")
        found.append(ends[1])
    return found


def chains(
    options: argparse.Namespace, whole: list[Reference], work: Path, compiled: Path
) -> Iterator[Chain]:
    """All chains, or the one that is asked for."""
    for kind in KINDS:
        for number, count in enumerate(
            interruptions_chains.lengths(getattr(options, kind), options.seed, kind)
        ):
            if options.only in (None, f"{kind}-{number}"):
                yield Chain(
                    kind, number, options.seed, count, whole[number % len(whole)], work, compiled
                )


def interrupt(
    options: argparse.Namespace, whole: list[Reference], work: Path, compiled: Path
) -> list[Outcome]:
    """Every chain, so many at a time."""
    with ThreadPoolExecutor(options.jobs) as pool:
        started = [pool.submit(chain.outcomes) for chain in chains(options, whole, work, compiled)]
        for chain in as_completed(started):
            for outcome in chain.result():
                say(
                    f"{outcome.kind}-{outcome.chain}: {outcome.what} in phase {outcome.phase}: {'NOT EQUAL' if outcome.wrong else 'equal'}"
                )
    return [outcome for chain in started for outcome in chain.result()]


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# What is printed


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """How many interruptions fell in each phase, and whether all runs ended equal."""
    yield "| phase | " + " | ".join(KINDS) + " | not equal |"
    yield "|---" * (len(KINDS) + 2) + "|"
    for phase in (*PHASES, "all"):
        here = [outcome for outcome in outcomes if phase in (outcome.phase, "all")]
        counts = [sum(outcome.kind == kind for outcome in here) for kind in KINDS]
        yield f"| {phase} | {' | '.join(map(str, counts))} | {sum(bool(outcome.wrong) for outcome in here) or 'none'} |"


def remarks(outcomes: list[Outcome]) -> Iterator[str]:
    """Figures that the table does not have."""
    calls = [
        outcome
        for outcome in outcomes
        if outcome.kind == "kills" and outcome.what.startswith("kill at ")
    ]
    harmless = sum(outcome.harmless for outcome in outcomes)
    default = [outcome for outcome in outcomes if outcome.by_default]
    yield f"Of the kills, {len(calls)} came in place of a system call, the others by the clock."
    yield f"{harmless} failed calls were harmless: the run went on to its end."
    yield f"{len(default)} signals found no handler, because the options were not read yet or the run was over, or because they were the second."
    stops = [
        outcome.seconds
        for outcome in outcomes
        if outcome.kind == "terms" and not outcome.by_default
    ]
    if stops:
        yield f"From a signal to the end of the process it took {sorted(stops)[len(stops) // 2]:.1f} s (median), {max(stops):.1f} s at most."


def reproduced(outcomes: list[Outcome], options: argparse.Namespace) -> Iterator[str]:
    """What was wrong, chain by chain, and the command that does it again."""
    for name in dict.fromkeys(
        f"{outcome.kind}-{outcome.chain}" for outcome in outcomes if outcome.wrong
    ):
        here = [outcome for outcome in outcomes if f"{outcome.kind}-{outcome.chain}" == name]
        yield f"\n{name}: " + ", ".join(f"{outcome.what} in {outcome.phase}" for outcome in here)
        yield from (
            f"  {line}" for line in next(outcome.wrong for outcome in here if outcome.wrong)[:8]
        )
        counts = " ".join(f"--{kind} {getattr(options, kind)}" for kind in KINDS)
        yield f"  again: python benchmarks/interruptions.py --seed {options.seed} {counts} --damages 0 --only {name}"


def about() -> dict[str, Any]:
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
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", metavar="KIND-NUMBER", help="one chain, as kills-17, of the same counts"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument(
        "--work", type=Path, help="a new folder to work in, which stays; a temporary one without it"
    )
    return parser.parse_args()


def campaign(options: argparse.Namespace, work: Path) -> int:
    """Everything, and the exit code."""
    began = time.monotonic()
    compiled = work / "compiled"
    whole = references(work, compiled)
    outcomes = interrupt(options, whole, work, compiled)
    controls: list[Found] = []
    damages: list[Found] = []
    if options.only is None:
        parts: list[tuple[list[Found], Callable]] = [
            (controls, interruptions_damage.controls),
            (damages, interruptions_damage.damages),
        ]
        for found, part in parts:
            for each in part(options, whole[0], work, compiled):
                found.append(each)
                say(each.line())
    wrong = [outcome for outcome in outcomes if outcome.wrong] + [
        each for each in controls + damages if each.wrong
    ]
    missing = (
        sum(getattr(options, kind) for kind in KINDS) - len(outcomes) if options.only is None else 0
    )
    lines = [
        *table(outcomes),
        "",
        *remarks(outcomes),
        *interruptions_damage.summary(controls, damages),
        *reproduced(outcomes, options),
    ]
    if missing:
        lines.append(f"{missing} interruptions did not come: their runs ended before")
    print("\n".join(lines))
    if options.json:
        parts_json = {"interruptions": outcomes, "controls": controls, "damages": damages}
        content = {
            name: [dataclasses.asdict(each) for each in found] for name, found in parts_json.items()
        }
        minutes = round((time.monotonic() - began) / 60, 1)
        options.json.write_text(
            json.dumps(
                {**about(), "seed": options.seed, "minutes": minutes, "report": lines, **content},
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
    print(
        f"what was not as promised lies in {work}" if code else "all as promised", file=sys.stderr
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
