"""Pairs of modules by a table and guessed, and the gradients of their parameters, by names."""

import numpy as np
import pytest

from jax_transformer.parity import pairs
from jax_transformer.parity.pairs import Called, Pair
from jax_transformer.parity.recording import ModelFunction, Recording
from jax_transformer.weights import Alias, Rule


def test_modules_that_hold_the_same_weights_are_a_pair_and_of_several_the_innermost():
    parts = tuple(f"blocks.0.attn.{name}.kernel" for name in ("q", "k", "v"))
    table = [
        Rule("enc.0.attn.qkv.weight", parts, "(part o) i -> i o"),
        Rule("enc.0.attn.out.weight", "blocks.0.attn.out.kernel"),
        Rule("enc.0.attn.distances.weight", "blocks.relative.embedding"),
        Rule("enc.0.norm.inner.weight", "blocks.0.norm.scale"),
        Rule("enc.0.norm.inner.bias", "blocks.0.norm.bias"),
        Alias("head.weight", "enc.0.norm.inner.weight"),
    ]
    inner = ["attn.q", "attn.k", "attn.v", "attn.out", "attn", "norm"]
    ours = [*(f"blocks.0.{name}" for name in inner), "blocks.0", "blocks.relative"]
    inner = ["attn.qkv", "attn.out", "attn.distances", "attn", "norm.inner", "norm"]
    theirs = [*(f"enc.0.{name}" for name in inner), "enc.0", "head"]
    expected = {"attn.out": "attn.out", "attn": "attn", "norm": "norm.inner"}
    names = {(f"blocks.0.{a}", f"enc.0.{b}") for a, b in expected.items()} | {("blocks.0", "enc.0")}
    for order in (1, -1):
        assert {*pairs.from_table(table, ours[::order], theirs[::order])} == names


def test_the_point_of_an_array_is_a_pair_of_its_tensor_s_module():
    names = {"up.weight": "w", "up.bias": "b", "unused.weight": "u", "down.weight": "d"}
    table = [Rule(*each) for each in names.items()]
    assert pairs.from_table(table, ["w", "b", "u"], ["up", "down"]) == [("w", "up")]


def called(**modules: tuple) -> list[Called]:
    return [Called(name.replace("_", "."), *each) for name, each in modules.items()]


def test_two_modules_with_equal_outputs_may_run_in_another_order():
    """One that has another shape stays alone."""
    ours = called(x=((2, 8), None, (1.0,)), y=((2, 8), None, (2.0,)), a=((3,), None))
    theirs = called(p=((2, 8), None, (2.0,)), q=((2, 8), None, (1.0,)), r=((5,), None))
    assert pairs.guessed(ours, theirs) == [("x", "q"), ("y", "p")]
    twice = called(x=((2, 8), None, (1.0,)), y=((2, 8), None, (1.0,)))
    assert len(pairs.guessed(twice, theirs[1:])) == len(pairs.guessed(theirs[1:], twice)) == 1
    similar = [
        called(abcd=((2,), None), efgh=((2,), None)),
        called(efx=((2,), None), abx=((2,), None)),
    ]
    assert len(pairs.guessed(*similar)) == 1, "names that are only similar"


@pytest.mark.parametrize(
    ("norm", "outputs", "same"),
    [((8,), ((1.0,), (2.0,)), False), ((8,), ((1.0,), (1.0,)), True), ((), ((), ()), True)],
)
def test_modules_are_no_pair_if_a_part_with_weights_is_outside_of_one(norm, outputs, same):
    shape, sizes = (2, 8), tuple(sorted((*norm, 64)))
    ours = called(m_norm=(shape, norm), m_up=(shape, (64,)), m=(shape, sizes, outputs[0]))
    theirs = called(norm=(shape, norm), t_up=(shape, (64,)), t=(shape, (64,), outputs[1]))
    inner = [("m.norm", "norm"), ("m.up", "t.up")]
    assert pairs.guessed(ours, theirs) == [*inner, *([("m", "t")] if same else [])]


