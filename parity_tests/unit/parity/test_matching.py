"""Matches of tensors and arrays by names, shapes and order, and the verdict on a table of them."""

import dataclasses
import itertools
from typing import Any

import pytest

from jax_transformer.parity import matching, search
from jax_transformer.parity.matching import Match, Part
from jax_transformer.parity.proposal import SAME, Line, Proposal
from jax_transformer.weights import Rule, Unused
from jax_transformer.weights.layouts import Layout
from parity_tests.unit.helpers import stand_in


@pytest.mark.parametrize(
    ("name", "words", "numbers", "template"),
    [
        ("encoder.layers_3.selfAttn.wq", "encoder attn q", (3,), "encoder.layers_{}.selfAttn.wq"),
        ("h.0.c_fc.weight", "up weight", (0,), "h.{}.c_fc.weight"),
        ("blocks.2.conv1.kernel", "weight conv 1", (2,), "blocks.{}.conv1.kernel"),
        ("linear1", "up", (1,), "linear1"),
        ("linear2.scale", "down weight", (2,), "linear2.scale"),
        ("fc2", "down", (2,), "fc2"),
        ("wi_0", "gate", (0,), "wi_{}"),
        ("wi_1", "up", (1,), "wi_{}"),
        ("a/~/block_1/query.w", "a q weight", (1,), "a/~/block_{}/query.w"),
        ("layers.11.layers.2", "layers", (11, 2), "layers.{}.layers.{}"),
    ],
)
def test_a_name_has_the_words_of_both_sides(name, words, numbers, template):
    expected = {*words.split()}
    actual = matching.words(name), matching.numbers(name), matching.template(name)
    assert actual == (expected, numbers, template)


def packed(*names: str) -> list[tuple[str, ...]]:
    """Return the arrays of a tensor that the arrays of these modules may be parts of."""
    tensor = Part("x.weight", (2 * len(names), 3), 0)
    parts = [Part(f"{name}.kernel", (3, 2), i) for i, name in enumerate(names)]
    return [match.flax for match in matching.matched([tensor], parts)]


def test_a_packed_tensor_has_up_to_sixteen_parts_in_their_usual_order():
    for count in (2, 16, 17):
        names = [f"e.{i}" for i in range(count)]
        assert packed(*names) == [tuple(f"{name}.kernel" for name in names)] * (count < 17)
    for usual in (("m.gate", "m.up"), ("m.q_proj", "m.key", "m.value")):
        for order in itertools.permutations(usual):
            assert packed(*order) == [tuple(f"{name}.kernel" for name in usual)]


SIZES = {"extra": 3, "other": 5}


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        ("a.weight", "b.scale", "only one of this size"),
        (
            "a.enc.weight b.dec.weight",
            "x.enc.scale y.dec.scale",
            "names (decoder, weight) and order",
        ),
        ("x.1.weight x.0.weight", "y.1.scale y.0.scale", "names (weight) and numbers"),
        ("a.weight b.other", "b.scale", "only one of this size"),
        (
            "north.pole.weight north.pole.extra hill.bias hill.other",
            "hill.scale north.pole.bias",
            "names (weight) and order",
        ),
    ],
)
def test_the_reason_of_a_match_is_what_both_names_have(theirs, ours, reason):
    """A weight becomes no bias, whatever modules are called and in which order they run."""
    names = [name for name in theirs.split() if name.rpartition(".")[2] not in SIZES]
    expected = sorted(zip(names, ours.split(), strict=True))
    parts = [
        [Part(n, (SIZES.get(n.rpartition(".")[2], 4),), i) for i, n in enumerate(side)]
        for side in (theirs.split(), sorted(ours.split(), reverse=True))
    ]
    matches = matching.matched(*parts)
    assert sorted((match.torch, *match.flax) for match in matches) == expected
    assert reason in {match.reason for match in matches}


def test_arrays_of_one_module_are_paired_by_name_and_then_by_order():
    def names(theirs, ours):
        sides = [[Part(f"m.{n}", (4,), 0) for n in side.split()] for side in (theirs, ours)]
        return {match.torch[2:]: match.flax[0][2:] for match in matching.matched(*sides)}

    assert names("x y z", "z w y") == {"x": "w", "y": "y", "z": "z"}
    assert names("weight scale", "gamma shift") == {"weight": "gamma", "scale": "shift"}
    assert names("b a", "d c") == {"b": "d", "a": "c"}


