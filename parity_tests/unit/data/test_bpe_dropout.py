"""BPE dropout: the distribution of ``tokenizers``, drawn by seed and step."""

import collections
import itertools
import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from jax_transformer.data import batches, bpe_dropout, encoding
from jax_transformer.data.bpe_dropout import BpeDropout
from jax_transformer.data.tokenizer import BOS, EOS, PAD, Tokenizer
from jax_transformer.errors import ConfigError

LINES = ["the cat sees the house", "a red dog and the cat, 1990", "", "houses and cats", "x"] * 8
WORDS = Tokenizer.train(LINES, 320, pad_id=1, bos_id=2, eos_id=3)
PAIRS = [(line, line[::-1]) for line in LINES if line]
ENCODED = encoding.encode_pairs(PAIRS, WORDS, WORDS, 40)


def dropped(rate: float, seed: int = 0) -> bpe_dropout.DroppedPairs:
    return bpe_dropout.dropped_pairs(rate, ENCODED, PAIRS, WORDS, WORDS, seed)


def test_tokens_are_as_likely_as_in_the_library():
    rate, line, count = 0.2, "house", 4000
    library = tokenizers.Tokenizer.from_str(WORDS.bpe.to_str())
    library.model.dropout = rate
    ours, draw = BpeDropout(WORDS, rate), random.Random(0).random
    usual = WORDS.encode(line)
    drawn = collections.Counter(tuple(ours.encode(line, usual, 99, draw)) for _ in range(count))
    theirs = collections.Counter(
        tuple(library.encode(line, add_special_tokens=False).ids) for _ in range(count)
    )
    assert len(drawn) > 4 and usual != WORDS.encode("h")
    for tokens in drawn | theirs:
        mean = (drawn[tokens] + theirs[tokens]) / 2
        assert abs(drawn[tokens] - theirs[tokens]) < 5 * np.sqrt(2 * mean) + 1, tokens


def test_without_a_drop_the_merges_are_those_of_the_library():
    ours = BpeDropout(WORDS, 0.5)
    for word in ("Ġhouses", "Ġsees", "cats"):
        symbols = [ours._ids[c] for c in word]
        assert ours._merged(symbols, itertools.repeat(1.0)) == ours._tokens(word)


def test_tokens_depend_on_seed_and_step_and_keep_the_text():
    everything = np.arange(len(PAIRS))
    first = dropped(0.3).at(7, everything, 40)
    for other, same in (
        (dropped(0.3).at(7, everything, 40), True),
        (dropped(0.3).at(8, everything, 40), False),
        (dropped(0.3, seed=1).at(7, everything, 40), False),
    ):
        equal = [np.array_equal(a, b) for a, b in zip(first.sources, other.sources, strict=True)]
        assert all(equal) == same
    assert sum(map(len, first.sources)) > 1.1 * sum(map(len, ENCODED.sources))
    for side, (sources, longest) in enumerate(((first.sources, 40), (first.targets, 40))):
        assert [WORDS.decode(ids) for ids in sources] == [pair[side] for pair in PAIRS]
        assert max(map(len, sources)) < longest


def test_no_line_outgrows_its_batch():
    everything = np.arange(len(PAIRS))
    width = int(ENCODED.lengths.max())
    tight = dropped(0.9).at(0, everything, width)
    assert tight.lengths.max() == width
    assert [WORDS.decode(ids) for ids in tight.sources] == [source for source, _ in PAIRS]
    lengths = dropped(0.9).lengths(40)
    assert (lengths >= ENCODED.lengths).all() and lengths.max() <= 40
    assert lengths.sum() > 1.2 * ENCODED.lengths.sum()


def test_a_stream_that_begins_later_has_the_same_batches():
    plan = batches.BatchPlan(dropped(0.3).lengths(40), (16, 40), (4, 2), 0)
    complete, later = (
        list(batches.train_stream(ENCODED, plan, start, 12, dropped=dropped(0.3)))
        for start in (0, 5)
    )
    assert len(complete[5:]) == len(later)
    for one, other in zip(complete[5:], later, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    without = next(batches.train_stream(ENCODED, plan, 0, 1))
    assert not np.array_equal(complete[0].source, without.source)


def test_text_that_was_cut_keeps_its_tokens():
    ours, usual = BpeDropout(WORDS, 0.9), WORDS.encode(LINES[0])[:3]
    assert ours.encode(LINES[0], usual, 99, random.Random(0).random) == usual


def test_other_tokenizers_are_refused():
    scores = [(PAD, 0.0), (BOS, 0.0), (EOS, 0.0), ("a", -1.0)]
    unigram = Tokenizer(tokenizers.Tokenizer(models.Unigram(scores, unk_id=0)))
    with pytest.raises(ConfigError, match=r"^data.bpe_dropout=0.1 needs .* byte-pair encoding"):
        BpeDropout(unigram, 0.1)
    data = json.loads(WORDS.bpe.to_str())
    data["model"]["end_of_word_suffix"] = "</w>"
    with pytest.raises(ConfigError, match="end_of_word_suffix"):
        BpeDropout(Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data))), 0.1)
