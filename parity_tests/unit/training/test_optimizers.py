"""AdamW, Adam, SGD, Adafactor and Lion by value, against their papers' formulas, and options."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer.errors import ConfigError
from jax_transformer.training import optimizer
from jax_transformer.training.optimizer import USED_BY, OptimizerName, OptimizerOptions, Schedule

RATE, DECAY, B1, B2, EPS = 0.1, 0.3, 0.8, 0.95, 1e-3
Arrays = dict[str, np.ndarray]


def chain(name: OptimizerName, **more: Any) -> optax.GradientTransformation:
    options = {"learning_rate": RATE, "weight_decay": DECAY, "clip_norm": 0.0, "warmup_steps": 0}
    return optimizer.make(
        OptimizerOptions(name, schedule=Schedule.CONSTANT, **(options | more)), 100
    )


def steps(tx: optax.GradientTransformation, params: Arrays, gradients: list[Arrays]) -> Arrays:
    """The parameters after one update for each entry of ``gradients``."""
    ours = jax.tree.map(jnp.asarray, params)
    with jax.numpy_dtype_promotion("standard"):
        state = tx.init(ours)
        for gradient in gradients:
            updates, state = tx.update(jax.tree.map(jnp.asarray, gradient), state, ours)
            ours = optax.apply_updates(ours, updates)
    return jax.tree.map(np.asarray, ours)


def by_hand(
    update: Callable[[np.ndarray, np.ndarray, list[np.ndarray], int], np.ndarray],
    params: Arrays,
    gradients: list[Arrays],
    memories: int,
) -> Arrays:
    """Return them by a formula ``update(parameter, gradient, memory, t)``, t from 1."""
    after = {}
    for name, p in params.items():
        memory = [np.zeros_like(p) for _ in range(memories)]
        for t, gradient in enumerate(gradients, 1):
            p = p + update(p, gradient[name], memory, t)
        after[name] = p
    return after


def adam_direction(g: np.ndarray, memory: list[np.ndarray], t: int) -> np.ndarray:
    memory[0] = B1 * memory[0] + (1 - B1) * g
    memory[1] = B2 * memory[1] + (1 - B2) * g**2
    first, second = memory[0] / (1 - B1**t), memory[1] / (1 - B2**t)
    return first / (np.sqrt(second) + EPS)


def problem(count: int = 5, shape: tuple[int, int] = (3, 2)) -> tuple[Arrays, list[Arrays]]:
    random = np.random.default_rng(0)
    shapes = {"kernel": shape, "bias": (shape[1],)}
    params, *gradients = (
        {name: random.normal(size=size) for name, size in shapes.items()} for _ in range(1 + count)
    )
    return params, gradients


def assert_close(ours: Arrays, theirs: Arrays, rtol: float = 1e-12) -> None:
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=rtol, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_five_steps_are_adamw_written_by_hand(decay, clip_norm):
    """Loshchilov and Hutter 2019, algorithm 2, the decay times the rate, as in torch."""
    params, gradients = problem()
    gradients = [
        {name: g * 10.0 ** (i - 2) for name, g in each.items()} for i, each in enumerate(gradients)
    ]
    norms = [np.sqrt(sum((g**2).sum() for g in each.values())) for each in gradients]
    factors = [min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0 for norm in norms]

    def adamw(p, g, memory, t):
        g = factors[t - 1] * g
        rate = RATE * (t / 3 if t <= 2 else (1 + np.cos(np.pi * (t - 3) / 3)) / 2)
        return -rate * decay * p - rate * adam_direction(g, memory, t)

    options = OptimizerOptions(
        **dict(learning_rate=RATE, warmup_steps=2, beta1=B1, beta2=B2, epsilon=EPS),
        **dict(weight_decay=decay, clip_norm=clip_norm),
    )
    for count in range(1, 6):
        actual = steps(optimizer.make(options, 5), params, gradients[:count])
        assert_close(actual, by_hand(adamw, params, gradients[:count], memories=2))


def test_the_moments_have_the_dtype_of_the_parameters():
    params = {"w": jnp.zeros(3, jnp.float32)}
    rule = optimizer.make(OptimizerOptions(), 5)
    with jax.numpy_dtype_promotion("standard"):
        updates, state = rule.update({"w": jnp.ones(3, jnp.float32)}, rule.init(params), params)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves((updates, state)) if leaf.ndim}
    assert dtypes == {"float32"}


@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_adam_adds_weight_decay_to_the_gradient(decay):
    def adam(p, g, memory, t):
        return -RATE * adam_direction(g + decay * p, memory, t)

    tx = chain(OptimizerName.ADAM, beta1=B1, beta2=B2, epsilon=EPS, weight_decay=decay)
    assert_close(steps(tx, *problem()), by_hand(adam, *problem(), memories=2))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_sgd_with_momentum(momentum, nesterov):
    def sgd(p, g, memory, t):
        g = g + DECAY * p
        memory[0] = momentum * memory[0] + g
        return -RATE * (g + momentum * memory[0] if nesterov else memory[0])

    if nesterov and not momentum:
        with pytest.raises(ConfigError, match=r"nesterov needs optimizer\.momentum above 0"):
            chain(OptimizerName.SGD, momentum=momentum, nesterov=nesterov)
        return
    tx = chain(OptimizerName.SGD, momentum=momentum, nesterov=nesterov)
    assert_close(steps(tx, *problem()), by_hand(sgd, *problem(), memories=1))
    state = jax.tree.leaves(tx.init(problem()[0]))
    assert any(array.ndim for array in state) == bool(momentum), (
        "without it, no memory of that size"
    )


def test_lion_steps_by_the_sign():
    """Chen et al. 2023, algorithm 2: the sign of one moving average, and another as state."""

    def lion(p, g, memory, t):
        sign = np.sign(B1 * memory[0] + (1 - B1) * g)
        memory[0] = B2 * memory[0] + (1 - B2) * g
        return -RATE * (sign + DECAY * p)

    tx = chain(OptimizerName.LION, beta1=B1, beta2=B2)
    assert_close(steps(tx, *problem()), by_hand(lion, *problem(), memories=1))


def rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(array**2)))


@pytest.mark.parametrize("shape", [(3, 2), (130, 129)])
def test_adafactor_factors_wide_matrices(shape):
    """Shazeer and Stern 2018, algorithms 4 and 5, with update clipping at 1 and relative steps."""

    def adafactor(p, g, memory, t):
        beta = 1 - float(t) ** -0.8
        memory[0] = beta * memory[0] + (1 - beta) * (g**2 + 1e-30)
        second = memory[0]
        # means of rows and columns are linear, so they are taken at the end
        if second.ndim > 1 and min(second.shape) >= 128:
            rows, columns = second.mean(axis=1), second.mean(axis=0)
            second = np.outer(rows, columns) / rows.mean()
        update = g / np.sqrt(second)
        update = update / max(1.0, rms(update))
        return -RATE * (update * max(1e-3, rms(p)) + DECAY * p)

    tx = chain(OptimizerName.ADAFACTOR)
    # Optax computes the decay of the second moment in float32
    expected = by_hand(adafactor, *problem(shape=shape), memories=1)
    assert_close(steps(tx, *problem(shape=shape)), expected, rtol=2e-5)
    stored = sum(leaf.size for leaf in jax.tree.leaves(tx.init(problem(shape=shape)[0])))
    assert (stored < shape[0] * shape[1]) == (shape == (130, 129))


@pytest.mark.parametrize("name", list(OptimizerName))
def test_every_optimizer_clips_and_follows_the_schedule(name):
    """Clipped, gradients a thousand times as large change nothing; nor does rate 0."""
    params, gradients = problem()
    large = [{key: array * 1000 for key, array in gradient.items()} for gradient in gradients]
    tx = chain(name, clip_norm=0.5, weight_decay=0.0)
    assert_close(steps(tx, params, large), steps(tx, params, gradients), rtol=1e-3)
    options = OptimizerOptions(name, schedule=Schedule.LINEAR, warmup_steps=0)
    with jax.numpy_dtype_promotion("standard"):
        ours = {key: jnp.asarray(array) for key, array in params.items()}
        tx = optimizer.make(options, 2)
        state, moved = tx.init(ours), []
        for gradient in gradients[:3]:
            updates, state = tx.update(jax.tree.map(jnp.asarray, gradient), state, ours)
            moved.append(max(float(jnp.abs(update).max()) for update in updates.values()))
    assert moved[0] > 0 and moved[1] > 0 and moved[2] == 0


@pytest.mark.parametrize("name", list(OptimizerName))
def test_an_option_of_another_optimizer_is_refused_by_name(name):
    others = {"beta1": 0.5, "beta2": 0.5, "epsilon": 0.5, "momentum": 0.5, "nesterov": True}
    foreign = {key: value for key, value in others.items() if name not in USED_BY[key]}
    assert len(foreign) < len(others) or name is OptimizerName.ADAFACTOR
    with pytest.raises(ConfigError) as refusal:
        OptimizerOptions(name, **foreign)
    message = str(refusal.value)
    assert f"optimizer.name={name.value}" in message and "\n" not in message
    assert all(f"optimizer.{key}={value}" in message for key, value in foreign.items())
    for key, value in others.items():
        if key not in foreign:
            OptimizerOptions(name, **{key: value})


NAN = float("nan")


@pytest.mark.parametrize(
    ("names", "allowed", "refused"),
    [
        ("beta1 beta2 momentum label_smoothing ema", (0.0, 0.999999), (1.0, -1e-9, NAN)),
        ("weight_decay clip_norm", (0.0, 10.0), (-1e-9, NAN)),
        ("learning_rate epsilon", (1e-12, 1.0), (0.0, -1.0, NAN)),
        ("warmup_steps", (0, 10), (-1,)),
        ("accumulate", (1, 2), (0, -1)),
    ],
)
def test_every_number_is_held_to_its_limits(names, allowed, refused):
    for name in names.split():
        owner = USED_BY.get(name, (OptimizerName.ADAMW,))[0]
        for value in allowed:
            assert getattr(OptimizerOptions(owner, **{name: value}), name) == value
        for value in refused:
            with pytest.raises(ConfigError, match=rf"optimizer\.{name}={value} must"):
                OptimizerOptions(owner, **{name: value})
