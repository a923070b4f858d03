"""Comparisons of models without a weight table, NNX and Linen, with PyTorch, by patterns."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from jax_transformer import weights
from jax_transformer.errors import ConfigError
from jax_transformer.parity import Report, compare_training, comparison, functions, golden
from parity_tests.test_parity_models import arrays, compare, fill, randomized
from torch_reference import recording


class StopGradient(nnx.Linear):
    """A linear layer that lets no gradient through."""

    def __call__(self, inputs, out_sharding=None):
        return super().__call__(jax.lax.stop_gradient(inputs), out_sharding)


class Custom(nnx.Module):
    """Two layers around a norm."""

    def __init__(self, *, stop_gradient: bool = False):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.second = (StopGradient if stop_gradient else nnx.Linear)(6, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(6, epsilon=1e-5, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.first(x))
        return self.second(x)


RULES = {"0": "first", "1": "norm", "2": "second"}


@pytest.fixture(scope="module")
def sequential() -> nn.Sequential:
    return randomized(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)))


def ported(module: nn.Sequential, **options: Any) -> Custom:
    model = Custom(**options)
    for i, name in RULES.items():
        fill(getattr(model, name), arrays(module), i)
    return model


def batch(*rows: float) -> list[np.ndarray]:
    x = np.random.default_rng(0).standard_normal((3, 5, 4))
    x[0, 0, 0 : len(rows)] = rows
    return [x]


ONE_PAIR = "compared: outputs of only 1 of 3 modules and gradients of only 2 of 6 parameters"


def test_a_verdict_on_one_pair_counts_it(sequential):
    report = compare(ported(sequential), sequential, batch(), RULES)
    counts = "compared: outputs of 3 of 3 modules and gradients of 6 of 6 parameters"
    assert report.summary().endswith(f" rounding; {counts}") and not report.coverage.missing
    for stop in (False, True):
        model = ported(sequential, stop_gradient=stop)
        report = compare(model, sequential, batch(), {"1": "norm"})
        assert report.agrees != stop
        missing = "not compared: 0, 2, 0.weight, 0.bias, 2.weight, 2.bias"
        assert (missing if report.agrees else f"{ONE_PAIR}; {missing}") in " ".join(
            map(str.strip, report.lines())
        )
        assert report.summary().endswith(f" rounding; {ONE_PAIR}") == report.agrees
        assert report.to_data()["coverage"]["text"] == ONE_PAIR
    report = compare(ported(sequential), sequential, batch(), RULES, gradients=False)
    assert report.summary().endswith("; compared: outputs of 3 of 3 modules and no gradients")


def test_sizes_of_parameters_pair_modules_without_gradients_too(sequential):
    linear, norm, second = sequential
    both = nn.Sequential(collections.OrderedDict(linear=linear, last=norm))
    theirs = nn.Sequential(collections.OrderedDict(norm=both, second=second))
    wrong = ported(sequential)
    wrong.first.bias[...] += 1
    report = compare(wrong, theirs, batch(), gradients=False)
    entries = [(entry.ours, entry.theirs) for entry in report.entries]
    assert entries == [("first", "norm.linear"), ("norm", "norm.last"), ("second", "second")]
    assert [entry.ours for entry in report.faults] == ["first"]


def test_a_fault_in_gradients_only_is_named_backward(sequential):
    report = compare(
        ported(sequential, stop_gradient=True), sequential, batch(), list(RULES.items())
    )
    assert report.result.agrees and not report.agrees and report.first_fault is None
    assert report.summary().startswith(
        "second | 2: outputs agree, and so does the gradient of its output;"
        " the gradient of its input differs"
    )


class TheirMixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1)
        return weights @ self.value(x)


class Mixing(nnx.Module):
    """Takes projected keys and values, as from a cache."""

    def __init__(self, state):
        self.query = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        fill(self.query, state, "1.query")

    def __call__(self, x, key, value):
        return jax.nn.softmax(self.query(x) @ key.transpose(0, 2, 1)) @ value


class Masked(nnx.Linear):
    """A linear layer with an input that has no gradient."""

    def __call__(self, inputs, mask):
        return jnp.where(mask > 0, super().__call__(inputs), 0)


class Mixed(nnx.Module):
    def __init__(self, state, key=nnx.Linear):
        kinds, rngs = (nnx.Linear, key, Masked), nnx.Rngs(0)
        self.first, self.key, self.value = (kind(4, 4, rngs=rngs) for kind in kinds)
        self.mix = Mixing(state)
        for name in ("key", "value"):
            fill(getattr(self, name), state, f"1.{name}")
        fill(self.first, state, "0")

    def __call__(self, x):
        x = self.first(x)
        return self.mix(x, self.key(x), self.value(x, jnp.ones_like(x)))


def test_a_gradient_that_goes_through_a_further_input_of_one_model_is_no_fault():
    theirs = randomized(nn.Sequential(nn.Linear(4, 4), TheirMixing()))
    rules = {"0": "first", "1": "mix", "1.query": "mix.query", "1.key": "key", "1.value": "value"}
    report = compare(Mixed(arrays(theirs)), theirs, batch(), rules)
    report.check()
    gradients = {entry.ours: entry.input_gradient for entry in report.entries}
    assert gradients["mix"] is None and None not in (gradients["key"], gradients["value"])
    report = compare(Mixed(arrays(theirs), key=StopGradient), theirs, batch(), rules)
    assert report.summary().startswith("key | 1.key: outputs agree, and so does the gradient of")


def test_nan_in_the_same_place_agrees_and_is_counted(sequential):
    report = compare(ported(sequential), sequential, batch(np.nan), RULES, gradients=False)
    report.check()
    assert report.result.wide.agreeing_nan == report.result.wide.nan_ours == 4


def test_a_nan_on_one_side_differs(sequential):
    wrong = ported(sequential)
    wrong.norm.bias[...] = jnp.asarray([np.nan, 0, 0, 0, 0, 0], jnp.float32)
    report = compare(wrong, sequential, batch(), RULES, gradients=False)
    assert report.first_fault.ours == "norm" and "NaN: 15 here, 0 there" in report.summary()


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        norm = linen.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm")
        return linen.Dense(4, name="second")(norm(linen.Dense(6, name="first")(x)))


def test_a_linen_module_is_paired_by_patterns(sequential):
    good = nnx.to_pure_dict(nnx.state(ported(sequential)))
    compare((Dense(), {"params": good}), sequential, batch(), RULES).check()
    bad = good | {"second": good["second"] | {"bias": good["second"]["bias"] + np.float32(1e-3)}}
    report = compare((Dense(), {"params": bad}), sequential, batch(), RULES, gradients=False)
    assert report.first_fault.title == "second | 2"


def test_only_parameters_of_linen_and_numbers_of_a_function_are_trained():
    variables = {kind: {"x": np.ones(2)} for kind in ("params", "batch_stats", "cache")}
    variables["cache"]["index"] = np.zeros((), np.int32)
    model = functions.from_linen(linen.Dense(2), variables)
    others = {"batch_stats.x", "cache.x", "cache.index"}
    assert (model.parameters.keys(), model.others.keys()) == ({"x"}, others)
    assert model.constants == others - {"batch_stats.x"}
    model = functions.from_function(len, {"a": np.ones(2), "b": [np.arange(2)], "c": "text"})
    assert (model.parameters.keys(), model.others.keys()) == ({"a"}, {"b.0"})


def test_models_that_cannot_be_compared_are_refused(sequential):
    model = ported(sequential)
    unknown = "the Flax model has no module 'frist' (did you mean 'first'?)"
    kinds = "neither an nnx.Module, nor (linen.Module, variables), nor (function, parameters)"
    half = {"call_torch": lambda module, x: module(x)[:2]}
    for flax_model, rules, options, message in (
        (
            model,
            {"3": "first", "{i}": "norm", "0": "frist"},
            {},
            "the PyTorch model has no module '3'; the rule '{i}': 'norm' has different placeholders"
            f" on its two sides; {unknown}",
        ),
        (
            model,
            RULES,
            {"dtype": "float8"},
            "dtype 'float8': must be one of float64, float32, float16, bfloat16",
        ),
        (object(), RULES, {}, f"a object is {kinds}"),
        (model, RULES, half, "returns shape (3, 5, 4) and the PyTorch model (2, 5, 4)"),
    ):
        with pytest.raises(ConfigError) as error:
            compare(flax_model, sequential, batch(), rules, gradients=False, **options)
        assert message in str(error.value)


NO_TORCH = "pass an instance of torch.nn.Module"
NO_NUMBERS = "first.bias of the JAX model has a shape and no numbers, as from eval_shape"
NO_ARRAY = "argument 0 of the batch is not an array"
RAGGED = f"{NO_ARRAY}: ValueError: setting an array element with a sequence"
TORCH_FAILS = "the PyTorch model fails on this batch: TypeError: Sequential.forward() "
JAX_FAILS = "the JAX model fails on this batch: TypeError: Custom.__call__() "
NO_TENSOR = "the PyTorch model returns no floating-point tensor (its result is torch.int64)"
X = np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("models", "x", "options", "message"),
    [
        (lambda ours, theirs: (ours, theirs.state_dict()), X, {}, f"a OrderedDict: {NO_TORCH}"),
        (lambda ours, theirs: (theirs, ours), X, {}, f"PyTorch model is a Custom: {NO_TORCH}"),
        (lambda ours, theirs: (ours, nn.ReLU), X, {}, f"is the class ReLU: {NO_TORCH}"),
        (lambda ours, theirs: (Custom, theirs), X, {}, "the class Custom is neither an nnx.Module"),
        (lambda ours, theirs: ((Dense, {}), theirs), X, {}, "a tuple is neither an nnx.Module, "),
        (lambda ours, theirs: (nnx.eval_shape(Custom), theirs), X, {}, NO_NUMBERS),
        (None, None, {}, "the batch is a NoneType: pass a list of arrays"),
        (None, [None], {}, f"{NO_ARRAY} of numbers"),
        (None, [[[1.0], [2.0, 3.0]]], {}, RAGGED),
        (None, {}, {}, f"{TORCH_FAILS}missing 1 required positional argument"),
        (None, [X, X], {}, f"{TORCH_FAILS}takes 2 positional arguments but 3 were given"),
        (None, [X, X], {"call_torch": lambda m, x, y: m(x)}, f"{JAX_FAILS}takes 2 positional"),
        (None, {"x": X}, {}, f"{TORCH_FAILS}got an unexpected keyword argument 'x'"),
        (None, {"input": X}, {}, f"{JAX_FAILS}got an unexpected keyword argument 'input'"),
        (None, X, {"call_torch": lambda m, x: m(x).argmax(-1)}, NO_TENSOR),
    ],
)
def test_what_does_not_fit_is_one_line_that_names_it(sequential, models, x, options, message):
    both = ported(sequential), sequential
    flax_model, module = models(*both) if models else both
    for function, arguments in (
        (compare, (flax_model, module)),
        (compare_training, (flax_model, module)),
        (weights.propose, (module, flax_model)),
    ):
        with pytest.raises(ConfigError) as error:
            function(*arguments, x, **options)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_memory_that_runs_out_is_no_error_of_the_model(sequential):
    def call(*_: Any) -> None:
        raise MemoryError

    for name in ("call_flax", "call_torch"):
        with pytest.raises(MemoryError):
            compare(ported(sequential), sequential, batch(), RULES, **{name: call})


def test_of_failures_in_every_dtype_the_first_is_named(sequential):
    def call(_: Any, x: torch.Tensor) -> None:
        raise ValueError(f"no {x.dtype}")

    with pytest.raises(ConfigError, match=r"PyTorch model fails .* ValueError: no torch\.float64"):
        compare(ported(sequential), sequential, batch(), RULES, call_torch=call)


def test_padding_is_not_compared(sequential):
    positions = np.arange(5) < np.array([[5], [3], [1]])
    model, other = ported(sequential), jnp.where(positions[..., None], 0, 1)
    options = {"call_flax": lambda model, x: model(x + other.astype(x.dtype))}
    assert not compare(model, sequential, batch(), RULES, **options).agrees
    options["positions"] = positions
    report = compare(model, sequential, batch(), RULES, **options)
    report.check()
    assert all(len(entry.parameters) == 2 for entry in report.entries)
    model.norm.bias[...] += 1
    report = compare(model, sequential, batch(), RULES, **options)
    assert report.first_fault.ours == "norm" and [each.ours for each in report.faults] == ["norm"]
    for wrong in (positions.T, positions.astype(int)):
        with pytest.raises(ConfigError, match="must be booleans for the first axes of the result"):
            compare(model, sequential, batch(), RULES, positions=wrong)


def test_a_batch_may_be_one_array(sequential):
    report = compare(ported(sequential), sequential, batch()[0], RULES, gradients=False)
    assert report.agrees and report.about["batch"] == [[3, 5, 4]]


def test_a_batch_by_name_reaches_both_models_by_name(sequential):
    rows = []

    def call_torch(module, *, x, shift):
        rows.append((len(x), len(shift)))
        return module(x + shift)

    named = {"call_torch": call_torch, "call_flax": lambda model, *, shift, x: model(x + shift)}
    model, x = ported(sequential), batch()[0]
    compare(model, sequential, {"x": x, "shift": x[:1]}, RULES, gradients=False, **named).check()
    assert {*rows} == {(3, 1)}
    named["call_flax"] = lambda model, *, shift, x: model(x - shift)
    report = compare(model, sequential, {"x": x, "shift": x[:1]}, RULES, gradients=False, **named)
    assert report.summary().startswith("the results differ")
    torch_by_name = {"call_flax": lambda model, input: model(input)}
    compare(model, sequential, {"input": x}, RULES, gradients=False, **torch_by_name).check()
    with pytest.raises(ConfigError, match="argument 'x' of the batch is not an array of numbers"):
        compare(model, sequential, {"x": None}, RULES)


class TheirScaled(nn.Embedding):
    """An embedding that scales its rows, as Gemma's."""

    def forward(self, ids):
        return 4 * super().forward(ids)


