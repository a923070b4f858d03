"""Steps of the search for a weight table, on tensors by name."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jax_transformer.parity import search
from jax_transformer.parity.matching import Match
from jax_transformer.parity.proposal import Line
from jax_transformer.weights import Alias, Rule, Unused, layouts
from jax_transformer.weights.layouts import Layout
from parity_tests.unit.helpers import stand_in

SAME, TURNED = Layout("", {}), Layout("o i -> i o", {})


def match(torch: str, *flax: str, layouts=(SAME,), choice=0, kind="Linear") -> Match:
    return Match(torch, flax or (torch,), layouts, kind, "why", choice)


def test_modules_around_with_no_more_weights_may_be_the_counterpart():
    one = stand_in(search._Search, state=dict.fromkeys(["a.b.c.w", "a.b.c.v", "a.bc.w"]))
    assert one._alike("a.b.c") == ["a.b.c", "a.b"] and one._alike("a.bc") == ["a.bc"]


def test_all_weights_are_changed_those_that_are_one_alike_and_what_has_no_array_is_zero():
    random = np.random.default_rng(0)
    state = {
        "zero": np.zeros(5),
        "one": np.ones(5),
        "few": np.zeros((2, 4)),
        "empty": np.zeros((0, 2)),
    }
    state |= {
        "wide": random.normal(size=(3, 4)) * 10,
        "tie": np.ones((3, 4)),
        "more.bias": np.ones(2),
    }
    state |= {"table": np.ones(3), "more.weight": np.ones(2)}
    names = ["zero", "one", "few", "empty", "wide"]
    parameters = [(name, None) for name in (*names, "more.bias", "more.weight")]
    one = stand_in(
        search._Search,
        state=state,
        first={name: name for name in state} | {"tie": "wide"},
        matches=[match(name) for name in names],
        module=SimpleNamespace(named_parameters=lambda: parameters),
    )
    new = one._random()
    assert [*new] == [*state] and (new["tie"] == new["wide"]).all()
    assert not new["more.bias"].any() and (new["more.weight"] == 1).all()
    assert (new["table"] == 1).all()
    spread = {name: np.abs(new[name] - state[name]).max(initial=0) for name in names}
    limits = {"zero": 0.05, "one": 0.05, "few": 0.5, "empty": 0, "wide": 0.5 * state["wide"].std()}
    for name, limit in limits.items():
        assert limit / 2 <= spread[name] <= limit and len({*new[name].flat}) == new[name].size


def searching(matches, shapes=(), **fields):
    """Return a search whose tensors have these shapes by name, and its arrays the same turned."""
    shapes = dict(shapes)
    state = {each.torch: np.zeros(shapes.get(each.torch, (4, 4))) for each in matches}
    arrays = {name: state[each.torch].shape[::-1] for each in matches for name in each.flax}
    return stand_in(search._Search, matches=matches, state=state, shapes=arrays, **fields)


def changes(one, tables) -> list[tuple[int, ...]]:
    """Return the numbers of the matches that each table changes."""
    matches = one.matches
    return [tuple(i for i, m in enumerate(matches) if m != table[i]) for table in tables]


def test_tensors_of_all_layers_are_one_group_if_they_have_as_many_layouts():
    names = {f"l.{i}.up.w": f"layers.{i}.up.k" for i in range(3)}
    names |= {"l.0.down.w": "layers.0.down.k", "norm.w": "layers_norm.k"}
    matches = [
        match(*each, layouts=(SAME, TURNED)[: 1 + (i == 2)]) for i, each in enumerate(names.items())
    ]
    one = searching(matches)
    assert one._groups() == [[0, 1], [2], [3], [4]]
    assert one._groups("layers.{}") == [[0, 1], [2], [3]]
    assert one._groups("layers.{}.up") == [[0, 1], [2]] and one._groups("layers") == [
        [0, 1],
        [2],
        [3],
    ]
    assert not one._groups("layer") + one._groups("layers.{}.u")


@pytest.mark.parametrize(("count", "all_"), [(3, True), (8, True), (9, False)])
def test_other_layouts_are_those_of_one_group_of_two_and_of_all_if_these_are_not_too_many(
    count, all_
):
    matches = [
        match(f"l.{layer}.{name}.w", layouts=(SAME, TURNED), choice=name == "c")
        for name in "abcdefghi"[:count]
        for layer in range(2)
    ]
    matches.append(match("norm.w"))
    one = searching(matches)
    changed = changes(one, one._other_layouts(one._groups()))
    assert len(changed) == len({*changed})
    assert all(i + 1 in each for each in changed for i in each if i % 2 == 0)
    counts = [len(each) // 2 for each in changed]
    pairs = count * (count - 1) // 2
    assert counts[: count + pairs] == [1] * count + [2] * pairs
    assert len(counts) == (2**count - 1 if all_ else count + pairs)


def test_parts_of_a_module_s_packed_tensors_are_in_one_order_and_first_cut_in_one_way():
    ways = Layout("(part o) i -> i o", {}), Layout("(o part) i -> i o", {})
    biases = [Layout(each.axes.replace(" i", "").replace("i ", ""), {}) for each in ways]
    matches = [match("qkv.b", "q.b", "v.b", layouts=biases), match("up.w")]
    matches.append(match("qkv.w", "q.w", "k.w", "v.w", layouts=ways))
    one = searching(matches)
    tables = [*one._other_parts(one._groups())]
    assert len(tables) == 2 * 2 * 6 and all(table[1] == matches[1] for table in tables)
    cuts = [(table[0].choice, table[2].choice) for table in tables]
    assert {*cuts[:12]} == {(0, 0), (1, 1)} and {*cuts[12:]} == {(0, 1), (1, 0)}
    for table in tables:
        order = ["qkv".index(name[0]) for name in table[2].flax]
        assert table[0].flax == tuple(("q.b", "v.b")[k] for k in order if k < 2)
    assert len({table[2].flax for table in tables[:6]}) == 6


def test_modules_of_one_shape_are_exchanged_in_all_layers_and_then_each_alone():
    names = [f"l.{i}.{name}.w" for name in "ab" for i in range(2)]
    packed = [match(f"l.{i}.ab.w", *names[i::2]) for i in range(2)]
    one = searching([*map(match, names), *packed, match("c.w")], {"c.w": (4, 5)})
    tables = [*one._exchanges(one._groups())]
    first = ["l.0.b.w", "l.1.b.w", "l.0.a.w", "l.1.a.w"]
    assert [each.flax[0] for each in tables[0][:4]] == first
    assert len(tables) == 1 + 23 and all(table[4:] == one.matches[4:] for table in tables)
    orders = {tuple(each.flax[0] for each in table[:4]) for table in tables}
    assert len(orders) == 23 and tuple(names) not in orders


@pytest.mark.parametrize(
    ("kind", "verdicts", "count"),
    [
        ("Linear", {"fc#0": False}, 4),
        ("Linear", {"fc#0": True}, 0),
        ("Linear", {}, 0),
        ("Conv1D", {"fc#0": False}, 0),
    ],
)
def test_a_wrong_product_may_come_after_a_flattened_image(kind, verdicts, count):
    """Its 12 inputs may be 2, 3, 4 or 6 channels; other layouts of its group come first."""
    matches = [match("fc.w", layouts=(TURNED, SAME), kind=kind), match("other.w")]
    one = searching(matches, {"fc.w": (5, 12)})
    first, *tables = one._another_layout(verdicts)
    assert first[0].rule.axes == "" and [*changes(one, [first])] == [(0,)]
    assert [table[0].rule.axes for table in tables] == ["o (h e) -> (e h) o"] * count


@pytest.mark.parametrize(
    ("shapes", "changed", "count"),
    [
        ({"q.w": (8, 6), "q.b": (8,), "k.w": (8, 6), "v.w": (8, 6)}, (0, 1, 2), 4),
        ({"q.w": (8, 6), "k.w": (4, 6)}, (0, 1), 2),
        ({"q.w": (12, 6), "k.w": (12, 6)}, (0, 1), 6),
        ({"q.w": (8, 6), "k.w": (12, 6)}, (0, 1), 2),
        ({"q.w": (8, 6), "v.w": (8, 6)}, (), 0),
        ({"k.w": (8, 6), "k.b": (8,)}, (), 0),
        ({"q.w": (2, 6), "k.w": (2, 6)}, (), 0),
        ({"q.w": (8, 6, 1), "k.w": (8, 6, 1)}, (), 0),
    ],
)
def test_queries_and_keys_may_have_another_order_of_rotary_features(shapes, changed, count):
    one = searching([match(f"x.{name}", layouts=(TURNED,)) for name in shapes])
    one.state = {f"x.{name}": np.zeros(shape) for name, shape in shapes.items()}
    one.shapes = {f"x.{name}": shape[::-1] for name, shape in shapes.items()}
    tables = [*one._other_features()]
    assert changes(one, tables) == [changed] * count
    assert all("rotary" in table[0].reason for table in tables)


def test_an_order_of_features_leaves_the_axes_and_what_it_does_not_fit():
    matches = [match(f"x.{name}", layouts=(SAME, TURNED), choice=name == "k") for name in "qk"]
    one = searching([*matches, match("x.q.packed", "a", "b")], {"x.q": (8, 8), "x.k": (8, 8)})
    one.matches = [replace(each, torch=f"{each.torch}.w") for each in one.matches]
    one.state = {f"{name}.w": x for name, x in one.state.items()}
    for table in one._other_features():
        assert [each.rule.axes.partition(" -> ")[2].index("i") == 0 for each in table[:2]] == [
            False,
            True,
        ]
        assert table[2] == one.matches[2]
    one.shapes["x.k"] = (64,)
    assert {*changes(one, one._other_features())} == {(0,)}


@pytest.mark.parametrize(
    ("theirs", "ours", "alone"),
    [
        ("attn.c", "x.c", True),
        ("x.c", "self_attention.c", True),
        ("QKV.c", "x.c", True),
        ("mlp.c", "x.c", False),
        ("attn.q", "x.q", False),
    ],
)
def test_a_module_of_an_attention_may_join_its_heads_in_another_order(theirs, ours, alone):
    matches = [match(f"{theirs}.{leaf}", f"{ours}.{leaf}", layouts=(TURNED,)) for leaf in "wb"]
    one = searching(matches, {f"{theirs}.w": (12, 6), f"{theirs}.b": (12,)})
    tables = [*one._other_features()]
    orders = [*layouts.joined(12)] if alone else []
    assert changes(one, tables) == [(0, 1)] * len(orders)
    one.state[f"{theirs}.b"] = np.zeros(24)
    assert not [*one._other_features()]


@pytest.mark.parametrize(
    ("off", "acting", "gradient", "right", "problem"),
    [
        (0.0, 1.0, 1.0, {}, None),
        (0.0, 1.0, 1.02, {}, None),
        (0.0, 1.0, 1.05, {}, "the gradients differ"),
        (0.0, 1e-11, 1.0, {}, "does not act on the result"),
        (0.0, 1e-9, 1.0, {}, None),
        (1e-3, 1e-4, 1.05, {}, "does not act on the result"),
        (1e-3, 1e-4, 1.0, {}, None),
        (0.0, 1.0, None, {}, None),
        (search.SAME, 1.0, 1.0, {"m#0": False}, "the outputs differ"),
        (search.SAME, 1.0, 1.0, {"m#0": True}, "the outputs differ, but not that of m"),
    ],
)
def test_a_rule_is_proven_by_outputs_and_by_a_gradient_that_acts(
    off, acting, gradient, right, problem
):
    gradients = {} if gradient is None else {"t.w": np.array([gradient, 0.0])}
    one = stand_in(
        search._Search,
        first={"t.w": "t.w", "tie": "t.w"},
        theirs=SimpleNamespace(parameters=gradients),
        joined={"t.w": np.array([1.0, 0.0])},
        largest=1e4,
    )
    options = [Layout(axes, {}) for axes in ("a b -> b a", "", "o i -> i o", "d", "e", "f")]
    ours = [np.zeros(2), np.array([0.0, -1e4 * acting])]
    line = one._line(match("tie", "m.w", layouts=options, choice=2), off, ours, right)
    assert line.entry.axes == "o i -> i o" and line.proven == (problem is None)
    assert line.reason == ("why" if problem is None else f"why; {problem}")
    assert line.candidates == (() if line.proven else ("a b -> b a", "the same axes", "d", "e"))


def test_a_tensor_without_an_array_is_a_tie_a_buffer_or_not_proven():
    names = ["w", "tie", "alone", "alone.tie", "more.bias", "frozen", "table"]
    parameters = [(n, SimpleNamespace(requires_grad=n != "frozen")) for n in names[:-1]]
    one = stand_in(
        search._Search,
        module=SimpleNamespace(named_parameters=lambda: parameters),
        state={name: np.zeros(i) for i, name in enumerate(names)},
        first={name: name for name in names} | {"tie": "w", "alone.tie": "alone"},
    )
    lines = {line.entry.torch: line for line in one._without_rule({"w"})}
    assert lines.pop("tie").entry == Alias("tie", "w")
    assert all(isinstance(line.entry, Unused) for line in lines.values())
    assert {name: line.proven for name, line in lines.items()} == {
        "alone": False,
        "alone.tie": False,
        "more.bias": False,
        "frozen": True,
        "table": True,
    }
    assert lines["alone"].reason == "no array for its shape (2,)"
    assert lines["more.bias"].reason.endswith("(4,); the rest is compared with zeros in it")


@pytest.mark.parametrize(
    ("others", "before", "after", "results", "reason"),
    [
        ([True], True, False, [0.0], "why; by the output of m"),
        ([True], True, True, [0.0], None),
        ([True], False, False, [0.0], None),
        ([False, True], True, False, [0.0], None),
        ([], True, False, [0.0], None),
        ([True], True, True, [1.0, 0.0], "why; by a result"),
        ([True], True, True, [0.0, search.SAME], "why; by a result"),
        ([], False, False, [0.0, 0.0, 1.0], "why; by a result"),
    ],
)
def test_a_rule_without_a_gradient_is_proven_by_what_other_numbers_change(
    others, before, after, results, reason
):
    spoilt = []
    one = stand_in(
        search._Search,
        matches=[],
        _results=lambda names: spoilt.append(names) or results,
        judged=lambda _, names: spoilt.append((*names,)) or {"m#0": after},
    )
    inert = Line(Rule("t.b", "m.b"), "why; does not act on the result", False)
    lines = [Line(Rule("t.w", f"m.w{i}"), "why", proven) for i, proven in enumerate(others)]
    lines += [inert, Line(Rule("n.w", "n.w"), "why", True), Line(Unused("x"), "why", True)]
    changed = one._by_modules(lines, {"m#0": before})
    new = inert if reason is None else Line(inert.entry, reason, True)
    assert changed == [new if line is inert else line for line in lines]
    assert {*spoilt} == {("m.b",)}
