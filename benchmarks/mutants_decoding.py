"""Faults of decoding: the cache, the loops, beam search, sampling."""

from benchmarks.mutants_fault import Mutant

_CACHE, _WHOLE = "jax_transformer/nn/attention.py", "jax_transformer/transformer.py"
_LOOP, _SCORERS, _SEARCH = (
    f"jax_transformer/generate/{name}.py" for name in ("decoding", "scorers", "beam_search")
)
_COMPACTION = "jax_transformer/generate/compaction.py"
_HALVES = "jax_transformer/generate/split_batch.py"
_UNIT = "parity_tests/unit/test_generate.py"
_IN_HALVES = "parity_tests/unit/test_halves.py"
_GREEDY = ("parity_tests/test_decoding.py::test_greedy_token_for_token[lesson10]",)
_STEPS = (f"{_UNIT}::test_each_cached_step_gives_the_logits_of_a_full_pass[lesson10]",)
_LEARNED = (
    f"{_UNIT}::test_each_cached_step_gives_the_logits_of_a_full_pass[pre-norm, learned positions]",
)
_BEAM = (f"{_UNIT}::test_beam_is_the_plain_search[2]",)
_STOP = (f"{_UNIT}::test_an_end_token_is_followed_by_padding_and_the_loop_stops_early",)

