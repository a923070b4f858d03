"""BPE dropout: the distribution of ``tokenizers``, drawn by seed and step."""

import collections
import dataclasses
import itertools
import json
import random
import shutil

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers

from jax_transformer.data import batches, bpe_dropout, encoding
from jax_transformer.data.bpe_dropout import BpeDropout
from jax_transformer.data.encoding import SpecialTokens
from jax_transformer.data.tokenizer import BOS, EOS, PAD, Tokenizer
from jax_transformer.errors import ConfigError
from parity_tests.unit import runs

LINES = ["the cat sees the house", "a red dog and the cat, 1990", "", "houses and cats", "x"] * 8
WORDS = Tokenizer.train(LINES, 320, pad_id=1, bos_id=2, eos_id=3)
PAIRS = [(line, line[::-1]) for line in LINES if line]
ENCODED = encoding.encode_pairs(PAIRS, WORDS, WORDS, 40)


EVERYTHING = np.arange(len(PAIRS))


def dropped(rate: float, seed: int = 0) -> bpe_dropout.DroppedPairs:
    return bpe_dropout.dropped_pairs(rate, PAIRS, WORDS, WORDS, seed)


def drawn_at(step: int, rate: float, seed: int = 0, width: int = 40) -> encoding.EncodedPairs:
    return dropped(rate, seed).at(step, EVERYTHING, ENCODED, width)


def plan() -> tuple[encoding.EncodedPairs, batches.BatchPlan]:
    table, order = batches.LengthTable.of(dropped(0.3).lengths(ENCODED, 40))
    return ENCODED.take(order), batches.BatchPlan(table, (16, 40), (4, 2), 0)


def test_tokens_are_as_likely_as_in_the_library():
    rate, line, count = 0.2, "house", 4000
    library = tokenizers.Tokenizer.from_str(WORDS.bpe.to_str())
    library.model.dropout = rate
    ours, draw = BpeDropout(WORDS, rate), random.Random(0).random
    usual = WORDS.encode(line)
    drawn = collections.Counter(tuple(ours.encode(line, usual, 99, draw)) for _ in range(count))
    encoded = (library.encode(line, add_special_tokens=False).ids for _ in range(count))
    theirs = collections.Counter(map(tuple, encoded))
    assert len(drawn) > 4 and usual != WORDS.encode("h")
    for tokens in drawn | theirs:
        mean = (drawn[tokens] + theirs[tokens]) / 2
        assert abs(drawn[tokens] - theirs[tokens]) < 5 * np.sqrt(2 * mean) + 1, tokens


def test_without_a_drop_the_merges_are_those_of_the_library():
    ours = BpeDropout(WORDS, 0.5)
    for word in ("Ġhouses", "Ġsees", "cats"):
        symbols = [ours._ids[c] for c in word]
        assert ours._merged(symbols, itertools.repeat(1.0)) == ours._tokens(word)


def test_no_line_outgrows_its_batch():
    width = int(ENCODED.lengths.max())
    tight = drawn_at(0, 0.9, width=width)
    assert tight.lengths.max() == width
    assert [WORDS.decode(ids) for ids in tight.sources] == [source for source, _ in PAIRS]
    lengths = dropped(0.9).lengths(ENCODED, 40)
    assert (lengths >= ENCODED.lengths).all() and lengths.max() <= 40
    assert lengths.sum() > 1.2 * ENCODED.lengths.sum()


def test_every_seed_and_step_has_tokens_of_its_own():
    numbers = (0, 1, 11, 111)
    drawn = {
        np.concatenate(drawn_at(step, 0.5, seed).sources).tobytes()
        for seed, step in itertools.product(numbers, repeat=2)
    }
    assert len(drawn) == len(numbers) ** 2


def test_each_epoch_is_dropped_anew():
    ordered, batch_plan = plan()
    count = batch_plan.batches_per_epoch
    stream = [*batches.train_stream(ordered, batch_plan, 1, 2 * count + 2, drawn=dropped(0.3))]
    for step in (1, count, count + 1, 2 * count + 1):
        bucket, indices = batch_plan.batch_indices(step)
        width, rows = batch_plan.widths[bucket], batch_plan.rows[bucket]
        drawn = dropped(0.3).at(step, indices, ordered.take(indices), width)
        assert all(map(np.array_equal, stream[step - 1], batches.make_batch(drawn, width, rows)))


