"""Encoding of text: long pairs are dropped or cut and counted, and a huge line costs nothing."""

import copy

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_transformer import errors
from jax_transformer.architectures.huggingface_config import from_config
from jax_transformer.data import encoding, tokenizer
from jax_transformer.data.options import DataOptions

NO_DEADLINE = hypothesis.settings(deadline=None)  # the machine may be busy
TOKENIZER = tokenizer.Tokenizer.train(
    ["one two three four five"] * 10, 300, pad_id=0, bos_id=1, eos_id=2
)
OTHER = tokenizer.Tokenizer.train(["eins zwei drei vier"] * 10, 300, pad_id=5, bos_id=6, eos_id=7)
# x and y are one token each
PAIRS = [("one", "eins"), ("x" * 8, "zwei"), ("three", "y" * 8), ("x" * 7, "y" * 7)]
PAIRS += [("four", "vier"), ("five", "drei")]


def text(encoded: encoding.EncodedPairs) -> list[tuple[str, str]]:
    assert all(array.dtype == np.int32 for array in encoded.sources + encoded.targets)
    both = zip(encoded.sources, encoded.targets, strict=True)
    return [(TOKENIZER.decode(source), OTHER.decode(target)) for source, target in both]


@pytest.fixture
def longest(monkeypatch) -> list[int]:
    """Record the length of the longest encoded line."""
    encode_batch, lengths = tokenizer.Tokenizer.encode_batch, [0]

    def record(self, lines):
        lengths[0] = max(lengths[0], *map(len, lines))
        return encode_batch(self, lines)

    monkeypatch.setattr(tokenizer.Tokenizer, "encode_batch", record)
    return lengths