MUTANTS = [
    Mutant(
        "the cache written a position late",
        _CACHE,
        "start = length * keys.shape[1]",
        "start = (length + 1) * keys.shape[1]",
        _STEPS,
        met="cache index",
    ),
    Mutant(
        "the cache never fills",
        _WHOLE,
        ("target_valid=target_valid, length=length + 1\n"),
        ("target_valid=target_valid, length=length\n"),
        _STEPS,
        met="cache index",
    ),
    Mutant(
        "a cached token at the next position",
        _WHOLE,
        "position = jnp.broadcast_to(length, beams)",
        "position = jnp.broadcast_to(length + 1, beams)",
        _LEARNED,
        met="off-by-one positions, only in decoding",
    ),
    Mutant(
        "the cache forgets what is padding",
        _WHOLE,
        "here = tokens != self.config.target_pad_id",
        "here = tokens >= 0",
        _STEPS,
        met="a mask that decoding forgets",
    ),
    Mutant(
        "cached keys and values exchanged",
        _CACHE,
        "return BlockCache(room, room, cache_layout(keys), cache_layout(values))",
        "return BlockCache(room, room, cache_layout(values), cache_layout(keys))",
        _STEPS,
        met="swapped K and V",
    ),
    Mutant(
        "beams do not inherit their past",
        _CACHE,
        "return self._replace(beam_indices=past)",
        "return self._replace(beam_indices=self.beam_indices)",
        _BEAM,
        met="a cache that is not reordered",
    ),
    Mutant(
        "beams inherit a position too few",
        _CACHE,
        "jnp.where(positions < self.length, past,",
        "jnp.where(positions < self.length - 1, past,",
        _BEAM,
        met="a cache that is not reordered, off by one",
    ),
    Mutant(
        "beams see each other",
        _WHOLE,
        "self_mask = own if self_mask is None else self_mask & own",
        "self_mask = self_mask",
        _BEAM,
        met="beams of a row in one cache",
    ),
    Mutant(
        "the start token fed at every step",
        _SEARCH,
        "jnp.where(length == 0, start, last)",
        "jnp.where(length >= 0, start, last)",
        _BEAM,
        met="decoder input",
    ),
    Mutant(
        "only as many continuations as beams",
        _SEARCH,
        ("-1), count)\n"),
        (
            "-1), count)\n"
            "    lowest = jnp.finfo(best.dtype).min / 2\n"
            "    best = best.at[:, static_args.config.num_beams :].set(lowest)\n"
        ),
        _BEAM,
        met="ends crowd out what goes on",
    ),
    Mutant(
        "logits added up, not log-probabilities",
        _SEARCH,
        "jax.nn.log_softmax(logits.astype(beams.log_probs.dtype))",
        "logits.astype(beams.log_probs.dtype)",
        _BEAM,
        met="unnormalised scores",
    ),
    Mutant(
        "length penalty of another form",
        _SCORERS,
        "((5 + length.astype(self.dtype)) / 6)",
        "(length.astype(self.dtype))",
        _BEAM,
        met="beam length penalty: Wu et al. and transformers",
    ),
    Mutant(
        "length penalty without the end token",
        _SEARCH,
        "scorer.mask(log_probs / scorer.divisor(length), closed",
        "scorer.mask(log_probs / scorer.divisor(length - 1), closed",
        _BEAM,
        met="beam length penalty off by one",
    ),
    Mutant(
        "a row stops at its first end",
        _SEARCH,
        (
            "worst = jnp.where(\n        beams.finished,"
            " beams.finished_scores.min(axis=1, keepdims=True), scorer.masked\n    )"
        ),
        "worst = beams.finished_scores.max(axis=1, keepdims=True)",
        ("parity_tests/test_decoding.py::test_beam_token_for_token",),
        met="early stop, which only n-best lists show",
    ),
    Mutant(
        "a row stops by the length so far",
        _SCORERS,
        "return jnp.asarray(self.static_args.max_new_tokens)",
        "return length",
        (
            f"{_UNIT}::test_beam_is_the_plain_search[2]",
            f"{_UNIT}::test_beam_is_the_plain_search[4]",
        ),
        met="early stop, as a heuristic",
    ),
    Mutant(
        "all beams continued at first",
        _SEARCH,
        "scores.at[:, 0].set(0)",
        "jnp.zeros(shape, scores.dtype)",
        _BEAM,
        met="beams that are copies of each other",
    ),
    Mutant(
        "finished hypotheses continue",
        _SEARCH,
        "jax.lax.top_k(scorer.mask(log_probs, ends), ",
        "jax.lax.top_k(log_probs, ",
        _BEAM,
        met="tokens after the end",
    ),
    Mutant(
        "a finished row continues",
        _LOOP,
        "jnp.where(carry.open, chosen, static_args.pad_id)",
        "chosen",
        (f"{_UNIT}::test_greedy_is_the_plain_loop_without_a_cache[lesson10]",),
        met="tokens after the end",
    ),
    Mutant(
        "greedy runs to the last position",
        _LOOP,
        "open=carry.open & (token != static_args.eos_id)",
        "open=carry.open",
        _STOP,
        met="early stop",
    ),
    Mutant(
        "greedy stops with its first row",
        _COMPACTION,
        "is_open(c).sum() > next_size",
        "is_open(c).all()",
        (f"{_UNIT}::test_greedy_is_the_plain_loop_without_a_cache[lesson10]",),
        met="early stop",
    ),
    Mutant(
        "rows that leave the batch lose their place",
        _COMPACTION,
        "now, rows[left], sizes[1:])",
        "now, left, sizes[1:])",
        ("parity_tests/unit/test_compaction.py::test_rows_leave_the_loop_and_keep_their_order",),
        met="rows of a batch in another order",
    ),
    Mutant(
        "the row in the middle comes twice, the last one never",
        _HALVES,
        "processes.on_host(other)[2 * length - count :]",
        "processes.on_host(other)[: count - length]",
        (f"{_IN_HALVES}::test_halves_give_what_the_whole_batch_gives",),
        met="an overlap that is kept",
    ),
    Mutant(
        "the second half draws as the first",
        _HALVES,
        "np.arange(count, dtype=np.int32) if row_ids is None else row_ids",
        "row_ids",
        (f"{_IN_HALVES}::test_halves_give_what_the_whole_batch_gives",),
        met="row numbers that begin again in each part",
    ),
    Mutant(
        "the second half has the settings of another thread",
        _HALVES,
        "stack.enter_context(context(value))",
        "pass",
        (f"{_IN_HALVES}::test_both_halves_have_the_settings_of_the_caller",),
        met="a context that a thread does not inherit",
    ),
    Mutant(
        "temperature multiplies",
        _LOOP,
        "(scores - scores[:, :1]) / jnp.maximum(",
        "(scores - scores[:, :1]) * jnp.maximum(",
        ("parity_tests/unit/test_sampling.py::test_first_tokens_have_the_requested_distribution",),
        met="inverse temperature",
    ),
    Mutant(
        "the nucleus a token short",
        _LOOP,
        "jnp.cumsum(probabilities, axis=-1) - probabilities",
        "jnp.cumsum(probabilities, axis=-1)",
        (
            "parity_tests/unit/test_sampling.py"
            "::test_the_nucleus_is_the_fewest_tokens_that_reach_top_p",
        ),
        met="top-p's token that crosses the line",
    ),
]
