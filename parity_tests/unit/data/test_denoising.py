"""Tasks of plain lines: sources and targets, other ones at every step, from lines of any length."""

import collections
import dataclasses
import math

import numpy as np
import pytest

from jax_transformer.data import denoising, encoding
from jax_transformer.data.denoising import Denoising, PrefixLM, SpanCorruption
from jax_transformer.data.options import DataOptions, Task
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import ConfigError

T5 = SpanCorruption(0.15, 3.0)
BART = Denoising(0.3, 3.0, mask=4, ends=(5,))
LINES = ["the quick brown fox jumps over the lazy dog " * n for n in (1, 3, 9)]
IDS = dict(pad_id=0, bos_id=0, eos_id=1)
WORDS = Tokenizer.train(LINES, 400, **IDS, sentinels=100)


def texts(lines=LINES, noise=T5, longest=(60, 60), words=WORDS, seed=4):
    if isinstance(noise, SpanCorruption):
        noise = dataclasses.replace(noise, sentinels=words.sentinels)
    return denoising.drawn_texts(lines, words, (noise,), *longest, seed)


def encoded_texts(count: int = 1000) -> encoding.EncodedPairs:
    random = np.random.default_rng(0)
    tokens = [random.integers(5, 90, n).astype(np.int32) for n in random.integers(2, 100, count)]
    ids = encoding.SpecialIds(0, 1, 0, 0, 1)
    return encoding.EncodedPairs(tokens, tokens, ids, np.arange(count), 0)


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


@pytest.mark.parametrize("noise", [T5, SpanCorruption(0.5, 1.0), SpanCorruption(0.3, 8.0)], ids=str)
def test_a_thousand_texts_equal_the_reference_with_the_same_spans(noise, monkeypatch):
    encoded = encoded_texts()
    all_parts, corrupt = [], denoising.corrupt

    def recorded(text, parts, sentinels):
        all_parts.append(parts)
        return corrupt(text, parts, sentinels)

    monkeypatch.setattr(denoising, "corrupt", recorded)
    sentinels = tuple(range(199, 99, -1))
    corrupted = denoising.DrawnTexts((dataclasses.replace(noise, sentinels=sentinels),), 3)
    drawn = corrupted.at(7, np.arange(1000), encoded, 0)
    for i, text in enumerate(encoded.sources):
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
    assert SpanCorruption(0.96, 1.0).counts(10) == (9, 1)  # a span needs a token before it
    assert denoising.longest(T5, 511, 511) == 568  # 512 tokens with the end: T5's expanded inputs
    assert [denoising.longest(T5, 511, room) for room in (113, 112)] == [568, 563]
    assert [denoising.longest(task, 9, 7) for task in (BART, PrefixLM())] == [7, 8]


def test_the_parts_of_a_text_are_drawn_uniformly():
    random = np.random.Philox(key=np.array([0, 1], np.uint64))
    drawn = collections.Counter(tuple(denoising._parts(5, 3, random).tolist()) for _ in range(6000))
    assert len(drawn) == 6 and max(drawn.values()) < 1150 and min(drawn.values()) > 850


def bart_reference(text, ends, order, starts, sizes, inserted) -> list[int]:
    """Lewis et al. 2019, section 2.2, by fairseq's rules, one token after another: sentences in
    this order; a span's first token becomes a mask and its others go; more masks are inserted."""
    sentences, sentence = [], []
    for i, token in enumerate(text):
        sentence.append(token)
        if token in ends and (i + 1 == len(text) or text[i + 1] not in ends):
            sentences.append(sentence)
            sentence = []
    sentences += [sentence] if sentence else []
    permuted = [token for i in order for token in sentences[i]]
    removed = {
        i for start, n in zip(starts, sizes, strict=True) for i in range(start + 1, start + n)
    }
    source = [4 if i in starts else token for i, token in enumerate(permuted) if i not in removed]
    for place in sorted(inserted):
        source.insert(place, 4)
    return source


@pytest.mark.parametrize("noise", [BART, Denoising(0.5, 1.0, 4, (5,)), Denoising(0.1, 9.0, 4)])
def test_a_thousand_denoised_texts_equal_the_reference_with_the_same_draws(noise, monkeypatch):
    encoded, permutations, all_sizes = encoded_texts(), [], []
    for text in encoded.sources:
        text[text > 75] = 5  # every sixth token ends a sentence, and some follow one another
    permutation, sizes = denoising._permutation, Denoising.sizes
    monkeypatch.setattr(
        denoising,
        "_permutation",
        lambda *a: permutations.append(permutation(*a)) or permutations[-1],
    )
    monkeypatch.setattr(Denoising, "sizes", lambda *a: all_sizes.append(sizes(*a)) or all_sizes[-1])
    drawn = denoising.DrawnTexts((noise,), 3).at(7, np.arange(1000), encoded, 0)
    all_inserted = 0
    for i, text in enumerate(map(np.ndarray.tolist, encoded.sources)):
        order, starts, among = (each.tolist() for each in permutations[3 * i : 3 * i + 3])
        lengths = all_sizes[i].tolist()
        assert sum(lengths) == math.ceil(len(text) * noise.density) and lengths[-1] > 0
        spans = [n for n in lengths if n]
        choices = (text, noise.ends, order, starts[: len(spans)], spans)
        inserted = min(len(lengths) - len(spans), len(text) - len(bart_reference(*choices, [])))
        expected = bart_reference(*choices, among[:inserted])
        assert drawn.sources[i].tolist() == expected and len(among) == len(expected) <= len(text)
        assert drawn.targets[i].tolist() == text
        all_inserted += inserted == len(lengths) - len(spans)
    assert noise is not BART or all_inserted > 950  # a short text may have no room for another mask


