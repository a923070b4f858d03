"""The optimizer and the learning rate: their options, ``--optimizer.*`` of ``train``, and what they
are in Optax, in the arithmetic of torch.optim and clip_grad_norm_.

What the two libraries have in common (AdamW, Adam, SGD with momentum) is equal step by step;
Adafactor and Lion are Optax's. The options alone load no JAX.
"""

import dataclasses
import enum
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from jax_transformer.config.option import Option, Rare
from jax_transformer.errors import ConfigError, check_numbers

if TYPE_CHECKING:
    import optax


class OptimizerName(enum.StrEnum):
    """The optimizer, with the paper that describes it."""

    ADAMW = "adamw"  # Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101
    ADAM = "adam"  # Kingma and Ba 2015, https://arxiv.org/abs/1412.6980
    # With momentum: Sutskever et al. 2013, https://proceedings.mlr.press/v28/sutskever13.html
    SGD = "sgd"
    ADAFACTOR = "adafactor"  # Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235
    LION = "lion"  # Chen et al. 2023, https://arxiv.org/abs/2302.06675


class Schedule(enum.StrEnum):
    """The learning rate after its linear warm-up."""

    COSINE = "cosine"  # to zero at the last step: Loshchilov and Hutter 2017, without restarts
    INVERSE_SQRT = "inverse_sqrt"  # with the root of the step: Vaswani et al. 2017, section 5.3
    LINEAR = "linear"  # to zero at the last step: Devlin et al. 2019
    CONSTANT = "constant"


_ADAMS = (OptimizerName.ADAMW, OptimizerName.ADAM)
USED_BY: dict[str, tuple[OptimizerName, ...]] = {
    "beta1": (*_ADAMS, OptimizerName.LION),
    "beta2": (*_ADAMS, OptimizerName.LION),
    "epsilon": _ADAMS,
    "momentum": (OptimizerName.SGD,),
    "nesterov": (OptimizerName.SGD,),
}
"""The options that only some optimizers have. Every other option is for all of them."""


class LearningRate(NamedTuple):
    """A learning rate that rises linearly to its peak, then follows a schedule."""

    learning_rate: float
    schedule: Schedule
    warmup_steps: int


