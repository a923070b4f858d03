"""Differences of arrays on hand-made numbers, and the pairs, verdicts and page made of them."""

import dataclasses
import json
import math
from xml.etree import ElementTree

import numpy as np
import pytest

from jax_transformer.errors import ConfigError, DifferentError
from jax_transformer.parity import ci, pairs
from jax_transformer.parity import difference as differences
from jax_transformer.parity.coverage import Coverage
from jax_transformer.parity.difference import Entry, Measurement, difference
from jax_transformer.parity.measuring import PairedRuns
from jax_transformer.parity.recording import Recording
from jax_transformer.parity.report import Report

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("dtype", "digits"), [("float64", 52), ("float32", 23), ("bfloat16", 7), ("float16", 10)]
)
def test_ulps_are_those_of_the_dtype(dtype, digits):
    step = 2.0**-digits
    assert difference(np.array([1 + 3 * step]), np.array([1.0]), dtype).ulps == 3
    assert difference(np.array([8 + 8 * step]), np.array([8.0]), dtype).ulps == 1


def test_cosine():
    assert difference(np.array([1.0, 0.0]), np.array([0.0, 2.0])).cosine == 0
    assert difference(np.array([3.0, 4.0]), np.array([-3.0, -4.0])).cosine == pytest.approx(-1)
    assert difference(np.zeros(2), np.zeros(2)).cosine == 1
    assert difference(np.zeros(2), np.ones(2)).cosine == 0


MASK = np.tri(3, dtype=bool)
WRONG = MASK | np.eye(3, k=2, dtype=bool)
ONE = "its mask{} differs in 1 of 9 places, first at (0, 2): {} here, {} there"


@pytest.mark.parametrize(
    "theirs, text",
    [
        ([WRONG], ONE.format("", False, True)),
        ([WRONG[None, None]], ONE.format("", False, True)),
        ([~WRONG], ONE.format(" (inverted there)", False, False)),
        ([np.where(WRONG, 0.0, -1e4)], ONE.format("", False, True)),
        ([np.where(WRONG, 0.0, -9999.0)], ""),
        ([np.where(WRONG, 0.0, -INF), np.ones((3, 3))], ONE.format("", False, True)),
        ([~MASK], ""),
        ([np.where(MASK, 0.0, -INF)[None]], ""),
        ([np.zeros((3, 3))], ""),
        ([WRONG, WRONG], ""),
        ([WRONG[:2]], ""),
        ([], ""),
    ],
)
def test_a_mask_differs_whatever_its_form(theirs, text):
    assert differences.mask_difference([MASK], theirs) == text


def test_a_mask_of_which_half_differs_is_not_inverted():
    text = "its mask differs in 3 of 6 places, first at (0, 0): True here, False there"
    assert differences.mask_difference([MASK[:2]], [np.array([[0, 1, 1], [1, 1, 0]], bool)]) == text


def test_ids_differ_where_both_sides_have_one_array_of_them():
    ids, others = np.arange(6).reshape(2, 3), np.array([[[0, 1, 7], [3, 4, 5]]], np.int32)
    text = "its integers differ in 1 of 6 places, first at (0, 2): 2 here, 7 there"
    assert differences.ids_difference([MASK, ids], [others, np.ones(3)]) == text
    assert not differences.ids_difference([ids], [ids.astype(np.uint8)])
    for incomparable in ([], [ids, others], [others[..., :2]], [others.astype(float)]):
        assert not differences.ids_difference([ids], incomparable)


# Pairs


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"layer.{i}": "blocks.{i}"}, "no module 'layer.{i}' (did you mean 'layers.0'?)"),
        ({"layers.{i}": "block.{i}"}, "no module 'block.0' (did you mean 'blocks.0'?)"),
        ({"layers.{i}": "blocks.{j}"}, "different placeholders"),
    ],
    ids=["theirs", "ours", "placeholders"],
)
def test_a_pattern_without_a_match_is_refused_with_the_nearest_name(patterns, message):
    with pytest.raises(ConfigError) as error:
        pairs.from_patterns(patterns, ["blocks.0"], ["layers.0"])
    assert message in str(error.value)


# Verdicts on artificial measurements


def measured(error: float, floor: float = 1e-16, **changes) -> Measurement:
    ours, theirs = np.array([1.0 + error, changes.pop("nan", 0.0)]), np.array([1.0, 0.0])
    wide = difference(np.array([1.0 + error, 0.0]), theirs)
    narrow = difference(ours, theirs, "float32")
    return Measurement(wide, differences.times_floor(wide, floor), narrow, 1.0, 0.0, 0.0)


GOOD, BAD = measured(2e-16), measured(1e-3)


