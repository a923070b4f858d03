"""Optimizer steps of strangers' models: right ports train alike, and faults are named by step and
parameter."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from torch import nn

import jax_transformer as jt
from jax_transformer import weights
from jax_transformer.errors import ConfigError, DifferentError
from jax_transformer.parity.steps_report import TrainingReport
from jax_transformer.weights import Alias, Rule, Stacked
from parity_tests.test_parity_models import randomized

IDS = np.random.default_rng(0).integers(0, 11, (3, 7))
HEADS = {"h": 2}
PARTS = ("query", "key", "value")


class Theirs(nn.Module):
    """Scores of tokens from an attention, with one table for ids and scores."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lm_head = nn.Linear(8, 11)
        self.lm_head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        return self.lm_head(self.norm(x + self.attn(x, x, x, need_weights=False)[0]))


class Ours(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(11))

    def __call__(self, ids):
        x = self.embed(ids)
        return self.embed.attend(self.norm(x + self.attention(x))) + self.bias[...]


kernels, biases = ([f"attention.{part}.{leaf}" for part in PARTS] for leaf in ("kernel", "bias"))
TABLE = [
    *weights.embedding("tokens", "embed"),
    Rule("attn.in_proj_weight", kernels, "(part h e) d -> d h e", HEADS),
    Rule("attn.in_proj_bias", biases, "(part h e) -> h e", HEADS),
    Rule("attn.out_proj.weight", "attention.out.kernel", "d (h e) -> h e d", HEADS),
    Rule("attn.out_proj.bias", "attention.out.bias"),
    *weights.layer_norm("norm", "norm"),
    Alias("lm_head.weight", "tokens.weight"),
    Rule("lm_head.bias", "bias"),
]


