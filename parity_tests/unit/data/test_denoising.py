"""Span corruption: T5's sources and targets, other ones at every step, from lines of any length."""

import collections

import numpy as np
import pytest

from jax_transformer.data import denoising, encoding
from jax_transformer.data.denoising import Noise
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import ConfigError

T5 = Noise(0.15, 3.0)
LINES = ["the quick brown fox jumps over the lazy dog " * n for n in (1, 3, 9)]
IDS = dict(pad_id=0, bos_id=0, eos_id=1)
WORDS = Tokenizer.train(LINES, 400, **IDS, sentinels=100)


def texts(lines=LINES, noise=T5, longest=(60, 60), words=WORDS, seed=4):
    return denoising.corrupted_texts(lines, words, noise, *longest, seed)


def reference(tokens: np.ndarray, noise_mask: np.ndarray, sentinels) -> list[list[int]]:
    """Raffel et al. 2020 as a mask: every run of masked tokens becomes the next sentinel. The
    target is the source of the opposite mask, where the text begins with a run."""
    results = []
    for mask in (noise_mask, ~noise_mask):
        result, following = [], iter(sentinels)
        for i, token in enumerate(tokens.tolist()):
            if not mask[i]:
                result.append(token)
            elif i == 0 or not mask[i - 1]:
                result.append(next(following))
        results.append(result)
    return results


@pytest.mark.parametrize("noise", [T5, Noise(0.5, 1.0), Noise(0.3, 8.0)], ids=str)
def test_a_thousand_texts_equal_the_reference_with_the_same_spans(noise, monkeypatch):
    random = np.random.default_rng(0)
    tokens = [random.integers(5, 90, n).astype(np.int32) for n in random.integers(2, 100, 1000)]
    ids = encoding.SpecialIds(0, 1, 0, 0, 1)
    encoded = encoding.EncodedPairs(tokens, tokens, ids, np.arange(1000), 0)
    all_parts, corrupt = [], denoising.corrupt

    def recorded(text, parts, sentinels):
        all_parts.append(parts)
        return corrupt(text, parts, sentinels)

    monkeypatch.setattr(denoising, "corrupt", recorded)
    sentinels = tuple(range(199, 99, -1))
    corrupted = denoising.CorruptedTexts(noise, sentinels, 3)
    drawn = corrupted.at(7, np.arange(1000), encoded, 0)
    for i, text in enumerate(tokens):
        parts = all_parts[i]
        assert parts.min() >= 1 and parts.sum() == len(text)
        assert (parts[:, 1].sum(), len(parts)) == noise.counts(len(text))
        mask = np.repeat(np.arange(2 * len(parts)) % 2 == 1, parts.reshape(-1))
        expected = reference(text, mask, sentinels)
        assert [drawn.sources[i].tolist(), drawn.targets[i].tolist()] == expected
    assert np.array_equal(drawn.lengths, corrupted.lengths(encoded, 0))


def test_the_amount_of_noise_is_that_of_t5():
    assert [T5.counts(n) for n in (2, 3, 10, 20, 100, 568)] == [
        (1, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (15, 5),
        (85, 28),
    ]
    assert Noise(0.9, 1.0).counts(10) == (9, 1)  # a span needs a token before it
    assert T5.longest(511, 511) == 568  # 512 tokens with the end: T5's expanded inputs
    assert T5.longest(511, 113) == 568 and T5.longest(511, 112) == 563


def test_the_parts_of_a_text_are_drawn_uniformly():
    random = np.random.Philox(key=np.array([0, 1], np.uint64))
    drawn = collections.Counter(tuple(denoising._parts(5, 3, random).tolist()) for _ in range(6000))
    assert len(drawn) == 6 and max(drawn.values()) < 1150 and min(drawn.values()) > 850


def test_spans_depend_on_step_and_seed_and_nothing_else():
    def drawn(step: int, seed: int = 4, chosen=(2, 0)) -> list[list[int]]:
        encoded, corrupted = texts(seed=seed)
        numbers = np.array(chosen)
        return list(map(list, corrupted.at(step, numbers, encoded.take(numbers), 0).sources))

    first = drawn(3)
    assert drawn(3) == first and drawn(3, chosen=(0,)) == first[1:]
    assert first not in (drawn(4), drawn(3, seed=5))


def test_equal_texts_have_spans_of_their_own():
    encoded, corrupted = texts([LINES[2]] * 2)
    one, other = corrupted.at(0, np.arange(2), encoded.take(np.arange(2)), 0).sources
    assert one.tolist() != other.tolist()


def test_a_long_line_is_cut_into_texts_that_fit_with_their_special_tokens():
    encoded, corrupted = texts(longest=(20, 9))
    tokens = [ids for line in LINES for ids in WORDS.encode(line)]
    assert np.concatenate(encoded.sources).tolist() == tokens
    assert corrupted.lengths(encoded, 0).max(axis=0).tolist() == [20, 5]
    assert encoded.indices.tolist() == sorted(encoded.indices)
    drawn = corrupted.at(0, np.arange(len(encoded.sources)), encoded, 0)
    assert np.array_equal(drawn.lengths, corrupted.lengths(encoded, 0))
    assert drawn.special_tokens[0].suffix == (1,)


def test_sentinels_are_the_last_ids_and_text_never_becomes_one():
    size = WORDS.vocab_size
    assert WORDS.sentinels == tuple(range(size - 1, size - 101, -1))
    assert WORDS.sentinels[0] not in WORDS.encode("<extra_id_0>")
    assert Tokenizer.train(LINES, 400, **IDS).sentinels == ()


def test_what_cannot_be_corrupted_is_refused():
    assert texts(["", "a"])[0].sources == []
    with pytest.raises(ConfigError, match="a maximum of 2 tokens has no room"):
        texts(longest=(60, 2))
    with pytest.raises(ConfigError, match="the tokenizer has 0 sentinels <extra_id_0>"):
        texts(words=Tokenizer.train(LINES, 400, **IDS))
    few = Tokenizer.train(LINES, 400, **IDS, sentinels=3)
    assert texts(words=few, longest=(59, 59))[1].sentinels == few.sentinels
    with pytest.raises(
        ConfigError, match="replaces up to 4 spans of a text, and the tokenizer has 3"
    ):
        texts(words=few, longest=(75, 75))
