"""Properties of measurements, verdicts and goldens: against loops over elements, and at limits."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from jax_transformer.convert.models import ModelDescription
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.parity import (
    comparison,
    from_files,
    functions,
    golden,
    measuring,
    pairs,
    plugin,
    recording,
    steps_report,
    structures,
)
from jax_transformer.parity import difference as differences
from jax_transformer.parity.difference import FAULT, difference
from jax_transformer.parity.measuring import PairedRuns
from jax_transformer.parity.recording import Recording
from jax_transformer.storage import safetensors
from jax_transformer.weights.layouts import rotary
from parity_tests.unit.helpers import random_model, stand_in, tiny
from parity_tests.unit.parity.test_difference import BAD, GOOD, entry, measured, report
from parity_tests.unit.parity.test_golden import BATCH, FakeRecorder, path, python

__all__ = ["path"]  # a fixture
NUMBERS = strategies.sampled_from([0.0, -0.0, 1.0, -2.5, 3e100, 1e-100, math.nan, math.inf])
SIGNED = strategies.one_of(NUMBERS, NUMBERS.map(lambda x: -x))
LISTS = strategies.lists(strategies.tuples(SIGNED, SIGNED), min_size=1, max_size=6)


BOTH = [*itertools.product(range(3), ("α-1", "b_2"))]


def gap(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf


@hypothesis.settings(deadline=None)
@hypothesis.given(LISTS)
def test_a_difference_is_that_of_a_loop_over_the_elements(both):
    measured = difference(*(np.array(side) for side in zip(*both, strict=True)))
    gaps = [gap(a, b) for a, b in both]
    at = gaps.index(max(gaps))
    assert (measured.max_abs, measured.where) == (max(gaps), (at,))
    assert repr((measured.ours, measured.theirs)) == repr(both[at])
    for count, side in (("ours", 0), ("theirs", 1)):
        numbers = [each[side] for each in both]
        assert getattr(measured, f"nan_{count}") == sum(map(math.isnan, numbers))
        assert getattr(measured, f"infinite_{count}") == sum(map(math.isinf, numbers))
    assert measured.agreeing_nan == sum(math.isnan(a) and math.isnan(b) for a, b in both)
    scale = max((abs(b) for a, b in both if math.isfinite(a) and math.isfinite(b)), default=0)
    expected = 0 if max(gaps) == 0 else max(gaps) / scale if scale else math.inf
    assert measured.max_relative == pytest.approx(expected)


@pytest.mark.parametrize("errors", [*itertools.permutations((1e-6, 2e-6, 5e-6))])
def test_the_rounding_floor_is_that_of_the_worst_side_in_any_order(errors):
    wide = np.array([1.0, -3.0])
    sides = [(np.float32(wide + error), wide) for error in errors]
    worst = max(float(np.abs(narrow - wide).max()) for narrow, wide in sides)
    for dtype, digits in (("float64", 52), ("float32", 23), ("bfloat16", 7)):
        scaled = worst * 2.0 ** (23 - digits)
        assert differences.rounding_floor(sides, dtype) == max(scaled, 3 * 2.0**-digits / 2)


# Verdicts


def test_a_difference_agrees_below_the_threshold_only(path):
    for times, agrees in ((math.nextafter(FAULT, 0), True), (FAULT, False), (FAULT + 1, False)):
        assert dataclasses.replace(GOOD, times=times).agrees == agrees
    loaded, floor = golden.load(path), 2.0**-51  # half a unit in the last place of 4
    for times, wrong in ((FAULT - 2, 0), (FAULT, 3), (FAULT + 2, 3)):
        check = golden.recheck(loaded, FakeRecorder(times * floor))
        assert sum(line.startswith("float64") for line in check.wrong) == wrong, times


@hypothesis.settings(deadline=None, max_examples=243)
@hypothesis.given(*[strategies.sampled_from([None, GOOD, BAD])] * 5)
def test_the_verdict_on_every_combination_of_arrays(into, out, above, below, weight):
    """A fault begins where all before it agrees; two models agree if nothing differs."""
    each = entry("a", into, out, output_gradient=above, input_gradient=below)
    each = dataclasses.replace(each, parameters={} if weight is None else {"kernel": weight})
    assert each.faulty == (out is BAD and into is not BAD)
    wrong = BAD in (below, weight) and above is GOOD and BAD not in (into, out)
    assert each.faulty_backward == wrong
    compared = report(each, result=GOOD)
    assert compared.agrees == (out is not BAD and BAD not in (above, below, weight))
    data, named = compared.to_data(), each.faulty or wrong
    assert data["first_fault"] == ("flax.a | torch.a" if named else None)
    assert (data["modules"][0]["first"], data["agrees"]) == (named, compared.agrees)
    assert compared.summary().startswith("the models agree") == compared.agrees
    assert compared.summary().startswith("flax.a | torch.a: ") == named


def test_calls_have_numbers_and_parts_of_their_own():
    """The second call of a module has the parts of that call in it, and no other ones."""
    calls = [
        dataclasses.replace(entry(name, *measurements), call=call)
        for call, name, *measurements in (
            *((0, "b.part", GOOD, GOOD), (0, "b", GOOD, GOOD)),
            *((1, "b.part", BAD, BAD), (1, "b", GOOD, BAD)),
        )
    ]
    compared = report(*calls)
    titles = ["flax.b | torch.b", "flax.b.part | torch.b.part (call 2)"]
    assert [each.title for each in calls][1:3] == titles
    inside = [[part.is_inside(outer) for part in calls] for outer in calls]
    assert inside[1] == [True, False, False, False] and inside[3] == [False, False, True, False]
    assert compared.first_fault is calls[3]
    assert "in it, the input of part is the first that differs" in compared.summary()
    assert "after part" not in compared.summary(), "it is the first call's"
    rows = [row.split()[1] for row in compared.lines() if row.startswith("flax.b")]
    assert rows[2:4] == ["#2"] * 2


def test_notes_are_told_whether_models_agree_or_not():
    for result in (GOOD, BAD):
        compared = dataclasses.replace(report(result=result), notes=("a note", "another"))
        assert sum(line.count("a note") for line in compared.lines()) == 1


def test_models_that_agree_do_so_within_the_largest_difference_of_a_result():
    results = {"a": GOOD, "b": dataclasses.replace(GOOD, times=FAULT / 2), "c": GOOD}
    summary = dataclasses.replace(report(result=GOOD), results=results).summary()
    assert f" {FAULT / 2:.1f}× rounding" in summary


@pytest.mark.parametrize("length", range(25, 50))
def test_a_row_has_its_columns_at_any_length_of_the_name(length):
    (row,) = list(report(entry("a" * (length - 5), GOOD, BAD), result=GOOD).lines())[2:-2]
    name, columns, row_name = row[:40], row[40:].split(), "flax." + "a" * (length - 5)
    assert name.rstrip() == (row_name if length < 40 else "…" + row_name[-38:])
    assert name[39] == " " and [row[40:48].strip(), row[48:56].strip()] == ["agrees", "DIFFERS"]
    assert len(row) <= 100 and columns[-1] == "<"


def test_every_figure_has_its_own_place_in_the_data():
    narrow = difference(np.float32([1.5, 3]), np.float32([1, 3]), "float32")
    each = differences.Measurement(GOOD.wide, 11.0, narrow, 22.0, 33.0, 44.0)
    data = each.to_data()
    for name, part, times in (("float64", each.wide, 11), ("run", each.narrow, 22)):
        numbers = dataclasses.asdict(part) | {"times_floor": times}
        numbers |= {"errors": [33, 44]} if name == "run" else {}
        assert data[name] == json.loads(json.dumps(numbers))


def test_an_input_with_heads_is_paired_with_one_without_if_they_are_alike():
    """Keys that are projected outside of an attention here are its memory there."""
    draw = np.random.default_rng(0)
    keys, memory = draw.standard_normal((3, 7, 2, 4)), draw.standard_normal((7, 3, 8))
    turned = keys.reshape(3, 7, 8).swapaxes(0, 1)
    assert measuring._alike(keys, turned) and measuring._alike(keys, turned + 0.5 * memory)
    assert not measuring._alike(keys, memory), "other arrays"
    assert measuring._alike(turned, memory), "of one shape, which may differ"
    assert not measuring._alike(keys, memory[1:])


def test_a_layer_has_its_share_of_the_numbers_of_all_layers():
    arrays = {"first.kernel": np.zeros((3, 4)), "first.bias": np.zeros(4)}
    arrays |= {"layers.kernel": np.zeros((5, 3, 4)), "layers.bias": np.zeros((5, 4))}
    assert pairs.sizes(arrays, "first", False) == pairs.sizes(arrays, "layers.2", False) == (4, 12)
    assert pairs.sizes(arrays, "layers", False) == (20, 60)


def test_a_column_of_steps_shows_the_furthest_of_its_measurements():
    assert steps_report._column({}).split() == ["-"]
    assert steps_report._column({"a": GOOD}).split()[0] == "agree"
    for both in ({"a": GOOD, "b": BAD}, {"b": BAD, "a": GOOD}):
        assert steps_report._column(both) == steps_report._column({"b": BAD})
    assert steps_report._column({"b": BAD}).split()[0] == "DIFFER"


@pytest.mark.parametrize("count", [1, 2, steps_report._SHOWN, steps_report._SHOWN + 1])
def test_of_several_gradients_that_differ_the_furthest_are_shown(count):
    gradients = {f"p{i:02}": measured(1e-3 * (i + 1)) for i in range(count)} | {"same": GOOD}
    report = steps_report.TrainingReport((steps_report.Step(GOOD, gradients, {}),))
    names = [line.split(":")[0].strip() for line in report.lines() if line.startswith("  p")]
    furthest = [f"p{i:02}" for i in range(count)][::-1][: steps_report._SHOWN]
    assert names == (furthest if count > 1 else [])
    others = f"; so do {count - 1} others of {count + 1}" if count > 1 else ""
    assert report.summary().startswith(f"p{count - 1:02}: ") and others in report.summary()
    hint = "; compare the models module by module first"
    assert hint not in report.summary()
    step, name = steps_report.Step(GOOD, {"same": GOOD}, gradients), f"p{count - 1:02}"
    moved = {name: "JAX", "same": "PyTorch"}
    report = steps_report.TrainingReport((step,), ("a note", "another"), moved)
    assert report.summary().startswith(f"{name}: the gradients of step 1 agree")
    assert report.summary().endswith(f"{others}; it changes in JAX only; a note; another")
    assert sum(line.count("a note") for line in report.lines()) == 1
    agreeing = dataclasses.replace(report, steps=(step._replace(parameters={"same": GOOD}),))
    assert [*agreeing.lines()][-3:-1] == ["a note", "another"]
    row = "1 1 1 2.2× agree 2.2× agree 2.2×"
    assert [" ".join(line.split()) for line in agreeing.lines()][1] == row
    for number in (1, 2):
        steps = (*agreeing.steps * (number - 1), step._replace(loss=BAD))
        summary = steps_report.TrainingReport(steps).summary()
        assert summary.startswith(f"step {number}: the loss differs") and "others" not in summary
        assert summary.endswith(hint) == (number == 1)


@pytest.mark.parametrize("description", [{}, {"config": "c.json"}, {"preset": "lesson10"}])
@pytest.mark.parametrize("own", [None, "own"])
@pytest.mark.parametrize("others", [None, "bare", "described"])
def test_a_configuration_is_the_file_s_the_other_file_s_or_that_of_the_command(
    description, own, others, monkeypatch
):
    settled = SimpleNamespace(config="settled")
    monkeypatch.setattr(ModelDescription, "settle", lambda self, source: settled)
    source = SimpleNamespace(config=own, path="a.pt")
    other = others and SimpleNamespace(config="other" if others == "described" else None)
    chosen = functools.partial(from_files._config, ModelDescription(**description), source, other)
    if own is not None and description:
        with pytest.raises(ConfigError, match=r"a\.pt has its own config\.json"):
            chosen()
    elif own is not None:
        assert chosen() is own
    else:
        assert chosen() == ("other" if others == "described" and not description else "settled")


def test_a_placeholder_is_one_part_of_a_name():
    theirs = [f"layers.{i}{part}" for i in range(12) for part in ("", ".norm", ".norm.more")]
    ours = [name.replace("layers", "blocks") for name in theirs]
    for tail in ("", ".norm", ".norm.more"):
        paired = pairs.from_patterns({f"layers.{{i}}{tail}": f"blocks.{{i}}{tail}"}, ours, theirs)
        assert paired == [(f"blocks.{i}{tail}", f"layers.{i}{tail}") for i in range(12)]
    both = {"layers.{i}.{part}": "blocks.{i}.{part}"}
    assert len(pairs.from_patterns(both, ours, theirs)) == 12


@pytest.mark.parametrize(
    ("theirs", "ours", "order"),
    [
        (["b", "a"], "a b", "b a"),
        (["b"], "a b", "b a"),
        ([], "a b", "a b"),
        (["c"], "a b", "a b"),
        ([""], "a b", "a b"),
        (["a", "b"], "b", "b"),
        (["0", "1"], "a b", "a b"),
        (["a", "b"], "0 1", "0 1"),
        (["a", "b"], "a c", None),
        (["a", "b"], "a b c", None),
        (["0", "1"], "a b c", None),
    ],
)
def test_results_correspond_by_name_or_by_number_and_the_first_is_compared(theirs, ours, order):
    results = structures.Results(theirs)
    arrays = {name: np.full(3, float(i)) for i, name in enumerate(ours.split())}
    refused = pytest.raises(ConfigError, match=r"returns (a, b|0, 1) and the JAX")
    with refused if order is None else contextlib.nullcontext():
        first = results.choose({"ids": np.arange(3), **arrays})
        assert first is arrays[order[0]] and results.ours == order.split()
        jaxpr = jax.make_jaxpr(lambda: results.choose(arrays))()
        marked = [each.params["point"].kind for each in jaxpr.eqns]
        assert marked == [f"result {name}" for name in theirs[1:]][: len(arrays) - 1]


@pytest.mark.parametrize(
    ("theirs", "ours", "compared", "rest"),
    [
        (["a"], ["a"], ["a"], ""),
        (["a", "b", "c"], ["a", "b", "c"], ["a", "c"], "b"),
        (["a"], ["a", "b", "c"], ["a"], "b, c"),
        ([], ["a", "b"], [""], "b"),
        (["a", "b"], ["a"], ["a"], "b"),
    ],
)
def test_a_note_names_the_results_that_are_not_compared(theirs, ours, compared, rest):
    notes = structures.Results(theirs, ours).note(compared)
    assert notes == ([f"not compared: {rest}, which a model also returns"] if rest else [])


def test_a_batch_is_arrays_of_numbers():
    one = np.ones(2)
    for batch, count in ((one, 1), ([one, np.int32(3)], 2), ((one, [1, 2], 3.5), 3), ([], 0)):
        assert [type(array) for array in structures.arrays_of(batch)] == [np.ndarray] * count
    is_dict = "the batch is a dict: pass a list of arrays in the order"  # for another process
    number = "argument {} of the batch is not an array of numbers".format
    for wrong, message in (([one, None], number(1)), ([[{}]], number(0)), ({}, is_dict)):
        with pytest.raises(ConfigError, match=message):
            structures.arrays_of(wrong)


def test_each_model_has_its_own_rounding_error():
    wide = np.array([1.0, 2.0])
    sides = (wide + 1e-6).astype(np.float32), (wide + 3e-6).astype(np.float32)
    ours, theirs = ({"float64": wide, "float32": side} for side in sides)
    runs = {name: (Recording(result=ours[name]), Recording(result=theirs[name])) for name in ours}
    measured = PairedRuns(runs, "float32").results()[""]
    assert (measured.error_ours, measured.error_theirs) == pytest.approx((1e-6, 3e-6), rel=0.1)
    assert measured.to_data()["run"]["errors"] == [measured.error_ours, measured.error_theirs]


def runs_of(
    ours: dict[str, np.ndarray],
    theirs: dict[str, np.ndarray],
    positions: np.ndarray | None = None,
    parameters: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = ({}, {}),
) -> PairedRuns:
    """Return the recordings of one call of a module with these inputs and outputs."""

    def recorded(side: dict[str, np.ndarray], own: dict[str, np.ndarray], dtype: str) -> Recording:
        arrays = {f"m#0/{name}": x.astype(dtype) for name, x in side.items()}
        gradients = {name: x.astype(dtype) for name, x in own.items()}
        return Recording(["m#0"], arrays, gradients, np.zeros(1))

    both = {
        dtype: (recorded(ours, parameters[0], dtype), recorded(theirs, parameters[1], dtype))
        for dtype in golden.DTYPES
    }
    return PairedRuns(both, "float32", positions=positions)


@pytest.mark.parametrize("dtype", differences.DTYPES)
def test_numbers_are_cast_and_others_are_not(dtype):
    wide = "complex128" if dtype == "float64" else "complex64"
    for kinds, expected in (
        (("float16", "bfloat16", "float32", "float64"), dtype),
        (("complex64", "complex128"), wide),
    ):
        for kind in kinds:
            assert recording._cast(np.ones(2, jnp.dtype(kind)), dtype).dtype == expected
            assert len([*recording.inexact({"x": np.ones(2, jnp.dtype(kind))})]) == 1
    for kind in ("int32", "uint8", "bool"):
        assert not [*recording.inexact({"x": np.ones(2, kind)})]
        assert recording._cast(np.ones(2, kind), dtype).dtype == kind


@pytest.mark.parametrize("part", ["model", "encoder"])
@pytest.mark.parametrize("field", [{"compute_dtype": "bfloat16"}, {"matmul_precision": "medium"}])
def test_a_model_is_compared_in_the_dtype_of_a_run_whatever_it_computes_in(field, part):
    model = random_model(tiny(num_layers=1, **field), dtype="float32")
    call, batch = type(model).encode, [np.ones((2, 3), np.int32)]
    if part == "encoder":
        model, call = model.encoder, type(model.encoder).encode_embeddings
        batch = [np.ones((2, 3, model.config.d_model), np.float32)]
    function = comparison.model_function(model, call)
    own, as_compared = (
        str(jax.make_jaxpr(each.run)(each.parameters | each.others, batch))
        for each in (functions.from_nnx(model, call), function)
    )
    assert "bf16" in own and "bf16" not in as_compared


def test_features_of_the_other_model_are_brought_to_our_order_whatever_padding_has():
    draw = np.random.default_rng(0)
    order, pair = rotary(8, 4)[0].indices(8), [pairs.Pair("m", "m")]
    x, y, gradient = draw.normal(size=(3, 2, 3, 8))
    kernel, bias = draw.normal(size=(8, 5)), draw.normal(size=8)
    ours = {"input": y, "output": x, "output gradient": gradient, "input gradient": y}
    theirs = {name: array[..., order] for name, array in ours.items()}
    positions = np.array([[True, True, False], [True, False, False]])
    theirs["output"] = np.where(positions[..., None], theirs["output"], 7)
    own = {"m.weight": kernel, "m.bias": bias}
    there = {name: array[order] for name, array in own.items()}
    getters: Any = {"m": {n: (partial(lambda n, x: [x.parameters[n]], n), n) for n in own}}
    runs = runs_of(ours, theirs, positions, (own, there))
    (before,) = runs.entries(pair, getters)
    assert not before.output.agrees and not before.layout
    (each,) = runs.in_our_order([before]).entries(pair, getters)
    assert each.layout == "in another order of features"
    arrays = each.input, each.output, each.input_gradient, each.output_gradient
    assert all(array.agrees for array in (*arrays, *each.parameters.values()))
    assert len(each.parameters) == 2 and runs.in_our_order([each]) is None
    alone = runs_of(ours, theirs | {"output": y + 1})
    assert alone.in_our_order([*alone.entries(pair, {})]) is None
    scalars = runs_of({"output": np.array(1.0)}, {"output": np.array(2.0)})
    assert scalars.in_our_order([*scalars.entries(pair, {})]) is None


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1)])
@pytest.mark.parametrize(("noise", "agrees"), [(0, True), (1e-5, False), (1e-2, False), (9, False)])
def test_axes_are_exchanged_only_if_numbers_are_much_nearer(order, noise, agrees):
    """With equal lengths: another order is meant if it is a thousand times nearer."""
    random = np.random.default_rng(0)
    x, off = random.normal(size=(2, 3, 3, 3))
    theirs = x.transpose(order) + noise * off
    (each,) = runs_of({"output": x}, {"output": theirs}).entries([pairs.Pair("m", "m")], {})
    assert each.output.agrees == agrees
    nearer = x.transpose(order) if noise < 1e-3 else x
    assert each.output.wide.max_abs == np.abs(nearer - theirs).max()


def test_the_rank_of_a_call_is_the_number_of_paired_modules_before_it():
    ranks = measuring._ranks(Recording(["a#0", "b#0", "a#1", "c#0", "a#2"]), {"a", "c"})
    assert ranks == {"a#0": 0, "b#0": 1, "a#1": 1, "c#0": 1, "a#2": 2}


def test_a_module_belongs_to_the_innermost_one_around_it():
    modules, names = ("blocks.1", "blocks.1.norm", "blocks.10"), {"blocks": "a", "blocks.1": "b"}
    assert [measuring._owner(module, names) for module in modules] == ["b", "b", "a"]


@pytest.mark.parametrize("native", ["float32", "bfloat16"])
def test_a_run_in_float32_shows_which_model_alone_computes_in_16_bits(native):
    runs = PairedRuns({"float64": (Recording(), Recording())}, native)
    runs.in_16_bits = [{"a", "b", "outer"}, {"b", "c", "outer.inner"}]
    lower = {name: runs.lower(name) for name in ("a", "b", "c", "d", "outer")}
    shown = {"a": "PyTorch", "c": "Flax"} if native == "float32" else {}
    assert {name: side for name, side in lower.items() if side} == shown
    runs.in_16_bits[0].add("")
    runs.ours.points = {"a#0", "d#0"}
    lower = {name: runs.lower(name) for name in "ac"}
    assert lower == {"a": "", "c": shown.get("c", "")}, "code before a point may be that of any"
    runs.in_16_bits = runs.in_16_bits[::-1]
    assert runs.lower("a") == ("Flax" if shown else "")


@pytest.mark.parametrize(
    "sides", [[{"", "a"}, set()], [set(), {""}], [{""}, {"a"}], [{"a"}, set()]]
)
@pytest.mark.parametrize("native", ["float32", "bfloat16"])
def test_code_outside_of_modules_is_the_first_to_compute_in_16_bits_if_its_effect_shows(
    sides, native
):
    runs = PairedRuns({"float64": (Recording(), Recording())}, native)
    runs.in_16_bits, runs.narrow = sides, {"": "float16"}
    small = measured(0.0)
    large = dataclasses.replace(small, narrow=BAD.narrow)
    first = [entry("a", small, small), entry("b", large, large), entry("c", small, large)]
    model = {1: "Flax", 0: "PyTorch"}[sides.index(next(filter(None, sides)))]
    expects_words = native == "float32" and sum("" in side for side in sides if not all(sides)) == 1
    for entries, results, place in (
        (first, {}, "the input of flax.b"),
        (first[:1], {"": large}, "the result"),
        (first[::-1], {"": large}, ""),  # a module is the first
        (first[:1], {"": small}, ""),
        ([], {}, ""),
    ):
        words = runs.outside_in_16_bits(entries, results)
        expected = f"computes in float16 in the {model} model only, and {place} is the first that"
        assert (expected in words) if expects_words and place else not words


def test_a_module_computes_in_16_bits_alone_if_its_input_does_not_show_a_difference():
    x, off = np.ones((2, 3)), 0.1 * np.eye(2, 3)
    for moved, expected in ((0 * off, "Flax"), (off, "")):
        runs = runs_of({"input": x, "output": x}, {"input": x + moved, "output": x + off})
        runs.ours.narrow, runs.theirs.narrow = {"m": "bfloat16"}, {}
        (each,) = runs.entries([pairs.Pair("m", "m")], {})
        assert (each.lower, each.narrow) == (expected, "bfloat16")


@pytest.mark.parametrize(
    ("ours", "calls"),
    [("c#0 d#0 a#0 a#1", {"a#0": "a#0", "a#1": "a#1"}), ("c#0 d#0 a#0", {"a#0": "a#1"})],
)
def test_calls_correspond_in_order_or_after_the_same_modules(ours, calls):
    both = Recording(ours.split()), Recording(["a#0", "c#0", "a#1", "d#0"])
    runs = PairedRuns({"float64": both}, "float32")
    runs.ranks, runs.their_ranks = (measuring._ranks(each, {*"acd"}) for each in both)
    assert runs._corresponding_calls(pairs.Pair("a", "a")) == calls


def test_outputs_of_other_shapes_are_a_note_and_results_of_other_shapes_an_error():
    runs = runs_of({"output": np.ones((2, 3))}, {"output": np.ones((4, 5))})
    (each,) = runs.entries([pairs.Pair("m", "m")], {})
    assert (each.output, each.note) == (None, "outputs (2, 3) and (4, 5) are not compared")
    for shape in ((2,), (1, 1)):
        for _, theirs in runs.runs.values():
            theirs.result = np.zeros(shape)
        words = f"returns shape (1,) and the PyTorch model {shape}"
        with pytest.raises(ConfigError, match=re.escape(words)):
            runs.results()


@pytest.mark.parametrize("wrong", range(3))
def test_the_input_that_is_furthest_apart_counts_and_each_has_one_of_its_own(wrong):
    random = np.random.default_rng(0)
    inputs = {name: random.normal(size=(2, 3)) for name in ("input", "input 1", "input 2")}
    ours = inputs | {"output": np.ones(3)}
    (each,) = runs_of(ours, ours).entries([pairs.Pair("m", "m")], {})
    assert each.input is not None and each.input.agrees
    name = [*inputs][wrong]
    theirs = ours | {name: inputs[name] + 1e-4, "output": np.zeros(3)}
    (each,) = runs_of(ours, theirs).entries([pairs.Pair("m", "m")], {})
    assert each.input.wide.max_abs == pytest.approx(1e-4) and not each.faulty
    two = {key: x for key, x in ours.items() if key != "input 2"}
    (each,) = runs_of(ours, two).entries([pairs.Pair("m", "m")], {})
    assert each.input is not None and each.input.agrees
    gradients = {f"{key} gradient": x for key, x in inputs.items()}
    (each,) = runs_of(ours | gradients, ours | gradients).entries([pairs.Pair("m", "m")], {})
    assert each.input_gradient.agrees
    more = {"input 3": np.ones((4, 5)), "input 3 gradient": np.ones((4, 5))}
    still, smaller = more | {"input 3 gradient": np.zeros((4, 5))}, {"input 3": np.ones((2, 5))}
    for one, other in ((more, {}), ({}, more), (still, {}), ({}, still), (more, smaller)):
        sides = (ours | gradients | side for side in (one, other))
        (each,) = runs_of(*sides).entries([pairs.Pair("m", "m")], {})
        assert each.input.agrees and (each.input_gradient is None) == any(
            x is more for x in (one, other)
        )


@pytest.mark.parametrize("wider", [{"input": np.ones((4, 5))}, {}])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_module_with_an_input_of_another_kind_is_compared_by_its_parts_or_as_a_point(
    wider, swapped
):
    arrays = {"output": np.ones((2, 3))}
    sides = [arrays | {"input": np.ones((2, 3))}, arrays | wider]
    one = runs_of(*sides[:: -1 if swapped else 1], parameters=({"w": np.ones(2)},) * 2)
    getters: Any = {"m": {"w": (lambda x: [x.parameters["w"]], "w")}}
    note = "input of another kind: its output is not compared"
    for others, points, expected in (
        ([], set(), note),
        ([pairs.Pair("mm", "mm")], set(), note),
        ([pairs.Pair("m.part", "m.part")], set(), ""),
        ([], {"m#0"}, ""),
        ([], {"m"}, note),
    ):
        one.ours.points = points
        (each,) = one.entries([pairs.Pair("m", "m"), *others], getters)
        assert (each.note, each.output is None) == (expected, bool(expected))
        assert [*each.parameters] == ["w"]


def test_a_second_call_has_its_number_and_no_gradients_of_parameters():
    calls = ["m#0", "m#1", "m#2"]
    arrays = {f"{call}/output": np.ones(2) for call in calls}
    arrays |= {f"{call}/input": np.ones(2) for call in calls}
    ours = Recording(calls, arrays, {"w": np.ones(2)}, np.zeros(1))
    theirs = dataclasses.replace(ours, order=calls[:2], arrays=arrays | {"m#1/input": np.ones(9)})
    runs = PairedRuns(dict.fromkeys(golden.DTYPES, (ours, theirs)), "float32")
    getters: Any = {"m": {"w": (lambda x: [x.parameters["w"]], "w")}}
    entries = [*runs.entries([pairs.Pair("m", "m")], getters)]
    assert [each.call for each in entries] == [0, 1, 2]
    assert [bool(each.note) for each in entries] == [False, True, True]
    assert [len(each.parameters) for each in entries] == [1, 0, 0]


@pytest.mark.parametrize("kind", ["input", "output"])
def test_calls_in_another_order_are_those_of_the_nearest_inputs_or_outputs(kind):
    """After a fault only inputs tell; if modules take ids, only outputs."""
    x, noise = np.random.default_rng(0).normal(size=(2, 3, 4))
    calls, order = [f"m#{i}" for i in range(3)], (1, 2, 0)
    ours = {f"{call}/{kind}": x[i] for i, call in enumerate(calls)}
    theirs = {f"{call}/{kind}": x[i] for i, call in zip(order, calls, strict=True)}
    if kind == "input":
        ours |= {f"{call}/output": x[i] for i, call in enumerate(calls)}
        theirs |= {f"{call}/output": x[i] + noise[i] for i, call in enumerate(calls)}
    runs = PairedRuns({"float64": (Recording(calls, ours), Recording(calls, theirs))}, "float32")
    expected = {f"m#{i}": call for i, call in zip(order, calls, strict=True)}
    assert runs._corresponding_calls(pairs.Pair("m", "m")) == expected


@pytest.mark.parametrize(("off", "moved"), [(1e-4, True), (1e-2, False)])
def test_another_call_must_be_much_nearer(off, moved):
    """A fault may make the next call a little nearer."""
    calls, ones = ["m#0", "m#1"], np.ones(2)
    ours = Recording(calls, {"m#0/input": 0 * ones, "m#1/input": 5 * ones})
    theirs = Recording(calls, {"m#0/input": ones, "m#1/input": off * ones})
    runs = PairedRuns({"float64": (ours, theirs)}, "float32")
    other = runs._corresponding_calls(pairs.Pair("m", "m"))["m#0"]
    assert other == ("m#1" if moved else "m#0")


def test_the_narrowest_dtype_of_a_module_and_its_parts_counts():
    narrow = {"m.a": "bfloat16", "m.b": "float32", "n": "float32"}
    sides = [Recording(narrow=dict(order), rounded=["m.a"]) for order in (narrow.items(), {})]
    for names in ([*narrow], [*narrow][::-1]):
        sides[0].narrow = {name: narrow[name] for name in names}
        for ours, theirs in (sides, sides[::-1]):
            runs = PairedRuns(dict.fromkeys(golden.DTYPES, (ours, theirs)), "float32")
            assert [*runs.entries([pairs.Pair("m", "m"), pairs.Pair("n", "n")], {})] == []
            assert runs.narrow == {"m": "bfloat16", "n": "float32"} and runs.rounded == {"m"}
            assert sorted(runs.in_16_bits, key=len) == [set(), {"m"}]
            assert runs._narrowest == [
                "bfloat16" if side is sides[0] else "float32" for side in (ours, theirs)
            ]
    left = Recording(arrays={"m#0/output": np.ones(2, np.float32), "n#0/output": np.ones(2)})
    runs = PairedRuns({"float64": (left, Recording(narrow={}))}, "float32")
    assert not [*runs.entries([pairs.Pair("m", "m"), pairs.Pair("n", "n")], {})]
    assert runs.narrow == {"m": "float32"} and runs.rounded == {"m"}
    compared_in_float32 = PairedRuns({"float64": (left, left)}, "float32", "float32")
    assert not [*compared_in_float32.entries([], {})] and not compared_in_float32.narrow


def test_inputs_that_differ_before_any_output_are_those_of_another_caller():
    each = [entry("a", BAD, GOOD, input_gradient=BAD), entry("b", BAD, None)]
    each += [entry("c", GOOD, BAD), entry("d", BAD, BAD)]
    inputs = [(e.input, e.input_gradient) for e in measuring.without_other_inputs(each)]
    assert inputs == [(None, None), (BAD, None), (GOOD, None), (BAD, None)]


@pytest.mark.parametrize(("wide", "narrow"), [(1e-3, 0.0), (0.0, 1e-3), (0.0, 1e-5)])
def test_a_difference_shows_if_float32_has_it(wide, narrow):
    ones = np.ones(1)
    both = {
        "float64": (ones + wide, ones),
        "float32": ((ones + narrow).astype(np.float32), ones.astype(np.float32)),
    }
    each = measuring.measured(both, "float64", "float32")
    assert measuring.shows(each) == (narrow > 1e-4) and not measuring.shows(None)


def test_only_the_wide_difference_is_allowed_more_than_rounding():
    ones = np.ones(1)
    both = {
        "float64": (ones + 1e-9, ones),
        "float32": ((ones + 1e-3).astype(np.float32), ones.astype(np.float32)),
        "bfloat16": ((ones + 0.1).astype(jnp.bfloat16), ones.astype(jnp.bfloat16)),
    }
    plain = measuring.measured(both, "float64", "bfloat16")
    floors = measuring.measured(both, "float64", "bfloat16", 1e3)
    narrowest = measuring.measured(both, "float64", "bfloat16", 0.0, ["bfloat16"] * 2)
    assert floors.times == pytest.approx(1e-12) and narrowest.times > 10 * plain.times
    assert floors.narrow_times == narrowest.narrow_times == plain.narrow_times
    assert plain.error_ours == pytest.approx(0.1, rel=0.1) and plain.error_theirs == 0


def test_masks_of_a_call_are_booleans_integers_and_further_inputs():
    arrays = {"m#0/input": np.ones(1), "m#0/input 1": np.ones(2), "m#0/input 3": np.ones(3)}
    side = Recording(arrays=arrays, masks={"m#0": [np.ones(4, bool)], "m#1": [np.ones(5, bool)]})
    assert [[x.size for x in measuring._masks(side, f"m#{i}")] for i in range(3)] == [
        [4, 2],
        [5],
        [],
    ]


def test_numbers_that_tell_nothing_leave_the_usual_order_of_axes():
    usual, x = {3: (1, 0, 2)}, np.random.default_rng(0).normal(size=(3, 3, 4))
    other, same = np.ones((3, 3, 4)), np.zeros((3, 3, 4))
    assert measuring.axes(x, other, usual) == (1, 0, 2)
    assert measuring.axes(x, other, {}) == measuring.axes(x, x + 1e-9, usual) == (0, 1, 2)
    assert measuring.axes(x, x.swapaxes(0, 1) + 1e-9) == (1, 0, 2)
    assert measuring.axes(x, other, {3: (0, 2, 1)}) == (0, 1, 2), "not of this shape"
    assert measuring.axes(same, same, usual) == (1, 0, 2)
    assert measuring.axes(np.ones((2, 3, 4, 5, 6)), np.ones((2, 4, 3, 5, 6))) is None


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_parameter_is_measured_in_the_layout_in_which_it_is_nearest(order):
    x = np.random.default_rng(0).normal(size=(3, 3))

    def layouts(of: Recording) -> list[np.ndarray]:
        kernel = of.parameters["kernel"]
        return [(kernel, kernel[::-1], kernel.T)[i] for i in order]

    both = {}
    for dtype in golden.DTYPES:
        ours, theirs = {"kernel": x.astype(dtype)}, {"weight": x.T.astype(dtype)}
        both[dtype] = Recording(parameters=ours), Recording(parameters=theirs)
    runs = PairedRuns(both, "float32")
    measured = runs._parameters({"kernel": (layouts, "weight"), "bias": (layouts, "none")})
    assert [*measured] == ["kernel"] and measured["kernel"].wide.max_abs == 0


def test_parameters_count_more_than_names_in_a_guess():
    ours = [pairs.Called("up", (2, 8), (8, 64)), pairs.Called("down", (2, 8), (8, 128))]
    theirs = [pairs.Called("down", (2, 8), (8, 64)), pairs.Called("up", (2, 8), (8, 128))]
    assert pairs.guessed(ours, theirs) == [("up", "down"), ("down", "up")]
    theirs.insert(1, pairs.Called("up", (2, 8), ()))
    assert pairs.guessed(ours, theirs) == [("up", "down"), ("down", "up")]
    assert pairs.guessed(ours[:1], [pairs.Called("up", (2, 8), ()), theirs[0]]) == [("up", "down")]
    nameless = [one._replace(sizes=None) for one in ours]
    assert pairs.guessed(nameless, nameless[::-1]) == [("up", "up"), ("down", "down")]


def test_a_layer_is_the_counterpart_of_a_layer_not_of_the_module_around_it():
    """A linear layer and its activation have the layer's parameters, and here its name."""
    around = [pairs.Called("up.linear", (2, 8), (8, 64)), pairs.Called("up", (2, 8), (8, 64))]
    layer = [pairs.Called("up", (2, 8), (8, 64))]
    assert pairs.guessed(around, layer) == [("up.linear", "up")]
    assert pairs.guessed(layer, around) == [("up", "up.linear")]


