"""Tokens are drawn from the requested distribution, by the key, and independently for each row."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import generate, transformer
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.generate import decoding
from jax_transformer.generate import logits as next_token
from parity_tests.marks import quick_if
from parity_tests.unit.helpers import ragged, random_arrays, random_model, tiny, unchecked
from parity_tests.unit.speakers import loud

ROWS, PLACES = 4, 8
CONFIG = tiny("lesson10", encoder_layers=1)
KEY = jax.random.key(5)


def source(seed: int) -> np.ndarray:
    return ragged(CONFIG.source_vocab_size, CONFIG.source_pad_id, ROWS, 7, seed)


def drawn(model, ids: np.ndarray, key=KEY, **options) -> np.ndarray:
    return np.asarray(generate.sample(model, ids, key, **{"max_length": PLACES} | options))


def test_low_temperature_and_top_k_1_are_greedy():
    for seed in (0, 1, 3):
        model, ids = loud(CONFIG, seed), source(seed)
        expected = np.asarray(generate.greedy(model, ids, max_length=PLACES))
        cold = ({"temperature": x} for x in (1e-6, 1e-300))
        for options in (*cold, dict(top_k=1), dict(top_p=1e-9)):
            tokens = drawn(model, ids, **options)
            assert tokens.dtype == np.int32 and (tokens == expected).all(), (seed, options)
        assert (drawn(model, ids) != expected).any()


def test_a_draw_is_decided_by_key_and_row():
    model, ids = loud(CONFIG, 0), source(0)
    tokens = drawn(model, ids)
    assert (drawn(model, ids, top_k=CONFIG.target_vocab_size) == tokens).all()
    assert (drawn(model, ids, jax.random.key(6)) != tokens).any()
    order = np.array([2, 0, 3, 1])
    assert (drawn(model, ids[order], rows=order) == tokens[order]).all()
    same = drawn(model, np.repeat(ids[:1], ROWS, axis=0))
    # the same source in other rows gives other draws
    assert (same[0] == tokens[0]).all() and len(np.unique(same, axis=0)) > 1


def test_an_end_token_is_followed_by_padding_and_a_forced_one_is_the_first():
    first = np.array([4, 6, 8, 4])
    draws = [
        drawn(loud(CONFIG, 0), source(0), jax.random.key(seed), forced_bos_token_id=first)
        for seed in range(8)
    ]
    tokens = np.concatenate(draws)
    ended = (tokens == CONFIG.eos_id).cumsum(axis=1) - (tokens == CONFIG.eos_id) > 0
    assert ended.any() and (tokens[ended] == CONFIG.target_pad_id).all()
    assert all((each[:, 0] == first).all() for each in draws)


@pytest.mark.parametrize(
    "options",
    [
        *(
            quick_if(False, each)
            for each in ({}, {"temperature": 1.7}, {"top_k": 4}, {"top_p": 0.8})
        ),
        {"temperature": 2.0, "top_k": 6, "top_p": 0.7},
    ],
)
def test_first_tokens_have_the_requested_distribution(options):
    count, model = 6000, loud(CONFIG, 2, eos=0.0)
    ids = source(2)[:1]
    logits = np.asarray(model(ids, np.array([[CONFIG.bos_id]])))[0, 0]
    logits = logits / options.get("temperature", 1.0)
    expected = np.exp(logits - logits.max())
    ranks = expected.argsort()[::-1]
    expected[ranks[options.get("top_k") or len(ranks) :]] = 0
    expected /= expected.sum()
    # the fewest tokens that reach top_p
    nucleus = int((expected[ranks].cumsum() < options.get("top_p", 1.0)).sum()) + 1
    expected[ranks[nucleus:]] = 0
    expected /= expected.sum()
    tokens = drawn(model, np.repeat(ids, count, axis=0), max_length=1, **options)[:, 0]
    frequencies = np.bincount(tokens, minlength=len(expected)) / count
    assert (frequencies[expected == 0] == 0).all() and (expected > 0).sum() > 1
    # four standard deviations of the worst token
    assert np.abs(frequencies - expected).max() < 4 * (0.25 / count) ** 0.5


def test_every_position_draws_anew():
    """Each position has the same logits, so equal draws would repeat one token."""
    arrays = random_arrays(CONFIG, seed=1)
    arrays["output.kernel"][...] = 0
    arrays["output.bias"][...] = 0
    arrays["output.bias"][CONFIG.eos_id] = -1e9
    model = transformer.unflatten(CONFIG, {name: jnp.asarray(x) for name, x in arrays.items()})
    tokens = drawn(model, source(4))
    assert all(len(set(row)) > 1 for row in tokens.tolist()), tokens


def test_the_scores_of_a_draw_are_float32_and_finite_at_any_temperature():
    logits = jnp.asarray([[90.0, 80.0, 90.0]], jnp.bfloat16)
    for temperature, top_p in itertools.product((1e-37, 1e-39, 1e-300), (None, 0.9)):
        nucleus = None if top_p is None else jnp.asarray(top_p)
        scores, _ = next_token.most_likely(logits, jnp.asarray(temperature), nucleus, 0)
        assert scores.dtype == jnp.float32
        assert scores[0, :2].tolist() == [0, 0] and not jnp.isnan(scores).any(), temperature


def test_the_order_of_nearly_equal_scores_decides_no_draw():
    """Rounding decides it, and so does the size of the batch."""
    random_logits = np.random.default_rng(0).normal(size=(200, 13))
    keys = jax.random.split(KEY, len(random_logits))
    draws = []
    for difference in (1e-9, -1e-9):
        logits = random_logits.copy()
        logits[:, 3] = logits[:, 7] + difference
        scores, tokens = next_token.most_likely(jnp.asarray(logits), jnp.asarray(1.0), None, 0)
        draws.append(next_token.categorical(keys, scores, tokens).tolist())
    assert draws[0] == draws[1] and {3, 7} < set(draws[0])


def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p():
    exact = jnp.log2(jnp.array([[0.125, 0.5, 0.125, 0.25]])) * jnp.log(2.0)
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
    sizes = {0.01: 1, 0.49: 1, 0.51: 2, 0.74: 2, 0.76: 3, 0.89: 3, 0.91: 4}
    cases = (logits, sizes, [1, 3, 2, 0]), (exact, {0.5: 1, 0.75: 2}, [1, 3, 0, 2])
    for scores, sizes, order in cases:
        for top_p, size in sizes.items():
            nucleus = jnp.asarray(top_p)
            cut, tokens = next_token.most_likely(scores, jnp.asarray(1.0), nucleus, 0)
            assert tokens.tolist() == [order], top_p
            assert np.isfinite(np.asarray(cut)).tolist() == [[i < size for i in range(4)]], top_p
    # of the two, the first has two thirds
    after_cut, _ = next_token.most_likely(logits, jnp.asarray(1.0), jnp.asarray(0.6), 2)
    assert np.isfinite(np.asarray(after_cut)).tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(temperature=0.0), r"temperature=0\.0 must be above 0"),
        (dict(temperature=float("nan")), "temperature=nan must"),
        (dict(temperature=float("inf")), "temperature=inf must"),
        (dict(top_k=-1), "top_k=-1 must be between 1 and the vocabulary of 13, or 0"),
        (dict(top_k=14), "top_k=14 must"),
        (dict(top_p=0.0), r"top_p=0\.0 must be above 0 and at most 1"),
        (dict(top_p=1.5), r"top_p=1\.5 must"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(options, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        drawn(random_model(CONFIG), source(0), **options)


def test_every_row_needs_an_index():
    for count in (3, 5):
        message = f"^source has 4 rows and rows {count} numbers$"
        with unchecked(), pytest.raises(InputError, match=message):
            drawn(random_model(CONFIG), source(0), rows=np.arange(count))


def test_only_a_nucleus_of_everything_costs_no_sum():
    model = generate.split(transformer.abstract(CONFIG))
    for top_p in (1.0, 0.9999):
        config = generate.GenerationConfig(do_sample=True, top_p=top_p)
        draws = decoding._draws(model, config, jax.random.key(0), None, 4)
        assert (draws.top_p is None) == (top_p == 1)
