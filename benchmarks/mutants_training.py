"""Faults of the loss, the optimizer, the step, and the conversion of optimizer states."""

from benchmarks.mutants_fault import GRADIENTS, Mutant

_RULE, _STEP, _LOSS = (
    "jax_transformer/training/optimizer.py",
    "jax_transformer/training/step.py",
    "jax_transformer/training/loss.py",
)
_STATE, _CROSS, _GROUPS = (
    "jax_transformer/convert/training_state/opt_state.py",
    "jax_transformer/convert/training_state/torch_optimizer.py",
    "jax_transformer/convert/training_state/parameter_groups.py",
)
_VALUES = "parity_tests/unit/test_optimizer_loss.py"
_BY_HAND = (f"{_VALUES}::test_five_steps_are_adamw_written_by_hand",)
_SMOOTHED = (f"{_VALUES}::test_the_loss_is_smoothed_cross_entropy_over_tokens",)
_STEPS = "parity_tests/unit/test_step.py"
_LIVE = "parity_tests/test_optimizer_state.py"

MUTANTS = [
    Mutant(
        "Adam's epsilon inside the root",
        _RULE,
        (
            "def _adamw(options: OptimizerOptions) -> Chain:\n"
            "    adam = optax.scale_by_adam(options.beta1, options.beta2, options.epsilon)"
        ),
        (
            "def _adamw(options: OptimizerOptions) -> Chain:\n"
            "    adam = optax.scale_by_adam(options.beta1, options.beta2, 0.0, options.epsilon)"
        ),
        _BY_HAND,
        met="Optax has both forms, torch one",
    ),
    Mutant(
        "weight decay within the gradient",
        _RULE,
        "return adam, optax.add_decayed_weights(options.weight_decay)",
        "return optax.add_decayed_weights(options.weight_decay), adam",
        _BY_HAND,
        met="decoupled decay: Adam's L2 and AdamW",
    ),
    Mutant(
        "weight decay not times the rate",
        _RULE,
        (
            "*_CHAINS[options.name](options),\n"
            "        optax.scale_by_learning_rate(schedule(options, steps)),"
        ),
        (
            "_CHAINS[options.name](options)[0],\n"
            "        optax.scale_by_learning_rate(schedule(options, steps)),\n"
            "        optax.add_decayed_weights(-options.weight_decay),"
        ),
        _BY_HAND,
        met="decoupled decay in the paper and in torch",
    ),
    Mutant(
        "betas exchanged",
        _RULE,
        (
            "def _adamw(options: OptimizerOptions) -> Chain:\n"
            "    adam = optax.scale_by_adam(options.beta1, options.beta2, "
        ),
        (
            "def _adamw(options: OptimizerOptions) -> Chain:\n"
            "    adam = optax.scale_by_adam(options.beta2, options.beta1, "
        ),
        _BY_HAND,
        met="order of arguments",
    ),
    Mutant(
        "no correction of Adam's bias",
        _RULE,
        (
            "def _adamw(options: OptimizerOptions) -> Chain:\n"
            "    adam = optax.scale_by_adam(options.beta1, options.beta2, options.epsilon)\n"
        ),
        (
            "def _adamw(options: OptimizerOptions) -> Chain:\n"
            "    adam = optax.chain(\n"
            "        optax.scale_by_adam(options.beta1, options.beta2, options.epsilon),\n"
            "        optax.scale_by_schedule(lambda count: 1 - options.beta1 ** (count + 1)),\n"
            "    )\n"
        ),
        _BY_HAND,
        met="bias correction left out, as in BERT's Adam",
    ),
    Mutant(
        "a learning rate of 0 at the first step",
        _RULE,
        "peak * (count + 1) / (warmup + 1)",
        "peak * count / warmup",
        (f"{_VALUES}::test_warm_up_is_linear_from_a_first_small_step_to_the_peak",),
        met="schedule off by one",
    ),
    Mutant(
        "warm-up reaches its peak a step early",
        _RULE,
        "peak * (count + 1) / (warmup + 1)",
        "peak * (count + 1) / warmup",
        (f"{_VALUES}::test_warm_up_is_linear_from_a_first_small_step_to_the_peak",),
        met="schedule off by one",
    ),
    Mutant(
        "the cosine forgets the warm-up",
        _RULE,
        "max(1, steps - warmup)",
        "max(1, steps)",
        (f"{_VALUES}::test_cosine_is_half_way_in_the_middle_and_zero_at_the_end",),
        met="schedule's length",
    ),
    Mutant(
        "the inverse root begins a step late",
        _RULE,
        "(jnp.maximum(count, 0).astype(float) + start)",
        "(jnp.maximum(count - 1, 0).astype(float) + start)",
        (f"{_VALUES}::test_inverse_square_root_continues_warm_up_without_a_jump",),
        met="schedule off by one",
    ),
    Mutant(
        "clipping by the norm without 1e-6",
        _RULE,
        "(optax.tree.norm(updates) + 1e-6)",
        "optax.tree.norm(updates)",
        (f"{_VALUES}::test_gradients_over_the_norm_are_scaled_as_torch_does",),
        met="Optax's clipping norm and torch's",
    ),
    Mutant(
        "each array clipped by its own norm",
        _RULE,
        "lambda g: g * factor.astype(g.dtype), updates)",
        "lambda g: g * jnp.minimum(1.0, max_norm / (jnp.linalg.norm(g) + 1e-6))"
        ".astype(g.dtype), updates)",
        (f"{_VALUES}::test_gradients_over_the_norm_are_scaled_as_torch_does",),
        met="clipping norm",
    ),
    Mutant(
        "small gradients scaled up",
        _RULE,
        "factor = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + 1e-6))",
        "factor = max_norm / (optax.tree.norm(updates) + 1e-6)",
        (f"{_VALUES}::test_gradients_below_the_norm_are_unchanged",),
        met="clipping norm",
    ),
    Mutant(
        "smoothing over the other tokens",
        _LOSS,
        "loss = loss - label_smoothing * logits.mean(axis=-1)",
        "loss = loss - label_smoothing * (logits.sum(axis=-1) - target) / (logits.shape[-1] - 1)",
        _SMOOTHED,
        met="label-smoothing form: tensor2tensor's and torch's",
    ),
    Mutant(
        "smoothing added to the full loss",
        _LOSS,
        "(1 - label_smoothing) *",
        "1.0 *",
        _SMOOTHED,
        met="label-smoothing form",
    ),
    Mutant(
        "padding counted",
        _LOSS,
        "counted.sum()",
        "jnp.asarray(targets.size, jnp.int32)",
        _SMOOTHED,
        met="mean over all positions",
    ),
    Mutant(
        "padding has a loss",
        _LOSS,
        "jnp.where(counted, loss, jnp.zeros((), loss.dtype)).sum()",
        "loss.sum()",
        _SMOOTHED,
        met="ignore_index left out",
    ),
    Mutant(
        "loss in 16 bits",
        _LOSS,
        "if logits.dtype.itemsize < 4:",
        "if logits.dtype.itemsize < 2:",
        (f"{_VALUES}::test_the_loss_is_computed_in_float32_at_least",),
        met="bfloat16 without the cast up",
    ),
    Mutant(
        "the target logit's gradient at the next id",
        _LOSS,
        "ids = jnp.arange(size, dtype=targets.dtype)",
        "ids = 1 + jnp.arange(size, dtype=targets.dtype)",
        (f"{_VALUES}::test_the_gradient_of_the_loss_is_that_of_autodiff",),
        met="a gradient written by hand",
    ),
    Mutant(
        "only the last chunk's gradient of the output layer",
        _LOSS,
        "return jax.tree.map(jnp.add, summed, (result, of_weights)), of_x",
        "return (jax.tree.map(jnp.add, summed[0], result), of_weights), of_x",
        (f"{_VALUES}::test_a_loss_in_chunks_is_the_whole_loss",),
        met="a sum over chunks",
    ),
    Mutant(
        "only the last batch counts",
        _STEP,
        "return jax.tree.map(jnp.add, summed, more)",
        "return more",
        (f"{_STEPS}::test_accumulated_batches_equal_one_batch",),
        met="accumulation",
    ),
    Mutant(
        "a mean of means",
        _STEP,
        "return jax.tree.map(jnp.add, summed, more)",
        "scale = (summed.losses.tokens / more.losses.tokens).astype(more.losses.loss.dtype)\n"
        "        gradients = jax.tree.map(\n"
        "            lambda a, b: a + b * scale, summed.gradients, more.gradients\n        )\n"
        "        summed = summed._replace(gradients=gradients)\n"
        "        more = more._replace(gradients=jax.tree.map(jnp.zeros_like, gradients))\n"
        "        return jax.tree.map(jnp.add, summed, more)",
        (f"{_STEPS}::test_accumulated_batches_equal_one_batch",),
        met="gradient accumulation weighs batches, not tokens",
    ),
    Mutant(
        "the average's decay inverted",
        _STEP,
        "optax.incremental_update(params[name], old, 1 - ema)",
        "optax.incremental_update(params[name], old, ema)",
        (f"{_STEPS}::test_the_moving_average_follows",),
        met="decay and its complement",
    ),
    Mutant(
        "the same dropout at every step",
        _STEP,
        "return update(state, sums(state, batch, jax.random.fold_in(key, state.step)))",
        "return update(state, sums(state, batch, key))",
        (f"{_STEPS}::test_each_step_has_its_own_dropout",),
        met="a key that is never folded",
    ),
    Mutant(
        "the same dropout in all accumulated batches",
        _STEP,
        "jax.random.fold_in(jax.random.fold_in(key, state.step), i)",
        "jax.random.fold_in(key, state.step)",
        (f"{_STEPS}::test_each_accumulated_batch_has_its_own_dropout",),
        met="a key that is never folded",
    ),
    Mutant(
        "gradient of the sum, not of the mean",
        _STEP,
        "jax.tree.map(lambda g: g / count.astype(g.dtype), summed.gradients)",
        "summed.gradients",
        (f"{GRADIENTS}::test_ten_steps[blog2023-cosine]",),
        met="reduction of the loss",
    ),
    Mutant(
        "Adam's count a step ahead",
        _STATE,
        "jnp.asarray(counts.pop() if counts else 0, fresh.count.dtype)",
        "jnp.asarray(counts.pop() + 1 if counts else 0, fresh.count.dtype)",
        (f"{_LIVE}::test_adamw_of_every_architecture[small]",),
        met="bias correction off by one",
    ),
    Mutant(
        "the schedule a step ahead",
        _STATE,
        "node._replace(count=jnp.asarray(position, node.count.dtype))",
        "node._replace(count=jnp.asarray(position + 1, node.count.dtype))",
        ("parity_tests/unit/test_optimizer_state.py::test_optax_chains_round_trip",),
        met="schedule off by one",
    ),
    Mutant(
        "first and second moments exchanged",
        _CROSS,
        "return counts, moments[0], moments[1]",
        "return counts, moments[1], {name: abs(array) for name, array in moments[0].items()}",
        (f"{_LIVE}::test_adamw_of_every_architecture[small]",),
        met="exp_avg and exp_avg_sq",
    ),
    Mutant(
        "moments lost",
        _STATE,
        "return {name: jnp.array(arrays[name], copy=True) for name in fresh}",
        "return {name: jnp.zeros_like(array) for name, array in fresh.items()}",
        (f"{_LIVE}::test_adamw_of_every_architecture[small]",),
        met="converters drop the optimizer's state",
    ),
    Mutant(
        "the count written a step ahead",
        _CROSS,
        "np.array(counts[name], np.float32)",
        "np.array(counts[name] + 1, np.float32)",
        (f"{_LIVE}::test_the_exported_state_is_an_ordinary_state_dict[small-adamw]",),
        met="bias correction off by one, on the way back",
    ),
    Mutant(
        "one weight decay for all groups",
        _CROSS,
        'float(optimizer_groups.plain(group["weight_decay"]))',
        'float(optimizer_groups.plain(groups[0]["weight_decay"]))',
        (f"{_LIVE}::test_weight_decay_groups",),
        met="decay of biases and norms",
    ),
    Mutant(
        "Adam taken for AdamW",
        _GROUPS,
        "return ADAMW if decoupled else ADAM",
        "return ADAMW",
        (f"{_LIVE}::test_the_exported_state_is_an_ordinary_state_dict[small-adam]",),
        met="decoupled decay",
    ),
    Mutant(
        "Nesterov's momentum forgotten",
        _GROUPS,
        '"nesterov": values["nesterov"]',
        '"nesterov": False',
        (f"{_LIVE}::test_the_exported_state_is_an_ordinary_state_dict[small-nesterov]",),
        met="a setting lost",
    ),
    Mutant(
        "amsgrad converted as Adam",
        _GROUPS,
        '"amsgrad": "Optax\'s Adam keeps',
        '"ams_grad": "Optax\'s Adam keeps',
        (f"{_LIVE}::test_other_optimizers_are_refused_by_name[amsgrad]",),
        met="ignored setting",
    ),
]