def test_pairs_that_fit_are_encoded_and_the_rest_counted(monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK", 2)  # several chunks, the last not full
    encoded = encoding.encode_pairs(PAIRS, TOKENIZER, OTHER, max_length=8)
    assert encoded.indices.tolist() == [0, 3, 4, 5]
    assert (encoded.dropped_long, encoded.cut_long) == (2, 0)
    expected = dict(source_pad=0, source_eos=2, target_pad=5, target_bos=6, target_eos=7)
    assert encoded.ids == encoding.SpecialIds(**expected)
    assert text(encoded) == [PAIRS[i] for i in encoded.indices]
    assert encoded.take(np.array([2, 1])).indices.tolist() == [4, 3]
    both = zip(encoded.sources, encoded.targets, strict=True)
    assert encoded.lengths.tolist() == [[len(s) + 1, len(t) + 1] for s, t in both]
    assert encoded.lengths.max() == 8


def test_cutting_keeps_every_pair_and_the_first_tokens_of_a_side(monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK", 2)
    encoded = encoding.encode_pairs(PAIRS, TOKENIZER, OTHER, max_length=8, cut=True)
    assert encoded.indices.tolist() == list(range(6))
    assert (encoded.dropped_long, encoded.cut_long) == (0, 2)
    expected = [*PAIRS]
    expected[1:3] = [("x" * 7, "zwei"), ("three", "y" * 7)]
    assert text(encoded) == expected


def test_each_side_has_its_own_maximum():
    dropped = encoding.encode_pairs(PAIRS, TOKENIZER, OTHER, 9, 8)
    assert dropped.indices.tolist() == [0, 1, 3, 4, 5]
    assert encoding.encode_pairs(PAIRS, TOKENIZER, OTHER, 8, 9).indices.tolist() == [0, 2, 3, 4, 5]
    cut = encoding.encode_pairs(PAIRS, TOKENIZER, OTHER, 4, 6, cut=True)
    assert (text(cut)[1], text(cut)[3]) == (("xxx", "zwei"), ("xxx", "yyyyy"))
    assert cut.lengths.max(axis=0).tolist() == [4, 6]


PIECES = st.sampled_from([*"one twthrefuvi,x1", " one two", "three", "five"])


@NO_DEADLINE
@hypothesis.given(st.lists(PIECES, min_size=1).map("".join), st.integers(2, 9))
def test_truncation_returns_the_first_ids_of_the_full_encoding(line, limit):
    encoded = encoding.encode_pairs([(line, line)], TOKENIZER, OTHER, limit, cut=True)
    assert encoded.sources[0].tolist() == TOKENIZER.encode(line)[: limit - 1]
    assert encoded.targets[0].tolist() == OTHER.encode(line)[: limit - 1]


def test_a_huge_line_is_dropped_without_being_encoded(longest):
    huge = "one two " * 1_250_000
    pairs = [("one", huge), ("two", "zwei"), (huge, "eins")]
    encoded = encoding.encode_pairs(pairs, TOKENIZER, OTHER, max_length=50)
    assert (encoded.indices.tolist(), encoded.dropped_long) == ([1], 2)
    assert longest == [4]
    encoded = encoding.encode_pairs([(huge, "eins")], TOKENIZER, OTHER, max_length=50, cut=True)
    assert encoded.cut_long == 1
    assert longest[0] <= 50 * tokenizer.LONGEST_TOKEN
    assert encoded.sources[0].tolist() == TOKENIZER.encode("one two " * 100)[:49]


def test_a_line_of_the_longest_tokens_is_known_to_be_too_long():
    wide = tokenizer.Tokenizer.train(
        ["a" * tokenizer.LONGEST_TOKEN] * 9, 300, pad_id=0, bos_id=1, eos_id=2
    )
    line = wide.decode(wide.encode("a" * 100)[:1]) * 5
    assert len(wide.encode(line)) == 5 and wide.fewest_tokens(line) == 5
    for long, limits in (((line, "b"), ("{}", 9)), (("b", line), (9, "{}"))):
        for limit, fits in ((4, False), (5, False), (6, True), (7, True)):  # five, and the end
            own = [limit if each == "{}" else each for each in limits]
            encoded = encoding.encode_pairs([long], wide, wide, *own, cut=True)
            assert encoded.cut_long == (not fits)
            dropped = encoding.encode_pairs([long, ("b", "b")], wide, wide, *own)
            assert dropped.indices.tolist() == ([0, 1] if fits else [1])
            ids, cut = encoding.cut_sources([line], wide, limit)
            assert cut == [not fits] and ids == [wide.encode(line)[: limit - 1]]


@pytest.mark.parametrize(
    ("limits", "limit_names"),
    [((4, None), "max_length=4"), ((4, 9), "max_source_length=4, max_target_length=9")],
)
def test_no_line_that_fits_is_refused(limits, limit_names):
    with pytest.raises(errors.InputError, match=f"none of the 1 pairs is within {limit_names}"):
        encoding.encode_pairs([("x" * 4, "y")], TOKENIZER, OTHER, *limits)


def test_a_side_without_a_maximum_has_the_usual_length_of_its_architecture():
    config = from_config({"model_type": "t5"})  # whose positions have no end
    assert encoding.limits(DataOptions(), config) == (512, 512)
    assert encoding.limits(DataOptions(max_source_length=600), config) == (600, 512)


def test_the_room_of_a_side_is_what_its_own_special_tokens_leave():
    two = copy.copy(TOKENIZER)
    two._suffix = (2, 2)
    for both in ((TOKENIZER, two), (two, TOKENIZER)):
        source, target = ("x" * (4 - len(each.suffix)) for each in both)
        pairs = [(source, target), (f"x{source}", target), (source, f"x{target}")]
        encoded = encoding.encode_pairs(pairs, *both, 4)
        assert encoded.indices.tolist() == [0] and encoded.lengths.tolist() == [[4, 4]]
        message = "a maximum of 1 tokens has no room for the 2 special ones"
        with pytest.raises(errors.ConfigError, match=message):
            encoding.encode_pairs([("", "")], *both, 1, cut=True)
    assert encoding.encode_sources(["xx"], two, 4) == [two.encode("xx")]
    with pytest.raises(errors.InputError, match="line 1 is 5 tokens long, over the model's"):
        encoding.encode_sources(["xxx"], two, 4)


def test_sources_to_translate_come_back_as_ids():
    lines, both = ["one", "", "xxx"], tokenizer.TokenizerPair(TOKENIZER, OTHER)
    for each in (TOKENIZER, both):
        assert encoding.encode_sources(lines, each, 4) == [*map(TOKENIZER.encode, lines)]
    assert encoding.encode_sources([], TOKENIZER, 4) == []


def test_the_first_long_source_is_named_and_a_huge_one_is_not_encoded(longest):
    huge = "one two " * 1_250_000
    for lines, message in (
        (["one", "xxxx", huge], "text: line 12 is 5 tokens long, over the model's max_length=4"),
        (
            ["one", "xxx", huge, "xxxx"],
            r"text: line 13 is at least \d{5,} tokens long, over the model's max_length=4",
        ),
    ):
        with pytest.raises(errors.InputError, match=message):
            encoding.encode_sources(lines, TOKENIZER, 4, where="text: ", first_number=11)
    assert longest == [4]


def test_only_sources_over_the_maximum_are_cut():
    cut = encoding.cut_sources(["xx", "xxx", "xxxx"], TOKENIZER, 4)
    assert cut == ([TOKENIZER.encode(line) for line in ("xx", "xxx", "xxx")], [False, False, True])
    two = copy.copy(TOKENIZER)
    two._suffix = (2, 2)
    ids, were_cut = encoding.cut_sources(["xx", "xxx"], two, 4)
    assert (list(map(len, ids)), were_cut) == ([2, 2], [False, True])
