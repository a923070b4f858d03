"""The mutation campaign: faults seeded one at a time; a test must notice each of them.

The comparison must also name the faulty module. See docs/mutants.md.

Each fault gets a process of its own, forked from one that has collected the tests, and runs only
the tests that reach it. Killed means that a comparison in a test failed, or that the package
refused its input; a test that cannot be collected, or fails with any other error, is broken.
"""

import argparse
import functools
import importlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import campaign, mutants_run  # noqa: E402
from benchmarks.campaign import Campaign, Case  # noqa: E402
from benchmarks.mutants_fault import Mutant  # noqa: E402
from benchmarks.mutants_run import KILLED, Result  # noqa: E402

PAGES = {
    "attention": "attention and its masks",
    "layers": "norms, feed-forwards, positions and linear layers",
    "whole": "residuals, dropout, and of how the layers are put together",
    "distances": "relative positions",
    "families": "what else Hugging Face's families do",
    "tables": "weight tables",
    "training": "loss, optimizer, step, and an optimizer's state between the frameworks",
    "decoding": "decoding",
    "mesh": "the layout on several devices",
    "updates": "accumulated updates, averages, and the lines of metrics",
    "runs": "a resumed run: its checkpoints, which are kept and averaged, and its metrics",
    "intact": "damage to the files of a run that is not noticed, and signals at bad moments",
    "batches": "the order of pairs, pairs left over, and the arrays of a batch",
    "text": "reading text, its normalisation, and lengths",
    "lines": "sampling, n-best lists, and the weighting of evaluation",
    "files": "casts, sharded exports and exit codes",
    "commands": "defaults, options, messages and outputs of the commands, and the service",
}
PAGE = ROOT / "docs" / "mutants.md"
BEGIN, END = "<!-- python benchmarks/campaign.py mutants -->\n", "<!-- end -->\n"


def mutants() -> dict[str, list[Mutant]]:
    """All mutants by page."""
    return {page: importlib.import_module(f"benchmarks.mutants_{page}").MUTANTS for page in PAGES}


def wrong_name(result: Result, mutants_by_name: dict[str, Mutant]) -> bool:
    """True if the comparison should have named a module and did not."""
    module = mutants_by_name[result.name].module
    return module is not None and result.named != module


def table(results: list[Result], mutants_by_name: dict[str, Mutant]) -> Iterator[str]:
    """Yield the summary of a campaign and its faults as markdown."""
    verdicts = Counter(result.verdict for result in results)
    modules = [result for result in results if mutants_by_name[result.name].module is not None]
    right = sum(not wrong_name(result, mutants_by_name) for result in modules)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    yield (
        f"{len(results)} faults: {counts}. Of the {len(modules)} inside a module, the comparison"
        f" names {right}."
    )
    for page, title in PAGES.items():
        rows = [result for result in results if result.page == page]
        if rows:
            yield f"\n### Faults of {title}\n"
            yield "| fault | similar to | verdict | by | named first | off by | s |"
            yield "|---|---|---|---|---|---|---|"
            for result in rows:
                yield row(result, mutants_by_name[result.name])


def row(result: Result, mutant: Mutant) -> str:
    """The line of one fault."""
    test = result.test.rpartition("/")[2].replace("|", "\\|")
    named = f"`{result.named}`" if mutant.module else "–"
    if wrong_name(result, {mutant.name: mutant}):
        named += f" (not `{mutant.module}`)"
    off = "–" if result.figure is None else f"{result.figure:.1e}"
    cells = [result.name, mutant.met, result.verdict, f"`{test}`", named, off]
    return f"| {' | '.join(cells)} | {result.seconds:.0f} |"


def publish(lines: list[str]) -> None:
    """Write the table into docs/mutants.md, between its two marks."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text(
        f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}" + rest.partition(END)[2],
        encoding="utf-8",
    )


# As a campaign


@functools.cache
def _settings(cache: Path) -> None:
    mutants_run.settings(cache)


def groups() -> list[list[tuple[str, Mutant]]]:
    """The faults and their pages; those that the same test files reach share their collection."""
    grouped: dict[tuple[str, ...], list[tuple[str, Mutant]]] = {}
    for page, each in mutants().items():
        for mutant in each:
            grouped.setdefault(mutants_run.files(mutant), []).append((page, mutant))
    return list(grouped.values())


def cases(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """The faults of a group."""
    del scratch, seed
    _settings(shared / "cache")
    for group in groups()[number : number + 1]:
        yield from map(case_of, mutants_run.results(group, shared / "tree"))


def case_of(result: Result) -> Case:
    """A result as an outcome, which is as promised if a test killed the fault and the comparison
    named its module."""
    [mutant] = [each for page in mutants().values() for each in page if each.name == result.name]
    wrong = [] if result.verdict == KILLED else [f"{result.verdict}: {result.error}"]
    if wrong_name(result, {mutant.name: mutant}):
        wrong.append(f"{result.named} is named, not {mutant.module}")
    facts = asdict(result)
    return Case(PAGES[result.page], result.verdict, result.name, tuple(wrong), facts=facts)


CAMPAIGN = Campaign(
    "each seeded fault turns a test red, and the comparison names its module",
    prepare=mutants_run.prepare,
    cases=cases,
    small=len(groups()),
    nightly=len(groups()),
)


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="run faults whose name has one of these words, or these pages",
    )
    what.add_argument(
        "--publish",
        type=Path,
        metavar="RESULTS",
        help="write the table of a campaign's results into docs/mutants.md",
    )
    what.add_argument(
        "--control",
        action="store_true",
        help="run the tests of all faults in the same way without any fault: all must pass",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    listed = [(page, mutant) for page, each in mutants().items() for mutant in each]
    if options.publish is not None:
        records = campaign.recorded(options.publish)
        by_name = {record.case.what: record.case for record in records if record.case.facts}
        results = [Result(**by_name[m.name].facts) for _, m in listed if m.name in by_name]
        publish(list(table(results, {mutant.name: mutant for _, mutant in listed})))
        return 0
    chosen = [
        (page, mutant)
        for page, mutant in listed
        if options.control or any(word == page or word in mutant.name for word in options.only)
    ]
    with tempfile.TemporaryDirectory() as name:
        mutants_run.settings(Path(name) / "cache")
        tree = Path(name)
        mutants_run.prepare(tree)
        if options.control:
            return mutants_run.control(chosen, tree / "tree")
        wrong = 0
        for result in mutants_run.results(chosen, tree / "tree"):
            case = case_of(result)
            wrong += bool(case.wrong)
            print(f"{result.verdict:9}{result.name}: {result.named} | {result.error[:120]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