def test_equal_outputs_count_more_than_the_order_in_a_guess():
    ours, theirs = (
        [pairs.Called(f"{side}.{i}", (2, 8), None, (float(i), 1.0)) for i in order]
        for side, order in (("a", (1, 2, 3)), ("b", (3, 1, 2)))
    )
    assert {(a[-1], b[-1]) for a, b in pairs.guessed(ours, theirs)} == {(i, i) for i in "123"}


def test_a_kernel_has_the_layouts_of_pytorch():
    """Written out by index: linear, convolution, transposed convolution, heads of three axes."""
    random = np.random.default_rng(0)
    window = random.normal(size=(3, 2, 4, 5))
    conv, turned, *_ = pairs._kernel_layouts(window)
    for i, j, a, b in np.ndindex(window.shape):
        assert conv[b, a, i, j] == turned[a, b, 2 - i, 1 - j] == window[i, j, a, b]
    heads = random.normal(size=(3, 4, 5))
    *_, of_inputs, of_outputs = pairs._kernel_layouts(heads)
    assert of_inputs.shape == (5, 12) and of_outputs.shape == (20, 3)
    assert of_inputs[2, 7] == heads[1, 3, 2] and of_outputs[7, 2] == heads[2, 1, 2]
    (linear,) = pairs._kernel_layouts(heads[0])
    assert (linear == heads[0].T).all()


