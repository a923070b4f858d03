"""Loops divide their batch in halves and drop rows that have ended: each row stays the same."""

import contextlib
import functools
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import generate
from jax_transformer.errors import InputError
from jax_transformer.generate import GenerationConfig, beam_search, decoding, logits, prepare
from parity_tests.marks import quick_if
from parity_tests.unit.helpers import ragged, tiny
from parity_tests.unit.speakers import loud

CONFIG = tiny("lesson10_repaired", vocab_size=40, max_length=24, num_layers=1)
ROWS = 17  # both halves have the row in the middle
SEARCHES = {
    "beam": {"num_beams": 2, "num_return_sequences": 2},
    "sample": {"do_sample": True, "seed": 3},
}


def model():
    return loud(CONFIG, 3)


def sources():
    return ragged(CONFIG.source_vocab_size, CONFIG.source_pad_id, ROWS, 7, 1)


@pytest.fixture
def parts(monkeypatch):
    """The rows of each call of a loop and its thread, on two cores."""
    seen = []
    one_part = decoding._hypotheses

    def noted(split, config, batch):
        seen.append((len(batch.source), threading.current_thread() is threading.main_thread()))
        return one_part(split, config, batch)

    monkeypatch.setattr(prepare.distributed, "cores", lambda: 2)
    monkeypatch.setattr(decoding, "_hypotheses", noted)
    return seen


def undivided(monkeypatch, *arguments, **options):
    with monkeypatch.context() as patch:
        patch.setattr(prepare.distributed, "cores", lambda: 1)
        return generate.generate(*arguments, **options)


@pytest.mark.parametrize("search", SEARCHES)
def test_halves_give_what_the_whole_batch_gives(search, parts, monkeypatch):
    config = GenerationConfig(max_new_tokens=9, **SEARCHES[search])
    prompt = np.stack([np.full(ROWS, CONFIG.bos_id), np.arange(ROWS) % 5 + 4], axis=1)
    more = {"row_ids": np.arange(ROWS)[::-1], "prompt": prompt}
    split = generate.split(model())
    tokens, scores = generate.generate(split, sources(), config, **more)
    assert parts == [(9, True), (9, False)]
    expected, expected_scores = undivided(monkeypatch, split, sources(), config, **more)
    assert parts[2:] == [(ROWS, True)]
    assert tokens.dtype == np.int32 and (tokens == expected).all()
    np.testing.assert_array_equal(scores, expected_scores)
    assert len(np.unique(tokens[:, 0], axis=0)) > 2  # rows can be told apart


SETTINGS = {
    "jax_enable_x64": False,
    "jax_default_matmul_precision": "bfloat16",
    "jax_default_device": "cpu",
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "warn",
}


def test_both_halves_have_the_settings_of_the_caller(monkeypatch):
    assert SETTINGS.keys() == prepare.THREAD_SETTINGS.keys()
    seen = []

    def noted(split, config, batch):
        seen.append({name: getattr(jax.config, name) for name in SETTINGS})
        return (jax.numpy.asarray(batch.source),)

    monkeypatch.setattr(prepare.distributed, "cores", lambda: 2)
    monkeypatch.setattr(decoding, "_hypotheses", noted)
    with contextlib.ExitStack() as stack:
        for name, value in SETTINGS.items():
            assert getattr(jax.config, name) != value
            stack.enter_context(prepare.THREAD_SETTINGS[name](value))
        generate.generate(model(), sources(), GenerationConfig(max_new_tokens=9))
    assert seen == [SETTINGS, SETTINGS]


def test_halves_of_32_bits_give_what_the_whole_batch_gives(parts, monkeypatch):
    config = GenerationConfig(max_new_tokens=9, num_beams=2)
    with jax.enable_x64(False):
        split = generate.split(model())
        tokens, scores = generate.generate(split, sources(), config)
        expected, expected_scores = undivided(monkeypatch, split, sources(), config)
    assert parts[1:] == [(9, False), (ROWS, True)]
    assert scores.dtype == np.float32 and (tokens == expected).all()
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5)


def test_few_rows_and_one_core_are_not_divided(parts, monkeypatch):
    """One program serves both halves, and an error in the second is raised."""
    split, config, compiled = generate.split(model()), GenerationConfig(max_new_tokens=9), []
    for rows in (15, 16):
        before = decoding._decode._cache_size()
        generate.generate(split, sources()[:rows], config)
        compiled.append(decoding._decode._cache_size() - before)
    undivided(monkeypatch, split, sources(), config)
    assert parts == [(15, True), (8, True), (8, False), (ROWS, True)] and compiled == [1, 1]
    source = sources()
    source[-1, 0] = 99
    with pytest.raises(InputError, match="source id 99 is outside the vocabulary"):
        generate.generate(split, source, config)
    assert parts[4:] == [(9, True), (9, False)]