def test_what_is_equal_in_one_layer_is_a_pair_in_the_others():
    shape, alike = (2, 8), (1.0,)
    ours = called(l_0_x=(shape, None, alike), l_1_x=(shape, None, (2.0,)))
    theirs = called(k_0_p=(shape, None, alike), k_0_q=(shape, None, (3.0,)))
    theirs += called(k_1_p=(shape, None, (4.0,)), k_1_q=(shape, None, (5.0,)))
    assert pairs.guessed(ours, theirs) == [("l.0.x", "k.0.p"), ("l.1.x", "k.1.p")]


def test_a_layer_may_be_cut_into_parts_on_the_other_side():
    layer, shape = called(up=((2, 8), (8, 64))), (2, 8)
    cut = called(up_w=(shape, (64,)), up_b=(shape, (8,)), up=(shape, (8, 64)))
    assert pairs.guessed(layer, cut) == pairs.guessed(cut, layer) == [("up", "up")]
    act = called(act=(shape, ())), called(act_inner=(shape, ()), act=(shape, ()))
    assert pairs.guessed(*act) == pairs.guessed(*act[::-1]) == [("act", "act")]


def test_a_module_that_is_better_elsewhere_has_that_counterpart():
    shape, alike, other = (2, 8), (1.0,), (2.0,)
    ours = called(a_x=(shape, None, other), a_y=(shape, None, alike))
    theirs = called(b_p=(shape, None, alike), c_z=(shape, None, alike))
    assert pairs.guessed(ours, theirs) == [("a.x", "b.p"), ("a.y", "c.z")]
    turned = [("b.p", "a.x"), ("c.z", "a.y")]
    assert pairs.guessed(theirs, ours) == turned


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ((2, 3, 8), (2, 3, 8), True),
        ((2, 3, 8), (3, 8, 2), True),
        ((2, 3, 8), (2, 3, 2, 4), True),
        ((2, 3, 8), (2, 2, 3, 4), True),
        ((2, 3, 8), (6, 8), True),
        ((2, 3, 8), (2, 3, 9), False),
        ((2, 3, 8), (2, 3), False),
        ((2, 3, 8), (2, 4, 6), False),
        ((2, 3, 8), (2, 3, 8, 2), False),
    ],
)
def test_outputs_may_have_other_axes_of_the_same_numbers(ours, theirs, same):
    for one, other in ((ours, theirs), (theirs, ours)):
        assert bool(pairs.guessed(called(a=(one, (8,))), called(a=(other, (8,))))) == same


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ({"a": ((2,), (4,))}, {"b": ((2,), ())}, False),
        ({"a": ((2,), ())}, {"b": ((2,), ())}, False),
        ({"a": ((2,), ())}, {"a": ((2,), ())}, True),
        ({"a": ((2,), (), (3.0,))}, {"b": ((2,), (), (3.0,))}, True),
        ({"a": ((2,), (), (3.0,))}, {"b": ((2,), (), (3.0001,))}, False),
        ({"a": ((2,), (), (3e-5,))}, {"b": ((2,), (), (4e-5,))}, False),
        ({"a": ((2,), None)}, {"b": ((2,), ())}, True),
        ({"a": ((2,), (4,))}, {"b": ((2,), None)}, True),
        ({"norm_2": ((2,), ())}, {"norm_1": ((2,), ())}, True),
        ({"a_norm_2": ((2,), ())}, {"a_norm_1": ((2,), ())}, True),
    ],
)
def test_modules_with_parameters_are_pairs_of_such_and_others_by_name_or_output(ours, theirs, same):
    assert bool(pairs.guessed(called(**ours), called(**theirs))) == same
    assert bool(pairs.guessed(called(**theirs), called(**ours))) == same


def test_numbers_in_a_name_are_places_among_the_modules_next_to_it():
    sides = [
        [Called(f"{n}.norm{i + first}", (2,), ()) for n in "ab" for i in (0, 1)] for first in (0, 1)
    ]
    expected = [(f"{n}.norm{i}", f"{n}.norm{i + 1}") for n in "ab" for i in (0, 1)]
    assert pairs.guessed(*sides) == expected


# Gradients


