"""Faults of accumulated updates, averages, and the lines of metrics."""

from benchmarks.mutants_fault import Mutant

_STEP = "jax_transformer/training/step.py"
_LOOP = "jax_transformer/training/run.py"
_METRICS_LOGGER = "jax_transformer/training/metrics_logger.py"
_IN_AVERAGES = "parity_tests/unit/test_averages.py"
_IN_LOOP = "parity_tests/unit/test_loop.py"
_IN_STEP = "parity_tests/unit/test_step.py"

MUTANTS = [
    Mutant(
        "a further batch has the next step's masks",
        _STEP,
        "jax.random.fold_in(jax.random.fold_in(key, state.step), i))",
        "jax.random.fold_in(key, state.step + i))",
        (f"{_IN_STEP}::test_each_accumulated_batch_has_its_own_dropout",),
        met="a key that counts batches and not steps",
    ),
    Mutant(
        "the first of several batches drops alike at every step",
        _STEP,
        (
            "return sums(state, batch, jax.random.fold_in(key, state.step))\n"
            "\n"
            "    @partial(jax.jit, donate_argnums=0)\n"
            "    def further"
        ),
        (
            "return sums(state, batch, key)\n"
            "\n"
            "    @partial(jax.jit, donate_argnums=0)\n"
            "    def further"
        ),
        (f"{_IN_STEP}::test_each_accumulated_batch_has_its_own_dropout",),
        met="a key that is not folded",
    ),
    Mutant(
        "the gradient norm after clipping",
        _STEP,
        '"gradient_norm": optax.tree.norm(gradients),',
        '"gradient_norm": optax.tree.norm(updates),',
        (f"{_IN_STEP}::test_the_gradient_norm_is_that_before_clipping",),
        met="the norm that clip_grad_norm_ returns is that before it",
    ),
    Mutant(
        "the moving average a step late",
        _STEP,
        "optax.incremental_update(params[name], old, 1 - ema)",
        "optax.incremental_update(state.params[name], old, 1 - ema)",
        (f"{_IN_STEP}::test_the_moving_average_follows",),
        met="an average before the update",
    ),
    Mutant(
        "the moving average begins at zero",
        _STEP,
        "jax.tree.map(jnp.copy, params) if ema else {},",
        "jax.tree.map(jnp.zeros_like, params) if ema else {},",
        (f"{_IN_STEP}::test_the_moving_average_follows",),
        met="Adam's averages begin at zero",
    ),
    Mutant(
        "validated weights are the raw ones",
        _STEP,
        "return lora.merge((self.ema or self.params) | self.frozen)",
        "return lora.merge(self.params | self.frozen)",
        (f"{_IN_STEP}::test_the_moving_average_follows",),
        met="a moving average that is kept and not used",
    ),
    Mutant(
        "the step is not counted",
        _STEP,
        "TrainState(state.step + 1, params, state.frozen",
        "TrainState(state.step, params, state.frozen",
        (f"{_IN_STEP}::test_accumulated_batches_equal_one_batch",),
        met="a counter outside the state",
    ),
    Mutant(
        "checkpoints averaged without their moving average",
        _LOOP,
        '    group = "ema" if like.ema else "params"\n',
        '    group, like = "params", like._replace(ema={})\n',
        (
            f"{_IN_AVERAGES}::test_the_mean_is_that_of_the_validated_weights_in_float64_rounded_once",
        ),
        met="raw weights averaged though validated ones are others",
    ),
    Mutant(
        "a mean rounded at each addition",
        _LOOP,
        "processes.on_host(weights[name]).astype(np.float64) + total",
        "processes.on_host(weights[name]).astype(np.float32) + total",
        (
            f"{_IN_AVERAGES}::test_the_mean_is_that_of_the_validated_weights_in_float64_rounded_once",
        ),
        met="float32 sums of checkpoints",
    ),
    Mutant(
        "a mean over one checkpoint fewer",
        _LOOP,
        "(array / len(steps)).astype",
        "(array / max(1, len(steps) - 1)).astype",
        (
            f"{_IN_AVERAGES}::test_the_mean_is_that_of_the_validated_weights_in_float64_rounded_once",
        ),
        met="n - 1 of a variance",
    ),
    Mutant(
        "a mean that stays in float64",
        _LOOP,
        ".astype(weights[name].dtype) for name, array in total.items()",
        ".astype(np.float64) for name, array in total.items()",
        (
            f"{_IN_AVERAGES}::test_the_mean_is_that_of_the_validated_weights_in_float64_rounded_once",
        ),
        met="an average in another dtype",
    ),
    Mutant(
        "a mean of the last checkpoint only",
        _LOOP,
        "processes.on_host(weights[name]).astype(np.float64) + total.get(name, 0)",
        "processes.on_host(weights[name]).astype(np.float64) * len(steps)",
        (
            f"{_IN_AVERAGES}::test_the_mean_is_that_of_the_validated_weights_in_float64_rounded_once",
        ),
        met="an accumulator that is overwritten",
    ),
    Mutant(
        "a resumed run repeats accumulated batches",
        _LOOP,
        "corpus.train, corpus.plan, began * each, options",
        "corpus.train, corpus.plan, began, options",
        (f"{_IN_LOOP}::test_a_stopped_run_goes_on_with_the_next_batches",),
        met="steps and batches confused",
    ),
    Mutant(
        "too few batches for accumulation",
        _LOOP,
        "options.steps * each, dropped",
        "options.steps, dropped",
        (f"{_IN_LOOP}::test_a_stopped_run_goes_on_with_the_next_batches",),
        met="steps and batches confused",
    ),
    Mutant(
        "no validation at the last step",
        _LOOP,
        "return now % self.options.eval_every == 0 or now == self.options.steps",
        "return now % self.options.eval_every == 0",
        (f"{_IN_LOOP}::test_the_last_step_has_a_line_a_validation_and_a_checkpoint",),
        met="a last step that is no multiple",
    ),
    Mutant(
        "no line of metrics at the last step",
        _LOOP,
        "if now % options.log_every == 0 or now == options.steps:",
        "if now % options.log_every == 0:",
        (f"{_IN_LOOP}::test_the_last_step_has_a_line_a_validation_and_a_checkpoint",),
        met="a last step that is no multiple",
    ),
    Mutant(
        "an old average stays after a resume",
        _LOOP,
        "[step for step in average if step <= began]",
        "average",
        (f"{_IN_LOOP}::test_the_average_of_steps_that_are_made_again_is_made_again",),
        met="an average of steps that are made again",
    ),
    Mutant(
        "a validation that a stop cut short is lost",
        _LOOP,
        ('self.validated = not began or "figures" in about or not self._validates(began)'),
        "self.validated = True",
        (f"{_IN_LOOP}::test_a_validation_that_a_stop_cuts_short_is_made_by_the_next_process",),
        met="stopped between the step and its validation",
    ),
    Mutant(
        "a loss line not weighted by tokens",
        _METRICS_LOGGER,
        "np.average([value[name] for value in values], weights=tokens)",
        "np.average([value[name] for value in values])",
        (
            f"{_IN_AVERAGES}::test_a_line_weighs_the_losses_by_tokens_and_holds_steps_before_a_resume",
        ),
        met="a mean of means",
    ),
    Mutant(
        "the learning rate of the next step",
        _METRICS_LOGGER,
        "float(self.schedule(now - 1))",
        "float(self.schedule(now))",
        (
            f"{_IN_AVERAGES}::test_a_line_weighs_the_losses_by_tokens_and_holds_steps_before_a_resume",
        ),
        met="off-by-one of a schedule",
    ),
    Mutant(
        "the gradient norm of another step",
        _METRICS_LOGGER,
        'float(values[-1]["gradient_norm"])',
        'float(values[0]["gradient_norm"])',
        (
            f"{_IN_AVERAGES}::test_a_line_weighs_the_losses_by_tokens_and_holds_steps_before_a_resume",
        ),
        met="the first of several steps",
    ),
    Mutant(
        "the step before a NaN is named",
        _METRICS_LOGGER,
        "step = now - len(values) + i + 1",
        "step = now - len(values) + i",
        (f"{_IN_AVERAGES}::test_the_step_of_a_number_that_is_not_finite_is_named",),
        met="off-by-one of a message",
    ),
    Mutant(
        "gradients may be infinite",
        _METRICS_LOGGER,
        'for name in ("loss", "gradient_norm"):',
        'for name in ("loss",):',
        (f"{_IN_AVERAGES}::test_the_step_of_a_number_that_is_not_finite_is_named",),
        met="a loss that is finite and a gradient that is not",
    ),
    Mutant(
        "each line is the mean since the beginning",
        _METRICS_LOGGER,
        "values, self.values = self.values, []",
        "values = self.values",
        (
            f"{_IN_AVERAGES}::test_a_line_weighs_the_losses_by_tokens_and_holds_steps_before_a_resume",
        ),
        met="an accumulator that is not cleared",
    ),
    Mutant(
        "steps before a resume are not in its first line",
        _METRICS_LOGGER,
        "        self.values += values\n",
        "        self.values = values\n",
        (
            f"{_IN_AVERAGES}::test_a_line_weighs_the_losses_by_tokens_and_holds_steps_before_a_resume",
        ),
        met="metrics after a resume",
    ),
    Mutant(
        "the average's figures shown as validation's",
        _METRICS_LOGGER,
        'group = "averaged" if "weights" in entry else "valid" if',
        'group = "valid" if',
        (f"{_IN_AVERAGES}::test_figures_of_averaged_weights_are_a_group_of_their_own",),
        met="two series under one name",
    ),
]
