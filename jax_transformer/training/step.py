"""The pure training step: state and batch in, state and metrics out."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int, PRNGKeyArray

from jax_transformer import transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.data.batches import Batch
from jax_transformer.nn.positions import Frozen
from jax_transformer.training.loss import cross_entropy
from jax_transformer.transformer import Transformer

Arrays = dict[str, jax.Array]


class TrainState(NamedTuple):
    """Everything that a step changes, and the arrays that it carries along."""

    step: Int[Array, ""]
    params: Arrays
    """Trained arrays by dotted path."""
    carried: Arrays
    """Arrays of the checkpoint that are never trained, by dotted path."""
    moments: optax.OptState


def initial_state(model: Transformer, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step. Its arrays are copies: a step takes over their memory, and the model keeps its own."""
    params, carried = (jax.tree.map(jnp.copy, transformer.flatten(model, kind)) for kind in (nnx.Param, Frozen))
    return TrainState(jnp.zeros((), jnp.int32), params, carried, optimizer.init(params))


def loss_sum(
    params: Arrays, carried: Arrays, batch: Batch, config: TransformerConfig, label_smoothing: float = 0.0, dropout: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Summed loss and number of target tokens of a batch; ``dropout`` is a key or another source of masks."""
    model = transformer.unflatten(config, params | carried)
    logits = model(batch.source, batch.target_in, rngs=dropout)
    assert isinstance(logits, jax.Array), "no attention was asked for"
    return cross_entropy(logits, jnp.asarray(batch.target_out), pad_id=config.target_pad_id, label_smoothing=label_smoothing)


def make_step(
    config: TransformerConfig, optimizer: optax.GradientTransformation, label_smoothing: float
) -> Callable[[TrainState, Batch, PRNGKeyArray], tuple[TrainState, dict[str, jax.Array]]]:
    """The jitted step. It takes over the memory of the state that it is given; the dropout of step n is drawn from ``fold_in(key, n)``."""

    def mean_loss(params: Arrays, carried: Arrays, batch: Batch, key: PRNGKeyArray) -> tuple[jax.Array, jax.Array]:
        total, tokens = loss_sum(params, carried, batch, config, label_smoothing, key)
        return total / jnp.maximum(tokens, 1).astype(total.dtype), tokens

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Batch, key: PRNGKeyArray) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(key, state.step)
        (loss, tokens), gradients = jax.value_and_grad(mean_loss, has_aux=True)(state.params, state.carried, batch, key)
        updates, moments = optimizer.update(gradients, state.moments, state.params)
        metrics = {"loss": loss, "tokens": tokens, "gradient_norm": optax.tree.norm(gradients)}
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), state.carried, moments), metrics

    return step


def make_evaluation(config: TransformerConfig) -> Callable[[TrainState, Batch], tuple[jax.Array, jax.Array]]:
    """The jitted validation step: summed loss without smoothing or dropout, and number of target tokens."""
    return jax.jit(lambda state, batch: loss_sum(state.params, state.carried, batch, config))
