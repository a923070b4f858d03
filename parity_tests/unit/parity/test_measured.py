"""Properties of measurements, verdicts and goldens: against loops over elements, and at limits."""

import dataclasses
import itertools
import json
import math
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from jax_transformer.convert.models import ModelDescription
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.parity import comparison, from_files, golden, pairs, plugin
from jax_transformer.parity import difference as differences
from jax_transformer.parity.difference import FAULT, difference
from jax_transformer.parity.measuring import PairedRuns
from jax_transformer.parity.recording import Recording
from jax_transformer.storage import safetensors
from parity_tests.unit.parity.test_difference import BAD, GOOD, entry, report
from parity_tests.unit.parity.test_golden import BATCH, FakeRecorder, path, python

__all__ = ["path"]  # a fixture
NUMBERS = strategies.sampled_from([0.0, -0.0, 1.0, -2.5, 3e100, 1e-100, math.nan, math.inf])
SIGNED = strategies.one_of(NUMBERS, NUMBERS.map(lambda x: -x))
LISTS = strategies.lists(strategies.tuples(SIGNED, SIGNED), min_size=1, max_size=6)


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
        dataclasses.replace(entry(name, into, out), call=call)
        for call, name, into, out in (
            (0, "b.part", GOOD, GOOD),
            (0, "b", GOOD, GOOD),
            (1, "b.part", BAD, BAD),
            (1, "b", GOOD, BAD),
        )
    ]
    compared = report(*calls)
    assert [each.title for each in calls][1:3] == [
        "flax.b | torch.b",
        "flax.b.part | torch.b.part (call 2)",
    ]
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


def test_each_model_has_its_own_rounding_error():
    wide = np.array([1.0, 2.0])
    sides = (wide + 1e-6).astype(np.float32), (wide + 3e-6).astype(np.float32)
    ours, theirs = ({"float64": wide, "float32": side} for side in sides)
    runs = {
        dtype: (Recording(result=ours[dtype]), Recording(result=theirs[dtype])) for dtype in ours
    }
    measured = PairedRuns(runs, "float32", ()).result()
    assert (measured.error_ours, measured.error_theirs) == pytest.approx((1e-6, 3e-6), rel=0.1)
    assert measured.to_data()["run"]["errors"] == [measured.error_ours, measured.error_theirs]


def test_a_kernel_has_the_layouts_of_pytorch():
    """Written out by index: linear, convolution, transposed convolution, heads of three axes."""
    random = np.random.default_rng(0)
    window = random.normal(size=(3, 2, 4, 5))
    conv, turned = pairs._kernel_layouts(window)
    for i, j, a, b in np.ndindex(window.shape):
        assert conv[b, a, i, j] == turned[a, b, 2 - i, 1 - j] == window[i, j, a, b]
    heads = random.normal(size=(3, 4, 5))
    *_, of_inputs, of_outputs = pairs._kernel_layouts(heads)
    assert of_inputs.shape == (5, 12) and of_outputs.shape == (20, 3)
    assert of_inputs[2, 7] == heads[1, 3, 2] and of_outputs[7, 2] == heads[2, 1, 2]


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

    assert golden.recheck(golden.load(path), column).wrong == tuple(
        f"{dtype} result: shape (1, 2) in the golden, (2, 1) now" for dtype in golden.DTYPES
    )


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


@pytest.mark.parametrize("weights", ["auto", "average", "best"])
def test_the_weights_that_are_asked_for_are_opened(weights, tmp_path, monkeypatch):
    def opened(path, kind="auto"):
        raise InputError(f"{path} {kind}")

    monkeypatch.setattr(from_files.registry, "open", opened)
    with pytest.raises(InputError, match=f"^run {weights}$"):
        from_files.create_golden(str(tmp_path / "g"), "run", weights, None, None, 0)
    with pytest.raises(InputError, match=f"^run {weights}$"):
        from_files.compare_files("run", "twin", ModelDescription(), weights=weights)


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
    json.dumps(recorder.source)