def getters_of(
    parameters: dict, ours: str, biases: dict | None = None
) -> dict[str, tuple[str, list[np.ndarray]]]:
    """Return PyTorch's names by those of a module's parameters, with what they have there."""
    function, recording = ModelFunction(parameters, {}, len), Recording(parameters=parameters)
    others = [Pair(name, "other") for name in biases or {} if name != ours]
    getters = pairs.gradient_getters(None, function, [Pair(ours, "t"), *others], biases or {})
    return {leaf: (name, get(recording)) for leaf, (get, name) in getters.get(ours, {}).items()}


LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "w": "weight"}
LEAVES |= {"bias": "bias", "b": "bias", "mean": "mean"}


@pytest.mark.parametrize("leaf", LEAVES)
def test_the_gradient_of_a_parameter_has_the_layouts_that_its_name_allows(leaf):
    x = np.random.default_rng(0).normal(size=(3, 4))
    parameters = {f"up.{leaf}": x, f"up.part.{leaf}": x, f"upper.{leaf}": x, "up.alpha": x}
    (known, (name, layouts)), *more = getters_of(parameters, "up").items()
    assert (known, name, more) == (leaf, f"t.{LEAVES[leaf]}", [])
    same = [] if leaf == "kernel" else [x]
    turned = [] if leaf in ("embedding", "scale", "bias") else [x.T]
    assert [each.tolist() for each in layouts] == [each.tolist() for each in (*same, *turned)]


def test_a_layer_has_its_own_part_of_the_gradient_of_all_layers():
    x = np.random.default_rng(0).normal(size=(4, 3, 5))
    for axis in range(3):
        inside = {"layers.up.bias": np.moveaxis(x, 1, axis), "layers.up.scale": np.zeros((3, 3, 3))}
        parameters = inside | {"layered.bias": np.zeros((7, 7, 7))}
        name, (layer,) = getters_of(parameters, "layers.2.up")["bias"]
        assert name == "t.bias" and (layer == x[:, 2]).all()
    stacked = {"layers.w": x, "layers.b": np.zeros((4, 3))}
    name, layouts = getters_of(stacked, "layers.2.w", {"layers.2.w": [""]})["layers.w"]
    assert name == "t.weight" and (layouts[0] == x[2]).all(), "of a point the first axis"


@pytest.mark.parametrize(
    ("biases", "known"),
    [
        ({"w": ["b"]}, True),
        ({"w": ["b"], "v": ["c"]}, True),
        ({"w": ["b", "c"]}, False),
        ({"w": ["b"], "v": ["b"]}, False),
        ({"w": [""]}, False),
        ({}, False),
    ],
)
def test_the_array_that_one_point_adds_is_its_bias(biases, known):
    parameters = {name: np.ones(3) for name in "wvbc"}
    getters = getters_of(parameters, "w", biases)
    assert {leaf: name for leaf, (name, _) in getters.items() if leaf != "w"} == (
        {"b": "t.bias"} if known else {}
    )


def test_a_rule_s_gradient_is_that_of_the_innermost_module_with_all_of_its_arrays():
    arrays = {f"block.attn.{n}.kernel": np.full((2, 2), i) for i, n in enumerate("qk")}
    arrays |= {"block.up.kernel": np.arange(4.0).reshape(2, 2)}
    table = [
        Rule("t.qk", tuple(arrays)[:2], "(part o) i -> i o"),
        Rule("t.up", "block.up.kernel", "o i -> i o"),
    ]
    paired = [Pair(name, name) for name in ("block", "block.attn.q", "block.attn", "block.up")]
    for order in (1, -1):
        function = ModelFunction(arrays, {}, len)
        getters = pairs.gradient_getters(table, function, paired[::order], {})
        names = {ours: [*leaves] for ours, leaves in getters.items()}
        assert names == {"block.attn": ["t.qk"], "block.up": ["t.up"]}
    get = getters["block.attn"]["t.qk"][0]
    assert [x.tolist() for x in get(Recording(parameters=arrays))] == [[[0, 0]] * 2 + [[1, 1]] * 2]
    assert get(Recording(parameters={"block.attn.q.kernel": np.ones((2, 2))})) == []
