"""The pure training step: state and batch in, state and metrics out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int, PRNGKeyArray

from jax_transformer import transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.data.batches import Batch, PackedBatch
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.training import devices
from jax_transformer.training.loss import LossSums, chunked_loss_sums, loss_sums
from jax_transformer.transformer import Transformer
from jax_transformer.weights.arrays import adapted_kernels, is_parameter, merge_adapters

Arrays = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
AnyBatch = Batch | PackedBatch


class TrainState(NamedTuple):
    """Everything that a step changes, and the frozen arrays of the model."""

    step: Int[Array, ""]
    params: Arrays
    """Trained arrays by dotted path: parameters of the model, or adapters."""
    frozen: Arrays
    """Arrays that are not trained, by dotted path."""
    opt_state: optax.OptState
    ema: Arrays
    """Moving average of ``params``; empty if none is kept."""

    @property
    def weights(self) -> Arrays:
        """The arrays of the model that validation and translation use."""
        return merge_adapters((self.ema or self.params) | self.frozen)

    @property
    def trained(self) -> list[str]:
        """The names of the model's arrays that training changes."""
        return [*adapted_kernels(self.params), *filter(is_parameter, self.params)]


def initial_state(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    *,
    ema: bool = False,
) -> TrainState:
    """Return the state before the first step, in which all parameters are trained.

    The arrays are copies: a step takes over their memory (donation), the model keeps its own.
    """
    params, frozen = (
        jax.tree.map(jnp.copy, transformer.flatten(model, kind)) for kind in (nnx.Param, Frozen)
    )
    return state_of(params, frozen, optimizer, ema=ema)


def state_of(
    params: Arrays, frozen: Arrays, optimizer: optax.GradientTransformation, *, ema: bool = False
) -> TrainState:
    """Return the state of :func:`initial_state`, from the trained arrays and the others."""
    average = jax.tree.map(jnp.copy, params) if ema else {}
    return TrainState(jnp.zeros((), jnp.int32), params, frozen, optimizer.init(params), average)


