"""docs/traps.md: each trap has three parts, and each test and fault that it names exists."""

import re
from pathlib import Path

from campaigns.mutants import faults

PAGE = (Path(__file__).parent.parent / "docs" / "traps.md").read_text(encoding="utf-8")
TRAPS = [
    " ".join(block.split()).replace("<br> ", "<br>\n").split("\n")
    for block in PAGE.split("\n\n")
    if block.strip().startswith("**")
]


def test_each_trap_has_a_description_a_figure_and_a_test():
    assert len(TRAPS) >= 50
    for trap in TRAPS:
        assert len(trap) == 3, trap
        description, number, guard = trap
        assert re.fullmatch(r"\*\*[^*]+\.\*\* .+<br>", description), description
        assert number.startswith("Shows as: ") and number.endswith(".<br>"), number
        assert re.fullmatch(r"Guarded by: `[^`]+`\.", guard), guard


def test_each_named_test_exists(request):
    named = tuple(re.fullmatch(r"Guarded by: `(.+)`\.", trap[2])[1] for trap in TRAPS)
    assert faults.missing_tests(named) == []
    assert not faults.uncollected(named, request.session), "not in the default suite"
    assert faults.missing_tests(("parity_tests/test_forward.py::test_of_nothing",)) != [], (
        "negative control"
    )


def test_each_named_fault_is_in_the_campaign():
    listed = {mutant.name for mutant in faults.listed()}
    named = set(re.findall(r"fault “([^”]+)”", " ".join(PAGE.split())))
    assert len(named) >= 30 and named <= listed, named - listed