def report(*entries: Entry, result: Measurement = BAD) -> Report:
    return Report(entries, {"": result}, "float32", {})


def entry(name: str, into=GOOD, out=GOOD, **more) -> Entry:
    return Entry(f"flax.{name}", f"torch.{name}", 0, into, out, **more)


def test_the_result_is_the_first_that_differs_or_the_first():
    agreeing = [measured(n * 1e-16) for n in (2, 4, 6)]
    for bad in ((), (1,), (1, 2)):
        each = [BAD if i in bad else measurement for i, measurement in enumerate(agreeing)]
        compared = dataclasses.replace(report(), results=dict(zip("abc", each, strict=True)))
        assert compared.result is each[bad[0] if bad else 0]


def test_the_first_module_whose_input_agrees_and_output_does_not():
    parts = entry("a"), entry("b", GOOD, BAD), entry("c", BAD, BAD), entry("d", GOOD, BAD)
    compared = report(*parts)
    assert compared.first_fault is compared.entries[1] and not compared.agrees
    assert compared.summary().startswith(
        "flax.b | torch.b: its input agrees and its output differs, by 0.001 in float64,"
        " 1e+13× rounding, at (0)"
    )
    with pytest.raises(DifferentError):
        compared.check()


@pytest.mark.parametrize(("error", "first"), [(1e-8, 2), (1e-6, 0)])
def test_a_difference_as_small_as_float32_s_rounding_comes_after_others(error, first):
    """For example GELU's constant with eight digits, in front of a wrong norm."""
    small = measured(error)
    parts = [entry("gelu", GOOD, small, own=small), entry("b", small, small)]
    parts += [entry("norm", small, BAD, own=BAD)]
    compared = report(*parts)
    assert compared.first_fault is compared.entries[first]
    assert report(*parts[:2]).first_fault.ours == "flax.gelu"


def test_a_part_is_not_named_if_the_input_of_its_parent_differs():
    """Cross-attention's queries agree and its memory, which came through the block, does not."""
    parts = entry("encoder", BAD, BAD), entry("block.cross", GOOD, BAD), entry("block", BAD, BAD)
    compared = report(*parts)
    assert compared.first_fault is None and "pair more modules" in compared.summary()


def test_a_part_is_named_if_the_parents_take_different_inputs_by_nature():
    """One encoder adds positions itself, the other receives them: nothing before it differs."""
    compared = report(
        entry("embedding"),
        entry("encoder.block.norm", GOOD, BAD),
        entry("encoder.block", GOOD, BAD),
        entry("encoder", BAD, BAD),
    )
    assert compared.first_fault is compared.entries[1]


def test_a_part_with_unknown_inputs_is_not_named_after_a_difference():
    parts = [entry("block.norm", BAD, BAD), entry("block.cross", None, BAD)]
    parts.append(entry("block", GOOD, BAD))
    assert report(*parts).first_fault is parts[2] and report(*parts[1:]).first_fault is parts[1]


def test_the_summary_names_the_two_parts_between_which_a_module_differs():
    compared = report(entry("block.up"), entry("block.down", BAD, BAD), entry("block", GOOD, BAD))
    assert "flax.block | torch.block" in compared.summary()
    assert "the input of down is the first that differs after up" in compared.summary()


def test_backward_the_last_module_that_differs_is_named():
    parts = [
        entry(name, output_gradient=g, input_gradient=i)
        for name, g, i in (("a", BAD, BAD), ("b", GOOD, BAD), ("c", GOOD, GOOD))
    ]
    compared = report(*parts, result=GOOD)
    assert compared.first_gradient_fault is parts[1] and compared.first_fault is None
    assert not compared.agrees
    assert (
        "flax.b | torch.b: outputs agree, and so does the gradient of its output;"
        " the gradient of its input differs" in compared.summary()
    )


def test_a_nan_on_one_side_in_the_narrow_dtype_is_a_difference():
    assert measured(0.0).agrees and not measured(0.0, nan=NAN).agrees


def recorded(*calls: tuple[str, np.ndarray]) -> dict[str, Recording]:
    """Return the recordings, by dtype, of modules with these outputs."""
    names = [call for call, _ in calls]

    def of(dtype: str) -> Recording:
        arrays = {f"{call}/output": array.astype(dtype) for call, array in calls}
        return Recording(names, arrays, result=np.zeros(1))

    return {dtype: of(dtype) for dtype in ("float64", "float32")}


