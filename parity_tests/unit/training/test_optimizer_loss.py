"""Schedules, clipping and the loss, by value: against formulas written out in NumPy."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import transformer
from jax_transformer.data.batches import Batch
from jax_transformer.training import loss, optimizer, step
from jax_transformer.training.optimizer import OptimizerOptions, Schedule
from parity_tests.marks import quick_if
from parity_tests.unit.helpers import batch, furthest, random_arrays, tiny

PAD = 2


def rates(steps: int, **options) -> list[float]:
    with jax.numpy_dtype_promotion("standard"):  # Optax adds Python numbers to arrays of any dtype
        schedule = optimizer.schedule(OptimizerOptions(**options), steps)
        return [float(schedule(jnp.asarray(step, jnp.int32))) for step in range(steps + 1)]


def share(kind: Schedule, step: int, steps: int, warmup: int) -> float:
    """Return the rate of a step as a share of the peak."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    left, first = max(0.0, (steps - step) / max(1, steps - warmup)), max(1, warmup)
    return {
        Schedule.CONSTANT: 1.0,
        Schedule.LINEAR: left,  # transformers' get_linear_schedule_with_warmup, but from 1 on
        Schedule.COSINE: (1 - math.cos(math.pi * left)) / 2,
        Schedule.INVERSE_SQRT: math.sqrt(first / (first + step - warmup)),
    }[kind]


@pytest.mark.parametrize("kind", list(Schedule))
@pytest.mark.parametrize(("steps", "warmup"), [(24, 4), (20, 0), (4, 9)])
def test_every_schedule_is_its_formula_after_a_linear_warm_up(kind, steps, warmup):
    """From a first small step on; a warm-up longer than the run ends below the peak."""
    actual = rates(steps, learning_rate=0.5, schedule=kind, warmup_steps=warmup)
    expected = [0.5 * share(kind, step, steps, warmup) for step in range(steps + 1)]
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-9)
    if warmup == 4:
        assert actual[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5], rel=1e-6)
        middle = {Schedule.CONSTANT: 0.5, Schedule.INVERSE_SQRT: 0.5 * math.sqrt(4 / 14)}
        assert actual[14] == pytest.approx(middle.get(kind, 0.25), rel=1e-6)


def clipped(gradients: dict, max_norm: float) -> dict:
    rule = optimizer.clip_by_global_norm(max_norm)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = rule.update(gradients, rule.init(gradients))
    return updates


# their norm is 5
GRADIENTS = {"a": jnp.array([3.0, 0.0], jnp.float64), "b": jnp.array([[4.0]], jnp.float64)}


@pytest.mark.parametrize("max_norm", [2.0, 5.0, 5.1, 1e9])
def test_only_gradients_over_the_norm_are_scaled_and_as_torch_does(max_norm):
    actual, factor = clipped(GRADIENTS, max_norm), min(1.0, max_norm / (5.0 + 1e-6))  # not Optax's
    for name, gradient in GRADIENTS.items():
        np.testing.assert_allclose(actual[name], np.asarray(gradient) * factor, rtol=1e-15)
        assert (actual[name].tobytes() == gradient.tobytes()) == (max_norm > 5)


def test_clipping_keeps_dtypes():
    actual = clipped({name: jnp.full(4, 100, name) for name in ("bfloat16", "float32")}, 1.0)
    assert {name: str(array.dtype) for name, array in actual.items()} == {n: n for n in actual}


def expected_loss(logits: np.ndarray, targets: np.ndarray, smoothing: float) -> tuple[float, int]:
    """Token by token: cross-entropy of (1 - smoothing) on the target, smoothing / v on all."""
    total, count = 0.0, 0
    for row, ids in zip(logits, targets, strict=True):
        for scores, target in zip(row, ids, strict=True):
            if target == PAD:
                continue
            distribution = np.full(len(scores), smoothing / len(scores))
            distribution[target] += 1 - smoothing
            log_probs = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
            total, count = total - (distribution * log_probs).sum(), count + 1
    return total, count


