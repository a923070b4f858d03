"""Faults follow code and tests that have moved; what cannot be placed stays and is named."""

import ast
import dataclasses
import subprocess
from pathlib import Path

import pytest

from campaigns.mutants import faults, reanchor
from campaigns.mutants.faults import Area, Mutant

ATTENTION = '''
import math

from package import scaling


def scaled(scores, width):
    """The scores, divided by a root."""
    if width:
        factor = scaling.factor(width, 1)
        return scores * factor
    return scores


def other(scores):
    return scores + 1
'''
MASKS = '''
def hide(scores, mask):
    """The scores that the mask shows."""
    for each in mask:
        scores = scores * each
    return scores


def show(scores):
    return scores + 1
'''
TESTS = """
def test_scaled():
    assert True


def test_hidden():
    assert True
"""


NONE = "parity_tests/none.py::test_scaled"


def fault(name: str, file: str, old: str, new: str, test: str = "test_scaled") -> Mutant:
    tests = (f"parity_tests/test_one.py::{test}[a-b]",)
    return Mutant(name, "something", f"package/{file}.py", old, new, tests)


FAULTS = (
    fault("stays", "attention", "if width:", "if not width:"),
    fault(
        "word", "attention", "factor = scaling.factor(width, 1)", "factor = scaling.factor(1, 1)"
    ),
    fault("several", "attention", "return scores + 1", "return scores + 2"),
    fault(
        "indented",
        "masks",
        "    for each in mask:\n        scores = scores * each\n    return scores",
        "    for each in mask:\n        if each:\n            pass\n    return scores",
        "test_hidden",
    ),
    fault("gone", "masks", "def show(scores):", "def show(scores, *_):", "test_no_more"),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "package/attention.py": ATTENTION,
        "package/masks.py": MASKS,
        "package/scaling.py": "def factor(width, power):\n    return width**power\n" * 3,
        "parity_tests/test_one.py": TESTS,
        "docs/page.md": "See `parity_tests/test_one.py::test_hidden[a]`.",
        "package/named.py": f"NAMES = 'parity_tests/test_one.py::test_scaled', '{NONE}'\n",
        "campaigns/mutants/data/area.toml": faults.written(Area("area", "code", FAULTS)),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", "a")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True)


def move(tree: Path) -> None:
    """Rename a module that another uses, merge two, reformat a loop, and split the tests."""
    package = tree / "package"
    (package / "scaling.py").rename(package / "powers_of_width.py")
    (package / "nn").mkdir()
    masks = MASKS.replace("def hide", "class Mask:\n    def hide").replace("\n    ", "\n        ")
    masks = masks.replace("        def hide", "    def hide").replace("def show", "def shown")
    text = ATTENTION.replace("scaling", "powers_of_width").replace(
        "(width, 1)", "(\n  width,\n 1,\n)"
    )
    (package / "nn" / "attention.py").write_text(text + masks)
    for name in ("attention", "masks"):
        (package / f"{name}.py").unlink()
    (tree / "parity_tests" / "unit").mkdir()
    (tree / "parity_tests" / "test_one.py").unlink()
    first, second = TESTS.split("\n\n\n")
    (tree / "parity_tests" / "unit" / "test_scaling.py").write_text(first)
    (tree / "parity_tests" / "unit" / "test_masks.py").write_text(second)


def test_faults_and_tests_are_found_where_they_have_moved(tree, capsys):
    move(tree)
    ast.parse((tree / "package/nn/attention.py").read_text())
    assert reanchor.main(["--root", str(tree)]) == 1
    out = capsys.readouterr().out
    now = {each.name: each for each in faults.read(next(tree.glob("**/area.toml"))).mutants}
    for name in ("stays", "word", "several", "indented"):
        assert now[name].file == "package/nn/attention.py"
        ast.parse(faults.applied(now[name], tree))
        assert not faults.missing_tests(now[name].tests, tree)
        assert now[name].tests[0].endswith("[a-b]")
    assert now["stays"].old == FAULTS[0].old and "stays" not in out
    assert now["word"].old == "factor = powers_of_width.factor(\n  width,\n 1,\n)"
    assert now["word"].new == "factor = powers_of_width.factor(1,\n 1,\n)"
    assert now["several"].old == "def other(scores):\n    return scores + 1"
    assert now["indented"].new.splitlines()[1:] == [
        "            if each:",
        "                pass",
        "        return scores",
    ]
    assert now["gone"] == FAULTS[4]
    assert "gone: NOT PLACED: its text is gone\n    was (show): def show(scores):" in out
    assert "def shown(scores):" in out and "no test parity_tests/test_one.py::test_no_more" in out
    assert "faults: 4 changed, 1 not placed, 1 as they were" in out
    page = (tree / "docs/page.md").read_text()
    assert "`parity_tests/unit/test_masks.py::test_hidden[a]`" in page
    named = (tree / "package/named.py").read_text()
    assert "parity_tests/unit/test_scaling.py::" in named and NONE in named


def test_nothing_changes_where_nothing_has_moved_or_nothing_may_be_written(tree, capsys):
    before = {path: path.read_bytes() for path in tree.rglob("*.*") if ".git" not in path.parts}
    assert reanchor.main(["--root", str(tree)]) == 1  # one test was never there
    move(tree)
    assert reanchor.main(["--root", str(tree), "--dry-run"]) == 1
    unchanged = [path for path in before if path.suffix in (".toml", ".md")]
    assert len(unchanged) == 2 and all(path.read_bytes() == before[path] for path in unchanged)


def test_a_fault_that_changes_nothing_or_breaks_the_syntax_is_not_placed(tree, capsys):
    path = next(tree.glob("**/area.toml"))
    wrong = (
        dataclasses.replace(FAULTS[0], new="if (width):"),
        dataclasses.replace(FAULTS[2], new="return scores +"),
    )
    path.write_text(faults.written(Area("area", "code", wrong)))
    assert reanchor.main(["--root", str(tree)]) == 1
    out = capsys.readouterr().out
    assert "it no longer changes package/attention.py" in out and "does not parse with it" in out
