"""Targets of fuzzing: text, JSON and sound."""

import gzip
import io
import json
import struct
import wave
from collections.abc import Iterator
from pathlib import Path

from campaigns.fuzzing import mutators
from campaigns.fuzzing.harness import Target, file_reader
from jax_transformer.data import parallel_text
from jax_transformer.extras.speech import sound
from jax_transformer.storage import untrusted

_PAIRS = (("Ein Haus.", "A house."), ("Größe", "size"), ("", ""), ("a", "b\u2028c"))


def _read_lines(path: Path) -> None:
    """Read a file of lines, none of which has another within it."""
    assert not any("\n" in line for line in parallel_text.read_lines(path)), "a line is two"


def _line_seeds() -> Iterator[bytes]:
    text = "".join(f"{source}\r\n" for source, _ in _PAIRS).encode()
    yield text
    yield parallel_text.UTF8_BOM + text
    yield gzip.compress(text, 1, mtime=0)


def _tsv_seeds() -> Iterator[bytes]:
    text = "".join(f"{source}\t{target}\n" for source, target in _PAIRS).encode()
    yield text
    yield gzip.compress(text, 1, mtime=0)


def _jsonl_seeds() -> Iterator[bytes]:
    pairs = [{"translation": {"de": source, "en": target}} for source, target in _PAIRS]
    yield "".join(f"{json.dumps(pair)}\n" for pair in pairs).encode()
    yield b'\n{"translation": {"de": "\\ud83d\\ude00", "en": "b"}, "id": [1, null]}'


def _read_jsonl(path: Path) -> None:
    parallel_text.read_pair_file(str(path), "translation.de", "translation.en")


def _wav_seeds() -> Iterator[bytes]:
    for channels, width, rate in ((1, 2, 16_000), (2, 1, 8_000), (1, 3, 44_100), (3, 4, 48_000)):
        content = io.BytesIO()
        with wave.open(content, "wb") as file:
            file.setparams((channels, width, rate, 0, "NONE", ""))
            file.writeframes(bytes(range(channels * width * 8)))
        yield content.getvalue()
    fmt = struct.pack("<HHLLHH", 1, 1, 16_000, 32_000, 2, 16)
    chunks = b"fmt " + struct.pack("<L", 16) + fmt + b"LIST" + struct.pack("<L", 3) + b"abc\0"
    chunks += b"data" + struct.pack("<L", 4) + bytes(4)
    yield b"RIFF" + struct.pack("<L", 4 + len(chunks)) + b"WAVE" + chunks
    fmt = struct.pack("<HHLLHHHHL", 0xFFFE, 2, 48_000, 288_000, 6, 24, 22, 24, 3)
    fmt += bytes.fromhex("0100000000001000800000aa00389b71")
    chunks = b"fmt " + struct.pack("<L", 40) + fmt + b"data" + struct.pack("<L", 6) + bytes(6)
    yield b"RIFF" + struct.pack("<L", 4 + len(chunks)) + b"WAVE" + chunks


def _json_seeds() -> Iterator[bytes]:
    yield b'{"a": [1, -2.5e3, true, null, "\\u00e9\\ud83d"], "b": {"c": {}}}'
    yield b"[NaN, Infinity, 1e400, 10000000000000000000000]"


TARGETS = {
    "lines": Target(
        file_reader("text.de", _read_lines), _line_seeds, 20_000, 1,
        mutators.sometimes(0.5, mutators.gzipped), ratio=2500,
    ),
    "tsv": Target(
        file_reader("pairs.tsv", lambda path: parallel_text.read_pair_file(str(path), "a", "b")),
        _tsv_seeds, 30_000, 2, mutators.sometimes(0.5, mutators.gzipped), ratio=2500,
    ),
    "jsonl": Target(
        file_reader("pairs.jsonl", _read_jsonl), _jsonl_seeds, 20_000, 2, mutators.json_lines,
        (b'"translation"', b'"de"', b'"en"'), ratio=500,
    ),
    "wav": Target(
        file_reader("sound.wav", sound.read), _wav_seeds, 15_000, 1, words=(b"fmt ", b"data"),
        memory=40_000_000,
    ),
    "json": Target(
        lambda folder: lambda content: untrusted.parse_json(folder / "file.json", content),
        _json_seeds, 100_000, 3, mutators.json_values, ratio=500,
    ),
}  # fmt: skip