# Goldens


def test_any_change_of_a_golden_is_detected(path, tmp_path):
    text, arrays = safetensors.metadata(path), safetensors.read(path)
    assert len(arrays) == 10
    for name, array in arrays.items():
        other = array.copy()
        other.flat[-1] = np.nextafter(other.flat[-1], 9, dtype=other.dtype)
        bits = array.view(f"uint{8 * array.itemsize}")
        for changed in ({name: other}, {name: array[None]}, {name: bits}, {f"{name}x": array}):
            rest = {key: value for key, value in arrays.items() if key != name}
            safetensors.write(tmp_path / "changed", rest | changed, text)
            group = name.partition("/")[0]
            with pytest.raises(InputError, match=f"SHA-256 of {group}$"):
                golden.load(tmp_path / "changed")


def test_the_same_bytes_of_another_shape_are_not_the_same_array(path):
    def column(*arguments):
        recording = FakeRecorder()(*arguments)
        return dataclasses.replace(recording, result=recording.result.T)

    wrong = golden.recheck(golden.load(path), column).wrong
    shapes = "shape (1, 2) in the golden, (2, 1) now"
    assert wrong == tuple(f"{dtype} result: {shapes}" for dtype in golden.DTYPES)


def test_a_golden_of_a_batch_with_nan_takes_that_batch(tmp_path):
    batch = [np.array([[math.nan, 2.0]]), np.array([[3]])]
    path = tmp_path / "golden.safetensors"
    loaded = golden.create(path, FakeRecorder(), batch, source={"factory": "a:b"}, seed=3)
    assert np.isnan(loaded("float64", 3, loaded.batch).result[0, 0])
    for other in ([batch[0]], [batch[0], batch[1] + 1], [np.array([[1.0, math.nan]]), batch[1]]):
        with pytest.raises(ConfigError, match="was recorded on another batch"):
            loaded("float64", 3, other)


