"""Ports whose modules compute in float32 by themselves: faults after them are named, alone and in
pairs, and correct ports agree."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jax_transformer.parity import Report
from parity_tests.test_parity_models import arrays, compare, fill, randomized

D, HEADS, LAYERS = 8, 2, 2


class TorchRMSNorm(nn.Module):
    """The norm of transformers, in float32 whatever the input is."""

    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), eps

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class TorchAttention(nn.Module):
    """The eager attention of transformers, with a softmax in float32."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = (
            layer(x).view(b, t, HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(2, 3) * (D // HEADS) ** -0.5
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, D))


class TorchBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = TorchRMSNorm(), TorchRMSNorm(), TorchAttention()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class TorchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, D)
        self.blocks = nn.ModuleList(TorchBlock() for _ in range(LAYERS))
        self.norm, self.head = TorchRMSNorm(), nn.Linear(D, 11)

    def forward(self, ids):
        x, mask = self.embed(ids), torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Block(nnx.Module):
    def __init__(self, state, prefix, rngs):
        self.norm1, self.norm2 = (nnx.RMSNorm(D, epsilon=1e-5, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)
        for name in ("norm1", "norm2", "up", "down"):
            fill(getattr(self, name), state, f"{prefix}.{name}")
        for ours, name in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "out")):
            layer = getattr(self.attention, ours)
            kernel = state[f"{prefix}.attention.{name}.weight"].T
            layer.kernel[...] = kernel.reshape(layer.kernel.shape)
            bias = state[f"{prefix}.attention.{name}.bias"]
            layer.bias[...] = bias.reshape(layer.bias.shape)
        self.tanh, self.causal, self.post_norm = False, True, False

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
        x = x + self.attention(self.norm1(x), mask=mask if self.causal else None)
        y = x if self.post_norm else self.norm2(x)
        y = self.down(jax.nn.gelu(self.up(y), approximate=self.tanh))
        return self.norm2(x + y) if self.post_norm else x + y


class Model(nnx.Module):
    def __init__(self, state):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, D, dtype=jnp.float32, rngs=rngs)
        self.embed.embedding[...] = state["embed.weight"]
        self.blocks = nnx.List([Block(state, f"blocks.{i}", rngs) for i in range(LAYERS)])
        self.norm = nnx.RMSNorm(D, epsilon=1e-5, dtype=jnp.float32, rngs=rngs)
        self.head = nnx.Linear(D, 11, rngs=rngs)
        fill(self.norm, state, "norm")
        fill(self.head, state, "head")

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


RULES = {name: name for name in ("embed", "norm", "head", "blocks.{i}")}
RULES |= {
    f"blocks.{{i}}.{name}": f"blocks.{{i}}.{name}"
    for name in ("norm1", "norm2", "attention", "up", "down")
}


def report_on(*changes: Callable[[Model], None], seed: int = 0, **options: Any) -> Report:
    torch.manual_seed(seed)
    theirs = randomized(TorchModel(), seed)
    ours = Model(arrays(theirs))
    for change in changes:
        change(ours)
    ids = np.random.default_rng(seed).integers(0, 11, (2, 5))
    return compare(ours, theirs, ids, RULES, gradients=False, **options)


def epsilon(model: Model) -> None:
    model.blocks[1].norm2.epsilon = 1e-6


def scale(model: Model) -> None:
    query = model.blocks[1].attention.query.kernel
    query[...] = query[...] * 2**0.5


def transposed(model: Model) -> None:
    kernel = model.blocks[0].attention.key.kernel
    kernel[...] = kernel[...].reshape(D, D).T.reshape(kernel.shape)


def heads(model: Model) -> None:
    for name in ("query", "key"):
        kernel = getattr(model.blocks[0].attention, name).kernel
        kernel[...] = jnp.moveaxis(kernel[...].reshape(D, -1, HEADS), 1, 2)


def activation(model: Model) -> None:
    model.blocks[0].tanh = True


def mask(model: Model) -> None:
    model.blocks[1].causal = False


def bias(model: Model) -> None:
    model.blocks[0].up.bias[...] *= 0


def placement(model: Model) -> None:
    model.blocks[1].post_norm = True