def test_only_one_cpu_divides_its_batch(monkeypatch):
    monkeypatch.setattr(prepare.distributed, "cores", lambda: 2)
    one, other, gpu = (mock.Mock(platform=name) for name in ("cpu", "cpu", "gpu"))
    for devices, divided in (({one}, True), ({one, other}, False), ({gpu}, False)):
        weights = [mock.Mock(jax.Array, devices=lambda devices=devices: devices)]
        assert prepare._divides(prepare.Rows(np.zeros((16, 3), int)), weights) == divided


# Rows that have ended leave the batch of a loop, and change no other row's result

MANY = 64


def test_a_loop_has_a_few_sizes():
    expected = [(1,), (15,), (16, 8), (31, 15), (32, 16, 8), (33, 16, 8), (200, 100, 50)]
    assert [prepare.batch_sizes(sizes[0]) for sizes in expected] == expected


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
        start = (jnp.zeros((), jnp.int32), jnp.zeros(MANY, jnp.int32), limits)
        return prepare.while_loop(
            lambda c: c[1] < c[2], step, start, lambda c: c[1], prepare.batch_sizes(MANY)
        )

    assert run(ends).tolist() == ends.tolist()
    jax.effects_barrier()
    left = [(ends > i).sum() for i in range(ends.max())]  # open rows at each step
    sizes = [min(size for size in (16, 32, 64) if size >= rows) for rows in left]
    assert sorted(computed, reverse=True) == sizes


FORCED = np.arange(4, 4 + MANY) % 30
FUNCTIONS = {
    "greedy": generate.greedy,
    "constrained": functools.partial(
        generate.greedy,
        **{"encoder_no_repeat_ngram_size": 1, "repetition_penalty": 1.5},
        forced_bos_token_id=FORCED,
    ),
    "sample": lambda *args, rows=None, **more: generate.sample(
        *args, jax.random.key(0), rows=np.arange(MANY) if rows is None else rows, **more
    ),
    "gnmt": functools.partial(generate.n_best, num_hypotheses=2, beam_size=2),
    "full": functools.partial(
        generate.n_best,
        **{"num_hypotheses": 2, "beam_size": 2, "scorer": generate.BeamScorer.AVERAGE},
        early_stopping=generate.EarlyStopping.FULL,
    ),
}


@pytest.mark.parametrize("name", [quick_if(n in ("sample", "full"), n) for n in FUNCTIONS])
def test_a_large_batch_gives_each_row_what_small_ones_give(name):
    search, model = FUNCTIONS[name], loud(CONFIG, 3)
    source = ragged(CONFIG.source_vocab_size, CONFIG.source_pad_id, MANY, 7, 1)
    large = jax.tree.map(np.asarray, search(model, source, max_length=20))
    each = {"sample": {"rows": np.arange(MANY)}, "constrained": {"forced_bos_token_id": FORCED}}
    parts = []
    for i in range(0, MANY, 8):
        more = {key: numbers[i : i + 8] for key, numbers in each.get(name, {}).items()}
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
    scores[2] *= random.random(size) < 4 / size  # equal ones in blocks of other maxima
    scores[3] = -np.inf
    scores[4, ::2] = -np.inf
    scores[5:] = random.normal(size=(15, size))
    scores[6] = np.nan
    scores = jnp.asarray(scores)
    assert logits.argmax(scores).tolist() == jnp.argmax(scores, axis=1).tolist()
    for count in (1, 2, 7):
        ours, theirs = logits.largest(scores[:6], count), jax.lax.top_k(scores[:6], count)
        assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("count", [1, 2])
def test_the_largest_are_found_in_every_column_of_every_block(count):
    limit = 4 * count * logits._BLOCK  # from here on, only some blocks are sorted
    for size in (limit, limit + logits._BLOCK + 5):
        scores = np.eye(size) + np.roll(np.eye(size), size // 2 + 3, axis=1) / 2 - 2
        best, index = logits.largest(jnp.asarray(scores), count)
        expected = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        assert (np.asarray(index) == expected).all() and (best[:, 0] == -1).all()


def test_values_of_a_search_compile_nothing():
    model, source = generate.split(loud(CONFIG, 3)), sources()
    for base, names in (
        ({"do_sample": True, "top_p": 0.7}, {"temperature": 1.5, "top_p": 0.6, "seed": 4}),
        ({"num_beams": 2}, {"length_penalty": 1.5}),
    ):
        config = GenerationConfig(max_new_tokens=5, **base)
        sizes, results = set(), []
        for options in ({}, *({name: value} for name, value in names.items())):
            results.append(generate.generate(model, source, config.overridden(options)))
            programs = decoding._decode, beam_search._search
            sizes.add(tuple(program._cache_size() for program in programs))
        assert len(sizes) == 1
        which = int("num_beams" in base)  # scores of a search, otherwise tokens
        assert all((results[0][which] != other[which]).any() for other in results[1:])
