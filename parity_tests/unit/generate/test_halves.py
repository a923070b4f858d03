"""A batch that is decoded in two halves gives what it gives in one piece."""

import contextlib
import threading

import jax
import numpy as np
import pytest

from jax_transformer import generate
from jax_transformer.errors import InputError
from jax_transformer.generate import GenerationConfig, decoding, loops
from parity_tests.unit.helpers import ragged, tiny
from parity_tests.unit.speakers import loud

CONFIG = tiny("lesson10_repaired", vocab_size=40, max_length=24, num_layers=1)
ROWS = 17  # both halves have the row in the middle
SEARCHES = {
    "greedy": {},
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

    monkeypatch.setattr(loops.distributed, "cores", lambda: 2)
    monkeypatch.setattr(decoding, "_hypotheses", noted)
    return seen


def undivided(monkeypatch, *arguments, **options):
    with monkeypatch.context() as patch:
        patch.setattr(loops.distributed, "cores", lambda: 1)
        return generate.generate(*arguments, **options)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("with_prompt", [False, True])
def test_halves_give_what_the_whole_batch_gives(search, with_prompt, parts, monkeypatch):
    config, more = GenerationConfig(max_new_tokens=9, **SEARCHES[search]), {}
    if with_prompt:
        more["row_ids"] = np.arange(ROWS)[::-1]
        more["prompt"] = np.stack([np.full(ROWS, CONFIG.bos_id), np.arange(ROWS) % 5 + 4], axis=1)
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
    assert SETTINGS.keys() == loops.THREAD_SETTINGS.keys()
    seen = []

    def noted(split, config, batch):
        seen.append({name: getattr(jax.config, name) for name in SETTINGS})
        return (jax.numpy.asarray(batch.source),)

    monkeypatch.setattr(loops.distributed, "cores", lambda: 2)
    monkeypatch.setattr(decoding, "_hypotheses", noted)
    with contextlib.ExitStack() as stack:
        for name, value in SETTINGS.items():
            assert getattr(jax.config, name) != value
            stack.enter_context(loops.THREAD_SETTINGS[name](value))
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


def test_the_program_is_compiled_once_for_both(parts):
    split = generate.split(model())
    config = GenerationConfig(max_new_tokens=10)
    compiled = decoding._decode._cache_size()
    generate.generate(split, sources(), config)
    assert decoding._decode._cache_size() == compiled + 1


def test_few_rows_and_one_core_are_not_divided(parts, monkeypatch):
    split, config = generate.split(model()), GenerationConfig(max_new_tokens=9)
    generate.generate(split, sources()[:15], config)
    with monkeypatch.context() as patch:
        patch.setattr(loops.distributed, "cores", lambda: 1)
        generate.generate(split, sources(), config)
    assert parts == [(15, True), (ROWS, True)]


def test_an_error_in_the_second_half_is_raised(parts):
    source = sources()
    source[-1, 0] = 99
    with pytest.raises(InputError, match="source id 99 is outside the vocabulary"):
        generate.generate(model(), source, GenerationConfig(max_new_tokens=9))
    assert parts == [(9, True), (9, False)]
