"""Optimizers and learning rates by Optax, in the arithmetic of torch.optim and clip_grad_norm_.

What the two libraries have in common (AdamW, Adam, SGD with momentum) is equal step by step;
Adafactor and Lion are Optax's.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jax_transformer.training.optimizer_options import OptimizerName, OptimizerOptions, Schedule

Chain = tuple[optax.GradientTransformation, ...]


def schedule(options: OptimizerOptions, steps: int) -> optax.Schedule:
    """Return the learning rate of step 0, 1, ..., of a run of ``steps``.

    It rises linearly to its peak at step ``warmup_steps``, then goes on as the options say.
    """
    peak, kind, warmup = options.rate
    start, remaining = float(max(1, warmup)), max(1, steps - warmup)
    after = {
        Schedule.CONSTANT: optax.constant_schedule(peak),
        Schedule.COSINE: optax.cosine_decay_schedule(peak, remaining),
        # optax.linear_schedule divides integers, which is float32 even in 64-bit mode
        Schedule.LINEAR: lambda count: (
            peak * (1 - jnp.clip(count, 0, remaining).astype(float) / remaining)
        ),
        Schedule.INVERSE_SQRT: lambda count: (
            peak * jnp.sqrt(start / (jnp.maximum(count, 0).astype(float) + start))
        ),
    }[kind]
    if not warmup:
        return after
    # Step 0 takes a first small step instead of none
    return optax.join_schedules([lambda count: peak * (count + 1) / (warmup + 1), after], [warmup])


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """PyTorch's clipping: multiply by ``max_norm / (norm + 1e-6)`` if that is below 1.

    ``optax.clip_by_global_norm`` divides by the norm without the 1e-6.
    """

    def update(updates, state, params=None):
        del params
        factor = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make(options: OptimizerOptions, steps: int) -> optax.GradientTransformation:
    """Return the optimizer of a run of ``steps``: clipping, the named rule, then the learning
    rate.
    """
    return optax.chain(
        clip_by_global_norm(options.clip_norm) if options.clip_norm else optax.identity(),
        *_CHAINS[options.name](options),
        optax.scale_by_learning_rate(schedule(options, steps)),
    )


def _adamw(options: OptimizerOptions) -> Chain:
    adam = optax.scale_by_adam(options.beta1, options.beta2, options.epsilon)
    return adam, optax.add_decayed_weights(options.weight_decay)


def _adam(options: OptimizerOptions) -> Chain:
    """Adam with an L2 penalty, as ``torch.optim.Adam(weight_decay=...)``."""
    adam = optax.scale_by_adam(options.beta1, options.beta2, options.epsilon)
    return optax.add_decayed_weights(options.weight_decay), adam


def _sgd(options: OptimizerOptions) -> Chain:
    """SGD with an L2 penalty, as ``torch.optim.SGD(weight_decay=...)`` without dampening."""
    momentum = optax.trace(options.momentum, options.nesterov)
    return (
        optax.add_decayed_weights(options.weight_decay),
        momentum if options.momentum else optax.identity(),
    )


def _adafactor(options: OptimizerOptions) -> Chain:
    """Adafactor without momentum; the learning rate is relative to the size of each array.

    ``optax.adafactor`` with its own numbers, but with weight decay times the learning rate, as the
    other optimizers have it.
    """
    return (
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
        optax.add_decayed_weights(options.weight_decay),
    )


def _lion(options: OptimizerOptions) -> Chain:
    lion = optax.scale_by_lion(options.beta1, options.beta2)
    return lion, optax.add_decayed_weights(options.weight_decay)


_CHAINS: dict[OptimizerName, Callable[[OptimizerOptions], Chain]] = {
    OptimizerName.ADAMW: _adamw,
    OptimizerName.ADAM: _adam,
    OptimizerName.SGD: _sgd,
    OptimizerName.ADAFACTOR: _adafactor,
    OptimizerName.LION: _lion,
}