def test_calls_of_one_module_correspond_by_shape_and_numbers():
    random = np.random.default_rng(0)
    first, second, third = (random.normal(size=size) for size in ((2, 3), (2, 3), (4, 3)))
    ours = recorded(("a#0", first), ("a#1", second + 1e-4), ("a#2", third), ("a#3", first))
    theirs = recorded(("b#0", third), ("b#1", second), ("b#2", first))
    runs = PairedRuns({dtype: (ours[dtype], theirs[dtype]) for dtype in ours}, "float32")
    entries = list(runs.entries([pairs.Pair("a", "b")], {}))
    assert [entry.call for entry in entries] == [0, 1, 2, 3]
    assert [entry.output and entry.output.agrees for entry in entries] == [True, False, True, None]
    assert entries[1].output.wide.max_abs == pytest.approx(1e-4), "a fault, not another call"
    assert entries[3].note == "called more often than in the PyTorch model"


def test_code_outside_that_computes_in_16_bits_in_one_model_is_a_difference():
    compared = dataclasses.replace(report(entry("a"), result=GOOD), outside_in_16_bits="why")
    assert not compared.agrees and compared.summary() == "why"
    compared = report(entry("a", lower="Flax", narrow="bfloat16"), result=GOOD)
    assert not compared.agrees and compared.first_fault is compared.entries[0]


def test_the_table_fits_100_columns_and_marks_the_first():
    note = "outputs (3, 4) and (4, 5) are not compared " * 3
    compared = report(entry("a" * 90, GOOD, BAD), entry("b", note=note))
    *rows, summary = compared.lines()
    assert max(map(len, rows)) <= 100 and summary == compared.summary()
    assert " ".join(row[40:].strip() for row in rows[3:-1]).count("are not compared") == 3
    assert [row[0] for row in rows if row.endswith("<")] == ["…"]


def test_below_the_table_are_the_modules_of_each_narrow_dtype_and_layout():
    narrow = {"a": "float16", "b": "bfloat16", "c": "float16"}
    parts = [entry(name, narrow=dtype) for name, dtype in narrow.items()]
    parts += [entry("c", narrow="float16"), entry("d", layout="(2, 3) and (3, 2)")]
    lines = [*report(*parts, result=GOOD).lines()]
    assert lines[lines.index("float16 inside: flax.a, flax.c") + 1 :][:2] == [
        "bfloat16 inside: flax.b",
        "outputs (2, 3) and (3, 2): flax.d",
    ]


NAMES = [f"layer{i}" for i in range(11)]


@pytest.mark.parametrize(
    ("modules", "parameters", "text", "names"),
    [
        ("1111", "11", "outputs of 4 of 4 modules and gradients of 2 of 2 parameters", ""),
        ("0101", "", "outputs of 2 of 4 modules and no gradients", "layer0, layer2"),
        (
            "00001",
            "0",
            "outputs of only 1 of 5 modules and gradients of only 0 of 1 parameters",
            "",
        ),
        ("0" * 10, "", "outputs of only 0 of 10 modules and no gradients", "and 2 more"),
    ],
)
def test_the_verdict_counts_what_was_compared(modules, parameters, text, names):
    both = [
        {name: digit == "1" for name, digit in zip(NAMES, digits, strict=False)}
        for digits in (modules, parameters)
    ]
    compared = dataclasses.replace(report(result=GOOD), coverage=Coverage(*both))
    assert compared.summary().endswith(f"; compared: {text}") and names in "".join(compared.lines())
    assert ("not compared" in "".join(compared.lines())) == ("0" in modules)
    (suite,) = ElementTree.fromstring(ci.junit([("t", compared)]))
    assert suite.find("properties/property").get("value") == f"compared: {text}"
    assert compared.to_data()["coverage"]["modules"]["all"] == len(modules)


# The page


def test_the_page_escapes_the_report():
    compared = report(entry("</script><script>alert(1)</script>", GOOD, BAD))
    text = compared.to_page("<b>")
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<b>" not in text
    assert "default-src 'none'" in text
    assert "SCRIPT-HASH" not in text
    assert "http" not in text.replace("http-equiv", "")
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert data["modules"][0]["first"]
    assert data["modules"][0]["output"]["float64"]["max_abs"] == pytest.approx(1e-3)


def test_junit_and_annotations_hold_any_text():
    entries = entry("a\x00<&", GOOD, BAD), entry("b", BAD, BAD), entry("c", note="why")
    text = ci.junit([("t\x1b", report(*entries)), ("good", report(entry("a"), result=GOOD))])
    bad, good = ElementTree.fromstring(text)
    assert (bad.get("name"), bad.get("failures"), good.get("failures")) == ("t�", "2", "0")
    assert bad[0].get("name") == "flax.a�<& | torch.a�<&"
    assert [case.find("failure") is not None for case in bad] == [True, False, False, True]
    line = ci.annotation("a.py::b, 100%", "50%\nx")
    assert line == "::error title=a.py%3A%3Ab%2C 100%25::50%25%0Ax"
