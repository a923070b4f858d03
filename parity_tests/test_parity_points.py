"""Gradients of functions of plain arrays, whose biases lie beside other arrays."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.parity import compare
from parity_tests.unit.parity.test_points import X, arrays, moments


class Theirs(torch.nn.Module):
    """Layers of an attention, a feed-forward and a norm."""

    def __init__(self):
        super().__init__()
        names = {each: torch.nn.Linear(4, 4) for each in ("q", "k", "v", "o")}
        names |= {"up": torch.nn.Linear(4, 6), "down": torch.nn.Linear(6, 4)}
        names["norm"] = torch.nn.LayerNorm(4)
        layers = [torch.nn.ModuleDict(copy.deepcopy(names)) for _ in range(2)]
        self.layers = torch.nn.ModuleList(layers)
        random = np.random.default_rng(0)
        for parameter in self.parameters():
            parameter.data = torch.from_numpy(random.normal(size=parameter.shape))

    def forward(self, x):
        for each in self.layers:
            q, k, v = (each[n](x).unflatten(-1, (2, 2)).transpose(1, 2) for n in ("q", "k", "v"))
            mixed = (q @ k.mT).softmax(-1) @ v
            x = x + each["o"](mixed.transpose(1, 2).flatten(2))
            x = each["norm"](x + each["down"](torch.tanh(each["up"](x))))
        return x


def flat(state) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each layer in one dict, the heads' with an axis of their own."""
    layers = []
    for i in range(2):
        names = {"wq": "q", "wk": "k", "wv": "v", "wo": "o", "w1": "up", "w2": "down"}
        p = {ours: state[f"layers.{i}.{name}.weight"].numpy().T for ours, name in names.items()}
        p |= {f"b{n[1:]}": state[f"layers.{i}.{name}.bias"].numpy() for n, name in names.items()}
        p |= {
            n: p[n].reshape(4, 2, 2) if n[0] == "w" else p[n].reshape(2, 2)
            for n in p
            if n[1] in "qkv"
        }
        norm = {n: state[f"layers.{i}.norm.{n}"].numpy() for n in ("weight", "bias")}
        layers.append({**p, "g": norm["weight"], "b": norm["bias"]})
    return layers


def flat_layer(x, p):
    q, k, v = (
        jnp.einsum("btd,dhe->bhte", x, p[f"w{n}"]) + p[f"b{n}"][:, None] for n in ("q", "k", "v")
    )
    mixed = jnp.einsum("bhqk,bhke->bqhe", jax.nn.softmax(jnp.einsum("bhqe,bhke->bhqk", q, k)), v)
    x = x + (mixed.reshape(x.shape) @ p["wo"] + p["bo"])
    x = x + (jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"])
    centred, variance = moments(x)
    return p["g"] * (centred / jnp.sqrt(variance)) + p["b"]


def loop(p, x, layer=flat_layer):
    for each in p:
        x = layer(x, each)
    return x


def sliced(p, x, layer=flat_layer):
    return loop([jax.tree.map(lambda array, i=i: array[i], p) for i in range(2)], x, layer)


def scanned(p, x, layer=flat_layer):
    return jax.lax.scan(lambda x, each: (layer(x, each), None), x, p)[0]


@pytest.mark.parametrize("run", [loop, sliced, scanned])
def test_gradients_of_biases_beside_other_arrays_are_compared(run):
    theirs = Theirs()
    layers = flat(theirs.state_dict())
    p = layers if run is loop else jax.tree.map(lambda *each: np.stack(each), *layers)
    with jax.numpy_rank_promotion("allow"):
        report = compare((run, p), theirs, X)
        assert report.agrees, report.summary()
        assert "modules and gradients of 28 of 28 parameters" in report.summary()
        modules = {"bq": "q", "b1": "up", "b": "norm"}
        for name, module in modules.items() if run is scanned else [("b1", "up")]:

            def frozen(x, p, name=name):
                return flat_layer(x, p | {name: jax.lax.stop_gradient(p[name])})

            report = compare((lambda p, x, f=frozen: run(p, x, f), p), theirs, X)
            fault = report.first_gradient_fault
            assert report.same_outputs and fault is not None, name
            assert fault.theirs == f"layers.1.{module}", report.summary()


@pytest.mark.parametrize("nested", [False, True])
def test_more_layers_than_features_are_stacked_along_the_first_axis(nested):
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(6)]
    weights = [[x.detach().numpy() for x in layer[0].parameters()] for layer in layers]
    p = {"w": np.stack([w.T for w, _ in weights]), "b1": np.stack([b for _, b in weights])}

    def run(p, x):
        p = p["layers"] if nested else p
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["w"] + w["b1"]), None), x, p)[0]

    with jax.numpy_rank_promotion("allow"):
        report = compare((run, {"layers": p} if nested else p), torch.nn.Sequential(*layers), X)
    assert report.agrees, report.summary()
    assert "gradients of 12 of 12 parameters" in report.summary()


def two(first, second):
    """Return a model of two products with these functions after them."""
    return lambda p, x: second(jnp.tanh(first(jnp.tanh(x) @ p["w1"], p)) @ p["w2"], p)


