"""Targets of fuzzing: tokenizers and their vocabularies. The libraries that read some of them are
not written in Python: a block of inputs runs in a process of its own, whose death is a finding.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from campaigns.fuzzing import mutators
from campaigns.fuzzing.harness import Read, Target, file_reader
from jax_transformer.data import huggingface_tokenizer, sentencepiece_vocabulary
from jax_transformer.data.encoding import load_tokenizer
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import ConfigError, InputError, UnsafeFileError
from jax_transformer.storage import huggingface_folder, run_files
from parity_tests import tokenizer_models

_LINE = "It's 10:30, Größe 3!"


def _read_tokenizer(path: Path) -> None:
    """The tokenizer of a run, and a line through it."""
    tokenizer = Tokenizer.load(path)
    tokenizer.decode(tokenizer.encode(_LINE))


def _tokenizer_seeds() -> Iterator[bytes]:
    for size in (259, 264):
        tokenizer = Tokenizer.train(["a a a bb bb", "ab ab"], size, pad_id=0, bos_id=1, eos_id=2)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tokenizer.json")
            tokenizer.save(path)
            data = json.loads(path.read_bytes())
        words = dict(list(data["model"]["vocab"].items())[:20])
        merges = [pair for pair in data["model"]["merges"] if all(one in words for one in pair)]
        data["model"] |= {"vocab": words, "merges": merges}
        yield json.dumps(data).encode()
    tokens = [{"id": i, "content": text} for i, text in enumerate(("<pad>", "<eos>"))]
    for token in tokens:
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        token |= dict.fromkeys(flags, False) | {"special": True}
    words = {"<pad>": 0, "<eos>": 1, "a": 2, "It": 3}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "a"}
    yield json.dumps({"added_tokens": tokens, "model": model}).encode()
    pieces = [["<unk>", 0.0], ["▁", -1.0], ["▁It", -2.0], ["<pad>", 0], ["<eos>", 0]]
    model = {"type": "Unigram", "unk_id": 0, "vocab": pieces}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
    words = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    parts = {"normalizer": normalizer, "pre_tokenizer": words, "decoder": words}
    yield json.dumps({"version": "1.0", "added_tokens": tokens, **parts, "model": model}).encode()


def _read_pieces(folder: Path) -> Read:
    """A model of SentencePiece, taken apart, and a line through it."""

    def read(content: bytes) -> None:
        path = folder / "source.spm"
        model = sentencepiece_vocabulary.load(path, content)
        sentencepiece_vocabulary.take_apart(path, model)
        model.decode_pieces(model.encode(_LINE, out_type=str))

    return read


def _piece_seeds() -> Iterator[bytes]:
    """Models with few pieces."""
    for specials, algorithm in (("t5", "unigram"), ("marian", "bpe"), ("fairseq", "unigram")):
        content = tokenizer_models.model(specials, algorithm, size=150)
        fields = list(mutators._fields(content))
        few = [field for field in fields if field[0] != 10][:1]
        few = fields[:20] + [field for field in fields[20:] if field[0] >> 3 != 1]
        small = [field for field in few if field[0] >> 3 != 3]  # the table of characters
        for each in (small, few):
            yield b"".join(mutators._field(key, value) for key, value in each)


# Folders of transformers


def _folder_reader(files: Callable[[], dict[str, Any]], name: str) -> Callable[[Path], Read]:
    def begin(folder: Path) -> Read:
        tokenizer_models.write(folder, files())

        def read(_: Path) -> None:
            tokenizer = huggingface_tokenizer.read_files(folder)
            tokenizer.target.decode(tokenizer.source.encode(_LINE))

        return file_reader(name, read)(folder)

    return begin


def _file_seeds(files: Callable[[], dict[str, Any]], name: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        content = files()[name]
        return [content if isinstance(content, bytes) else json.dumps(content).encode()]

    return seeds


def _settings_seeds() -> Iterator[bytes]:
    yield json.dumps({"tokenizer_class": "MarianTokenizer", "separate_vocabs": False}).encode()
    token = {"content": "</s>", "lstrip": False, "special": True}
    added = {"0": token, "1": {"content": "<unk>", "special": True}}
    values = {"added_tokens_decoder": added, "eos_token": token, "extra_special_tokens": ["<a>"]}
    yield json.dumps(values | {"clean_up_tokenization_spaces": True}).encode()


def _read_languages(folder: Path) -> Read:
    tokenizer_models.write(folder / huggingface_folder.IN_RUN, tokenizer_models.marian())
    return file_reader(run_files.LANGUAGES_FILE, lambda _: load_tokenizer(folder))(folder)


_json = mutators.json_values
_lines = mutators.lines
_REFUSALS = (InputError, UnsafeFileError, ConfigError)
_small = tokenizer_models.blenderbot_small

TARGETS = {
    "tokenizer.json": Target(
        file_reader("tokenizer.json", _read_tokenizer), _tokenizer_seeds, 7_500, 2, _json,
        ratio=1000, longest=8000,
    ),
    "sentencepiece": Target(
        _read_pieces, _piece_seeds, 7_500, 2,
        mutators.sometimes(0.7, mutators.protobuf), ratio=1000,
    ),
    "tokenizer_config.json": Target(
        _folder_reader(tokenizer_models.marian, "tokenizer_config.json"), _settings_seeds,
        1_250, 1, _json, memory=8_000_000, ratio=1000,
    ),
    "vocab.json": Target(
        _folder_reader(_small, "vocab.json"), _file_seeds(_small, "vocab.json"),
        2_500, 1, _json, memory=8_000_000, ratio=1000, longest=16_000,
    ),
    "merges.txt": Target(
        _folder_reader(_small, "merges.txt"), _file_seeds(_small, "merges.txt"),
        2_500, 1, _lines, memory=8_000_000, ratio=1000, longest=16_000,
    ),
    "languages.json": Target(
        _read_languages, lambda: [b'{"source_lang": "en", "target_lang": null}'],
        750, 1, _json, memory=8_000_000, refusals=_REFUSALS, ratio=1000,
    ),
}  # fmt: skip
