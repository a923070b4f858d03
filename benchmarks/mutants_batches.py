"""Faults of the order of pairs, of pairs left over, and of the arrays of a batch."""

from benchmarks.mutants_fault import Mutant

_BATCHES = "jax_transformer/data/batches.py"
_IN_BATCHES = "parity_tests/unit/test_batches.py"

MUTANTS = [
    Mutant(
        "an epoch a batch short",
        _BATCHES,
        "counts[-1] += left > 0\n",
        "pass\n",
        (f"{_IN_BATCHES}::test_every_epoch_has_every_pair_exactly_once",),
        met="a last batch that is not full",
    ),
    Mutant(
        "pairs left over in a bucket are lost",
        _BATCHES,
        "            left = pool[full:]\n",
        "            left = pool[:0]\n",
        (f"{_IN_BATCHES}::test_every_epoch_has_every_pair_exactly_once",),
        met="drop_last of a loader",
    ),
    Mutant(
        "an epoch's last pairs are lost",
        _BATCHES,
        ("        if len(left):\n            batches.append"),
        ("        if False:\n            batches.append"),
        (f"{_IN_BATCHES}::test_every_epoch_has_every_pair_exactly_once",),
        met="drop_last of a loader",
    ),
    Mutant(
        "every epoch in the same order",
        _BATCHES,
        "np.array([self.seed % 2**64, epoch], np.uint64)",
        "np.array([self.seed % 2**64, 0], np.uint64)",
        (f"{_IN_BATCHES}::test_the_order_is_a_pure_function_of_seed_and_epoch",),
        met="a sampler whose set_epoch is forgotten",
    ),
    Mutant(
        "the same order whatever the seed",
        _BATCHES,
        "np.array([self.seed % 2**64, epoch], np.uint64)",
        "np.array([0, epoch], np.uint64)",
        (f"{_IN_BATCHES}::test_the_order_is_a_pure_function_of_seed_and_epoch",),
        met="a seed that is not used",
    ),
    Mutant(
        "batches in order of length",
        _BATCHES,
        "return [batches[i] for i in _permutation(random, len(batches))]",
        "return batches",
        (f"{_IN_BATCHES}::test_the_order_is_a_pure_function_of_seed_and_epoch",),
        met="a curriculum that nobody asked for",
    ),
    Mutant(
        "a resumed run a batch ahead",
        _BATCHES,
        "epoch, position = divmod(step, self.batches_per_epoch)",
        "epoch, position = divmod(step + 1, self.batches_per_epoch)",
        (f"{_IN_BATCHES}::test_steps_count_on_across_epochs",),
        met="off-by-one of a position",
    ),
    Mutant(
        "pairs as long as a bucket in the next one",
        _BATCHES,
        "return np.searchsorted(widths, lengths).astype",
        'return np.searchsorted(widths[:-1], lengths, side="right").astype',
        (f"{_IN_BATCHES}::test_a_pair_goes_to_its_narrowest_bucket_and_left_overs_to_the_next",),
        met="< or <= at an edge",
    ),
    Mutant(
        "filler rows have something to predict",
        _BATCHES,
        "    target_out[len(indices) :] = ids.target_pad\n",
        "",
        (f"{_IN_BATCHES}::test_fill_is_the_share_of_tokens",),
        met="rows without pairs",
    ),
    Mutant(
        "the decoder reads a token too many",
        _BATCHES,
        "np.arange(1, width) < lengths[:, None]",
        "np.arange(1, width) <= lengths[:, None]",
        (f"{_IN_BATCHES}::test_a_batch_has_tokens_special_tokens_and_padding",),
        met="teacher forcing that holds the end token",
    ),
    Mutant(
        "targets begin with the end token",
        _BATCHES,
        "target_in[:, 0] = ids.target_bos",
        "target_in[:, 0] = ids.target_eos",
        (f"{_IN_BATCHES}::test_a_batch_has_tokens_special_tokens_and_padding",),
        met="bos and eos confused",
    ),
    Mutant(
        "targets padded with the sources' id",
        _BATCHES,
        "(ids.source_pad, ids.target_pad),\n",
        "(ids.source_pad, ids.source_pad),\n",
        (f"{_IN_BATCHES}::test_fill_is_the_share_of_tokens",),
        met="two vocabularies, one pad id",
    ),
    Mutant(
        "an end token over the last token",
        _BATCHES,
        "padded[np.arange(rows), lengths + offset] = token",
        "padded[np.arange(rows), np.maximum(lengths - 1, 0) + offset] = token",
        (f"{_IN_BATCHES}::test_fill_is_the_share_of_tokens",),
        met="off-by-one of an end token",
    ),
    Mutant(
        "rows that devices cannot share",
        _BATCHES,
        "tokens_per_batch // width // rows_multiple * rows_multiple)",
        "tokens_per_batch // width)",
        (f"{_IN_BATCHES}::test_rows_fill_the_budget",),
        met="a batch that is not divisible",
    ),
    Mutant(
        "weights rounded down",
        _BATCHES,
        "np.maximum(1, np.rint(sizes * unique[:, 1])).astype",
        "np.maximum(1, np.floor(sizes * unique[:, 1])).astype",
        (f"{_IN_BATCHES}::test_the_number_of_pairs_of_a_weight_is_rounded_and_never_0",),
        met="a rounding of counts",
    ),
    Mutant(
        "a light file is left out",
        _BATCHES,
        "np.maximum(1, np.rint(sizes * unique[:, 1])).astype",
        "np.rint(sizes * unique[:, 1]).astype",
        (f"{_IN_BATCHES}::test_the_number_of_pairs_of_a_weight_is_rounded_and_never_0",),
        met="a count that becomes 0",
    ),
    Mutant(
        "weights repeat the same pairs in every epoch",
        _BATCHES,
        (
            "group = self._groups[0][order]\n"
            "        return np.concatenate(\n"
            "            [np.resize(order[group == i], count)"
        ),
        (
            "group = self._groups[0][order]\n"
            "        return np.concatenate(\n"
            "            [np.resize(np.sort(order[group == i]), count)"
        ),
        (f"{_IN_BATCHES}::test_pairs_come_as_often_as_their_weights_say",),
        met="the first of a list, always",
    ),
    Mutant(
        "weighted pairs next to their copies",
        _BATCHES,
        "            order = order[_permutation(random, len(order))]\n",
        "            pass\n",
        (f"{_IN_BATCHES}::test_a_batch_of_weighted_pairs_is_shuffled_like_any_other",),
        met="copies in one batch",
    ),
    Mutant(
        "one bucket too few",
        _BATCHES,
        "for _ in range(min(count, len(widths)) - 1):",
        "for _ in range(min(count, len(widths)) - 2):",
        (f"{_IN_BATCHES}::test_bucket_widths_are_optimal",),
        met="off-by-one of a count",
    ),
    Mutant(
        "the fill counts one side",
        _BATCHES,
        "            2 * count * rows * width\n",
        "            count * rows * width\n",
        (f"{_IN_BATCHES}::test_pairs_come_as_often_as_their_weights_say",),
        met="positions of one side",
    ),
    Mutant(
        "an epoch's order is made anew at each step",
        _BATCHES,
        "            if epoch not in self._epochs:",
        "            if True:",
        (f"{_IN_BATCHES}::test_epoch_plans_are_cached",),
        met="a cache that is never used",
    ),
]
