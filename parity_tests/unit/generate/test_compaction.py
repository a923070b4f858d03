"""Rows that have ended leave the batch of a decoding loop, and change no other row's result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import generate
from jax_transformer.generate import BeamScorer, Constraints, EarlyStopping, logits, loops
from parity_tests.marks import quick_if
from parity_tests.unit.helpers import ragged, tiny
from parity_tests.unit.speakers import loud

CONFIG = tiny("lesson10_repaired", vocab_size=40, max_length=24, num_layers=1)
ROWS = 64


def test_a_loop_has_a_few_sizes():
    assert [loops.batch_sizes(rows) for rows in (1, 16, 33, 64, 200)] == [
        (1,),
        (16, 8),
        (33, 16, 8),
        (64, 32, 16),
        (200, 100, 50),
    ]


@pytest.mark.parametrize("ends", [range(1, 65), [40] * 64, [1] * 63 + [9], [1] * 20 + [30] * 44])
def test_rows_leave_the_loop_and_keep_their_order(ends):
    """Each row counts to its end; the number of rows that are computed falls by halves."""
    ends = np.random.default_rng(0).permutation(np.array(ends, np.int32))
    computed = []

    def step(carry):
        jax.debug.callback(lambda rows: computed.append(len(rows)), carry[1])
        now, counts, limits = carry
        return now + 1, jnp.minimum(counts + 1, limits), limits

    @jax.jit
    def run(limits):
        start = (jnp.zeros((), jnp.int32), jnp.zeros(ROWS, jnp.int32), limits)
        return loops.while_loop(
            lambda c: c[1] < c[2], step, start, lambda c: c[1], loops.batch_sizes(ROWS)
        )

    assert run(ends).tolist() == ends.tolist()
    jax.effects_barrier()
    left = [(ends > i).sum() for i in range(ends.max())]  # open rows at each step
    assert sorted(computed, reverse=True) == [
        16 if open_rows <= 16 else 32 if open_rows <= 32 else 64 for open_rows in left
    ]


SEARCHES = {
    "greedy": generate.greedy,
    "constrained": functools.partial(
        generate.greedy,
        constraints=Constraints(encoder_no_repeat_ngram_size=1, repetition_penalty=1.5),
        forced_bos_token_id=np.arange(4, 4 + ROWS) % 30,
    ),
    "sample": lambda *args, rows=None, **more: generate.sample(
        *args, jax.random.key(0), rows=np.arange(ROWS) if rows is None else rows, **more
    ),
    "gnmt": functools.partial(generate.n_best, num_hypotheses=2, beam_size=2),
    "full": functools.partial(
        generate.n_best,
        num_hypotheses=2,
        beam_size=2,
        scorer=BeamScorer.AVERAGE,
        early_stopping=EarlyStopping.FULL,
    ),
}


@pytest.mark.parametrize("name", [quick_if(n != "gnmt", n) for n in SEARCHES])
def test_a_large_batch_gives_each_row_what_small_ones_give(name):
    search, model = SEARCHES[name], loud(CONFIG, 3)
    source = ragged(CONFIG.source_vocab_size, CONFIG.source_pad_id, ROWS, 7, 1)
    large = jax.tree.map(np.asarray, search(model, source, max_length=20))
    parts = []
    for i in range(0, ROWS, 8):
        more = {}
        if name == "sample":
            more["rows"] = np.arange(i, i + 8)
        if name == "constrained":
            more["forced_bos_token_id"] = search.keywords["forced_bos_token_id"][i : i + 8]
        parts.append(search(model, source[i : i + 8], max_length=20, **more))
    parts = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    tokens = jax.tree.leaves(large)[0]
    assert (tokens == jax.tree.leaves(parts)[0]).all()
    ended = (tokens == CONFIG.eos_id).any(axis=-1)
    lengths = (tokens != CONFIG.target_pad_id).sum(axis=-1)
    assert ended.mean() > 0.5 and len(np.unique(lengths)) > 2  # rows do leave


@pytest.mark.parametrize("size", [7, 300, 8000])
def test_the_largest_scores_are_those_of_jax(size):
    random = np.random.default_rng(size)
    scores = random.integers(0, 9, (20, size)).astype(np.float32)  # many are equal
    scores[3] = -np.inf
    scores[4, ::2] = -np.inf
    scores[5:] = random.normal(size=(15, size))
    scores[6] = np.nan
    scores = jnp.asarray(scores)
    assert logits.argmax(scores).tolist() == jnp.argmax(scores, axis=1).tolist()
    for count in (1, 2, 7):
        ours, theirs = logits.largest(scores[:6], count), jax.lax.top_k(scores[:6], count)
        assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