def softmax(model: Model) -> None:
    def attention(query, key, value, *, mask, **_):
        scores = jnp.einsum("bqhe,bkhe->bhqk", query / (D // HEADS) ** 0.5, key)
        scores = scores if mask is None else jnp.where(mask, scores, -1e30)
        scores = scores.astype(jnp.bfloat16)
        return jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores).astype(value.dtype), value)

    model.blocks[1].attention.attention_fn = attention


FAULTS = {
    epsilon: "blocks.1.norm2",
    scale: "blocks.1.attention",
    transposed: "blocks.0.attention",
    heads: "blocks.0.attention",
    activation: "blocks.0",
    mask: "blocks.1.attention",
    bias: "blocks.0.up",
    placement: "blocks.1",
    softmax: "blocks.1.attention",
}


def named(report: Report) -> set[str]:
    return {entry.ours for entry in report.faults}


@pytest.mark.parametrize("seed", [0, pytest.param(range(1, 20), marks=pytest.mark.slow)])
def test_a_correct_port_agrees_in_float64(seed):
    for each in np.atleast_1d(seed):
        report = report_on(seed=int(each))
        assert report.agrees and report.result.times < 30
        assert not report.faults and report.own_result is None
    dtypes = {entry.ours: entry.narrow for entry in report.entries}
    assert (dtypes["blocks.0.attention"], dtypes["blocks.0.up"]) == ("float32", "")
    assert any(line.startswith("float32 inside: embed, blocks.0.norm1") for line in report.lines())


class Outside(nnx.Module):
    """Two layers, with a softmax between them or code after them in a dtype of its own."""

    def __init__(self, layers, dtypes: dict[str, Any]):
        self.layers, self.dtypes = nnx.List(layers), dtypes

    def __call__(self, x):
        y = self.layers[0](x)
        between, after = (self.dtypes.get(name, y.dtype) for name in ("between", "after"))
        y = jax.nn.softmax(y.astype(between), axis=-1).astype(y.dtype)
        return self.layers[1](y).astype(after).astype(y.dtype)


@pytest.mark.parametrize(
    ("dtypes", "place"),
    [
        ({"between": jnp.bfloat16}, "the input of layers.1 is the first that differs, by"),
        ({"after": jnp.float16}, "the result is the first that differs, by"),
        ({"between": jnp.float32}, ""),
    ],
    ids=["between", "after", "float32"],
)
def test_code_in_16_bits_outside_of_all_modules_is_a_difference(dtypes, place):
    theirs = randomized(nn.Sequential(nn.Linear(D, D), nn.Softmax(dim=-1), nn.Linear(D, 3)))
    rngs, state = nnx.Rngs(0), arrays(theirs)
    ours = Outside([nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, 3, rngs=rngs)], dtypes)
    for i, layer in enumerate(ours.layers):
        fill(layer, state, f"{2 * i}")
    x = np.random.default_rng(0).normal(size=(3, D))
    rules = {"0": "layers.0", "2": "layers.1"}
    report = compare(ours, theirs, [x.astype(np.float32)], rules)
    assert report.agrees is not bool(place) and not report.faults
    dtype = "float16" if "after" in dtypes else "bfloat16"
    begin = f"code outside of the paired modules computes in {dtype} in the Flax model only, and "
    assert not place or report.summary().startswith(begin + place)
    assert compare(ours, theirs, [x], rules, dtype="bfloat16").agrees


@pytest.mark.parametrize("fault", [epsilon, activation, softmax])
def test_a_fault_among_them_is_the_only_one(fault):
    report = report_on(fault, seed=3)
    assert named(report) == {FAULTS[fault]} and report.first_fault is report.faults[0]
    assert "by themselves" not in "".join(report.lines())


PAIRS = [*itertools.combinations(FAULTS, 2)]
QUICK = [(epsilon, transposed), (scale, activation), (heads, placement), (mask, bias)]


@pytest.mark.parametrize(
    "faults", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in PAIRS)]
)
def test_of_two_faults_both_are_named_and_nothing_else(faults):
    report = report_on(*faults, seed=PAIRS.index(faults) if faults in PAIRS else 1)
    expected = {FAULTS[fault] for fault in faults}
    assert named(report) == expected and report.first_fault.ours in expected
    lines = [*report.lines()]
    if len(expected) == 2:
        assert "2 parts differ by themselves:" in lines
        assert report.summary().endswith("; 1 other module differs by itself")
    assert len(report.to_data()["faults"]) == len(expected)


