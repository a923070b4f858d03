"""Verdicts on artificial measurements, in words."""

import dataclasses

import pytest

from jax_transformer.parity import report as reports
from jax_transformer.parity.difference import IN_FLOAT32
from parity_tests.unit.parity.test_difference import BAD, GOOD, entry, measured, report

WORSE, NARROW = measured(1e-2), {"lower": "Flax", "narrow": "bfloat16"}


def outside(compared, measurement=BAD, place=""):
    return dataclasses.replace(compared, own_result=(measurement, place))


def test_modules_that_differ_by_themselves_come_with_the_largest_first():
    parts = [entry("a", own=BAD), entry("b", own=WORSE), entry("c", **NARROW), entry("d", own=GOOD)]
    compared = report(*parts, dataclasses.replace(parts[0], call=1, own=measured(1e-4)))
    assert compared.faults == [parts[1], parts[0], parts[2]]
    assert report(entry("a"), result=GOOD).faults == []


def test_the_first_fault_is_the_first_that_differs_by_itself_if_only_that_tells():
    small = measured(IN_FLOAT32 * 1e-17)
    parts = [entry("a", own=small), entry("b", own=BAD), entry("c", own=WORSE)]
    assert report(*parts).first_fault is parts[1]
    assert report(*parts[:1], *parts[3:]).first_fault is parts[0]
    assert outside(report(*parts)).first_fault is None
    assert outside(report(*parts), GOOD).first_fault is parts[1]
    narrow = entry("n", GOOD, BAD, **NARROW)
    assert report(parts[0], narrow, parts[1]).first_fault is narrow
    first = entry("first", GOOD, BAD, own=GOOD)
    assert report(first, entry("n", **NARROW)).first_fault.ours == "flax.n"


def test_a_part_comes_before_its_module_if_the_module_s_input_agrees():
    parts = [entry("x", BAD, BAD), entry("m.a", GOOD, BAD), entry("m", GOOD, BAD)]
    assert report(*parts).first_fault is parts[1]
    assert report(*parts[:2], entry("m", BAD, BAD)).first_fault is None


def test_code_outside_a_result_or_a_module_s_own_difference_is_a_difference():
    good = report(entry("a"), result=GOOD)
    assert good.same_outputs and outside(good, GOOD).same_outputs
    assert not outside(good).same_outputs and not report(entry("a")).same_outputs
    for bad in ({"out": BAD}, {"own": BAD}, NARROW):
        assert not report(entry("a", **bad), result=GOOD).same_outputs
    assert report(entry("a", BAD), result=GOOD).same_outputs, "an input may be of another kind"
    for bad in ({"input_gradient": BAD}, {"output_gradient": BAD}, {"parameters": {"w": BAD}}):
        compared = report(entry("a", output_gradient=GOOD), entry("b", **bad), result=GOOD)
        assert compared.same_outputs and not compared.agrees


def test_the_first_fault_of_gradients_is_the_last_module_if_all_outputs_agree():
    parts = [entry(name, output_gradient=GOOD, parameters={"w": BAD}) for name in "ab"]
    compared = report(*parts, result=GOOD)
    assert compared.first_gradient_fault is parts[1] and "flax.b" in compared.summary()
    assert "the gradient of its w differs" in compared.summary()
    assert report(*parts).first_gradient_fault is None
    above = entry("c", output_gradient=BAD, input_gradient=BAD)
    unclear = report(above, result=GOOD)
    assert unclear.summary().startswith("outputs agree and gradients differ, but no paired module")


FAULT = entry("m", GOOD, BAD)
BEGIN = "flax.m | torch.m: its input agrees and its output differs, by 0.001 in float64, 1e+13× "
BEGIN += "rounding, at (0): 1.001 here, 1 there"
NO_MORE = ": pair more modules to narrow it down"


@pytest.mark.parametrize(
    ("compared", "words"),
    [
        (report(FAULT), BEGIN),
        (report(FAULT, result=GOOD), f"{BEGIN}; the results agree on this batch"),
        (report(dataclasses.replace(FAULT, mask="its mask differs")), f"{BEGIN}; its mask differs"),
        (
            report(dataclasses.replace(FAULT, ids="its integers differ")),
            BEGIN.replace("its input agrees", "its integers differ,"),
        ),
        (report(entry("m.a"), FAULT), f"{BEGIN}; all its paired parts agree"),
        (
            report(entry("m.a"), entry("m.b"), entry("m.c", BAD, BAD), FAULT),
            f"{BEGIN}; in it, the input of c is the first that differs after b",
        ),
        (
            report(entry("m.a", GOOD, BAD), entry("m.c", BAD, BAD), entry("n", BAD, BAD)),
            BEGIN.replace(".m ", ".m.a ").replace("torch.m:", "torch.m.a:"),
        ),
        (
            report(dataclasses.replace(FAULT, own=BAD), *(entry(n, own=BAD) for n in "no")),
            f"{BEGIN}; 2 other modules differ by themselves",
        ),
        (outside(report(FAULT)), f"{BEGIN}; so does code outside of them"),
        (
            report(
                dataclasses.replace(FAULT, own=BAD), dataclasses.replace(FAULT, call=1, own=BAD)
            ),
            BEGIN,
        ),
        (
            report(dataclasses.replace(FAULT, **NARROW), result=GOOD),
            "flax.m | torch.m: computes in bfloat16 in the Flax model only, and its output differs"
            " by 0.001 in float32",
        ),
        (
            report(entry("m", own=BAD, own_place="m.part")),
            "flax.m | torch.m: on the other model's arrays the input of m.part differs, "
            "by 0.001 in float64, 1e+13× rounding, at (0): 1.001 here, 1 there",
        ),
        (
            report(entry("m"), entry("n", BAD)),
            "the results differ, by 0.001 in float64, 1e+13× rounding, at (0): 1.001 here, 1 there,"
            f" and the input of flax.n is the first that differs after flax.m{NO_MORE}",
        ),
        (
            outside(report(entry("m", own=BAD), result=GOOD)),
            "the results agree and outputs of modules differ, and all paired modules agree"
            f"{NO_MORE}; 1 module differs by itself",
        ),
    ],
)
def test_the_verdict_on_outputs_in_words(compared, words):
    assert compared.summary() == words
    noted = dataclasses.replace(compared, notes=("a note", "another"))
    assert noted.summary() == f"{words}; a note; another"


def test_of_several_results_the_one_that_differs_is_named():
    compared = dataclasses.replace(report(entry("m")), results={"a": GOOD, "b": BAD})
    assert compared.summary().startswith("the result b differs, by 0.001 in float64")
    agreeing = dataclasses.replace(compared, results={"a": GOOD, "b": measured(1e-15)})
    assert agreeing.summary().startswith("the models agree: largest difference 1.1e-15 in float64")
    titles = [line.split()[:2] for line in compared.lines() if line.startswith("result")]
    assert titles == [["result", "a"], ["result", "b"]]
    assert (
        dataclasses.replace(report(), results={"": BAD})
        .summary()
        .endswith("and no module of one is paired with any of the other")
    )


def test_no_line_is_longer_than_100_columns():
    for word in ("a", "ab"):
        text = f"{word} " * 200
        lines = [*reports.wrapped(text), *report(entry("m", note=text)).lines()]
        assert all(len(line) <= 100 for line in lines[:-1])