@pytest.mark.parametrize(("count", "lengths"), [(1, [1, 2]), (3, [1, 1, 1])])
def test_a_tensor_is_no_sum_of_arrays_that_have_tensors_of_their_own(count, lengths):
    arrays = [Part(f"{i}.kernel", (4, 4), i) for i in range(3)]
    tensors = [Part(f"{i}.weight", (4, 4), i) for i in range(count)]
    matches = matching.matched([Part("table.weight", (8, 4), 0), *tensors], arrays)
    assert sorted(len(match.flax) for match in matches) == lengths


@pytest.mark.parametrize("count", range(2, 6))
def test_an_array_is_as_many_parts_as_there_are_tensors(count):
    def stacks(name, shape, leaf, of, missing=0):
        tensors = [Part(f"{i}.{leaf}", of, i) for i in range(count - missing)]
        return matching.stacks({name: shape}, [], tensors)

    joined = count < 5  # a query, key, value and gate at most
    expected = {"a.kernel": (1, count)} if joined else {}
    assert stacks("a.kernel", (4, 4 * count), "weight", (4, 4)) == expected
    expected = {"a.bias": (0, count)} if joined else {}
    assert stacks("a.bias", (4 * count,), "bias", (4,)) == expected
    assert stacks("a.bias", (4 * count,), "weight", (4,)) == {}
    assert stacks("a.w", (count, 3, 4), "weight", (3, 4)) == {"a.w": (0, 0)}
    assert stacks("a.w", (count, 3, 4), "weight", (3, 4), missing=1) == {}
    assert stacks("a.bias", (count, 7), "bias", (7,)) == {"a.bias": (0, 0)}
    inner = {"a.kernel": (1, 0)} if joined else {}
    assert stacks("a.kernel", (7, count, 9), "weight", (7, 9)) == inner
    assert stacks("a.kernel", (7, count, 9), "weight", (7, 9), missing=1) == {}
    modules = [f"layers.{i}" for i in range(count)]
    for axis, shape in enumerate([(count, 7, 9), (7, count, 9), (7, 9, count)]):
        assert matching.stacks({"layers.w": shape}, modules, []) == {"layers": (axis, 0)}
    assert matching.stacks({"layers.w": (count + 1, 7, 9)}, modules, []) == {}


def test_scales_of_layers_are_seen_next_to_their_matrices():
    tensors = [Part(f"{i}.weight", (7, 9), i) for i in range(3)]
    tensors += [Part(f"{i}.norm.weight", (9,), i) for i in range(3)]
    arrays = {"layers.w": (3, 9, 7), "layers.scale": (3, 9), "layers.n": (2, 9)}
    assert matching.stacks(arrays, [], tensors) == {"layers.w": (0, 0), "layers.scale": (0, 0)}
    assert matching.stacks(arrays, [], tensors[:-1]) == {"layers.w": (0, 0)}
    other = [*tensors, Part("table", (27,), 0)]
    assert matching.stacks(arrays, [], other) == {"layers.w": (0, 0)}
    elsewhere = {"layers.w": (3, 9, 7), "other.scale": (3, 9)}
    assert matching.stacks(elsewhere, [], tensors)["other.scale"] != (0, 0)


def test_a_table_is_matched_with_a_matrix_though_a_scale_has_its_size():
    """T5 may have relative positions of 8 buckets and 4 heads, and norms of 32 features."""
    tensors = [Part("bias.weight", (8, 4), 0, "Embedding"), Part("norm.weight", (32,), 1)]
    parts = [Part("n.scale", (32,), 0), Part("rel.embedding", (8, 4), 1)]
    matches = {match.torch: match.flax for match in matching.matched(tensors, parts)}
    assert matches == {"bias.weight": ("rel.embedding",), "norm.weight": ("n.scale",)}


@pytest.mark.parametrize("kind", ["Embedding", "Linear", "LayerNorm"])
@pytest.mark.parametrize("leaf", ["embedding", "kernel", "scale"])
def test_a_table_and_the_matrix_of_a_product_are_unlike(kind, leaf):
    unlike = (kind, leaf) in {("Embedding", "kernel"), ("Linear", "embedding")}
    sides = Part("a.weight", (3, 4), 0, kind), Part(f"b.{leaf}", (3, 4), 0)
    assert matching._unlike(*sides) == unlike


