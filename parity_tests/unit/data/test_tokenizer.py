"""The tokenizer loses nothing, keeps special tokens out of text, and is the same file each time."""

import hashlib
import json

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from jax_transformer import errors
from jax_transformer.data import encoding, tokenizer
from jax_transformer.storage import run_files
from parity_tests.unit import runs

NO_DEADLINE = hypothesis.settings(deadline=None)  # the machine may be busy
LINES = [
    "the quick brown fox jumps over the lazy dog",
    "the price is 1234567 dollars",
    "der schnelle braune Fuchs springt über den faulen Hund",
    "<2de> at 10:30",
    "<eos> and <pad> and <bos> are written here: <eos><eos>",
] * 20
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unused0>")


def train(lines=LINES, vocab_size=300, pad_id=1, bos_id=2, eos_id=3) -> tokenizer.Tokenizer:
    return tokenizer.Tokenizer.train(lines, vocab_size, pad_id=pad_id, bos_id=bos_id, eos_id=eos_id)


TOKENIZER = train()


def vocabulary(model: tokenizer.Tokenizer, folder) -> dict[str, int]:
    model.save(folder / "vocabulary.json")
    return json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))["model"]["vocab"]


@NO_DEADLINE
@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"])))
@hypothesis.example("  leading, trailing and   several spaces  ")
@hypothesis.example("\x00\t\r\n\x0b\x1f\x7f\u0085\u2028\ufeff\U0010ffff")
@hypothesis.example("👩‍👩‍👧 e\u0301 é 漢字 ﬁ")
@hypothesis.example("it's 12 345,67 <2de>")
@hypothesis.example("".join(SPECIALS))
@hypothesis.example("")
def test_decode_undoes_encode_and_no_special_id_comes_of_text(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(3 < i < TOKENIZER.vocab_size for i in ids)
    assert TOKENIZER.encode_batch([text, "x", text]) == [ids, TOKENIZER.encode("x"), ids]


def test_every_byte_is_in_the_vocabulary_without_training():
    bare = train(lines=[], vocab_size=10_000)
    assert bare.vocab_size == 4 + 256
    text = "".join(map(chr, range(0x300))) + "漢字👩"
    assert bare.decode(bare.encode(text)) == text
    assert len(bare.encode(text)) == len(text.encode())


def test_merges_are_learned_and_digits_stay_separate(tmp_path):
    assert len(TOKENIZER.encode("the quick brown fox")) < 15
    number = [TOKENIZER.decode([i]) for i in TOKENIZER.encode("1234567")]
    assert number == list("1234567")
    assert not any(
        any(c.isdigit() for c in token) and len(token) > 1
        for token in vocabulary(TOKENIZER, tmp_path)
        if token not in SPECIALS and not any(token in tag for tag in ("<2de>", "<2fr>", "<2es>"))
    )
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode("<2de> 7")][-2:] == [" ", "7"]
    tags = train(["<2zh_CN>ten", "<2PT>ten", "<2de>ten"] * 9, vocab_size=400)
    assert [len(tags.encode(tag)) for tag in ("<2zh_CN>", "<2PT>", "<2de>")] == [1, 1, 1]


@pytest.mark.parametrize("ids", [(0, 1, 2), (1, 2, 3), (2, 0, 5), (7, 3, 0)])
def test_special_tokens_have_the_requested_ids(tmp_path, ids):
    pad_id, bos_id, eos_id = ids
    model = train(pad_id=pad_id, bos_id=bos_id, eos_id=eos_id)
    assert (model.pad_id, model.bos_id, model.eos_id) == ids
    names = {i: name for name, i in vocabulary(model, tmp_path).items()}
    named = {pad_id: "<pad>", bos_id: "<bos>", eos_id: "<eos>"}
    expected = [named.get(i, f"<unused{i}>") for i in range(max(ids) + 1)]
    assert [names[i] for i in range(max(ids) + 1)] == expected
    assert sorted(names) == list(range(model.vocab_size))
    assert min(model.encode("<unused0> <eos>")) > max(ids)