class Scaled(nnx.Module):
    """The same scale outside of the embedding, in an array that is no variable."""

    def __init__(self):
        self.scale = nnx.data(jnp.array(4, jnp.int32))
        self.embed = nnx.Embed(11, 4, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(4, 6, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.head(self.scale.astype(self.embed.embedding.dtype) * self.embed(ids))


def test_a_scale_inside_of_one_embedding_is_no_difference():
    theirs = randomized(nn.Sequential(TheirScaled(11, 4), nn.Linear(4, 6)))
    table = [*weights.embedding("0", "embed"), *weights.linear("1", "head")]
    ours = weights.from_torch(theirs.state_dict(), table, into=Scaled())
    report = compare(ours, theirs, ids := np.arange(6).reshape(2, 3))
    report.check()
    assert report.coverage.missing == ["0"] and all(report.coverage.parameters.values())
    assert "code outside makes up for its output" in "".join(report.lines())
    ours.head.bias[...] += 1e-3
    assert [entry.ours for entry in compare(ours, theirs, ids).faults] == ["head"]


Result = collections.namedtuple("Result", "scores hidden")
Output = dataclasses.make_dataclass("Output", ["scores", "hidden"])
LONE = "not compared: hidden, which a model also returns"
NAMES = "the PyTorch model returns scores, hidden and the JAX model "


@pytest.mark.parametrize(
    "ours", [lambda x, y: {"hidden": y, "scores": x}, Result, Output, lambda x, y: (x, [y])]
)
def test_each_array_of_a_result_is_compared_by_name_or_order(sequential, ours):
    def call_torch(module, x):
        return Output(y := module(x), y * 2)

    def report(factor: float, size: int = 3) -> Report:
        def call_flax(model, x):
            return ours(y := model(x), y[:size] * factor)

        calls = {"call_torch": call_torch, "call_flax": call_flax}
        report = compare(ported(sequential), sequential, batch(), RULES, gradients=False, **calls)
        assert [*report.results] == ["scores", "hidden"] and "not compared" not in str(report.notes)
        return report

    report(2).check()
    wrong = report(2 + 1e-6)
    rows = [line.split()[:3] for line in wrong.lines() if line.startswith("result")]
    assert rows == [["result", "scores", "agrees"], ["result", "hidden", "DIFFERS"]]
    assert wrong.summary().startswith("the result hidden differs, by ")
    assert "outside of them" not in wrong.summary() and not wrong.own_result[0].agrees
    assert not wrong.to_data()["results"]["hidden"]["agrees"]
    with pytest.raises(ConfigError, match=r"returns hidden of shape \(2, 5, 4\) and the PyTorch"):
        report(2, size=2)


def test_a_golden_has_each_array_of_a_result(sequential, tmp_path):
    def recorder(dtype, seed, batch):
        call = {"call": lambda module, x: (y := module(x), y * 2)}
        return recording.record(sequential, batch, dtype=dtype, seed=seed, **call)

    loaded = golden.create(tmp_path / "golden", recorder, batch(), source={})
    for times in (2, 3):
        options = {"call": lambda model, x, times=times: (y := model(x), y * times)}
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            report = comparison.compare_recorded(
                ported(sequential), loaded, loaded.batch, RULES, **options
            )
        assert report.agrees == (times == 2) and [*report.results] == ["0", "1"]


@pytest.mark.parametrize(
    ("ours", "note"),
    [
        (lambda x: x, LONE),
        (lambda x: {"hidden": x, "score": x}, f"{NAMES}hidden, score: pass call_torch="),
        (lambda x: (x, x, x), f"{NAMES}0, 1, 2: pass call_torch="),
        (lambda x: "text", "returns no floating-point array (str): pass call_flax="),
        (lambda x: {"ids": x.argmax(-1)}, "no floating-point array (ids is int64): pass call_flax"),
    ],
)
def test_arrays_that_one_model_alone_returns_are_noted_or_refused(sequential, ours, note):
    calls = {
        "call_torch": lambda module, x: Output(y := module(x), y * 2),
        "call_flax": lambda model, x: ours(model(x)),
    }
    try:
        report = compare(ported(sequential), sequential, batch(), RULES, gradients=False, **calls)
    except ConfigError as error:
        assert note in str(error)
        return
    assert report.agrees and any(note in each for each in report.notes)


def test_train_mode_is_named_if_the_models_differ_and_stays(sequential):
    """A forgotten eval(), with dropout that the Flax model does not have."""
    dropping = nn.Sequential(*sequential, nn.Dropout(0.5))
    model = ported(sequential)
    hint = "; the PyTorch module is in train mode: call its eval() unless that is meant"
    report = compare(model, dropping.train(), batch(), RULES, gradients=False)
    assert dropping.training and report.summary().endswith(hint)
    assert list(report.lines())[-1].endswith(hint)
    report = compare(model, dropping.eval(), batch(), RULES, gradients=False)
    assert report.agrees and not dropping.training and "train mode" not in report.summary()
    report = compare(model, nn.Sequential(*sequential).train(), batch(), RULES, gradients=False)
    assert report.agrees and not report.notes


def test_the_flax_model_runs_under_jit(sequential):
    """The model is traced once for each dtype."""
    traced = []

    def call(model, x):
        traced.append((isinstance(model.first.kernel.get_value(), jax.core.Tracer), x.dtype.name))
        return model(x)

    compare(ported(sequential), sequential, batch(), RULES, gradients=False, call_flax=call).check()
    assert sorted(traced) == [(True, "float32"), (True, "float64")]


class Jitted(Custom):
    """A module whose call is jitted."""

    __call__ = nnx.jit(Custom.__call__)


@pytest.mark.parametrize(
    ("kind", "call"),
    [(Custom, None), (Jitted, None), (Custom, lambda model, x: jax.jit(lambda x: model(x))(x))],
    ids=["as it is", "nnx.jit", "jax.jit"],
)
def test_an_nnx_module_is_paired_by_patterns_inside_jit_too(sequential, kind, call):
    model = ported(sequential)
    model.__class__ = kind
    report = compare(model, sequential, batch(), RULES, call_flax=call)
    report.check()
    linear, norm = {"bias", "kernel"}, {"bias", "scale"}
    entries = [(entry.ours, {*entry.parameters}) for entry in report.entries]
    assert entries == [("first", linear), ("norm", norm), ("second", linear)]


def test_a_module_of_another_model_is_called_with_its_arguments(sequential):
    """It is of a class that the model has too."""

    def call(model, x):
        zero = nnx.Linear(
            4, 4, kernel_init=nnx.initializers.zeros, param_dtype=x.dtype, rngs=nnx.Rngs(0)
        )
        return model(x + zero(inputs=x))

    options = {"gradients": False, "call_flax": call}
    report = compare(ported(sequential), sequential, batch(), RULES, **options)
    report.check()
    assert [entry.ours for entry in report.entries] == ["first", "norm", "second"]


def test_a_tensor_is_replaced_in_copies_of_what_holds_it():
    old, new = torch.ones(2), torch.zeros(2)
    pair = collections.namedtuple("pair", "a b")
    holder = dataclasses.make_dataclass("holder", ["a"])
    for value in ({"a": old}, [old], (1, old), pair(old, 1), holder(old), [{"a": [holder(old)]}]):
        result = recording._replaced(value, old, new)
        assert next(recording._floats(value)) is old and next(recording._floats(result)) is new
        assert type(result) is type(value) and recording._replaced(value, new, old) is value