def example(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    targets = random.integers(0, 11, (3, 5))
    targets[1, 2:], targets[2, 4] = PAD, PAD
    return random.normal(size=(3, 5, 11)) * 5, targets.astype(np.int32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_the_loss_is_smoothed_cross_entropy_over_tokens(smoothing):
    logits, targets = example()
    total, tokens = loss.cross_entropy(
        jnp.asarray(logits), jnp.asarray(targets), pad_id=PAD, label_smoothing=smoothing
    )
    expected, count = expected_loss(logits, targets, smoothing)
    np.testing.assert_allclose(total, expected, rtol=1e-14)
    assert int(tokens) == count < targets.size


def test_padding_has_neither_loss_nor_gradient():
    """Nor a logit that overflows there, nor a batch of nothing else."""
    logits, targets = example()

    def total(logits, targets):
        return loss.cross_entropy(logits, jnp.asarray(targets), pad_id=PAD, label_smoothing=0.1)

    both = jax.value_and_grad(total, has_aux=True)
    gradient = np.asarray(both(jnp.asarray(logits), targets)[1])
    assert not np.any(gradient[targets == PAD])
    assert np.all(np.abs(gradient[targets != PAD]).max(axis=-1) > 0)
    (value, tokens), gradient = both(jnp.asarray(logits), np.full_like(targets, PAD))
    assert (float(value), int(tokens)) == (0.0, 0) and not np.any(gradient)
    expected, logits[1, 3] = expected_loss(logits, targets, 0.1)[0], np.inf
    np.testing.assert_allclose(total(jnp.asarray(logits), targets)[0], expected, rtol=1e-14)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_the_loss_is_computed_in_float32_at_least(dtype):
    logits, targets = example()
    rounded = jnp.asarray(logits, dtype)
    total, _ = loss.cross_entropy(rounded, jnp.asarray(targets), pad_id=PAD)
    assert str(total.dtype) == ("float64" if dtype == "float64" else "float32")
    expected, _ = expected_loss(np.asarray(rounded, np.float64), targets, 0.0)
    np.testing.assert_allclose(total, expected, rtol=1e-6)


def scattered(logits: jax.Array, targets: jax.Array, smoothing: float) -> jax.Array:
    """Return the loss whose gradient JAX derives: that of ``take_along_axis`` is a scatter-add."""
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    per_token = normalizer - (1 - smoothing) * target - smoothing * logits.mean(axis=-1)
    return jnp.where(targets != PAD, per_token, 0.0).sum()


def selected(logits: jax.Array, targets: jax.Array, smoothing: float) -> jax.Array:
    """Return the loss with its own gradient."""
    return loss.loss_sums(logits, targets, pad_id=PAD, label_smoothing=smoothing).loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_of_the_loss_is_that_of_autodiff(smoothing):
    logits, targets = map(jnp.asarray, example())
    value, gradient = jax.value_and_grad(selected)(logits, targets, smoothing)
    expected, reference = jax.value_and_grad(scattered)(logits, targets, smoothing)
    assert float(value) == float(expected)
    assert furthest(gradient, reference) < 1e-13


def test_the_gradient_of_the_loss_needs_no_scatter():
    logits, targets = map(jnp.asarray, example())
    programs = [
        str(jax.make_jaxpr(jax.grad(partial(each, smoothing=0.1)))(logits, targets))
        for each in (scattered, selected)
    ]
    assert ["scatter" in program for program in programs] == [True, False]


HEADS = {
    "tied": dict(name="vaswani2017_base"),
    "tied to the target's embedding, with a bias": dict(tying="output", output_bias=True),
    "untied, with a bias": {},
    "scaled logits": dict(name="t5", tying="all"),
    "a bias that is never trained": dict(name="marian"),
}


CHUNKS = [quick_if(head != "scaled logits", head, 3) for head in HEADS]
CHUNKS += [quick_if(n == 99, "untied, with a bias", n) for n in (2, 5, 99)]


@pytest.mark.parametrize(("head", "chunks"), CHUNKS)
def test_a_loss_in_chunks_is_the_whole_loss(head, chunks):
    """Five positions; two and three do not divide them, and 99 chunks are more than there are."""
    config = tiny(**HEADS[head], num_layers=1)
    everything = random_arrays(config)
    weights = {name: jnp.asarray(everything[name]) for name in transformer.head_names(config)}
    _, targets = batch(config)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(*targets.shape, config.d_model)))
    options = dict(pad_id=config.target_pad_id, label_smoothing=0.1)
    logits = partial(transformer.logits_of, config)

    def at_once(weights: dict, x: jax.Array) -> tuple[jax.Array, loss.LossSums]:
        sums = loss.loss_sums(logits(weights, x), jnp.asarray(targets), **options)
        return 0.3 * sums.loss, sums

    def parts(weights: dict, x: jax.Array) -> tuple[jax.Array, loss.LossSums]:
        ids = jnp.asarray(targets)
        sums = loss.chunked_loss_sums(logits, weights, x, ids, chunks=chunks, **options)
        return 0.3 * sums.loss, sums

    (_, expected), reference = jax.value_and_grad(at_once, (0, 1), has_aux=True)(weights, x)
    (_, sums), gradients = jax.value_and_grad(parts, (0, 1), has_aux=True)(weights, x)
    assert int(sums.tokens) == int((targets != config.target_pad_id).sum()) < targets.size
    np.testing.assert_allclose(sums, expected, rtol=1e-14)
    np.testing.assert_allclose(jax.jit(parts)(weights, x)[1], expected, rtol=1e-14)
    assert float(sums.loss) != float(sums.nll_loss)
    for have, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(reference), strict=True):
        assert furthest(have, want) < 1e-14 * (1 + float(jnp.abs(want).max()))
    assert all(np.any(np.asarray(each)) for each in jax.tree.leaves(gradients))


def test_a_step_with_its_loss_in_chunks_is_the_whole_step():
    """With tied embeddings, so that the output layer's gradient is only a part."""
    config = tiny("vaswani2017_base", num_layers=1, dropout=0.2)
    arrays = {name: jnp.asarray(array) for name, array in random_arrays(config).items()}
    source, target = batch(config)
    losses = step.loss_sum
    at_once, parts = (
        jax.jit(jax.value_and_grad(losses, has_aux=True), static_argnums=(3, 4, 6))(
            arrays, {}, Batch(source, target, target[::-1]), config, 0.1, jax.random.key(0), n
        )
        for n in (1, 2)
    )
    np.testing.assert_allclose(parts[0], at_once[0], rtol=1e-14)
    for name, gradient in at_once[1].items():
        assert furthest(parts[1][name], gradient) < 1e-13, name
