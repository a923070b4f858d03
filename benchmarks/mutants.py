"""The mutation campaign: faults seeded one at a time; a test must notice each of them.

The comparison must also name the faulty module. See docs/mutants.md.

Each fault gets a process of its own, forked from one that has collected the tests, and runs only
the tests that reach it. Killed means that a comparison in a test failed, or that the package
refused its input; a test that cannot be collected, or fails with any other error, is broken.
"""

import argparse
import importlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.mutants_fault import Mutant  # noqa: E402
from benchmarks.mutants_run import (  # noqa: E402
    KILLED,
    Result,
    campaign,
    control,
    prepare,
    settings,
)

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
    "batches": "the order of pairs, pairs left over, and the arrays of a batch",
    "text": "reading text, its normalisation, and lengths",
    "lines": "sampling, n-best lists, and the weighting of evaluation",
    "files": "casts, sharded exports and exit codes",
    "commands": "defaults, options, messages and outputs of the commands, and the service",
}
PAGE = ROOT / "docs" / "mutants.md"
BEGIN, END = "<!-- python benchmarks/mutants.py -->\n", "<!-- end -->\n"


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="run faults whose name has one of these words, or these pages",
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="file of results, one JSON object per line; faults with a result are not run again",
    )
    parser.add_argument(
        "--publish", action="store_true", help="write the table into docs/mutants.md"
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="run the same tests in the same way without any fault: all must pass",
    )
    return parser.parse_args()


def known(path: Path | None, listed: list[tuple[str, Mutant]]) -> dict[str, Result]:
    """Results of an earlier campaign for faults that are still in the list."""
    lines = (
        path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    )
    pages = {mutant.name: page for page, mutant in listed}
    results = (Result(**json.loads(line)) for line in lines)
    return {
        result.name: replace(result, page=pages[result.name])
        for result in results
        if result.name in pages
    }


def main() -> None:
    options = arguments()
    listed = [(page, mutant) for page, each in mutants().items() for mutant in each]
    mutants_by_name = {mutant.name: mutant for _, mutant in listed}
    results = known(options.results, listed)
    chosen = [
        (p, m)
        for p, m in listed
        if options.only is None or any(word == p or word in m.name for word in options.only)
    ]
    todo = [(page, mutant) for page, mutant in chosen if mutant.name not in results]
    with tempfile.TemporaryDirectory() as name:
        settings(Path(name) / "cache")
        if options.control:
            raise SystemExit(control(chosen, prepare(Path(name))))
        for result in campaign(todo, prepare(Path(name))):
            results[result.name] = result
            print(
                f"{result.verdict:9}{result.name}: {result.named} | {result.error[:120]}"
                f" ({result.seconds} s)",
                file=sys.stderr,
                flush=True,
            )
            if options.results:
                with open(options.results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    ordered = [results[mutant.name] for _, mutant in chosen if mutant.name in results]
    lines = list(table(ordered, mutants_by_name))
    print("\n".join(lines))
    if options.publish:
        publish(lines)
    if any(result.verdict != KILLED or wrong_name(result, mutants_by_name) for result in ordered):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
