"""The comparison of models of others: NNX and Linen modules beside PyTorch's, by rules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

import jax_transformer as jt
from jax_transformer.errors import ConfigError
from jax_transformer.parity import Report


class Cut(nnx.Linear):
    """A linear layer that lets no gradient through."""

    def __call__(self, inputs, out_sharding=None):
        return super().__call__(jax.lax.stop_gradient(inputs), out_sharding)


class Stranger(nnx.Module):
    """Two layers around a norm."""

    def __init__(self, *, cut: bool = False):
        rngs = nnx.Rngs(0)
        self.first, self.second = (
            nnx.Linear(4, 6, rngs=rngs),
            (Cut if cut else nnx.Linear)(6, 4, rngs=rngs),
        )
        self.norm = nnx.LayerNorm(6, epsilon=1e-5, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.first(x))
        return self.second(x)


def beside(ours: Any, theirs: nn.Module, *arguments: Any, **options: Any) -> Report:
    """Flax's own layers promote dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jt.parity.compare(ours, theirs, *arguments, **options)


RULES = {"0": "first", "1": "norm", "2": "second"}


@pytest.fixture(scope="module")
def stranger() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def weights(module: nn.Sequential) -> dict[str, dict[str, np.ndarray]]:
    found = {}
    for i, name in RULES.items():
        part = module.get_submodule(i)
        weight, bias = part.weight.detach().numpy(), part.bias.detach().numpy()
        found[name] = {
            "scale" if name == "norm" else "kernel": weight if name == "norm" else weight.T,
            "bias": bias,
        }
    return found


def ported(module: nn.Sequential, **options: Any) -> Stranger:
    made = Stranger(**options)
    for name, leaves in weights(module).items():
        for leaf, value in leaves.items():
            getattr(getattr(made, name), leaf)[...] = jnp.asarray(value)
    return made


def batch(*rows: float) -> list[np.ndarray]:
    x = np.random.default_rng(0).standard_normal((3, 5, 4))
    x[0, 0, 0 : len(rows)] = rows
    return [x]


def test_an_nnx_module_by_rules(stranger):
    report = beside(ported(stranger), stranger, batch(), RULES)
    report.check()
    assert [entry.ours for entry in report.entries] == ["first", "norm", "second"]
    assert [sorted(entry.parameters) for entry in report.entries] == [
        ["bias", "kernel"],
        ["bias", "scale"],
        ["bias", "kernel"],
    ]


def test_a_fault_of_the_gradient_alone_is_named_backward(stranger):
    report = beside(ported(stranger, cut=True), stranger, batch(), list(RULES.items()))
    assert report.result.agrees and not report.agrees and report.first_fault is None
    assert report.summary().startswith(
        "second | 2: outputs agree, and so does the gradient of its output; that of its input differs"
    )


def test_nan_in_the_same_place_agrees_and_is_counted(stranger):
    report = beside(ported(stranger), stranger, batch(np.nan), RULES, gradients=False)
    report.check()
    assert report.result.wide.agreeing_nan == report.result.wide.nan_ours == 4


def test_nan_on_one_side_differs(stranger):
    wrong = ported(stranger)
    wrong.norm.bias[...] = jnp.asarray([np.nan, 0, 0, 0, 0, 0], jnp.float32)
    report = beside(wrong, stranger, batch(), RULES, gradients=False)
    assert report.first_fault.ours == "norm" and "NaN: 15 here, 0 there" in report.summary()


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm")(
            linen.Dense(6, name="first")(x)
        )
        return linen.Dense(4, name="second")(x)


def test_a_linen_module_by_rules(stranger):
    good = weights(stranger)
    beside((Dense(), {"params": good}), stranger, batch(), RULES).check()
    bad = good | {"second": good["second"] | {"bias": good["second"]["bias"] + np.float32(1e-3)}}
    report = beside((Dense(), {"params": bad}), stranger, batch(), RULES, gradients=False)
    assert report.first_fault.title == "second | 2"


def test_what_cannot_be_compared_is_refused(stranger):
    model = ported(stranger)
    for given, options, said in (
        (model, {}, "say which modules are which"),
        (
            model,
            {"rules_or_pairs": {"0": "frist"}},
            "the Flax model has no module 'frist' (did you mean 'first'?)",
        ),
        (model, {"rules_or_pairs": {"3": "first"}}, "the PyTorch model has no module '3'"),
        (
            model,
            {"rules_or_pairs": RULES, "dtype": "float8"},
            "dtype 'float8': give one of float64, float32, float16, bfloat16",
        ),
        (
            object(),
            {"rules_or_pairs": RULES},
            "a object is neither an nnx.Module nor (linen.Module, variables)",
        ),
        (
            model,
            {"rules_or_pairs": RULES, "call_torch": lambda module, x: module(x)[:2]},
            "gives (3, 5, 4) and the PyTorch model (2, 5, 4)",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            beside(given, stranger, batch(), gradients=False, **options)
        assert said in str(error.value)


def test_a_pytorch_module_that_gives_no_numbers_is_refused(stranger):
    with pytest.raises(TypeError, match="gives no floating-point tensor"):
        beside(
            ported(stranger),
            stranger,
            batch(),
            RULES,
            call_torch=lambda module, x: module(x).argmax(-1),
        )


def test_the_flax_model_runs_under_jit(stranger):
    """Once for each dtype is it traced, with what is recorded, and then it is a program."""
    traced = []

    def call(model, x):
        traced.append((isinstance(model.first.kernel.get_value(), jax.core.Tracer), x.dtype.name))
        return model(x)

    beside(ported(stranger), stranger, batch(), RULES, gradients=False, call_flax=call).check()
    assert sorted(traced) == [(True, "float32"), (True, "float64")]


class Inner(Stranger):
    """One whose call is a program of its own."""

    __call__ = nnx.jit(Stranger.__call__)


@pytest.mark.parametrize(
    ("kind", "call", "said"),
    [
        (Inner, None, "a copy of a Linear is called, as nnx.jit, nnx.remat and nnx.scan make them"),
        (
            Stranger,
            lambda model, x: jax.jit(lambda x: model(x))(x),
            "a module is called within jit, scan or the like of the model's own",
        ),
    ],
    ids=["nnx.jit", "jax.jit"],
)
def test_a_transformation_within_the_model_hides_its_modules_and_is_told(
    stranger, kind, call, said
):
    with pytest.raises(ConfigError) as error:
        beside(kind(), stranger, batch(), RULES, gradients=False, call_flax=call)
    assert said in str(error.value)
