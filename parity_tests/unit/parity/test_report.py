"""Verdicts on artificial measurements, in words."""

import dataclasses
import math

import numpy as np
import pytest

from jax_transformer.parity import report as reports
from jax_transformer.parity.coverage import Coverage
from jax_transformer.parity.difference import IN_FLOAT32, difference
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


def test_notes_and_coverage_stand_below_the_table():
    coverage = Coverage({"m": True, "n": False}, {})
    agreeing = dataclasses.replace(
        report(entry("m")), results={"logits": GOOD}, notes=("a note",), coverage=coverage
    )
    *_, result, missing, note, summary = agreeing.lines()
    assert result.split()[:2] == ["result", "agrees"] and summary == agreeing.summary()
    assert (missing, note) == ("not compared: n", "a note")
    *_, counts, summary = dataclasses.replace(agreeing, results={"": BAD}).lines()
    assert counts == f"{coverage}; not compared: n" and summary.endswith("; a note")


def test_no_line_is_longer_than_100_columns():
    for word in ("a", "ab"):
        text = f"{word} " * 200
        lines = [*reports.wrapped(text), *report(entry("m", note=text)).lines()]
        assert all(len(line) <= 100 for line in lines[:-1])


def test_the_data_of_a_report_has_every_measurement():
    names = "input output input_gradient output_gradient own".split()
    each = {name: measured(10.0**-i) for i, name in enumerate(names, 2)}
    one = dataclasses.replace(entry("m"), **each, own_place="m.part", parameters={"w": WORSE})
    data = outside(report(one), BAD, "n").to_data()
    (module,) = data["modules"]
    for name, measurement in each.items():
        assert module[name]["float64"]["max_abs"] == measurement.wide.max_abs
    assert module["own"]["place"] == "m.part" and not module["parameters"]["w"]["agrees"]
    assert data["faults"] == [one.title] and data["own_result"]["place"] == "n"
    assert report().to_data()["own_result"] is None and "own" not in report(FAULT).to_data()
    backward = entry("b", output_gradient=GOOD, parameters={"w": BAD})
    data = report(backward, result=GOOD).to_data()
    assert data["first_fault"] == backward.title and data["modules"][0]["first"]


def test_a_row_has_the_verdicts_and_the_figures_of_the_output():
    output = dataclasses.replace(BAD, times=2e3, narrow_times=7.0)
    one = dataclasses.replace(entry("m", GOOD, output), call=1, parameters={"w": BAD})
    row = next(line for line in report(one).lines() if line.startswith("flax.m"))
    figures = ["2e+03×", "0.001", "7.0×", "8389", "<"]
    assert row.split() == ["flax.m", "#2", "agrees", "DIFFERS", "DIFFERS", *figures]


def test_parts_that_differ_by_themselves_are_listed_if_they_are_several():
    parts = [entry(name, own=BAD) for name in "ab"]
    for compared, count in (
        (report(parts[0]), 1),
        (outside(report(parts[0]), GOOD), 1),
        (outside(report(parts[0]), BAD), 2),
        (outside(report(*parts), GOOD), 2),
        (outside(report(*parts), BAD), 3),
    ):
        text = f"{count} parts differ by themselves:"
        assert [line for line in compared.lines() if "parts differ by" in line] == (
            [text] if count > 1 else []
        )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.04, "0.0×"), (999.94, "999.9×"), (1000, "1e+03×"), (math.inf, "inf")],
)
def test_multiples_of_rounding_are_short(value, text):
    assert reports.multiple(value) == text


def test_the_words_for_a_difference_have_its_element_and_nan_on_one_side():
    for ours, theirs, at, nan in (
        ([[1.0, 3.0]], [[1.0, 2.0]], ", at (0, 1)", ""),
        (3.0, 2.0, "", ""),
        ([math.nan, 3.0], [math.nan, 2.0], ", at (1)", ""),
        ([3.0, math.nan, math.nan], [2.0, math.nan, 1.0], None, "; NaN: 2 here, 1 there"),
    ):
        wide = difference(np.array(ours), np.array(theirs))
        words = reports.in_words(dataclasses.replace(BAD, wide=wide))
        assert words.endswith(nan or ": 3 here, 2 there")
        assert at is None or words.startswith(
            f"by 1 in float64, {reports.multiple(BAD.times)} rounding{at}:"
        )
