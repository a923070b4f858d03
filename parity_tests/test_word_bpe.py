"""Byte-pair encoding of words against transformers' class that does it."""

import json
import random
from pathlib import Path

import regex
import transformers

from jax_transformer.data import word_bpe
from jax_transformer.data.word_bpe import WordBpe
from parity_tests import tokenizer_models
from parity_tests.test_huggingface_tokenizers import LINES

LETTERS = "abcdeœ'.,!?() \n\t\r\x0b\x1c\x85\xa0\u2028\u3000ABÀİßΣ_<>/w@1"
SPECIAL = ("__null__", "__start__", "__end__", "__unk__", "__newln__")


def their_tokenizer(folder: Path, merges: list[tuple[str, str]]):
    lines = "".join(f"{first} {second}\n" for first, second in merges)
    vocabulary = {token: i for i, token in enumerate(SPECIAL)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    return transformers.BlenderbotSmallTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt")
    )


def test_pieces_and_text_are_those_of_transformers(tmp_path):
    merges = tokenizer_models.word_merges()
    theirs, ours = their_tokenizer(tmp_path, merges), WordBpe(merges)
    draw = random.Random(0)
    lines = [*LINES.values(), *("".join(draw.choices(LETTERS, k=1 + i % 40)) for i in range(3000))]
    for line in lines:
        pieces = theirs._tokenize(line)
        assert ours.cut(line) == pieces, repr(line)
        assert ours.join(pieces).strip() == theirs.convert_tokens_to_string(pieces)
    assert len({piece for line in lines for piece in ours.cut(line)}) > 100


def test_white_space_is_that_of_the_regex_library():
    every = "x".join(chr(code) * 2 for code in range(0x110000))
    ours, theirs = word_bpe._SPACES.findall(every), regex.findall(r"\s{2,}", every)
    assert ours == theirs and len(theirs) > 20
