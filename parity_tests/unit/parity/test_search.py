"""Steps of the search for a weight table, on tensors by name."""

from types import SimpleNamespace

import numpy as np

from jax_transformer.parity import search
from jax_transformer.parity.matching import Match
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