class TorchRotary(nn.Module):
    """Rotary positions of transformers: frequencies are stored in float32."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(0, D, 2).float() / D))

    def forward(self, x):
        angles = torch.arange(x.shape[1]).float()[:, None] * self.frequencies.float()
        return x * torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)


class Rotary(nnx.Module):
    def __call__(self, x):
        frequencies = 10000.0 ** -(jnp.arange(0, D, 2, jnp.float32) / D)
        angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
        return x * jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1).astype(x.dtype)


POSITIONS = 300


def sines(library: Any, dtype: Any = None) -> Any:
    dtype = dtype or library.float32
    rates = 10000.0 ** -(library.arange(0, D, 2, dtype=dtype) / D)
    angles = library.arange(POSITIONS, dtype=dtype)[:, None] * rates
    return library.concatenate([library.sin(angles), library.cos(angles)], -1)


class TorchComputed(nn.Module):
    def forward(self, x):
        return x * sines(torch)[: x.shape[1]].to(x.dtype)


class TorchTable(nn.Module):
    """Positions as in transformers' M2M100."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", sines(torch), persistent=False)

    def forward(self, x):
        return x * self.table[: x.shape[1]]


class TorchFrozen(nn.Module):
    """Positions as in transformers' RoFormer, which a Flax model computes without a module."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(POSITIONS, D, _weight=sines(torch), _freeze=True)

    def forward(self, x):
        return x * self.positions(torch.arange(x.shape[1]))


class Computed(nnx.Module):
    def __call__(self, x):
        return x * jnp.asarray(sines(np, np.float64), x.dtype)[: x.shape[1]]


class Table(nnx.Module):
    def __init__(self):
        self.table = nnx.Variable(jnp.asarray(sines(torch).numpy()))

    def __call__(self, x):
        return x * self.table[: x.shape[1]]


class Rotated(nnx.Module):
    def __init__(self, state, rotary):
        self.rotary, self.linear = rotary, nnx.Linear(D, D, rngs=nnx.Rngs(0))
        fill(self.linear, state, "1")

    def __call__(self, x):
        return self.linear(self.rotary(x))


@pytest.mark.parametrize("length", [9, POSITIONS])
@pytest.mark.parametrize(
    ("stored", "computed"),
    [
        (TorchRotary, Rotary),
        (TorchTable, Computed),
        (TorchFrozen, Computed),
        (TorchComputed, Table),
    ],
)
def test_constants_that_one_model_stores_in_float32_are_no_faults(stored, computed, length):
    theirs = nn.Sequential(stored(), randomized(nn.Linear(D, D)))
    x = np.random.default_rng(0).standard_normal((2, length, D))
    rules = {"0": "rotary", "1": "linear"}
    report = compare(Rotated(arrays(theirs), computed()), theirs, x, rules)
    assert report.agrees and report.result.times > 1e3
    assert report.entries[0].narrow == "float32"
    assert report.notes == ("a constant of rotary is rounded to float32 in one of the models only",)
    wrong = Rotated(arrays(theirs), computed())
    wrong.linear.kernel[...] *= 1 + 1e-6
    report = compare(wrong, theirs, x, rules)
    assert not report.agrees and named(report) == {"linear"}


def test_a_parameter_that_is_not_trained_is_not_taken_for_such_a_constant():
    theirs = randomized(nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)))
    theirs[0].requires_grad_(False)
    state = arrays(theirs)
    ours = nnx.Sequential(*(nnx.Linear(D, D, rngs=nnx.Rngs(0)) for _ in theirs))
    for name, layer in zip(("0", "1"), ours.layers, strict=True):
        fill(layer, state, name)
    x = np.random.default_rng(0).standard_normal((2, D))
    rules = {"0": "layers.0", "1": "layers.1"}
    assert compare(ours, theirs, x, rules).result.times < 10
    kernel = np.asarray(ours.layers[0].kernel, np.float64) * (1 + 1e-8)
    ours.layers[0].kernel = nnx.Param(jnp.asarray(kernel))
    report = compare(ours, theirs, x, rules)
    assert not report.agrees and named(report) == {"layers.0"}


class TorchScaled(nn.Module):
    def __init__(self, numbers: np.ndarray, persistent: bool):
        super().__init__()
        self.register_buffer("numbers", torch.tensor(numbers), persistent=persistent)

    def forward(self, x):
        return x * self.numbers


class Scaled(nnx.Module):
    def __init__(self, numbers: np.ndarray, kind: type[nnx.Variable]):
        self.numbers = kind(jnp.asarray(numbers))

    def __call__(self, x):
        return x * self.numbers[...]


@pytest.mark.parametrize("factors", [(1, 1 + 1e-9), (1 + 1e-9, 1)])
@pytest.mark.parametrize(
    ("numbers", "persistent"),
    [([3.0, 0.5, 300.0, 70000.0], False), ([0.1, 0.2, 0.3, 0.4], True)],
    ids=["exact numbers", "numbers of the state_dict"],
)
def test_a_difference_of_other_constants_is_a_fault(numbers, persistent, factors):
    ours, theirs = (np.array(numbers, np.float32) * np.float64(factor) for factor in factors)
    model = nnx.Dict(scaled=Scaled(ours, nnx.BatchStat if persistent else nnx.Variable))
    options: dict[str, Any] = {"call_flax": lambda model, x: model.scaled(x), "gradients": False}
    x = np.random.default_rng(0).standard_normal((2, 4))
    module = nn.Sequential(TorchScaled(theirs, persistent))
    assert not compare(model, module, x, {"0": "scaled"}, **options).agrees


@pytest.mark.slow
def test_transformers_m2m100_agrees_as_it_is():
    pytest.importorskip("transformers")
    from parity_tests import huggingface

    both = huggingface.pair("m2m_100", dtype=torch.float32)

    def call_torch(module, source, target):
        return module(**huggingface.inputs(both.config, source.numpy()), decoder_input_ids=target)

    batch = huggingface.batch(both.config)
    report = compare(both.ours, both.theirs, batch, gradients=False, call_torch=call_torch)
    assert report.agrees and report.result.times > 1e3
    assert [entry.ours for entry in report.entries if entry.narrow] == ["encoder", "decoder"]


# What cannot be run in float64


class Linear(nnx.Module):
    """A linear layer, and a loop that carries float32 and int32: JAX refuses that for inputs of
    float64, and of int64."""

    def __init__(self, state, dtype):
        self.layer, self.dtype = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), dtype
        fill(self.layer, state, "0")

    def __call__(self, x):
        x = self.layer(x)
        first = jnp.zeros(x.shape, self.dtype or x.dtype), jnp.int32(0) if self.dtype else 0

        def step(i, carry):
            return carry[0] + jnp.tanh(x) * (0.7 * i), carry[1] + jnp.arange(2).sum()

        return jax.lax.fori_loop(0, 3, step, first)[0]


class Loop(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2.1


class OnlyFloat32(Loop):
    def forward(self, x):
        assert x.dtype == torch.float32, "this kernel has no float64"
        return super().forward(x)


class Bits(Loop):
    """Reads a number from its bits."""

    def forward(self, x):
        one = torch.tensor([0x3F800000], dtype=torch.int32).view(torch.float32)
        return super().forward(x * one)


NOT_TRACED = "the JAX model cannot be traced in float64 (TypeError: scan body function carry"
NOT_WIDE = "the PyTorch model is not run in float64 everywhere (TypeError: the bits of"
NOT_RUN = "compared in float32: float64 fails with AssertionError: this kernel has no float64"


@pytest.mark.parametrize(
    ("carry", "loop", "note", "dtype"),
    [
        (jnp.float32, Loop, NOT_TRACED, "float64"),
        (None, Bits, NOT_WIDE, "float64"),
        (None, OnlyFloat32, NOT_RUN, "float32"),
    ],
)
def test_models_that_do_not_run_in_float64_are_compared_with_a_note(carry, loop, note, dtype):
    theirs = randomized(nn.Sequential(nn.Linear(3, 3), loop()))
    ours, x = Linear(arrays(theirs), carry), np.random.default_rng(0).standard_normal((4, 3))
    with jax.enable_x64(False):
        report = compare(ours, theirs, x, {"0": "layer"})
        report.check()
        assert report.result.wide.dtype == dtype and report.result.times < 30
        ours.layer.kernel[...] = ours.layer.kernel[...] * (1 + 1e-3)
        report = compare(ours, theirs, x, {"0": "layer"})
    assert named(report) == {"layer"}
    assert any(each.startswith(note) for each in report.notes)