@pytest.mark.parametrize("width", [None, 60])
def test_each_side_is_dropped_by_its_own_tokenizer_within_its_own_room(width):
    """The target's tokenizer lower-cases; the first pair is too long and left out."""
    text = [line.lower()[::-1] for line in LINES]
    small = Tokenizer.train(text, 330, pad_id=5, bos_id=6, eos_id=7)
    small.bpe.normalizer = normalizers.Lowercase()
    pairs = [("1" * 50, "x"), *((source, target.title()) for source, target in PAIRS)]
    encoded = dataclasses.replace(
        encoding.encode_pairs(pairs, WORDS, small, 40),
        added=(SpecialTokens((2,), (3,)), SpecialTokens((6,), (7, 9))),
    )
    both = zip(encoded.sources, encoded.targets, strict=True)
    lengths = [[len(s) + 2, len(t) + 3] for s, t in both]
    assert encoded.lengths.tolist() == lengths and encoded.dropped_long == 1
    pairs_of_steps = bpe_dropout.dropped_pairs(0.9, pairs, WORDS, small, 0)
    width = width or encoded.lengths.max() + 2
    drawn = pairs_of_steps.at(3, EVERYTHING, encoded, int(width))
    assert drawn.added == encoded.added and drawn.lengths.max() <= width
    assert [WORDS.decode(ids) for ids in drawn.sources] == [source for source, _ in pairs[1:]]
    assert [small.decode(ids) for ids in drawn.targets] == [t.lower() for _, t in pairs[1:]]
    assert (drawn.lengths.sum(axis=0) > 1.2 * encoded.lengths.sum(axis=0)).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_last_words_keep_their_usual_tokens_if_there_is_too_little_room(seed):
    ours, line = BpeDropout(WORDS, 0.8), "the house and the cat"
    words = ["the", " house", " and", " the", " cat"]
    usual = [WORDS.encode(word) for word in words]
    draw = random.Random(seed).random
    free = [ours.encode(word, ids, 99, draw) for word, ids in zip(words, usual, strict=True)]
    assert len(free[0]) > len(usual[0]) or len(free[1]) > len(usual[1])

    def joined(parts: list[list[int]]) -> list[int]:
        return [*itertools.chain(*parts)]

    for room in range(len(joined(usual)), len(joined(free)) + 2):
        cuts = (joined(free[:count] + usual[count:]) for count in range(len(words) + 1))
        tokens = ours.encode(line, joined(usual), room, random.Random(seed).random)
        assert tokens == [each for each in cuts if len(each) <= room][-1]


def test_a_run_of_weighted_files_with_dropout_trains_on_them_and_resumes_bit_for_bit(tmp_path):
    flags = [*runs.OPTIONS, *runs.write_text(tmp_path)]
    few = {"--steps": 4, "--eval-every": 2, "--optimizer.warmup-steps": 1, "--data.buckets": 1}
    for name, value in few.items():
        flags = runs.with_option(flags, name, value)
    for side in ("source", "target"):
        at = flags.index(f"--data.train-{side}") + 2
        flags[at:at] = [flags[at - 1]]
    flags += ["--data.train-weights", "2", "0.5", "--data.bpe-dropout", "0.5", "--seed", "3"]
    one, other = tmp_path / "one", tmp_path / "other"
    with runs.as_a_user(), pytest.MonkeyPatch.context() as patch:
        at, steps = bpe_dropout.DroppedPairs.at, set()

        def drawn(self, step, *more):
            steps.add((self.seed, step))
            return at(self, step, *more)

        patch.setattr(bpe_dropout.DroppedPairs, "at", drawn)
        result = runs.train("--run", one, *flags)
        assert result.code == 0, result.err
        assert steps >= {(3, step) for step in range(4)}
        shutil.copytree(one, other)
        shutil.rmtree(other / "checkpoints" / "4")
        assert runs.train("--run", other, *flags).code == 0
    assert not runs.differing(runs.arrays(one, 4), runs.arrays(other, 4))


def test_text_that_was_cut_keeps_its_tokens():
    ours, usual = BpeDropout(WORDS, 0.9), WORDS.encode(LINES[0])[:3]
    assert ours.encode(LINES[0], usual, 99, random.Random(0).random) == usual


def test_other_tokenizers_are_refused():
    scores = [(PAD, 0.0), (BOS, 0.0), (EOS, 0.0), ("a", -1.0)]
    unigram = Tokenizer(tokenizers.Tokenizer(models.Unigram(scores, unk_id=0)))
    with pytest.raises(ConfigError, match=r"^data.bpe_dropout=0.1 needs .* byte-pair encoding"):
        BpeDropout(unigram, 0.1)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        data = json.loads(WORDS.bpe.to_str())
        data["model"] |= {name: "@", "merges": []}
        with pytest.raises(ConfigError, match=name):
            BpeDropout(Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data))), 0.1)
