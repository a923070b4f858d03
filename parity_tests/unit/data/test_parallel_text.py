"""Reading parallel text: line ends, dropped pairs, and refusals in one line that names the file."""

import gzip
import io
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from jax_transformer import errors
from jax_transformer.data import parallel_text
from parity_tests.unit import runs

NO_DEADLINE = hypothesis.settings(deadline=None)  # the machine may be busy
LINE = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))


def refusal(function, *arguments) -> str:
    with pytest.raises(errors.InputError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_lines_end_at_newline_only(tmp_path):
    path = written(tmp_path / "text", "a\u2028b\u0085c\x0bd\x0ce\x1cf\rg\n\nlast")
    assert parallel_text.read_lines(path) == ["a\u2028b\u0085c\x0bd\x0ce\x1cf\rg", "", "last"]


@NO_DEADLINE
@hypothesis.given(st.lists(LINE, min_size=1), st.booleans())
def test_written_lines_are_read_back(lines, crlf):
    hypothesis.assume(any(lines))
    hypothesis.assume(not lines[0].startswith("\ufeff"))
    content = "".join(line + ("\r\n" if crlf else "\n") for line in lines).encode()
    expected = lines if crlf else [line.removesuffix("\r") for line in lines]
    file = io.BufferedReader(io.BytesIO(content))
    assert [line for part in parallel_text.split_chunks(file, "") for line in part] == expected


@pytest.mark.parametrize("name", ["text.gz", "text.de"])
@pytest.mark.parametrize(
    "content",
    [
        *("one\r\ntwo\r\n", "one\r\ntwo", "\ufeffone\ntwo\n", "\ufeffone\r\ntwo"),
        gzip.compress(b"one\ntwo\n", mtime=0),
        gzip.compress(b"one\n", mtime=0) + gzip.compress(b"two\n", mtime=0),
        *("one\n\ufefftwo\n", "one\n\ufefftwo"),  # a byte order mark elsewhere stays
    ],
)
def test_gzip_is_detected_by_content_and_carriage_returns_are_removed(tmp_path, content, name):
    second = "\ufefftwo" if "\n\ufeff" in str(content) else "two"
    assert parallel_text.read_lines(written(tmp_path / name, content)) == ["one", second]


def test_damaged_gzip_is_refused(tmp_path):
    content = gzip.compress(b"some text\n" * 100)
    assert parallel_text.read_lines(written(tmp_path / "whole.gz", content)) == ["some text"] * 100
    for size in range(2, len(content)):
        message = refusal(parallel_text.read_lines, written(tmp_path / "cut.gz", content[:size]))
        assert "cut.gz" in message and "gzip" in message
    # the header comes first; no checksum covers fields such as its time
    for position in range(10, len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        path = written(tmp_path / "flipped.gz", bytes(damaged))
        assert "damaged" in refusal(parallel_text.read_lines, path)


def test_zstd_is_read_like_gzip_and_refused_when_cut(tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    text = [f"line {i}" for i in range(20_000)]
    content = "\n".join(text).encode()
    frames = compressor.compress(content[:100_000]) + compressor.compress(content[100_000:])
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0size"  # as pzstd writes
    path = tmp_path / "text"
    for packed in (frames, skipped + frames):
        assert parallel_text.read_lines(written(path, packed)) == text
    for size in (4, 20, len(frames) // 2, len(frames) - 1):
        message = refusal(parallel_text.read_lines, written(path, frames[:size]))
        assert message == f"{path}: the zstd data are truncated"
    flipped = frames[:-20] + bytes([frames[-20] ^ 255]) + frames[-19:]
    assert "zstd data cannot be read: " in refusal(parallel_text.read_lines, written(path, flipped))
    assert "empty" in refusal(parallel_text.read_lines, written(path, compressor.compress(b"")))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(errors.ConfigError, match=r"pip install 'jax-seq2seq\[zstd\]'"):
        parallel_text.read_lines(path)


@pytest.mark.parametrize("size", [2, 12, 1000])
@pytest.mark.parametrize("line", [1, 2, 3])
def test_invalid_utf8_names_file_and_line(tmp_path, monkeypatch, line, size):
    monkeypatch.setattr(parallel_text, "_CHUNK", size)
    content = b"\n".join(b"caf\xe9" if i == line else "café".encode() for i in (1, 2, 3))
    for packed in (content, content + b"\n", gzip.compress(b"\xef\xbb\xbf" + content)):
        path = written(tmp_path / "latin.txt", packed)
        message = f"{path}: line {line} is not valid UTF-8 (byte 0xe9); "
        assert refusal(parallel_text.read_lines, path).startswith(message)


def test_blocks_of_files_are_read_together_until_one_has_more_lines(tmp_path):
    paths = [str(written(tmp_path / f"{count}.txt", "a\n" * count)) for count in (7, 5)]
    blocks = parallel_text.read_blocks(paths, 2)
    assert [next(blocks), next(blocks)] == [(["a", "a"],) * 2] * 2
    message = refusal(next, blocks)
    assert "7.txt has 7 lines and " in message and "5.txt has 5; line n" in message
    assert refusal(parallel_text.read_pairs, *paths) == message


def test_unreadable_paths_are_refused(tmp_path, monkeypatch):
    assert "absent.txt" in refusal(parallel_text.read_lines, tmp_path / "absent.txt")
    assert "No such file" in refusal(parallel_text.read_lines, str(tmp_path / "absent.txt"))
    assert "directory" in refusal(parallel_text.read_lines, tmp_path)

    def refuse(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    assert "Permission denied" in refusal(parallel_text.read_lines, tmp_path / "secret")


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_refused(tmp_path, content):
    message = refusal(parallel_text.read_lines, written(tmp_path / "nothing", content))
    assert "nothing" in message and "empty" in message


def pair_files(tmp_path, source: str, target: str) -> tuple[Path, Path]:
    return written(tmp_path / "text.en", source), written(tmp_path / "text.de", target)


def test_pairs_in_order_and_empty_sides_counted(tmp_path):
    files = pair_files(tmp_path, "a\n\nc\nd \n \t\u3000\nf\n", "A\nB\n  \nD\nE\nF\n")
    expected = parallel_text.Pairs([("a", "A"), ("d ", "D"), ("f", "F")], dropped_empty=3)
    assert parallel_text.read_pairs(*files) == expected


@pytest.mark.parametrize("target", [b"a\nb\n", b"a\r\nb\r\n", gzip.compress(b"a\nb\n", mtime=0)])
def test_equal_content_is_refused(tmp_path, target):
    source = written(tmp_path / "text.en", b"a\nb\n")
    message = refusal(parallel_text.read_pairs, source, written(tmp_path / "text.de", target))
    assert all(part in message for part in ("text.en", "text.de", "same content"))
    assert len(parallel_text.read_pairs(source, written(tmp_path / "text.de", "a\nc\n")).pairs) == 2


def test_data_without_any_pair_are_refused(tmp_path):
    message = refusal(parallel_text.read_pairs, *pair_files(tmp_path, "a\n \n", "\nB\n"))
    assert all(part in message for part in ("text.en", "text.de", "2 pairs"))


def test_files_are_joined_in_order(tmp_path):
    parts = [parallel_text.Pairs([("a", "A")], 2), parallel_text.Pairs([("b", "B"), ("c", "C")], 3)]
    pairs = [("a", "A"), ("b", "B"), ("c", "C")]
    expected = parallel_text.Pairs(pairs, dropped_empty=5, counts=(1, 2))
    assert parallel_text.joined(parts) == expected


def test_every_unreadable_file_is_named_at_once(tmp_path, monkeypatch):
    good = written(tmp_path / "good", "text")
    parallel_text.check_readable([good, str(good)])
    paths = [good, tmp_path / "absent", tmp_path, tmp_path / "absent", tmp_path / "gone"]
    message = refusal(parallel_text.check_readable, paths)
    assert message.count("absent") == 1 and "No such file" in message
    assert f"{tmp_path}: cannot be read: Is a directory" in message
    assert "gone" in message and "good" not in message
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "Permission denied" in refusal(parallel_text.check_readable, [good])


def sentences(count: int, word: str, other: str) -> list[tuple[str, str]]:
    return [
        (f"{word * (i % 40 + 1)}, x {i}", f"{other * (i % 40 + 1)}, x {i}") for i in range(count)
    ]


def test_swapped_sides_are_detected_by_their_words():
    train = sentences(100, "a", "b")
    assert parallel_text.looks_swapped(train, sentences(20, "b", "a"))
    capitals = [(s.upper(), t.title()) for s, t in sentences(50, "b", "a")]
    assert parallel_text.looks_swapped(train, capitals)
    names = [("Anna Bo Cem Dan Eva Finn Gil Hui Ida Jan",) * 2]
    assert parallel_text.looks_swapped(train + names, sentences(50, "b", "a") + names)
    assert not parallel_text.looks_swapped(train, sentences(50, "a", "b"))
    assert not parallel_text.looks_swapped(train, sentences(50, "c", "d"))
    # too few words to decide
    assert not parallel_text.looks_swapped(train, sentences(19, "b", "a"))
    for straight, swapped in ((3, True), (4, False)):  # a tenth of the words may be straight
        others = sentences(30, "b", "a") + sentences(straight, "a", "b")
        assert parallel_text.looks_swapped(train, others) == swapped
    # one swapped side proves nothing
    assert not parallel_text.looks_swapped(train, sentences(50, "b", "c"))
    both = train + sentences(100, "b", "a")  # training text has both directions
    assert not parallel_text.looks_swapped(both, sentences(50, "b", "a"))


def test_content_hash_is_unambiguous():
    lists = [[], [("", "")], [("a", "b"), ("c", "d")], [("c", "d"), ("a", "b")], [("ab", "cd")]]
    lists += [[("b", "a"), ("d", "c")], [("a", "b")], [("ab", "")], [("", "ab")], [("a\nb", "")]]
    lists += [[("a", "bcd")], [("\ud800", "a")], [("?", "a")]]
    assert len({parallel_text.content_hash(pairs) for pairs in lists}) == len(lists)


def test_content_hash_is_the_same_in_every_version():
    # After a change of the encoding no earlier run could be resumed. The value: sha256 over size
    # (8 bytes, little-endian) and UTF-8.
    actual = parallel_text.content_hash([("a", "ä")])
    assert actual == "004421f5c0c5a2d110a1521b4157288e4c3fe6ac2deed8e688857b2d4a7f106b"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "content", [b"one\ntwo\n", b"one\n\ntwo", b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\r\nthree", b"\n\n"]
)
def test_lines_that_come_in_pieces_are_those_of_the_file(tmp_path, monkeypatch, content, size):
    path = written(tmp_path / "text", content)
    expected = parallel_text.read_lines(path)
    monkeypatch.setattr(parallel_text, "_CHUNK", size)
    assert parallel_text.read_lines(path) == expected


def test_importing_the_corpus_loads_no_jax():
    script = (
        "import sys, jax_transformer.training.corpus, jax_transformer.data.batches;"
        "assert not {'jax', 'torch', 'transformers', 'grain'} & set(sys.modules)"
    )
    assert runs.python("-c", script).returncode == 0