def loss_sum(
    params: Arrays,
    frozen: Arrays,
    batch: AnyBatch,
    config: TransformerConfig,
    label_smoothing: float = 0.0,
    dropout: Any = None,
    chunks: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Return the summed loss and number of target tokens of a batch.

    ``dropout`` is a key, another source of masks, or None for a deterministic model; ``chunks`` is
    as for :func:`make_step`.
    """
    sums = _loss_sums(params | frozen, batch, config, label_smoothing, dropout, chunks)
    return sums.loss, sums.tokens


def _loss_sums(
    weights: Arrays,
    batch: AnyBatch,
    config: TransformerConfig,
    label_smoothing: float,
    dropout: Any,
    chunks: int,
) -> LossSums:
    merged = merge_adapters(weights)
    model = transformer.unflatten(config, merged)
    segments = batch.segments if isinstance(batch, PackedBatch) else None
    x = model.hidden(batch.source, batch.target_in, rngs=dropout, segments=segments)
    targets, pad_id = jnp.asarray(batch.target_out), config.target_pad_id
    if chunks == 1:
        logits = model.logits(x)
        return loss_sums(logits, targets, pad_id=pad_id, label_smoothing=label_smoothing)
    return chunked_loss_sums(
        partial(transformer.logits_of, config),
        {name: merged[name] for name in transformer.head_names(config)},
        x,
        targets,
        chunks=chunks,
        pad_id=pad_id,
        label_smoothing=label_smoothing,
    )


class Sums(NamedTuple):
    """Sums over the batches of one update."""

    gradients: Arrays
    losses: LossSums


@dataclass(frozen=True)
class TrainStep:
    """One update from one batch or several, each token weighing the same.

    It takes over the memory of its input state.
    """

    one: Any
    """The update from a single batch."""
    first: Any
    further: Any
    finish: Any

    def __call__(
        self, state: TrainState, batches: Sequence[AnyBatch], key: PRNGKeyArray
    ) -> tuple[TrainState, Metrics]:
        """Return the next state, and its metrics.

        They are ``loss`` and, without label smoothing, ``nll_loss`` (nats per token), ``tokens``,
        and ``gradient_norm`` before clipping.
        """
        if len(batches) == 1:
            return self.one(state, batches[0], key)
        sums = self.first(state, batches[0], key)
        for i, batch in enumerate(batches[1:], 1):
            sums = self.further(sums, state, batch, key, np.int32(i))
        return self.finish(state, sums)

    def programs(self) -> int:
        """Return the number of compiled programs."""
        return sum(each._cache_size() for each in vars(self).values())


def make_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    label_smoothing: float,
    ema: float = 0.0,
    loss_chunks: int = 1,
    shardings: TrainState | None = None,
) -> TrainStep:
    """Return the jitted step; ``ema`` is the decay of the state's moving average, if it has one.

    With ``loss_chunks`` above 1 the loss is computed in so many chunks of positions, one by one:
    see :func:`jax_transformer.training.loss.chunked_loss_sums`. ``shardings`` lay out the next
    state; without them XLA chooses.

    The dropout of step n is drawn from ``fold_in(key, n)``; for its further batches i = 1, 2,
    ... from ``fold_in(fold_in(key, n), i)``.
    """

    def first(state: TrainState, batch: AnyBatch, key: PRNGKeyArray, i: Any = None) -> Sums:
        dropout = jax.random.fold_in(key, state.step)
        if i is not None:
            dropout = jax.random.fold_in(dropout, i)

        def loss(params: Arrays) -> tuple[jax.Array, LossSums]:
            weights = params | state.frozen
            summed = _loss_sums(weights, batch, config, label_smoothing, dropout, loss_chunks)
            return summed.loss, summed

        (_, losses), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return Sums(devices.constrain(gradients), losses)

    def further(
        summed: Sums, state: TrainState, batch: AnyBatch, key: PRNGKeyArray, i: Int[Array, ""]
    ) -> Sums:
        return jax.tree.map(jnp.add, summed, first(state, batch, key, i))

    def finish(state: TrainState, summed: Sums) -> tuple[TrainState, Metrics]:
        losses = summed.losses
        count = jnp.maximum(losses.tokens, 1).astype(losses.loss.dtype)
        gradients = jax.tree.map(lambda g: g / count.astype(g.dtype), summed.gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        average = {
            name: optax.incremental_update(params[name], old, 1 - ema)
            for name, old in state.ema.items()
        }
        metrics = {
            "loss": losses.loss / count,
            "nll_loss": losses.nll_loss / count,
            "tokens": losses.tokens,
            "gradient_norm": optax.tree.norm(gradients),
        }
        return TrainState(state.step + 1, params, state.frozen, opt_state, average), metrics

    def one(state: TrainState, batch: AnyBatch, key: PRNGKeyArray) -> tuple[TrainState, Metrics]:
        return finish(state, first(state, batch, key))

    # What comes in is laid out as its arguments are; a donated argument gives up its memory
    updated = (shardings, None)
    return TrainStep(
        one=jax.jit(one, out_shardings=updated, donate_argnums=0),
        first=jax.jit(first),
        further=jax.jit(further, donate_argnums=0, keep_unused=True),  # `estimate` counts all
        finish=jax.jit(finish, out_shardings=updated, donate_argnums=0),
    )


def make_evaluation(
    config: TransformerConfig, loss_chunks: int = 1
) -> Callable[[Arrays, AnyBatch], tuple[jax.Array, jax.Array]]:
    """Return the jitted validation step: summed loss, not smoothed, and target tokens.

    ``loss_chunks`` is as for :func:`make_step`.
    """
    return jax.jit(lambda weights, batch: loss_sum(weights, {}, batch, config, chunks=loss_chunks))