def test_the_lengths_of_spans_are_of_a_poisson_distribution():
    random = np.random.Philox(key=np.array([0, 1], np.uint64))
    sizes = BART.sizes(30_000, random)[:-1]
    for n in range(8):
        expected = math.exp(-3) * 3**n / math.factorial(n)
        assert abs(np.mean(sizes == n) - expected) < 0.01
    assert abs(sizes.mean() - 3) < 0.06 and sizes.max() > 8


def test_a_prefix_ends_at_every_token_alike():
    encoded = encoded_texts(1)
    text = encoded.sources[0][:5]
    encoded = dataclasses.replace(encoded, sources=[text] * 4000, indices=np.arange(4000))
    drawn = denoising.DrawnTexts((PrefixLM(),), 0).at(0, np.arange(4000), encoded, 0)
    for source, target in zip(drawn.sources, drawn.targets, strict=True):
        assert [*source, *target] == text.tolist()
    counts = np.bincount(list(map(len, drawn.sources)))
    assert counts[0] == 0 and len(counts) == 5 and 900 < counts[1:].min() < counts.max() < 1100


@pytest.mark.parametrize("noise", [T5, BART, PrefixLM()], ids=lambda task: type(task).__name__)
def test_spans_depend_on_step_and_seed_and_nothing_else(noise):
    def drawn(step: int, seed: int = 4, chosen=(2, 0)) -> list[list[int]]:
        encoded, corrupted = texts(noise=noise, seed=seed)
        numbers = np.array(chosen)
        return list(map(list, corrupted.at(step, numbers, encoded.take(numbers), 0).sources))

    first = drawn(3)
    assert drawn(3) == first and drawn(3, chosen=(0,)) == first[1:]
    assert first not in (drawn(4), drawn(3, seed=5))


def test_every_text_has_random_numbers_of_its_own_at_every_step_and_seed():
    encoded, numbers = encoded_texts(3), []

    class Task(PrefixLM):
        def __call__(self, tokens, random):
            numbers.extend(random.random_raw(64))
            return tokens, tokens

    for step, seed in ((0, 0), (1, 0), (0, 1)):
        denoising.DrawnTexts((Task(),), seed).at(step, np.arange(3), encoded, 0)
    assert len({*numbers}) == len(numbers) == 9 * 64


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


def test_a_mask_is_the_last_id_and_sentences_end_with_punctuation():
    words = Tokenizer.train([*LINES, "One. Two? Three! 3.5"], 262, **IDS, mask=True)
    task = denoising.objective(DataOptions(), Task.DENOISING, words)
    assert (task.density, task.span_length, task.mask) == (0.3, 3.0, words.vocab_size - 1)
    assert words.vocab_size == 262 and words.tokens()[task.mask] == "<mask>"
    assert task.mask not in words.encode("<mask>")
    assert sorted(map(words.decode, ([end] for end in task.ends))) == ["!", ".", "?"]
    assert (
        denoising.objective(DataOptions(Task.DENOISING, 0.2, 4.0), Task.DENOISING, words).density
        == 0.2
    )
    with pytest.raises(ConfigError, match=r"replaces spans by <mask>, and the tokenizer has no"):
        denoising.objective(DataOptions(), Task.DENOISING, WORDS)


def test_what_cannot_be_corrupted_is_refused():
    assert texts(["", "a"])[0].sources == []
    with pytest.raises(ConfigError, match="a maximum of 2 tokens has no room"):
        texts(longest=(60, 2))
    with pytest.raises(ConfigError, match="the tokenizer has 0 sentinels <extra_id_0>"):
        texts(words=Tokenizer.train(LINES, 400, **IDS))
    few = Tokenizer.train(LINES, 400, **IDS, sentinels=3)
    assert texts(words=few, longest=(59, 59))[1].tasks[0].sentinels == few.sentinels
    with pytest.raises(
        ConfigError, match="replaces up to 4 spans of a text, and the tokenizer has 3"
    ):
        texts(words=few, longest=(75, 75))
