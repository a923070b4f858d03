"""Run some seeded faults, or the same tests without any, or publish a campaign's results.

``python -m campaigns.mutants --only WORD ... | --control | --publish RESULTS``; all faults are the
campaign ``mutants``. The exit code is 1 if one survives or is misnamed.
"""

import argparse
import csv
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks import pages
from campaigns import report
from campaigns.mutants import campaign, faults, run
from campaigns.mutants.faults import ROOT, Mutant
from campaigns.mutants.run import Result

PAGE, TABLE = ROOT / "docs" / "mutants.md", ROOT / "docs" / "data" / "mutants.tsv"
HEADER = ["section", "fault", "similar to", "verdict", "by", "named first", "off by", "s"]


def summary(results: Sequence[tuple[Result, Mutant]]) -> str:
    """The counts of a campaign in a sentence or two."""
    verdicts = Counter(result.verdict for result, _ in results)
    modules = [(result, mutant) for result, mutant in results if mutant.module is not None]
    right = sum(result.named == mutant.module for result, mutant in modules)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    inside = f"Of the {len(modules)} inside a module, the comparison names {right}."
    return f"{len(results)} faults: {counts}. {inside}"


def row(result: Result, mutant: Mutant) -> list[str]:
    """The cells of one fault, without its section."""
    named = f"`{result.named}`" if mutant.module else "–"
    if mutant.module not in (None, result.named):
        named += f" (not `{mutant.module}`)"
    off = "–" if result.figure is None else f"{result.figure:.1e}"
    test = f"`{result.test.rpartition('/')[2]}`"
    return [result.name, mutant.met, result.verdict, test, named, off, f"{result.seconds:.0f}"]


def publish(results: Sequence[tuple[Result, Mutant]]) -> None:
    """Write the table of docs/data/mutants.tsv, and the counts into docs/mutants.md."""
    TABLE.parent.mkdir(exist_ok=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, "excel-tab", lineterminator="\n")
        lines.writerow(HEADER)
        for result, mutant in results:
            about = f"Faults of {faults.area_of(result.name).about}"
            lines.writerow([about, *row(result, mutant)])
    pages.write(PAGE, "python -m campaigns.mutants --publish", summary(results))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="run faults whose name has one of these words, or these areas",
    )
    what.add_argument(
        "--publish",
        type=Path,
        metavar="RESULTS",
        help="write the table of a campaign's results into docs/data/mutants.tsv",
    )
    what.add_argument(
        "--control",
        action="store_true",
        help="run the tests of all faults in the same way without any fault: all must pass",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    listed = faults.listed()
    if options.publish is not None:
        records = report.recorded(options.publish)
        by_name = {record.case.what: record.case.facts for record in records if record.case.facts}
        publish([(Result(**by_name[m.name]), m) for m in listed if m.name in by_name])
        return 0
    chosen = [
        mutant
        for area in faults.areas()
        for mutant in area.mutants
        if options.control or any(word == area.name or word in mutant.name for word in options.only)
    ]
    by_name = {mutant.name: mutant for mutant in chosen}
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        run.settings(tree / "cache")
        run.prepare(tree)
        if options.control:
            return run.control(chosen, tree / "tree")
        wrong = 0
        for result in run.results(chosen, tree / "tree"):
            wrong += bool(campaign.case_of(result, by_name[result.name]).wrong)
            print(f"{result.verdict:9}{result.name}: {result.named} | {result.error[:120]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