@pytest.mark.parametrize("ids", [(0, 1, 0), (0, 1, 1), (-1, 0, 1), (0, 0, 0)])
def test_invalid_special_ids_are_refused(ids):
    with pytest.raises(errors.ConfigError, match="distinct"):
        train(pad_id=ids[0], bos_id=ids[1], eos_id=ids[2])


def test_the_smallest_vocabulary_is_named_and_the_size_is_the_actual_one():
    with pytest.raises(errors.ConfigError, match=r"vocab_size=259 .* at least 260"):
        train(vocab_size=259)
    assert train(vocab_size=260).vocab_size == 260 < TOKENIZER.vocab_size == 300
    last = train(vocab_size=300, pad_id=299)
    assert (last.vocab_size, last.pad_id) == (300, 299)
    assert train(lines=["ab"], vocab_size=400).vocab_size == 4 + 256 + 1
    # without building a list of a thousand million names first
    with pytest.raises(errors.ConfigError, match="at least 1000000257"):
        train(eos_id=1_000_000_000)


def test_one_enormous_line_neither_hangs_training_nor_makes_enormous_tokens():
    model = train(lines=["a" * 10_000_000, *LINES], vocab_size=1000)
    assert len(model.encode("a" * 1000)) >= 1000 // tokenizer.LONGEST_TOKEN


@NO_DEADLINE
@hypothesis.given(st.text(st.sampled_from("the quickfoxü 1👩<eos>")))
@hypothesis.example("the" * 1000)
def test_fewest_tokens_is_a_lower_bound(text):
    assert TOKENIZER.fewest_tokens(text) <= len(TOKENIZER.encode(text))


def test_training_is_deterministic_over_threads_and_processes():
    assert train().hash == TOKENIZER.hash
    assert train(lines=LINES[1:]).hash != train(lines=LINES[:1]).hash
    script = (
        "from jax_transformer.data import tokenizer as t; "
        f"print(t.Tokenizer.train({LINES!r}, 300, pad_id=1, bos_id=2, eos_id=3).hash)"
    )
    for threads in ("1", "3"):
        done = runs.python("-c", script, RAYON_NUM_THREADS=threads)
        assert done.stdout.strip() == TOKENIZER.hash, done.stderr


