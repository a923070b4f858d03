"""Faults of sampling, n-best lists, and the weighting of evaluation."""

from benchmarks.mutants_fault import Mutant

_DECODING = "jax_transformer/generate/decoding.py"
_TRANSLATION = "jax_transformer/inference/translation.py"
_SCORES = "jax_transformer/inference/scores.py"
_EVALUATION = "jax_transformer/training/evaluation.py"
_VALIDATION = "jax_transformer/training/validation.py"
_IN_EVALUATION = "parity_tests/unit/test_evaluation.py"
_IN_METRICS = "parity_tests/unit/test_metrics.py"
_IN_SAMPLES = "parity_tests/unit/test_samples.py"
_IN_SAMPLING = "parity_tests/unit/test_sampling.py"
_IN_TRANSLATION = "parity_tests/unit/test_translation.py"
_IN_VALIDATION = "parity_tests/unit/test_validation.py"

MUTANTS = [
    Mutant(
        "all rows draw alike",
        _DECODING,
        "keys = jax.vmap(partial(jax.random.fold_in, draws.key))(draws.row_ids)",
        "keys = jax.vmap(partial(jax.random.fold_in, draws.key))(draws.row_ids * 0)",
        (f"{_IN_SAMPLING}::test_a_draw_is_decided_by_key_and_row",),
        met="one key for a batch",
    ),
    Mutant(
        "all positions draw alike",
        _DECODING,
        "step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys[rows], step)",
        ("step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys[rows], step * 0)"),
        (f"{_IN_SAMPLING}::test_every_position_draws_anew",),
        met="one key for a sequence",
    ),
    Mutant(
        "a draw depends on the row's place",
        _DECODING,
        ("    row_ids = jnp.arange(batch) if rows is None else jnp.asarray(rows)\n    if"),
        (
            "    row_ids = jnp.arange(batch) + (0 if rows is None else 0 * "
            "jnp.asarray(rows)[:batch].sum())\n"
            "    if"
        ),
        (f"{_IN_SAMPLING}::test_a_draw_is_decided_by_key_and_row",),
        met="draws that change with the batch",
    ),
    Mutant(
        "the nucleus a token long at its edge",
        _DECODING,
        "jnp.where(before < top_p.astype(dtype), scores, -jnp.inf)",
        "jnp.where(before <= top_p.astype(dtype), scores, -jnp.inf)",
        (f"{_IN_SAMPLING}::test_a_nucleus_ends_with_the_token_that_reaches_it",),
        met="< or <= at an edge",
    ),
    Mutant(
        "a small temperature overflows",
        _DECODING,
        "scores = (scores - scores[:, :1]) / jnp.maximum(",
        "scores = scores / jnp.maximum(",
        (f"{_IN_SAMPLING}::test_the_scores_of_a_draw_are_float32_and_finite_at_any_temperature",),
        met="infinity minus infinity",
    ),
    Mutant(
        "a temperature that float32 rounds to zero",
        _DECODING,
        "/ jnp.maximum(temperature.astype(dtype), at_least)",
        "/ temperature.astype(dtype)",
        (f"{_IN_SAMPLING}::test_the_scores_of_a_draw_are_float32_and_finite_at_any_temperature",),
        met="0 / 0 below the smallest float",
    ),
    Mutant(
        "the nucleus before the temperature",
        _DECODING,
        "        probabilities = jax.nn.softmax(scores, axis=-1)\n",
        ("        probabilities = jax.nn.softmax(scores * temperature.astype(dtype), axis=-1)\n"),
        (f"{_IN_SAMPLING}::test_first_tokens_have_the_requested_distribution[options4]",),
        met="the order of warpers",
    ),
    Mutant(
        "sampling in 16 bits",
        _DECODING,
        ("dtype = np.promote_types(logits.dtype, np.float32)\n    scores, tokens"),
        ("dtype = logits.dtype\n    scores, tokens"),
        (f"{_IN_SAMPLING}::test_the_scores_of_a_draw_are_float32_and_finite_at_any_temperature",),
        met="a cumulative sum in bfloat16",
    ),
    Mutant(
        "top-k keeps one token more",
        _DECODING,
        "selection.top_k(logits.astype(dtype), top_k or logits.shape[1])",
        ("selection.top_k(logits.astype(dtype), top_k + 1 if top_k else logits.shape[1])"),
        (f"{_IN_SAMPLING}::test_low_temperature_and_top_k_1_are_greedy",),
        met="off-by-one of a count",
    ),
    Mutant(
        "a temperature of 0 is accepted",
        _DECODING,
        'if not 0 < temperature < float("inf"):',
        'if not 0 <= temperature < float("inf"):',
        (f"{_IN_SAMPLING}::test_arguments_that_mean_nothing_are_refused",),
        met="an edge that divides by zero",
    ),
    Mutant(
        "an empty nucleus is accepted",
        _DECODING,
        "if not 0 < top_p <= 1:",
        "if not 0 <= top_p <= 1:",
        (f"{_IN_SAMPLING}::test_arguments_that_mean_nothing_are_refused",),
        met="an edge that draws nothing",
    ),
    Mutant(
        "n-best lists count from 1",
        _TRANSLATION,
        'f"{line.number} ||| {hypothesis.text}',
        'f"{line.number + 1} ||| {hypothesis.text}',
        (f"{_IN_TRANSLATION}::test_n_best_lists_have_the_moses_format",),
        met="Moses counts from 0",
    ),
    Mutant(
        "n-best scores with three digits",
        _TRANSLATION,
        "{hypothesis.score:.6f}",
        "{hypothesis.score:.3f}",
        (f"{_IN_TRANSLATION}::test_n_best_lists_have_the_moses_format",),
        met="a rounding that ties",
    ),
    Mutant(
        "only the best of an n-best list",
        _TRANSLATION,
        ("        for hypothesis in line.hypotheses\n    ]"),
        ("        for hypothesis in line.hypotheses[:1]\n    ]"),
        (f"{_IN_TRANSLATION}::test_n_best_lists_have_the_moses_format",),
        met="the first of a list",
    ),
    Mutant(
        "a line waits behind a blank one",
        _TRANSLATION,
        ("    while queue and queue[0].hypotheses:\n        yield queue.popleft()"),
        (
            "    while queue and queue[0].hypotheses and queue[0].source:\n"
            "        yield queue.popleft()"
        ),
        (f"{_IN_TRANSLATION}::test_translations_come_in_the_order_of_the_lines",),
        met="an empty value that is false",
    ),
    Mutant(
        "line numbers begin anew in each window",
        _TRANSLATION,
        "            start += len(window)\n",
        "            start = len(window)\n",
        (f"{_IN_TRANSLATION}::test_a_full_window_leaves_incomplete_batches_to_the_next",),
        met="an accumulator that is overwritten",
    ),
    Mutant(
        "only the first reference counts for exact match",
        _SCORES,
        (
            "exact = sum(h in several for h, *several in zip(hypotheses, references, "
            "*others, strict=True))"
        ),
        "exact = sum(h == r for h, r in zip(hypotheses, references, strict=True))",
        (f"{_IN_EVALUATION}::test_several_references_are_those_of_sacrebleu",),
        met="several references",
    ),
    Mutant(
        "several references are not given to sacreBLEU",
        _SCORES,
        "streams = [list(lines) for lines in (references, *others)]",
        "streams = [list(references)]",
        (f"{_IN_EVALUATION}::test_several_references_are_those_of_sacrebleu",),
        met="several references",
    ),
    Mutant(
        "exact match as a share",
        _SCORES,
        '"exact_match": 100 * exact / len(references)',
        '"exact_match": exact / len(references)',
        (f"{_IN_METRICS}::test_validation_has_bleu_chrf_and_exact_match",),
        met="per cent or share",
    ),
    Mutant(
        "intervals of one resampling",
        _SCORES,
        "n_bootstrap=max(1, bootstrap))",
        "n_bootstrap=max(1, min(bootstrap, 2)))",
        (f"{_IN_METRICS}::test_intervals_are_those_of_sacrebleu",),
        met="a parameter that is not passed on",
    ),
    Mutant(
        "perplexity in bits",
        _EVALUATION,
        "math.exp(total / tokens)",
        "2 ** (total / tokens)",
        (f"{_IN_EVALUATION}::test_excluded_pairs_are_counted",),
        met="nats or bits",
    ),
    Mutant(
        "the loss per pair",
        _EVALUATION,
        '"loss": total / tokens if tokens else None',
        '"loss": total / len(pairs) if tokens else None',
        (f"{_IN_EVALUATION}::test_excluded_pairs_are_counted",),
        met="a mean over pairs for one over tokens",
    ),
    Mutant(
        "pairs without a loss are not counted",
        _EVALUATION,
        '"left_out_of_loss": len(pairs) - pairs_counted',
        '"left_out_of_loss": 0',
        (f"{_IN_EVALUATION}::test_excluded_pairs_are_counted",),
        met="a count that nobody checks",
    ),
    Mutant(
        "references do not skip empty pairs",
        _EVALUATION,
        ("return [x for (s, t), x in zip(pairs, lines, strict=True) if s.strip() and t.strip()]"),
        (
            "return [x for (s, t), x in zip(pairs, lines, strict=True)][: "
            "sum(bool(s.strip() and t.strip()) for s, t in pairs)]"
        ),
        (f"{_IN_EVALUATION}::test_several_references_are_those_of_sacrebleu",),
        met="lists that are filtered differently",
    ),
    Mutant(
        "translations move up over empty pairs",
        _EVALUATION,
        'return [next(left) if s.strip() and t.strip() else "" for s, t in pairs]',
        'return [next(left, "") for s, t in pairs]',
        (f"{_IN_EVALUATION}::test_excluded_pairs_are_counted",),
        met="lines that no longer match",
    ),
    Mutant(
        "the loss of an ensemble's first model",
        _EVALUATION,
        "    if len(translator.models) > 1:",
        "    if len(translator.models) > 99:",
        (f"{_IN_TRANSLATION}::test_the_loss_of_an_ensemble_is_that_of_its_mean_probabilities",),
        met="a loss that does not belong to the scores",
    ),
    Mutant(
        "validation loss is a mean of means",
        _VALIDATION,
        (
            "sums = [self.loss_sum(weights, self.devices.divide(batch)) for _, batch "
            "in groups]\n"
            "        losses, tokens = np.array(jax.device_get(sums)).sum(axis=0)"
        ),
        (
            "sums = [self.loss_sum(weights, self.devices.divide(batch)) for _, batch "
            "in groups]\n"
            "        losses, tokens = np.mean([[a / b, 1] for a, b in "
            "jax.device_get(sums)], axis=0)"
        ),
        (f"{_IN_VALIDATION}::test_the_loss_is_of_all_pairs_and_scores_of_the_first",),
        met="a mean of means",
    ),
    Mutant(
        "validation loss of the first batch",
        _VALIDATION,
        ("np.array(jax.device_get(sums)).sum(axis=0)\n        model"),
        ("np.array(jax.device_get(sums))[0]\n        model"),
        (f"{_IN_VALIDATION}::test_the_loss_is_of_all_pairs_and_scores_of_the_first",),
        met="the first of several batches",
    ),
    Mutant(
        "all pairs are translated",
        _VALIDATION,
        "self.pairs = corpus.valid_pairs[: options.eval_pairs]",
        "self.pairs = corpus.valid_pairs",
        (f"{_IN_VALIDATION}::test_the_loss_is_of_all_pairs_and_scores_of_the_first",),
        met="an option that does nothing",
    ),
    Mutant(
        "the same examples at every validation",
        _VALIDATION,
        "return [(number * count + i) % pairs for i in range(min(count, pairs))]",
        "return [i % pairs for i in range(min(count, pairs))]",
        (f"{_IN_SAMPLES}::test_successive_samples_go_through_the_set",),
        met="a counter that is not used",
    ),
]