def test_arrays_of_a_function_are_matched_by_layer_and_by_their_shapes():
    """They have no modules, so nothing is known of the order in which they run."""
    tensors, names = [], ("gate", "up", "down")
    for layer in range(3):
        shapes = [(5, 4), (5, 4), (4, 5)]
        tensors += [
            Part(f"layers.{layer}.mlp.{name}.weight", shape, len(tensors), "Linear")
            for name, shape in zip(names, shapes, strict=True)
        ]
        tensors.append(Part(f"layers.{layer}.norm.weight", (6,), len(tensors)))
    tensors.append(Part("norm.weight", (6,), 99))
    parts = [Part(f"layers.n1.{i}", (6,), 0) for i in range(3)] + [Part("norm", (6,), 0)]
    shapes = {"w1": (4, 5), "w2": (5, 4), "w3": (4, 5)}
    parts += [Part(f"layers.{w}.{i}", shape, 0) for w, shape in shapes.items() for i in range(3)]
    matches = {match.torch: match.flax[0] for match in matching.matched(tensors, parts)}
    expected = {"norm.weight": "norm"}
    for i in range(3):
        expected |= {
            f"layers.{i}.mlp.gate.weight": f"layers.w1.{i}",
            f"layers.{i}.mlp.up.weight": f"layers.w3.{i}",
            f"layers.{i}.mlp.down.weight": f"layers.w2.{i}",
            f"layers.{i}.norm.weight": f"layers.n1.{i}",
        }
    assert matches == expected


def test_the_order_of_arrays_of_a_function_says_nothing():
    tensors = [Part(f"{n}_proj.weight", (4, 4), i, "Linear") for i, n in enumerate("qkvo")]
    parts = [Part(f"w{name}", (4, 4), 0) for name in "ovkq"]
    matches = {match.torch: match.flax for match in matching.matched(tensors, parts)}
    assert matches == {f"{name}_proj.weight": (f"w{name}",) for name in "qkvo"}


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_square_matrix_has_the_layout_of_the_others_of_its_class(kind, turned):
    shapes = {"a": (4, 4), "b": (4, 6)}
    theirs = [Part(f"{name}.weight", shape, 0, kind) for name, shape in shapes.items()]
    ours = [Part(f"{n}.weight", s[::-1] if turned else s, 0) for n, s in shapes.items()]
    axes = {match.rule.axes for match in matching.matched(theirs, ours)}
    assert axes == {"o i -> i o" if turned else ""}


def test_modules_have_a_place_and_every_two_are_exchanged():
    assert sorted(search._swaps(3)) == [(0, 2, 1), (1, 0, 2), (2, 1, 0)]
    assert search._around("a.b") == ["a.b", "a", ""] and search._around("") == [""]
    names = ["a.b.w", "a.w", "c.w", "unused.w", "a.b.part.w", "point"]
    ranks = search._ranks(["a.b#0", "a#0", "a.b#1", "c#0", "point#0"], names)
    assert ranks == dict(zip(names, (0, 0, 3, 3, 0, 4), strict=True))


@pytest.mark.parametrize(("count", "orders"), [(2, 2), (3, 6), (4, 24), (5, 1 + 10), (6, 1 + 15)])
def test_up_to_four_modules_of_the_same_shapes_get_every_order_and_more_get_swaps(count, orders):
    names = [f"{name}.weight" for name in "abcdef"[:count]]
    matches = [Match(name, (name,), [Layout("", {})], "Linear", "why") for name in names]
    fields = {"matches": matches, "shapes": dict.fromkeys(names, (4, 4))}
    exchanged = stand_in(search._Search, **fields)._exchanges([[*range(count)]])
    tables = [tuple(match.flax[0] for match in table) for table in [matches, *exchanged]]
    assert len(tables) == len(set(tables)) == orders
    assert all(sorted(table) == names for table in tables)


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize("missing", [[], ["x", "y"]])
@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("off", [0.0, SAME])
def test_a_table_converts_if_all_comes_back_and_the_outputs_agree(proven, missing, back, off):
    lines = [Line(Rule("a", "b"), "why", True), Line(Rule("c", "d"), "why", proven, ("i o",))]
    proposal = Proposal(lines, missing, off, back, 1)
    assert proposal.proven == (back and proven and not missing)
    assert proposal.converts == (back and not missing and off < SAME)
    texts = [*proposal.lines()]
    assert [text[0] for text in texts[:2]] == [" ", " " if proven else "?"]
    assert ("! no tensor for x" in texts) == bool(missing) == ("no tensor for x" in proposal.code())
    exec(proposal.code(), names := dict[str, Any]())
    assert names["table"] == proposal.table
    assert proposal.summary().startswith(f"{1 + proven} of 2 rules proven, {len(missing)} array")
    unused = [Line(Unused(name), "why", name == "buffer") for name in ("buffer", "w")]
    more = dataclasses.replace(proposal, entries=[*lines, *unused])
    assert ", 1 tensor without an array; " in more.summary()
    assert "without an array" not in proposal.summary() and not more.converts


