"""AdamW by Optax, in the arithmetic of torch.optim.AdamW and torch.nn.utils.clip_grad_norm_."""

import jax
import jax.numpy as jnp
import optax

from jax_transformer.training.options import OptimizerOptions, Schedule


def schedule(options: OptimizerOptions, steps: int) -> optax.Schedule:
    """The learning rate of step 0, 1, ...: a linear rise that reaches its peak at step ``warmup_steps``, then as the options say."""
    peak, warmup = options.learning_rate, options.warmup_steps
    start = float(max(1, warmup))
    after = {
        Schedule.CONSTANT: optax.constant_schedule(peak),
        Schedule.COSINE: optax.cosine_decay_schedule(peak, max(1, steps - warmup)),
        Schedule.INVERSE_SQRT: lambda count: (
            peak * jnp.sqrt(start / (jnp.maximum(count, 0).astype(float) + start))
        ),
    }[options.schedule]
    if not warmup:
        return after
    # Step 0 takes a first small step instead of none
    return optax.join_schedules([lambda count: peak * (count + 1) / (warmup + 1), after], [warmup])


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """torch's form: multiply by max_norm / (norm + 1e-6) where that is below 1. Optax's own divides by the norm alone."""

    def update(updates, state, params=None):
        del params
        factor = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make(options: OptimizerOptions, steps: int) -> optax.GradientTransformation:
    """Clipping, Adam's moments, decoupled weight decay, and the schedule."""
    return optax.chain(
        clip_by_global_norm(options.clip_norm) if options.clip_norm else optax.identity(),
        optax.scale_by_adam(options.beta1, options.beta2, options.epsilon),
        optax.add_decayed_weights(options.weight_decay),
        optax.scale_by_learning_rate(schedule(options, steps)),
    )