def test_another_process_records_again_for_anything_else(tmp_path, monkeypatch):
    """A recording is used again for its own seed and batch only: values, shapes and dtypes."""
    runs: list[Any] = []
    process = golden.OtherProcess("a:b", python(tmp_path, "exit 1"))

    def run(dtypes, seed, batch):
        runs.append((dtypes, seed))
        process._recordings.update({dtype: Recording(result=batch[0]) for dtype in dtypes})

    monkeypatch.setattr(process, "_run", run)
    zeros = np.zeros((2, 3), np.float32)
    for seed, batch in (
        (0, [zeros]),
        (1, [zeros]),
        (None, [zeros]),
        (None, [zeros.T]),
        (None, [zeros.T.view(np.int32)]),
        (None, [zeros.T, zeros]),
    ):
        for dtype in ("float64", "float32", "float64", "bfloat16", "bfloat16"):
            assert process(dtype, seed, batch).result is batch[0]
        assert runs == [(golden.DTYPES, seed), (("bfloat16",), seed)]
        runs.clear()


def test_the_recorder_gets_the_seed_of_the_gradients(monkeypatch):
    seen: list[Any] = []

    def recorder(dtype, seed, batch):
        seen.append((dtype, seed))
        x = batch[0].astype(dtype)
        parameters = {}
        if seed is not None:
            R = np.random.default_rng(seed).standard_normal(x.shape).astype(dtype)
            parameters["layer.weight"] = (x * R).sum(axis=0)
        calls = {"layer#0/output": 2 * x}
        return Recording(["layer#0"], calls, parameters, 2 * x)

    def layer(weights, x):
        return comparison.recording.tap("layer", weights["layer"]["scale"] * x)

    flax = layer, {"layer": {"scale": jnp.full(2, 2, jnp.bfloat16), "other": jnp.ones(1)}}
    rules = {"layer": "layer"}
    for options, seed in (({"seed": 7}, 7), ({}, 0), ({"seed": 7, "gradients": False}, None)):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            result = comparison.compare_recorded(flax, recorder, BATCH, rules, **options)
        assert result.agrees and (result.about["seed"], result.dtype) == (seed, "bfloat16")
        assert seen == [(dtype, seed) for dtype in ("float64", "float32", "bfloat16")]
        assert {*result.entries[0].parameters} == (set() if seed is None else {"scale"})
        seen.clear()