FROM_SCRATCH = LearningRate(3e-3, Schedule.COSINE, 200)
"""The defaults for random weights: small models, AdamW."""
FINE_TUNING = LearningRate(5e-5, Schedule.LINEAR, 100)
"""The defaults with ``init``: a higher rate would undo the training of those weights."""
ADAPTERS = LearningRate(2e-4, Schedule.LINEAR, 100)
"""The defaults with ``init`` for low-rank adapters, which begin at zero and need a higher rate.

Hu et al. 2021, appendix D (https://arxiv.org/abs/2106.09685): the rate of GPT-2 and GPT-3."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer, learning rate and loss."""

    name: Annotated[OptimizerName, Option(synonyms="optimizer optim")] = OptimizerName.ADAMW
    """Optimizer; each needs another learning rate."""
    learning_rate: Annotated[float | None, Option(synonyms="lr max_lr")] = None
    """Highest learning rate; with --init 5e-5, or 2e-4 for LoRA."""
    schedule: Annotated[
        Schedule | None, Option(synonyms="lr_scheduler lr_scheduler_type scheduler")
    ] = None
    """Schedule after warm-up; linear with --init."""
    warmup_steps: Annotated[
        int | None, Option(synonyms="warmup num_warmup_steps warmup_updates")
    ] = None
    """Steps of linear warm-up; 100 with --init."""
    beta1: Rare[float] = 0.9
    """Decay of the mean gradient (adamw, adam, lion)."""
    beta2: Rare[float] = 0.98
    """Decay of the mean square (adamw, adam, lion)."""
    epsilon: Rare[float] = 1e-9
    """Added to the mean square's root (adamw, adam)."""
    momentum: Rare[float] = 0.9
    """Decay of past gradients (sgd; 0: none)."""
    nesterov: Rare[bool] = False
    """Use Nesterov momentum (sgd)."""
    weight_decay: float = 0.01
    """Weight decay; an L2 penalty for adam and sgd."""
    clip_norm: Annotated[float, Option(synonyms="max_grad_norm clip grad_clip")] = 1.0
    """Clip gradients to this global norm (0: off)."""
    label_smoothing: float = 0.1
    """Label smoothing of the training loss."""
    accumulate: Annotated[
        int, Option(synonyms="gradient_accumulation_steps grad_accum update_freq")
    ] = 1
    """Batches per update."""
    ema: float = 0.0
    """Decay of an average of the weights (0: off)."""

    def __post_init__(self) -> None:
        check = partial(check_numbers, self, "optimizer.")
        check("warmup_steps weight_decay clip_norm", "not be negative", lambda x: x >= 0)
        rates = "beta1 beta2 momentum label_smoothing ema"
        check(rates, "be at least 0 and below 1", lambda x: 0 <= x < 1)
        check("accumulate", "be at least 1", lambda x: x >= 1)
        check("learning_rate epsilon", "be above 0", lambda x: x > 0)
        unused = []
        for field in dataclasses.fields(self):
            owners, value = USED_BY.get(field.name, (self.name,)), getattr(self, field.name)
            if self.name not in owners and value != field.default:
                unused.append(f"optimizer.{field.name}={value} (only for {', '.join(owners)})")
        if unused:
            raise ConfigError(
                f"{', '.join(unused)}: has no meaning with optimizer.name={self.name.value}"
            )
        if self.nesterov and not self.momentum:
            raise ConfigError("optimizer.nesterov needs optimizer.momentum above 0")

    @property
    def given_rate(self) -> dict[str, Any]:
        """The options of the learning rate that are given."""
        rate = {name: getattr(self, name) for name in LearningRate._fields}
        return {name: value for name, value in rate.items() if value is not None}

    @property
    def rate(self) -> LearningRate:
        """The learning rate; of training from scratch for what is not given."""
        return FROM_SCRATCH._replace(**self.given_rate)


def schedule(options: OptimizerOptions, steps: int) -> "optax.Schedule":
    """Return the learning rate of step 0, 1, ..., of a run of ``steps``.

    It rises linearly to its peak at step ``warmup_steps``, then goes on as the options say.
    """
    import jax.numpy as jnp
    import optax

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


def clip_by_global_norm(max_norm: float) -> "optax.GradientTransformation":
    """PyTorch's clipping: multiply by ``max_norm / (norm + 1e-6)`` if that is below 1.

    ``optax.clip_by_global_norm`` divides by the norm without the 1e-6.
    """
    import jax
    import jax.numpy as jnp
    import optax

    def update(updates: Any, params: Any) -> Any:
        factor = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates)

    return optax.stateless(update)


def make(options: OptimizerOptions, steps: int) -> "optax.GradientTransformation":
    """Return the optimizer of a run of ``steps``: clipping, the named rule, then the learning
    rate.

    As in torch.optim, ``weight_decay`` is an L2 penalty for Adam and SGD, which has no dampening.
    """
    import optax

    decay = optax.add_decayed_weights(options.weight_decay)
    rule: tuple[optax.GradientTransformation, ...]
    match options.name:
        case OptimizerName.ADAMW | OptimizerName.ADAM:
            adam = optax.scale_by_adam(options.beta1, options.beta2, options.epsilon)
            rule = (adam, decay) if options.name is OptimizerName.ADAMW else (decay, adam)
        case OptimizerName.SGD:
            momentum = optax.trace(options.momentum, options.nesterov)
            rule = (decay, momentum if options.momentum else optax.identity())
        case OptimizerName.ADAFACTOR:
            # optax.adafactor with its own numbers, without momentum and relative to the size of
            # each array, but with weight decay times the learning rate, as the others have it
            rule = (
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.scale_by_param_block_rms(),
                decay,
            )
        case OptimizerName.LION:
            rule = (optax.scale_by_lion(options.beta1, options.beta2), decay)
    return optax.chain(
        clip_by_global_norm(options.clip_norm) if options.clip_norm else optax.identity(),
        *rule,
        optax.scale_by_learning_rate(schedule(options, steps)),
    )
