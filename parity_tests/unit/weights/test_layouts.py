"""The layouts of tensors and arrays by their shapes: the usual one first, every one a rule."""

import itertools
import math

import numpy as np
import pytest

from jax_transformer.weights import Rule
from jax_transformer.weights.layouts import flattened, joined, layouts, rotary


@pytest.mark.parametrize(
    ("kind", "torch", "flax", "axes", "sizes"),
    [
        ("Linear", (6, 6), [(6, 6)], "o i -> i o", {}),
        ("Linear", (6, 4), [(4, 6)], "o i -> i o", {}),
        ("Embedding", (6, 6), [(6, 6)], "", {}),
        ("Conv1D", (6, 6), [(6, 6)], "", {}),
        ("LayerNorm", (6,), [(6,)], "", {}),
        ("", (6, 6), [(6, 6)], "", {}),
        ("Conv2d", (3, 3, 3, 3), [(3, 3, 3, 3)], "o i y x -> y x i o", {}),
        ("Conv1d", (5, 1, 4), [(4, 1, 5)], "o i x -> x i o", {}),
        ("ConvTranspose1d", (2, 3, 4), [(4, 2, 3)], "o i x -> -x o i", {}),
        ("Linear", (6, 6), [(6, 2, 3)], "(h e) d -> d h e", {}),
        ("Linear", (6, 6), [(2, 3, 6)], "d (h e) -> h e d", {}),
        ("Linear", (18, 6), [(6, 3, 2, 3)], "(h e f) d -> d h e f", {}),
        ("Conv1D", (6, 6), [(2, 3, 6)], "(h e) d -> h e d", {}),
        ("Conv2d", (8, 3, 2, 2), [(12, 8)], "d h e f -> (h e f) d", {"e": 2, "f": 2}),
        ("Conv2d", (8, 3, 1, 1), [(3, 8)], "d i 1 1 -> i d", {}),
        ("", (1, 5, 8), [(5, 8)], "1 d i -> d i", {}),
        ("MultiheadAttention", (18, 6), [(6, 6)] * 3, "(part o) i -> i o", {}),
        ("MultiheadAttention", (18,), [(2, 3)] * 3, "(part h e) -> h e", {}),
        ("Linear", (16, 8), [(8, 2, 4), (8, 1, 4), (8, 1, 4)], "(part h e) d -> d h e", {}),
        ("Conv1D", (6, 18), [(6, 2, 3)] * 3, "d (part h e) -> d h e", {}),
    ],
)
def test_the_usual_layout_of_a_kind_is_first(kind, torch, flax, axes, sizes):
    assert layouts(torch, flax, kind)[0] == (axes, sizes)


@pytest.mark.parametrize(
    ("torch", "flax", "axes", "sizes"),
    [
        ((6, 6), [(6, 6)], "", {}),
        ((6, 6), [(6, 2, 3)], "(e h) d -> d h e", {}),
        ((6, 6), [(6, 2, 3)], "d (h e) -> d h e", {}),
        ((18, 6), [(6, 6)] * 3, "(h part e) i -> i (h e)", {"h": 2}),
        ((18, 6), [(6, 2, 3)] * 3, "(h part e) d -> d h e", {}),
        ((192, 6), [(6, 64)] * 3, "(h part e) i -> i (h e)", {"h": 64}),
        ((3, 4, 6), [(6, 4)] * 3, "part o i -> i o", {}),
    ],
)
def test_others_are_among_the_layouts(torch, flax, axes, sizes):
    assert (axes, sizes) in layouts(torch, flax, "Linear")


