"""The seeded faults stay valid: each matches the code, and its tests exist."""

import ast
import dataclasses
import os
from types import ModuleType

import pytest

from campaigns.mutants import campaign, faults, run, seed
from campaigns.mutants.faults import Area

LISTED = faults.listed()


def test_every_mutant_matches_the_code_exactly_once_and_changes_it():
    assert len(LISTED) >= 100 and len({mutant.name for mutant in LISTED}) == len(LISTED)
    for mutant in LISTED:
        ast.parse(faults.applied(mutant))
        assert mutant.met, mutant.name


def test_every_mutant_has_tests_that_exist():
    absent = {
        mutant.name: missing
        for mutant in LISTED
        if (missing := faults.missing_tests(mutant.tests)) or not mutant.tests
    }
    assert not absent


def test_every_named_test_is_of_the_default_suite(request):
    """A fault that only slow tests or parameters detect does not count as detected."""
    absent = faults.uncollected(
        {node for mutant in LISTED for node in mutant.tests}, request.session
    )
    if absent is None:
        pytest.skip("this run collects none of their files completely")
    assert absent == []


def test_the_data_is_written_as_it_is_read(tmp_path):
    """So a script that changes a field changes its line only."""
    for path in faults.DATA.glob("*.toml"):
        assert faults.written(faults.read(path)) == path.read_text(encoding="utf-8"), path.name
    texts = ("\n  x\n", "it's", "a\n'b'", 'a "b" \\n', "", " ", "é\t")
    odd = [dataclasses.replace(LISTED[0], old=text, new=text, name=text) for text in texts]
    path = tmp_path / "odd.toml"
    path.write_text(faults.written(Area("odd", "'\"", tuple(odd))), encoding="utf-8")
    assert faults.read(path) == Area("odd", "'\"", tuple(odd))
    with pytest.raises(ValueError, match="three quotes cannot stand in the data"):
        faults.written(Area("odd", "", (dataclasses.replace(LISTED[0], old="'''"),)))


@pytest.mark.parametrize("file", ["storage/pt/unpickler", "architectures/t5", "cli/config_file"])
def test_seeding_exchanges_only_what_differs(file):
    """Tables of functions and classes stay, so that no fault is killed by a copy of its module."""
    mutant = dataclasses.replace(LISTED[0], file=f"jax_transformer/{file}.py")
    text = (faults.ROOT / mutant.file).read_text(encoding="utf-8")
    unchanged = dataclasses.replace(mutant, old=text, new=f"{text}\n# the same\n")
    with pytest.raises(ValueError, match="no function and no table"):
        seed.seed(unchanged)


def test_a_table_holds_the_module_s_own_functions_and_classes():
    module = ModuleType("made")
    code = "class A: pass\ndef f(): pass\nTABLE = {'a': (A, f)}"
    exec(code, vars(module))
    copy = ModuleType("made")
    exec(code, vars(copy))
    adopted = seed._adopted(module, {"b": copy.TABLE["a"], 1: (copy.A(),)})
    assert adopted["b"] == (module.A, module.f) and type(adopted[1][0]) is module.A


def test_a_mutant_that_no_longer_matches_is_refused():
    """Negative controls."""
    mutant = LISTED[0]
    with pytest.raises(
        ValueError, match=r"its old text occurs 0 times in jax_transformer/nn/attention\.py"
    ):
        faults.applied(dataclasses.replace(mutant, old="no such text"))
    with pytest.raises(ValueError, match="occurs 1 times"):
        faults.applied(dataclasses.replace(mutant, new=mutant.old))
    assert faults.missing_tests(
        ("parity_tests/test_forward.py::test_nothing[a]", "parity_tests/none.py::test_level")
    ) == [
        "parity_tests/test_forward.py::test_nothing[a]",
        "parity_tests/none.py::test_level",
    ]
    assert faults.missing_tests(("parity_tests/test_forward.py::test_level[a]",)) == []
    assert faults.not_among(["f.py::test", "f.py::test[b]", "f.py::tes"], ["f.py::test[a]"]) == [
        "f.py::test[b]",
        "f.py::tes",
    ]


def test_each_process_seeds_into_a_tree_of_its_own(tmp_path, monkeypatch):
    """Else a module that one process imports has the fault that another has just written."""
    monkeypatch.setattr(run, "settings", lambda cache: None)
    (tmp_path / "tree").mkdir()
    trees = {tmp_path / "tree"}
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        trees.add(campaign.own_tree.__wrapped__(tmp_path))
    assert len(trees) == 3 and all(tree.is_dir() for tree in trees)