def parts(**shapes: tuple[int, ...]) -> list[Part]:
    """Return parts that run one after the other, by their names with `_` in place of `.`."""
    every = enumerate(shapes.items())
    return [Part(name.replace("_", "."), shape, i) for i, (name, shape) in every]


def test_a_packed_tensor_in_the_last_module_has_the_arrays_of_the_last_one():
    theirs = parts(a_q=(4, 4), a_k=(4, 4), a_v=(4, 4), pool_in=(12, 4))
    ours = [Part(f"{m}.{n}.w", (4, 2, 2), 3 * i) for i, m in enumerate("xy") for n in "qkv"]
    flax = {match.torch: match.flax for match in matching.matched(theirs, ours)}
    assert flax["pool.in"] == ("y.q.w", "y.k.w", "y.v.w")


def test_a_joined_bias_has_the_modules_of_its_matrix_whatever_order_arrays_are_in():
    theirs = parts(a_w=(12, 4), a_b=(12,), d_w=(12, 4), d_b=(12,))
    ours = [Part("n.scale", (4,), 0), *(Part(f"{m}.kernel", (4, 4), 0) for m in "mprstu")]
    ours += [Part(f"{m}.bias", (4,), 0) for m in "utsrpm"]
    flax = {match.torch: match.flax for match in matching.matched(theirs, ours)}
    for name in "ad":
        assert len(flax[f"{name}.w"]) == 3
        owners = [[array[0] for array in flax[f"{name}.{leaf}"]] for leaf in "wb"]
        assert owners[0] == owners[1]


def test_of_several_tensors_of_one_size_the_likeliest_has_its_arrays_first():
    theirs = parts(n_w=(8, 4), n_b=(8,), up_w=(8, 4))
    ours = parts(up_c=(4, 4), up_d=(4, 4), m_e=(4, 4), m_f=(4, 4), m_b0=(4,), m_b1=(4,))
    flax = {match.torch: match.flax for match in matching.matched(theirs, ours)}
    assert flax["up.w"] == ("up.c", "up.d") and flax["n.w"] == ("m.e", "m.f")


def test_one_module_may_hold_all_parts_of_a_matrix_and_of_its_bias():
    theirs = parts(a_w=(8, 4), a_b=(8,))
    ours = parts(m_w0=(4, 4), m_w1=(4, 4), m_b0=(4,), m_b1=(4,))
    flax = {match.torch: match.flax for match in matching.matched(theirs, ours)}
    assert flax == {"a.w": ("m.w0", "m.w1"), "a.b": ("m.b0", "m.b1")}


@pytest.mark.parametrize("shape", [(2, 1, 4, 2), (2, 4, 2)])
def test_keys_and_values_are_cut_if_they_are_as_large_as_the_queries(shape):
    """Two heads of queries and one of keys: three arrays have the size of two tensors."""
    tensors = parts(q=(4, 4), k=(2, 4), v=(2, 4), o=(4, 4))
    arrays = {"kv.w": shape, "out.w": (2, 2, 4), "q.w": (2, 4, 2)}
    assert matching.stacks(arrays, (), tensors) == {"kv.w": (0, 0)}
    assert not matching.stacks(arrays | {"kv.w": (4, 5)}, (), tensors)
    assert not matching.stacks(arrays, (), [*tensors, Part("p", (4, 4), 0)])


@pytest.mark.parametrize(("shape", "axis"), [((12, 4), 0), ((4, 12), 1), ((36, 12), 0)])
def test_a_joined_matrix_is_cut_along_its_outputs(shape, axis):
    width = min(shape)
    tensors = parts(q=(width, width), k=(width, width), v=(width, width))
    assert matching.stacks({"qkv": shape}, (), tensors) == {"qkv": (axis, 3)}


def test_arrays_of_one_module_are_in_the_order_of_their_own_numbers():
    """The number of a module around all of them says nothing."""
    tensors = parts(gate=(6, 4), up=(6, 4), down=(4, 6))
    ours = [Part(f"m_0.{n}", shape, 0) for n, shape in (("w.0", (4, 6)), ("w.1", (4, 6)))]
    ours.append(Part("m_0.z", (6, 4), 0))
    matches = {match.torch: match.flax[0] for match in matching.matched(tensors, ours)}
    assert matches == {"gate": "m_0.w.0", "up": "m_0.w.1", "down": "m_0.z"}