def plus_b1(y, p):
    return y + p["b1"]


def plus_b2(y, p):
    return y + p["b2"]


def in_scan(p, x):
    ws = jnp.stack([p["w1"], p["w2"]])
    return jax.lax.scan(lambda x, w: (jnp.tanh(x) @ w + p["b1"], None), x, ws)[0]


def of_one_weight(first):
    return lambda p, x: two(first, plus_b2)(p | {"w2": p["w1"]}, x)


ADDED = {
    "subtracted": (two(lambda y, p: y - p["b1"], plus_b2), {"b1": -1}, ["b2"]),
    "doubled": (two(lambda y, p: y + 2 * p["b1"], plus_b2), {"b1": 2}, ["b2"]),
    "twice": (two(plus_b1, lambda y, p: plus_b2(y, p) + 0 * p["b1"]), {}, ["b2"]),
    "one bias": (two(plus_b1, plus_b1), {"b2": "b1"}, []),
    "one bias in a scan": (in_scan, {"b2": "b1"}, []),
    "one weight": (of_one_weight(plus_b1), {"w2": "w1"}, []),
    "one weight, one bias": (of_one_weight(lambda y, p: p["b1"] - (-y)), {"w2": "w1"}, []),
}
"""Models, what their arrays are in PyTorch, and the arrays with the gradient of a bias."""


@pytest.mark.parametrize(("run", "changes", "compared"), ADDED.values(), ids=ADDED)
def test_only_an_array_that_is_added_once_has_the_gradient_of_a_bias(run, changes, compared):
    p = arrays(w1=(4, 4), b1=4, w2=(4, 4), b2=4)
    linear = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    theirs = torch.nn.Sequential(torch.nn.Tanh(), linear[0], torch.nn.Tanh(), linear[1])
    for name in p:
        change = changes.get(name, 1)
        array = p[change] if isinstance(change, str) else change * p[name]
        layer, kind = linear[int(name[1]) - 1], {"w": "weight", "b": "bias"}[name[0]]
        setattr(layer, kind, torch.nn.Parameter(torch.from_numpy(array.T.copy())))
    if changes.get("w2") == "w1":
        linear[1].weight = linear[0].weight
    with jax.numpy_rank_promotion("allow"):
        report = compare((run, p), theirs, X)
    assert report.agrees, report.summary()
    names = [name for entry in report.entries for name in entry.parameters]
    assert [name for name in names if name.startswith("b")] == compared


class Embedded(torch.nn.Module):
    """Tokens and positions, a norm, a softmax and a product; positions return their rows alone."""

    def __init__(self, dtype: torch.dtype | None = None):
        super().__init__()
        self.dtype = dtype
        self.tokens, self.positions = torch.nn.Embedding(9, 4), torch.nn.Embedding(6, 4)
        self.norm, self.up = torch.nn.LayerNorm(4, 1e-5), torch.nn.Linear(4, 6)
        torch.nn.init.normal_(self.norm.weight)

    def forward(self, ids):
        rows = self.positions(torch.arange(ids.shape[1]).expand(ids.shape))
        x = self.norm(self.tokens(ids) + rows)
        return self.up(x.to(self.dtype or x.dtype).softmax(-1).to(x.dtype))


def report_of(theirs, dtype=None, offset=0, epsilon=1e-5, factor=1.0):
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    p = {n: state[f"{n}.weight"] for n in ("tokens", "positions")}
    p["norm"] = {n: state[f"norm.{n}"] for n in ("weight", "bias")}
    p["up"] = {"kernel": factor * state["up.weight"].T, "bias": state["up.bias"]}

    def ours(p, ids):
        x = p["tokens"][ids] + p["positions"][offset : ids.shape[1] + offset]
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + epsilon)
        x = x * p["norm"]["weight"] + p["norm"]["bias"]
        weights = jax.nn.softmax(x.astype(dtype or x.dtype)).astype(x.dtype)
        return weights @ p["up"]["kernel"] + p["up"]["bias"]

    ids = np.random.default_rng(0).integers(0, 9, (3, 5))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return compare((ours, p), theirs, ids, gradients=False)


@pytest.mark.parametrize(
    ("fault", "module"),
    [
        ({"epsilon": 1e-6}, "norm"),
        ({"factor": -1.0}, "up"),
        ({"offset": 1}, "positions"),
        ({"dtype": jnp.bfloat16}, "up"),
    ],
)
def test_rows_that_are_added_are_no_fault_of_another_one(fault, module):
    torch.manual_seed(0)
    report = report_of(Embedded(), **fault)
    assert (report.first_fault or report.faults[0]).ours == module


def test_code_in_16_bits_is_a_fault_in_one_model_only():
    """Code outside of modules, and before a point, may be that of either."""
    torch.manual_seed(0)
    assert report_of(Embedded()).agrees
    assert not report_of(Embedded(), dtype=jnp.bfloat16).agrees
    assert report_of(Embedded(torch.bfloat16), dtype=jnp.bfloat16).agrees
