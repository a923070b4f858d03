"""One update: several batches, half precision, and a moving average."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_transformer import transformer
from jax_transformer.config import RATES
from jax_transformer.data.batches import Batch
from jax_transformer.training import step
from parity_tests.unit import helpers

KEY = jax.random.key(3)
NO_DROPOUT = dict.fromkeys(RATES, 0.0)


def batch_of(config, rows: int, *, length: int = 6, seed: int = 0) -> Batch:
    """Return ragged rows; the target input is the target output, shifted by one position."""
    source = helpers.ragged(config.source_vocab_size, config.source_pad_id, rows, length, seed)
    target = helpers.ragged(config.target_vocab_size, config.target_pad_id, rows, length, seed + 1)
    begun = np.concatenate([np.full((rows, 1), config.bos_id), target[:, :-1]], axis=1)
    return Batch(*(side.astype(np.int32) for side in (source, begun, target)))


def rows_of(batch: Batch, start: int, end: int) -> Batch:
    return Batch(*(side[start:end] for side in batch))


def furthest(first: dict, second: dict) -> float:
    assert first.keys() == second.keys()
    return max(helpers.furthest(first[name], second[name]) for name in first)


def strict_off(function):
    """Turn off strict promotion, which Optax does not support."""

    def call(*arguments):
        with jax.numpy_dtype_promotion("standard"):
            return function(*arguments)

    return call


def prepared(ema: bool = False):
    """Return a configuration without dropout, an optimizer, and the initial state."""
    config = helpers.tiny(num_layers=1, **NO_DROPOUT)
    rule = optax.sgd(0.1, momentum=0.9)
    state = strict_off(partial(step.initial_state, ema=ema))(helpers.random_model(config), rule)
    return config, rule, state


def test_accumulated_batches_equal_one_batch():
    """The rows have different lengths, so that a mean of means would differ."""
    config, rule, state = prepared()
    train = strict_off(step.make_step(config, rule, 0.1))
    batch = batch_of(config, 6)
    copies = [jax.tree.map(np.array, state) for _ in range(2)]
    once, once_metrics = train(copies[0], [batch], KEY)
    parts, parts_metrics = train(copies[1], [rows_of(batch, i, i + 2) for i in (0, 2, 4)], KEY)
    assert furthest(once.params, parts.params) < 1e-13
    tokens = int((batch.target_out != config.target_pad_id).sum())
    assert int(parts_metrics["tokens"]) == int(once_metrics["tokens"]) == tokens
    for name in ("loss", "nll_loss", "gradient_norm"):
        np.testing.assert_allclose(once_metrics[name], parts_metrics[name], rtol=1e-13)
    total, tokens = strict_off(step.loss_sum)(state.params, state.frozen, batch, config)
    np.testing.assert_allclose(parts_metrics["nll_loss"], float(total) / int(tokens), rtol=1e-13)
    assert parts_metrics["loss"] != parts_metrics["nll_loss"], "smoothed"
    assert int(parts.step) == 1


def test_an_update_without_target_tokens_changes_nothing():
    """And the model keeps its own arrays: a step takes over the memory of copies."""
    config, rule, _ = prepared()
    model = helpers.random_model(config)
    state = strict_off(step.initial_state)(model, rule)
    before = jax.tree.map(np.array, state.params)
    batch = batch_of(config, 2)
    empty = batch._replace(target_out=np.full_like(batch.target_out, config.target_pad_id))
    state, measured = strict_off(step.make_step(config, rule, 0.1))(state, [empty], KEY)
    assert furthest(before, state.params) == 0 and float(measured["loss"]) == 0
    own = transformer.flatten(model, nnx.Param)
    assert not any(array.is_deleted() for array in own.values()) and furthest(before, own) == 0


def test_each_accumulated_batch_has_its_own_dropout():
    """Equal masks would give equal losses, in one step or in two."""
    config, rule, state = prepared()
    train = step.make_step(config.with_sizes(dropout=0.5), rule, 0.0)
    batch, losses = batch_of(config, 2), []
    for n in range(3):
        here = state._replace(step=jnp.asarray(n, jnp.int32))
        sums = [train.first(here, batch, KEY)]
        losses.append(loss_of(sums[0]))
        for i in (1, 2):
            before = jax.tree.map(jnp.copy, sums[-1])
            sums.append(train.further(before, here, batch, KEY, np.int32(i)))
            losses.append(loss_of(sums[-1]) - loss_of(sums[-2]))
    assert len(losses) == 9 and np.diff(np.sort(losses)).min() > 1e-6, losses


def loss_of(sums: step.Sums) -> float:
    return float(sums.losses.loss)


def test_each_step_has_its_own_dropout():
    config, rule, state = prepared()
    train = step.make_step(config.with_sizes(dropout=0.5), rule, 0.0)
    batch = batch_of(config, 2)
    states = [jax.tree.map(jnp.copy, state)._replace(step=jnp.int32(i)) for i in range(2)]
    losses = [float(strict_off(train)(each, [batch], KEY)[1]["loss"]) for each in states]
    assert abs(losses[0] - losses[1]) > 1e-3, "the same masks would give the same loss"


def test_the_gradient_norm_is_that_before_clipping():
    config, rule, state = prepared()
    clipped = optax.chain(optax.clip_by_global_norm(1e-3), rule)
    state = state._replace(opt_state=strict_off(clipped.init)(state.params))
    batch = batch_of(config, 2)
    loss = jax.jit(jax.grad(lambda params: step.loss_sum(params, state.frozen, batch, config)[0]))
    gradients = strict_off(loss)(state.params)
    squares = sum(float((np.asarray(gradient) ** 2).sum()) for gradient in gradients.values())
    _, measured = strict_off(step.make_step(config, clipped, 0.0))(state, [batch], KEY)
    expected = np.sqrt(squares) / int(measured["tokens"])
    np.testing.assert_allclose(measured["gradient_norm"], expected, rtol=1e-12)
    assert expected > 1e-3, "clipped"


def test_the_moving_average_follows():
    config, rule, state = prepared(ema=True)
    assert furthest(state.params, state.ema) == 0, "it begins at the weights"
    expected = {name: np.array(value) for name, value in state.ema.items()}
    train = strict_off(step.make_step(config, rule, 0.0, 0.75))
    for i in range(3):
        state, _ = train(state, [batch_of(config, 2, seed=i)], KEY)
        expected = {
            name: 0.75 * value + 0.25 * np.array(state.params[name])
            for name, value in expected.items()
        }
    assert furthest(expected, state.ema) < 1e-15
    assert furthest(state.params, state.ema) > 1e-4
    assert furthest(state.weights, state.ema | state.frozen) == 0


def test_bfloat16_computes_in_bfloat16_and_keeps_float32():
    narrow = dict(compute_dtype="bfloat16", matmul_precision="medium")  # as the command sets them
    config = helpers.tiny(num_layers=1, **narrow, **NO_DROPOUT)
    model = helpers.random_model(config, dtype="float32")
    rule = optax.sgd(0.1, momentum=0.9)
    state = strict_off(step.initial_state)(model, rule)
    batch = batch_of(config, 2)
    assert model(batch.source, batch.target_in).dtype == "bfloat16"
    wide = helpers.random_model(config.with_sizes(compute_dtype=None), dtype="float32")
    exact, _ = step.loss_sum(transformer.flatten(wide), {}, batch, config)
    state, measured = strict_off(step.make_step(config, rule, 0.0))(state, [batch], KEY)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves((state.params, state.opt_state))}
    assert dtypes <= {"float32", "int32"}
    assert measured["loss"].dtype == "float32"
    assert abs(float(measured["loss"]) - float(exact) / int(measured["tokens"])) < 0.05