def test_after_a_flattened_image_the_inputs_have_another_order():
    """For every number of channels that may be; each is a rule between these shapes."""
    options = flattened((5, 12), (12, 5))
    assert [layout.sizes["h"] for layout in options] == [2, 3, 4, 6]
    tensor = np.arange(60.0).reshape(5, 12)
    for layout in options:
        image = tensor.reshape(5, layout.sizes["h"], -1)
        kernel = Rule("t", "k", *layout).part(0, tensor, [(12, 5)])
        assert (kernel == image.transpose(2, 1, 0).reshape(12, 5)).all()
    for torch, flax in (((5, 12), (5, 12)), ((5, 7), (7, 5)), ((4, 3, 5), (5, 3, 4))):
        assert flattened(torch, flax) == []


@pytest.mark.parametrize(
    ("torch", "flax", "same"),
    [((12, 5), (5, 12), False), ((12, 5), (12, 5), True), ((12, 5), (5, 2, 6), False),
     ((12, 12), (12, 12), False), ((12, 12), (12, 12), True), ((12,), (12,), True),
     ((12,), (2, 6), False), ((6,), (6,), True)],
)  # fmt: skip
def test_halves_of_heads_become_pairs_of_features_and_back(torch, flax, same):
    tensor = np.random.default_rng(0).normal(size=torch)
    heads = tensor.reshape(-1, 6, *torch[1:])
    for each, order in zip(
        rotary(torch[0], 6), ([0, 3, 1, 4, 2, 5], [0, 2, 4, 1, 3, 5]), strict=True
    ):
        layout = each.layout(torch, flax, same=same)
        array = Rule("t", "k", *layout).part(0, tensor, [flax])
        expected = heads[:, order].reshape(torch)
        assert (array == (expected if same else expected.T).reshape(flax)).all()
        assert (Rule("t", "k", *layout).joined([array]) == tensor).all()


def test_heads_of_joined_tensors_come_apart_and_together():
    tensor = np.random.default_rng(0).normal(size=(24, 5))
    orders = [order for order in joined(24) if order.sizes == {"h": 4, "g": 3}]
    heads = np.arange(24).reshape(4, 3, 2).swapaxes(0, 1).ravel()
    for order, expected in zip(orders, (heads, heads.argsort()), strict=True):
        layout = order.layout((24, 5), (5, 24), same=False)
        assert (Rule("t", "k", *layout).part(0, tensor, [(5, 24)]) == tensor[expected].T).all()
        assert (order.indices(24) == expected).all()
        assert order.layout((24, 5), (5, 4, 6), same=False) is None or order.flax == "h g e"
    assert {(o.sizes["h"], o.sizes["g"]) for o in joined(12)} == {
        (2, 3),
        (4, 3),
        (2, 2),
        (3, 2),
        (6, 2),
    }


@pytest.mark.parametrize(
    ("torch", "flax", "size"),
    [((12, 5), (5, 12), 5), ((12, 5), (5, 12), 8), ((12, 5), (5, 4, 3), 6), ((12, 5, 1), (1,), 6)],
)
def test_other_tensors_have_no_halves_of_heads(torch, flax, size):
    assert not any(each.layout(torch, flax, same=False) for each in rotary(torch[0], size))


def test_halves_of_heads_that_come_first_are_seen_by_their_shape():
    layout = rotary(12, 6)[0].layout((12, 5), (2, 6, 5), same=False)
    assert layout.axes == "(h g e) i -> h (e g) i"


def test_every_layout_is_a_rule_between_these_shapes():
    """Also for lengths of 1, equal lengths, and several arrays; other sizes have none."""
    shapes = [s for n in (1, 2, 3) for s in itertools.product((1, 2, 4), repeat=n)]
    tried = 0
    for torch, flax, parts in itertools.product(shapes, shapes, (1, 2)):
        each = [flax] * parts
        for layout in layouts(torch, each, "Conv1d"):
            names = [f"a{i}" for i in range(parts)]
            assert Rule("t", names, *layout).torch_shape(each) == torch, (torch, each, layout)
            tried += 1
        if math.prod(torch) != parts * math.prod(flax):
            assert layouts(torch, each) == []
    assert tried > 1000