def trained(ours: Any, theirs: nn.Module, batch: Any, table: Any, **options: Any) -> TrainingReport:
    """The report, with promotion allowed, which Flax's layers and Optax need."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jt.parity.compare_training(ours, theirs, batch, table, **options)


@pytest.fixture
def theirs() -> Theirs:
    return randomized(Theirs())


def optimizers(flax: optax.GradientTransformation, kind: Any, **options: Any) -> dict[str, Any]:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        return kind(module.parameters(), **options)

    return {"optimizer_flax": flax, "optimizer_torch": make}


def test_a_right_port_trains_alike_and_everything_is_counted(theirs):
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    ours = Ours()
    report = trained(ours, theirs, IDS, TABLE)
    report.check()
    assert report.summary().startswith("the models train alike for 3 steps: largest difference")
    assert report.summary().endswith("; compared: the loss, 9 gradients and 9 parameters")
    lines = [*report.lines()]
    assert len(lines) == 5 and max(map(len, lines[:4])) <= 100
    assert [line.split()[:2] for line in lines[1:4]] == [
        [str(i), f"{step.loss.wide.ours:.8g}"] for i, step in enumerate(report.steps, 1)
    ]
    data = json.loads(report.to_json())
    assert data["agrees"] and data["first_fault"] is None and len(data["steps"]) == 3
    for step, written in zip(report.steps, data["steps"], strict=True):
        for kind, measured in (("gradients", step.gradients), ("parameters", step.parameters)):
            assert written[kind] == {name: each.to_data() for name, each in measured.items()}
    losses = [step.loss.wide.theirs for step in report.steps]
    assert losses == sorted(losses, reverse=True) and losses[2] < losses[0]
    assert all(torch.equal(before[name], x) for name, x in theirs.state_dict().items())
    assert not np.any(ours.bias[...])
    assert report.steps[0].loss.narrow.dtype == "float32"
    assert 0 < report.steps[0].loss.error_ours < 1e-5


def test_without_a_table_one_is_proposed(theirs):
    report = trained(Ours(), theirs, IDS, None, steps=1)
    report.check()
    assert report.notes == ("the weight table is proposed",)
    assert report.summary().endswith("; compared: the loss, 9 gradients and 9 parameters")
    wrong = Ours()
    wrong.norm.epsilon = 1e-3
    assert not trained(wrong, theirs, IDS, None, steps=1).agrees


@pytest.mark.parametrize(
    "options",
    [
        optimizers(
            optax.adamw(1e-3, weight_decay=1e-2, eps=1e-15), torch.optim.AdamW, lr=1e-3, eps=1e-15
        ),
        {
            "call_flax": lambda model, ids: 1e4 * (model(ids) ** 2).sum(),
            "call_torch": lambda module, ids: 1e4 * module(ids).square().sum(),
        },
    ],
    ids=["tiny epsilon", "large loss"],
)
def test_gradients_that_are_rounding_are_no_fault(theirs, options):
    """Adam makes full steps of them: a bias of keys changes nothing."""
    trained(Ours(), theirs, IDS, TABLE, steps=2, **options).check()


class Layer(nnx.Module):
    """A linear layer with faults to choose from."""

    def __init__(self, factor: float = 1.0, kind: type[nnx.Variable] = nnx.Param):
        self.kernel, self.bias = kind(jnp.zeros((4, 4))), nnx.Param(jnp.zeros(4))
        self.factor = factor

    def __call__(self, x):
        kernel = self.kernel[...]
        if self.factor != 1:
            kernel = self.factor * kernel + (1 - self.factor) * jax.lax.stop_gradient(kernel)
        return x @ kernel + self.bias[...]


class Two(nnx.Module):
    def __init__(self, first: Layer | None = None, second: Layer | None = None):
        self.first, self.second = first or Layer(), second or Layer()

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


X = np.random.default_rng(1).standard_normal((5, 4))
LAYERS = [*weights.linear("0", "first"), *weights.linear("2", "second")]
TX = optax.adamw(1e-3, weight_decay=1e-2)


def two() -> nn.Sequential:
    return randomized(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))


def of_adamw(flax: optax.GradientTransformation) -> dict[str, Any]:
    return optimizers(flax, torch.optim.AdamW, lr=1e-3)


def kernels_only(parameters: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, parameters)


FAULTS = {
    "another epsilon": (
        Two,
        of_adamw(optax.adamw(1e-3, weight_decay=1e-2, eps=1e-7)),
        (1, "parameter", {"first.kernel | 0.weight", "second.bias | 2.bias"}),
    ),
    "weight decay is forgotten": (
        Two,
        of_adamw(optax.adam(1e-3)),
        (1, "parameter", {"first.kernel | 0.weight", "second.bias | 2.bias"}),
    ),
    "no weight decay of biases": (
        Two,
        of_adamw(optax.adamw(1e-3, weight_decay=1e-2, mask=kernels_only)),
        (1, "parameter", {"first.bias | 0.bias", "second.bias | 2.bias"}),
    ),
    "another momentum": (
        Two,
        optimizers(optax.sgd(1e-2, momentum=0.9), torch.optim.SGD, lr=1e-2, momentum=0.8),
        (2, "parameter", {"first.kernel | 0.weight", "second.bias | 2.bias"}),
    ),
    "a scaled gradient": (
        lambda: Two(Layer(1 + 1e-6)),
        {},
        (1, "gradient", {"first.kernel | 0.weight"}),
    ),
    "a gradient that is stopped": (
        lambda: Two(second=Layer(0.0)),
        {},
        (1, "gradient", {"second.kernel | 2.weight"}),
    ),
    "a kernel that is no parameter": (
        lambda: Two(Layer(kind=nnx.BatchStat)),
        {},
        (1, "parameter", {"first.kernel | 0.weight"}),
    ),
    "updates that are gradients": (
        Two,
        of_adamw(optax.masked(TX, kernels_only)),
        (1, "parameter", {"first.bias | 0.bias", "second.bias | 2.bias"}),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_step_and_parameter(fault):
    make, options, (step, kind, names) = FAULTS[fault]
    report = trained(make(), two(), X, LAYERS, **options)
    first = report.first_fault
    assert (first.step, first.kind) == (step, kind)
    everything = {"first.kernel | 0.weight", "first.bias | 0.bias"}
    everything |= {"second.kernel | 2.weight", "second.bias | 2.bias"}
    alone = fault not in ("another epsilon", "weight decay is forgotten") and step == 1
    assert {*first.differing} == (names if alone else everything)
    name, worst = next(iter(first.differing.items()))
    assert worst.times == max(each.times for each in first.differing.values())
    assert report.summary().startswith(f"{name}: ") and f"of step {step} agree" in report.summary()
    assert worst.bound < worst.wide.max_abs and f"bound is {worst.bound:.3g}" in report.summary()
    with pytest.raises(DifferentError):
        report.check()
    data = json.loads(report.to_json())["first_fault"]
    assert data == {"step": step, "kind": kind, "names": [*first.differing]}


def test_other_weights_differ_in_the_loss_of_the_first_step():
    report = trained(Two(), two(), X, LAYERS, call_flax=lambda model, x: model(x) + 1e-6)
    assert report.summary().startswith("step 1: the loss differs, by ")
    assert report.summary().endswith("; compare the models module by module first")


class Tied(nn.Module):
    """Two layers that hold one matrix."""

    def __init__(self, tied: bool = True):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        nn.init.normal_(self.one.bias)
        if tied:
            self.two.weight = self.one.weight
        else:
            self.two.load_state_dict({"weight": self.one.weight})

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def call_tied(model: Layer, x: jax.Array) -> jax.Array:
    return jnp.tanh(model(x)) @ model.kernel[...]


def call_twice(parameters: dict[str, Any], x: jax.Array) -> jax.Array:
    x = jnp.tanh(x @ parameters["one"] + parameters["bias"])
    return x @ parameters["two"]


ONE = [Rule("one.weight", "kernel", "o i -> i o"), Rule("one.bias", "bias")]
SEPARATE = {"one": np.zeros((4, 4)), "two": np.zeros((4, 4)), "bias": np.zeros(4)}
COPIES = [Rule("one.weight", ["one", "two"], "o i -> i o"), Rule("one.bias", "bias")]


def test_tied_tensors_share_their_gradient():
    alias, options = Alias("two.weight", "one.weight"), {"call_flax": call_tied}
    trained(Layer(), Tied(), X, [*ONE, alias], **options).check()
    fault = trained(Layer(), Tied(tied=False), X, [*ONE, alias], **options).first_fault
    assert (fault.step, fault.kind) == (1, "gradient")
    assert {*fault.differing} == {"kernel | one.weight", "kernel | two.weight"}
    rules = [Rule(f"{name}.weight", name, "o i -> i o") for name in ("one", "two")]
    report = trained((call_twice, SEPARATE), Tied(), X, [*rules, COPIES[1]])
    assert report.first_fault[:2] == (1, "gradient") and len(report.first_fault.differing) == 2


def test_copies_of_a_tensor_have_its_gradient_together():
    """Each alone makes another update."""
    table = [*COPIES, Alias("two.weight", "one.weight")]
    fault = trained((call_twice, SEPARATE), Tied(), X, table).first_fault
    assert (fault.step, fault.kind) == (1, "parameter")
    assert {*fault.differing} == {"one, two | one.weight", "one, two | two.weight"}


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name="second")(jnp.tanh(linen.Dense(4, name="first")(x)))


def stacked(parameters: dict[str, Any], x: jax.Array) -> jax.Array:
    def layer(x, weights):
        return jnp.tanh(x @ weights["kernel"] + weights["bias"]), None

    return jax.lax.scan(layer, x, parameters["layers"])[0]


def test_models_of_any_library_train():
    variables = Dense().init(jax.random.key(0), X.astype(np.float32))
    by_name = of_adamw(
        optax.multi_transform(
            {"a": TX, "b": TX},
            lambda params: {name: "a" if name == "first" else "b" for name in params},
        )
    )
    report = trained((Dense(), variables), two(), X, LAYERS, **by_name)
    report.check()
    assert [len(group) for group in report.steps[-1][1:]] == [4, 4]
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    rules = [rule for i in range(2) for rule in weights.linear(str(2 * i), f"layers.{i}")]
    table = [Stacked("layers"), *rules]
    parameters = {"layers": {"kernel": np.zeros((2, 4, 4)), "bias": np.zeros((2, 4))}}
    parameters |= {"name": "two layers"}
    report = trained((stacked, parameters), layers, X, table)
    report.check()
    assert [*report.steps[-1].gradients][2:] == [
        "layers.1.kernel | 2.weight",
        "layers.1.bias | 2.bias",
    ]
    layers[2].bias.requires_grad_(False)
    report = trained((stacked, parameters), layers, X, table)
    assert report.first_fault[:2] == (1, "parameter")
    assert [*report.first_fault.differing] == ["layers.1.bias | 2.bias"]
    assert "; it changes in JAX only; no gradient in PyTorch: layers.1.bias" in report.summary()


def test_a_parameter_may_be_frozen_on_both_sides():
    theirs = two()
    theirs[0].weight.requires_grad_(False)
    theirs[2].weight.data.zero_()  # the first bias has no gradient in the first step
    report = trained(Two(Layer(kind=nnx.BatchStat)), theirs, X, LAYERS)
    report.check()
    assert report.notes == ("no gradient in PyTorch: first.kernel | 0.weight",)
    assert report.summary().endswith("; compared: the loss, 3 gradients and 4 parameters")


class Islands(nn.Module):
    """A layer whose input is scaled in float32, by a buffer that is rounded to it."""

    def __init__(self, rounded: bool):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        scale = 1 / torch.arange(1, 5, dtype=torch.float64).sqrt()
        scale = scale.float() if rounded else scale
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x):
        return self.fc((x.float() * self.scale.float()).to(x.dtype))


def scaled(model: nnx.Linear, x: jax.Array) -> jax.Array:
    scale = jnp.arange(1, 5, dtype=jnp.float32) ** -0.5
    return model((x.astype(jnp.float32) * scale).astype(x.dtype))


@pytest.mark.parametrize("rounded", [False, True])
def test_float32_inside_of_a_model_is_no_fault(rounded):
    ours, theirs = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), randomized(Islands(rounded))
    table = [Rule("fc.weight", "kernel", "o i -> i o"), Rule("fc.bias", "bias")]
    report = trained(ours, theirs, X, table, call_flax=scaled, steps=2)
    report.check()
    note = "a constant is rounded to float32 in one of the models only"
    assert report.notes == ((note,) if rounded else ())
    ours.kernel[...] += 0  # its weights are the table's
    options = optimizers(optax.sgd(1e-2), torch.optim.SGD, lr=1.01e-2)
    report = trained(ours, theirs, X, table, call_flax=scaled, **options)
    assert report.first_fault[:2] == (1, "parameter")


def test_models_that_fail_in_float64_are_compared_in_float32():
    def call(model, x):
        assert x.dtype == jnp.float32, "only float32"
        return model(x)

    theirs = two()
    report = trained(Two(), theirs, X.astype(np.float32), LAYERS, call_flax=call)
    assert report.agrees and report.steps[0].loss.wide.dtype in ("float64", "float32")
    assert any("cannot be traced in float64" in note for note in report.notes)

    def call_torch(module, x):
        assert x.dtype == torch.float32, "only float32"
        return module(x)

    report = trained(Two(), theirs, X, LAYERS, call_torch=call_torch)
    report.check()
    assert report.notes == ("compared in float32: float64 fails with AssertionError: only float32",)
    assert report.steps[0].loss.wide.dtype == "float32"
    report = trained(Two(), theirs, X, LAYERS, call_torch=call_torch, **of_adamw(optax.adam(2e-3)))
    assert report.first_fault[:2] == (1, "parameter")


def test_what_cannot_be_compared_is_refused():
    theirs, half = two(), {"call_torch": lambda module, x: module(x)[:2]}
    other = {"call_torch": lambda module, x: module(x) + 1}
    for table, options, message in (
        (None, other, "pass table=, as the proposed one is not right: 0 of 4 rules"),
        (LAYERS, {"steps": 0}, "steps=0: must be at least 1"),
        (LAYERS, {"optimizer_flax": TX}, "pass both, or neither for AdamW"),
        (LAYERS, {"optimizer_torch": torch.optim.SGD}, "pass both, or neither for AdamW"),
        (LAYERS, half, r"returns shape \(5, 4\) and the PyTorch model \(2, 4\)"),
        (LAYERS[:-1], {}, "arrays of the model without a rule: second.bias"),
    ):
        with pytest.raises(ConfigError, match=message):
            trained(Two(), theirs, X, table, **options)
    for model in (Two, None, (Two, {})):
        with pytest.raises(ConfigError, match=r"is neither an nnx\.Module, nor"):
            trained(model, theirs, X, LAYERS)
