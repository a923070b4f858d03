"""The table of Hugging Face families in docs/huggingface.md, from tests that have just passed.

Runs the tests of the suite, with ``--slow`` all.

A test says what it proves by ``@pytest.mark.proves("logits")``; of which family, by a parameter
that is the name of a case or of a family, or by further arguments of the mark.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from jax_transformer.architectures import huggingface

ROOT = Path(__file__).resolve().parent.parent
ASPECTS = ("logits", "gradients", "greedy", "beam", "round trip", "tokenizer", "fine-tuning")
FAMILIES = huggingface.families()
# A tokenizer that is not a family's first one has a case of its own name, such as mbart50
_OTHER_NAMES = {
    recipe.name.lower(): name
    for name, family in FAMILIES.items()
    for recipe in family.tokenizers[1:]
}


def family_of_case(name: str) -> str | None:
    """Return the family that a case's name begins with."""
    first = name.replace(",", " ").partition(" ")[0]
    first = _OTHER_NAMES.get(first, first)
    return first if first in FAMILIES else None


def outcomes(report: Path) -> dict[tuple[str, str], Counter[bool]]:
    """Count the tests of each family and aspect that passed and that did not, from pytest's JUnit
    file.
    """
    counts_by_test: dict[tuple[str, str], Counter[bool]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        properties = [(p.get("name"), p.get("value", "")) for p in case.iter("property")]
        passed = not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        families = {family_of_case(value) for name, value in properties if name == "of"} - {None}
        for aspect in (value for name, value in properties if name == "proves"):
            for one in families:
                counts_by_test.setdefault((str(one), aspect), Counter())[passed] += 1
    return counts_by_test


def table(counts_by_test: Mapping[tuple[str, str], Counter[bool]]) -> str:
    """Return the table in Markdown: the number of tests that hold, ✗ if one does not, – if there is
    none.
    """

    def cell(one: str, aspect: str) -> str:
        counts = counts_by_test.get((one, aspect), Counter())
        return "✗" if counts[False] else f"✓ {counts[True]}" if counts[True] else "–"

    rows = [["", *ASPECTS], ["---"] * (len(ASPECTS) + 1)]
    rows += [
        [family.title, *(cell(name, aspect) for aspect in ASPECTS)]
        for name, family in FAMILIES.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--slow", action="store_true", help="run the tests under the marker slow, too"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        tests = sorted((ROOT / "parity_tests").rglob("test_huggingface_*.py"))
        marks = "slow or not slow" if options.slow else "not slow"
        command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junit-xml={report}"]
        command += map(str, tests)
        status = subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode
        lines = table(outcomes(report))
    print(lines)
    return status


if __name__ == "__main__":
    sys.exit(main())