def test_save_and_load(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("what was there before")
    TOKENIZER.save(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == TOKENIZER.hash
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = tokenizer.Tokenizer.load(path)
    assert loaded.hash == TOKENIZER.hash
    assert (loaded.pad_id, loaded.bos_id, loaded.eos_id, loaded.vocab_size) == (1, 2, 3, 300)
    text = " <eos> über 12 foxes "
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    for no_id in (-1, 2**32):
        with pytest.raises(errors.InputError, match=f"^{path}: "):
            loaded.decode([no_id])


def refusal(path) -> str:
    with pytest.raises(errors.InputError) as caught:
        tokenizer.Tokenizer.load(path)
    message = str(caught.value)
    assert "\n" not in message and path.name in message
    return message


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "absent.json")
    assert "directory" in refusal(tmp_path)
    path = tmp_path / "broken.json"
    TOKENIZER.save(path)
    valid = path.read_bytes()
    broken = b"", b"{}", b"[1,\n2]", b"\xff\xfe", valid[:1000], valid[:-1]
    for content in (*broken, valid.replace(b'"BPE"', b'"nonsense"')):
        path.write_bytes(content)
        assert "not a tokenizer file" in refusal(path)
    with pytest.raises(KeyboardInterrupt), tokenizer.guarded(path):  # which is no fault of a file
        raise KeyboardInterrupt


def test_a_tokenizer_without_a_special_token_is_refused(tmp_path):
    path = tmp_path / "foreign.json"
    TOKENIZER.save(path)
    path.write_bytes(path.read_bytes().replace(b"<eos>", b"</s>"))
    assert "<eos>" in refusal(path)


def test_a_file_s_truncation_and_special_tokens_are_ignored(tmp_path):
    path = tmp_path / "foreign.json"
    TOKENIZER.save(path)
    model = tokenizers.Tokenizer.from_file(str(path))
    model.enable_truncation(2)
    model.enable_padding(length=50, pad_id=1, pad_token="<pad>")
    model.post_processor = processors.BertProcessing(("<eos>", 3), ("<bos>", 2))
    model.save(str(path))
    loaded = tokenizer.Tokenizer.load(path)
    assert loaded.encode("the lazy dog") == TOKENIZER.encode("the lazy dog")
    assert loaded.encode_batch(["the lazy dog"]) == [TOKENIZER.encode("the lazy dog")]
    model.normalizer = normalizers.Strip()
    model.save(str(path))
    assert tokenizer.Tokenizer.load(path).fewest_tokens(" " * 1000) == 0


# Two vocabularies, and folders

SOURCE = TOKENIZER
TARGET = train(lines=["ein Haus steht am Fluss"] * 20, pad_id=0, bos_id=4, eos_id=5)


def test_a_pair_reads_sources_and_writes_targets():
    pair = tokenizer.TokenizerPair(SOURCE, TARGET)
    assert pair.encode("the fox") == SOURCE.encode("the fox") != TARGET.encode("the fox")
    assert pair.encode_batch(["the fox", ""]) == [SOURCE.encode("the fox"), []]
    assert pair.decode(TARGET.encode("ein Haus")) == "ein Haus"
    assert pair.decode([4, *TARGET.encode("ein Haus"), 5, 0]) == "ein Haus"
    assert (pair.pad_id, pair.eos_id) == (1, 3)
    assert pair.fewest_tokens("a" * 1000) == SOURCE.fewest_tokens("a" * 1000)
    assert pair.hash == hashlib.sha256(f"{SOURCE.hash}{TARGET.hash}".encode()).hexdigest()
    others = [tokenizer.TokenizerPair(*both) for both in ((TARGET, SOURCE), (SOURCE, SOURCE))]
    assert len({each.hash for each in (pair, *others, SOURCE)}) == 4
    assert SOURCE.source is SOURCE.target is SOURCE


def test_a_folder_has_one_or_two_tokenizers(tmp_path):
    assert not encoding.has_tokenizer(tmp_path)
    with pytest.raises(errors.InputError, match=r"tokenizer\.json: missing \(a run converted"):
        encoding.load_tokenizer(tmp_path)
    encoding.save_tokenizer(SOURCE, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    assert encoding.has_tokenizer(tmp_path)
    loaded = encoding.load_tokenizer(tmp_path)
    assert isinstance(loaded, tokenizer.Tokenizer) and loaded.hash == SOURCE.hash
    two = tmp_path / "two"
    two.mkdir()
    pair = tokenizer.TokenizerPair(SOURCE, TARGET)
    encoding.save_tokenizer(pair, two)
    assert sorted(file.name for file in two.iterdir()) == sorted(run_files.SIDE_FILES)
    assert encoding.has_tokenizer(two)
    loaded = encoding.load_tokenizer(two)
    assert isinstance(loaded, tokenizer.TokenizerPair)
    assert loaded.hash == pair.hash
    assert (loaded.source.hash, loaded.target.hash) == (SOURCE.hash, TARGET.hash)


@pytest.mark.parametrize("missing", run_files.SIDE_FILES)
def test_a_folder_with_one_of_two_tokenizers_names_the_other(tmp_path, missing):
    encoding.save_tokenizer(tokenizer.TokenizerPair(SOURCE, TARGET), tmp_path)
    (tmp_path / missing).unlink()
    assert encoding.has_tokenizer(tmp_path)
    with pytest.raises(errors.InputError, match=f"{missing}: cannot be read"):
        encoding.load_tokenizer(tmp_path)
    encoding.save_tokenizer(SOURCE, tmp_path)
    message = r"holds tokenizer\.json and tokenizer\.(source|target)\.json"
    with pytest.raises(errors.InputError, match=message):
        encoding.load_tokenizer(tmp_path)


@NO_DEADLINE
@hypothesis.given(st.text(st.sampled_from("the quickfoxü 1👩<eos>"), min_size=1), st.integers(1, 5))
def test_a_prefix_has_the_requested_tokens_and_little_more_text(text, tokens):
    beginning = TOKENIZER.beginning(text * 50, tokens)
    assert (text * 50).startswith(beginning) and len(beginning) <= tokens * tokenizer.LONGEST_TOKEN
    assert beginning == text * 50 or len(TOKENIZER.encode(beginning)) >= tokens
