"""A run's optimizer and its twin in torch.optim: ten updates with clipping and each schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.convert.training_state import opt_state
from jax_transformer.errors import ConfigError
from jax_transformer.training import optimizer
from jax_transformer.training.optimizer import OptimizerName, OptimizerOptions, Schedule
from parity_tests.unit.training.test_optimizers import steps
from torch_reference import training

STEPS = 10
BOUND = 1e-14
OPTIONS = {
    "adamw": OptimizerOptions(weight_decay=0.1, warmup_steps=3, clip_norm=0.5),
    "adam": OptimizerOptions(
        OptimizerName.ADAM, schedule=Schedule.LINEAR, weight_decay=0.1, warmup_steps=3
    ),
    "sgd": OptimizerOptions(
        OptimizerName.SGD, schedule=Schedule.INVERSE_SQRT, warmup_steps=2, clip_norm=0.5
    ),
    "nesterov": OptimizerOptions(
        OptimizerName.SGD, nesterov=True, schedule=Schedule.LINEAR, warmup_steps=0
    ),
    "without momentum": OptimizerOptions(
        OptimizerName.SGD, momentum=0.0, schedule=Schedule.CONSTANT, weight_decay=0.0
    ),
}
SHAPES = {"kernel": (5, 3), "bias": (3,)}


def gradients() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return [
        {name: random.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(STEPS)
    ]


def parameters() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape) for name, shape in SHAPES.items()}


def by_optax(options: OptimizerOptions) -> dict[str, np.ndarray]:
    return steps(optimizer.make(options, STEPS), parameters(), gradients())


def by_torch(options: OptimizerOptions) -> dict[str, np.ndarray]:
    params = {n: torch.nn.Parameter(torch.from_numpy(a)) for n, a in parameters().items()}
    torch_optimizer = training.make_optimizer(options, params.values())
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        torch_optimizer, lambda step: training.relative_rate(step, *options.rate[1:], STEPS)
    )
    for gradient in gradients():
        for name, parameter in params.items():
            parameter.grad = torch.from_numpy(gradient[name].copy())
        if options.clip_norm:
            torch.nn.utils.clip_grad_norm_(params.values(), options.clip_norm)
        torch_optimizer.step()
        scheduler.step()
    return {name: parameter.detach().numpy() for name, parameter in params.items()}


def distance(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in SHAPES)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_ten_updates_are_those_of_torch_optim(name: str):
    assert distance(by_optax(OPTIONS[name]), by_torch(OPTIONS[name])) < BOUND


def test_different_optimizers_differ_by_far():
    """Negative control: all pairs of different optimizers, by more than a million bounds."""
    ours = {name: by_optax(options) for name, options in OPTIONS.items()}
    theirs = {name: by_torch(options) for name, options in OPTIONS.items()}
    pairs = [(a, b) for a in OPTIONS for b in OPTIONS if a != b]
    assert min(distance(ours[a], theirs[b]) for a, b in pairs) > 1e6 * BOUND


@pytest.mark.parametrize("kind", list(Schedule))
@pytest.mark.parametrize(("steps", "warmup"), [(12, 0), (12, 4), (3, 5)])
def test_schedules_are_those_of_the_torch_loop(kind: Schedule, steps: int, warmup: int):
    with jax.numpy_dtype_promotion("standard"):
        rate = optimizer.schedule(OptimizerOptions(schedule=kind, warmup_steps=warmup), steps)
        ours = [float(rate(jnp.asarray(step))) / 3e-3 for step in range(steps + 2)]
    theirs = [training.relative_rate(step, kind, warmup, steps) for step in range(steps + 2)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", [OptimizerName.ADAFACTOR, OptimizerName.LION])
def test_options_that_pytorch_lacks_are_refused_by_name(name: OptimizerName):
    options = OptimizerOptions(name)
    for refuse, kind in (
        (lambda: opt_state.torch_kind(options), ConfigError),
        (lambda: training.make_optimizer(options, []), ValueError),
    ):
        with pytest.raises(kind, match=rf"^optimizer\.name={name.value}: [^\n]+$"):
            refuse()