@pytest.mark.parametrize(
    "change",
    [
        *({"version": 0}, {"version": 2}, {"order": []}, {"sha256": None}, {"seed": ...}),
        *({"about": []}, {"about": {"float64": 3}}),
    ],
)
def test_another_description_of_a_golden_is_refused(change, path):
    description = json.loads(safetensors.metadata(path)["golden"]) | change
    text = json.dumps({key: value for key, value in description.items() if value is not ...})
    safetensors.write(path, safetensors.read(path), {"golden": text})
    message = "of version .: make" if "version" in change else "description as a golden cannot be"
    with pytest.raises(InputError, match=message.replace("of version .: make", "make it again")):
        golden.load(path)


def test_the_seed_that_is_asked_for_is_that_of_the_batch_and_the_gradients(path, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(from_files, "_check_torch", lambda: None)
    monkeypatch.setattr(from_files, "_twin", lambda *_: None)
    monkeypatch.setattr(from_files, "_twin_recorder", lambda *_: None)
    monkeypatch.setattr(from_files, "_config", lambda *_: CONFIG)
    monkeypatch.setattr(from_files.registry, "open", lambda *_: Opened())
    monkeypatch.setattr(from_files.conversion, "random_batch", lambda *args: seen.append(args))
    loaded = golden.load(path)

    def record(result):
        return lambda *_, **named: seen.append(named.get("seed")) or result

    monkeypatch.setattr(from_files.comparison, "compare", record(report()))
    monkeypatch.setattr(from_files.golden, "create", record(loaded))
    for seed in (None, 0, 5):
        lengths, expected = [2, 3], seed or 0
        from_files.compare_files("run", "twin", ModelDescription(), lengths=lengths, seed=seed)
        batches = [(CONFIG, expected, length) for length in lengths]
        assert seen == [batches[0], expected, batches[1], expected]
        seen.clear()
    from_files.create_golden("golden", "run", "auto", None, None, 5)
    assert seen == [(CONFIG, 5), 5]


@pytest.mark.parametrize("seed", [None, 0, 3, 4])
def test_another_seed_than_the_golden_s_is_refused(path, seed):
    loaded = dataclasses.replace(golden.load(path), batch=(np.ones((2, 3), np.int32),) * 2)
    expected = contextlib.nullcontext() if seed in (None, 3) else pytest.raises(ConfigError)
    with expected:
        from_files._check_golden_fits(loaded, seed)


class Opened:
    """A stand-in for opened weights."""

    config = tiny(max_length=9)

    def state(self, *_: object, **__: object) -> dict[str, np.ndarray]:
        return {}

    def model(self, _: object) -> None:
        return None


CONFIG = Opened.config


@pytest.mark.parametrize("weights", ["auto", "average", "best"])
def test_the_weights_that_are_asked_for_are_opened(weights, tmp_path, monkeypatch):
    def opened(path, kind="auto"):
        raise InputError(f"{path} {kind}")

    monkeypatch.setattr(from_files.registry, "open", opened)
    with pytest.raises(InputError, match=f"^run {weights}$"):
        from_files.create_golden(str(tmp_path / "g"), "run", weights, None, None, 0)
    with pytest.raises(InputError, match=f"^run {weights}$"):
        from_files.compare_files("run", "twin", ModelDescription(), weights=weights)


def test_an_array_that_one_side_lacks_is_a_difference(path):
    def named(name):
        def recorder(*arguments):
            recording = FakeRecorder()(*arguments)
            recording.parameters[name] = recording.parameters.pop("layer.weight")
            return recording

        return recorder

    wrong = golden.recheck(golden.load(path), named("other")).wrong
    assert wrong == tuple(
        f"{dtype} parameters/{name} {side}"
        for dtype in golden.DTYPES
        for name, side in (("layer.weight:", "only in the golden"), ("other:", "not in the golden"))
    )


# The fixture


def test_every_argument_of_the_fixture_reaches_the_comparison(tmp_path, monkeypatch):
    options: dict[str, Any] = dict(dtype="bfloat16", gradients=False, seed=7, architecture="marian")
    calls = dict(call_flax=len, call_torch=max)
    seen: list[Any] = []
    agreeing = report(result=GOOD)
    for name in ("compare", "compare_recorded"):
        monkeypatch.setattr(
            f"jax_transformer.parity.comparison.{name}",
            lambda *args, **named: seen.append((args, named)) or agreeing,
        )
    fixture = plugin.Parity("test", None, True)
    assert fixture("flax", "torch", BATCH, {"a": "b"}, **options, **calls) is agreeing
    assert seen.pop() == (("flax", "torch", BATCH, {"a": "b"}), options | calls)
    monkeypatch.setattr(golden, "OtherProcess", lambda *_: FakeRecorder())
    more = {"torch_factory": "a:b", "golden": tmp_path / "golden", "call_flax": len}
    fixture("flax", None, BATCH, {"a": "b"}, **options, **more)
    (_, recorder, batch, rules), named = seen.pop()
    assert (rules, named) == ({"a": "b"}, options | {"call": len})
    assert (recorder.seed, recorder.source) == (7, {"factory": "a:b"}) and batch == recorder.batch
    names = [
        plugin.Parity(f"a.py::test[{i}/{case}]", str(tmp_path / "a/b"), False) for i, case in BOTH
    ]
    for one in names:
        one._write(report())
    assert len({page.name for page in tmp_path.glob("a/b/*.html")}) == len(names) == 6


@pytest.mark.parametrize(
    ("ours", "theirs", "order"),
    [
        ((2, 6, 4), (2, 6, 4), (0, 1, 2)),
        ((2, 6, 4), (2, 4, 6), (0, 2, 1)),
        ((2, 6, 4), (6, 2, 4), (1, 0, 2)),
        ((2, 3, 4, 5), (2, 5, 3, 4), (0, 3, 1, 2)),
        ((2, 3, 5, 4), (2, 5, 3, 4), (0, 2, 1, 3)),
        ((2, 6, 2, 3), (2, 6, 6), (0, 1, 2, 3)),
        ((2, 6, 4), (2, 4, 2, 3), (0, 2, 1)),  # pixels, and an image with its channels first
        ((2, 6, 4), (2, 3, 2, 4), (0, 1, 2)),
        ((2, 6, 4), (2, 3, 8), None),
        ((2, 6, 4), (2, 2, 4, 3), None),
    ],
)
def test_axes_are_found_by_shape_also_where_one_side_has_two_as_one(ours, theirs, order):
    array = np.random.default_rng(0).standard_normal(ours)
    assert measuring.axes(array, np.zeros(theirs)) == order
    if order is not None:
        other = measuring.as_theirs(array, order, theirs)
        assert other.shape == theirs and measuring.axes(array, other) == order
        assert (measuring.as_ours(other, order, ours) == array).all()


@pytest.mark.parametrize("count", [4, 256])
def test_a_single_head_may_have_the_other_order_of_rotary_features(count):
    theirs = np.random.default_rng(0).standard_normal((3, count))
    runs = stand_in(PairedRuns, positions=None)
    for order in rotary(count, count):
        ours = theirs[:, order.indices(count)]
        assert (theirs[:, runs._features(ours, theirs)] == ours).all()


def test_numbers_tell_the_order_of_an_image_of_as_many_pixels_as_channels():
    array = np.random.default_rng(0).standard_normal((2, 4, 4))
    for order in ((0, 1, 2), (0, 2, 1)):
        theirs = measuring.as_theirs(array, order, (2, 4, 2, 2))
        assert measuring.axes(array, theirs) == order
