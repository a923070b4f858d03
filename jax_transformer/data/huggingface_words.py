"""A Hugging Face folder's vocabularies, found by its family's files, and the ids and languages that they have."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from jax_transformer.data import (
    fast_words,
    huggingface_files,
    language_codes,
    piece_words,
    sentencepiece_model,
)
from jax_transformer.data.huggingface_files import Described, Kind
from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.storage import untrusted
from jax_transformer.storage.untrusted import shown

LONGEST = 200_000_000  # of one file
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_VOCABULARIES: dict[Kind, tuple[str, ...]] = {
    Kind.MARIAN: ("source.spm", "target.spm", "vocab.json"),
    Kind.M2M_100: ("sentencepiece.bpe.model", "vocab.json"),
    Kind.BART: ("vocab.json", "merges.txt"),
    Kind.T5: ("spiece.model",),
    Kind.PEGASUS: ("spiece.model",),
    Kind.MBART: ("sentencepiece.bpe.model",),
    Kind.MBART50: ("sentencepiece.bpe.model",),
    Kind.NLLB: ("sentencepiece.bpe.model",),
}
_DEFAULT_LANGUAGE = {
    Kind.MBART: "en_XX",
    Kind.MBART50: "en_XX",
    Kind.NLLB: "eng_Latn",
    Kind.M2M_100: "en",
}
# How a family writes a language as a token
_WRITTEN = {
    Kind.MARIAN: ">>{}<<",
    Kind.M2M_100: "__{}__",
    Kind.MBART: "{}",
    Kind.MBART50: "{}",
    Kind.NLLB: "{}",
}
_PATTERNS = {
    Kind.MARIAN: re.compile(">>([^<>]+)<<"),
    Kind.M2M_100: re.compile("__([a-z]{2,3})__"),
    Kind.MBART: re.compile("([a-z]{2}_[A-Z]{2})"),
    Kind.MBART50: re.compile("([a-z]{2}_[A-Z]{2})"),
    Kind.NLLB: re.compile("([a-z]{3}_[A-Z][a-z]{3})"),
}


@runtime_checkable
class Words(Protocol):
    """A vocabulary, and how text becomes its ids and these become text; nothing is put around a line."""

    size: int

    def encode(self, line: str) -> list[int]: ...

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def id_of(self, token: str) -> int | None: ...

    def names(self) -> list[str]: ...


@dataclass(frozen=True)
class Opened:
    """A folder's vocabularies, before languages are chosen."""

    told: Described
    source: Words
    target: Words
    files: dict[str, bytes]
    """All that was read."""
    languages: tuple[str, ...]

    @property
    def separate(self) -> bool:
        """Whether each side has a vocabulary of its own."""
        return self.told.flag("separate_vocabs")

    @property
    def default_language(self) -> str | None:
        """What transformers reads where it is told no source language."""
        found = _DEFAULT_LANGUAGE.get(self.told.kind)
        return found if found in self.languages else None

    @property
    def digest(self) -> str:
        """SHA-256 of the files that decide ids."""
        made = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            if name not in ("config.json", "generation_config.json"):
                made.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
        return made.hexdigest()

    def id_of(self, words: Words, token: str) -> int:
        """The id of a token that has to be there."""
        found = words.id_of(token)
        if found is None:
            raise InputError(f"{self.told.folder}: its vocabulary has no {shown(token)}")
        return found

    def language_id(self, words: Words, language: str) -> int:
        """The id of a language. Raises ConfigError where it is none of the folder's."""
        if language not in self.languages:
            if not self.languages:
                raise ConfigError(
                    f"{self.told.folder}: its tokenizer has no languages; leave out {shown(language)}"
                )
            near = (
                nearest(language, list(self.languages))
                or f"; it has {', '.join(self.languages[:8])}, ..."
            )
            raise ConfigError(
                f"{self.told.folder}: its tokenizer has no language {shown(language)}{near}"
            )
        return self.id_of(words, _WRITTEN[self.told.kind].format(language))

    @property
    def pad_id(self) -> int:
        """The id of padding, of which the model has one for both sides."""
        return self.id_of(self.source, self.told.pad)

    @property
    def start_id(self) -> int:
        """What the decoder begins with: the model's ``decoder_start_token_id``, or where it tells none what its family does."""
        found = self.told.model.get("decoder_start_token_id")
        if type(found) is int:
            return found
        begins_with_pad = self.told.kind in (Kind.MARIAN, Kind.T5, Kind.PEGASUS)
        return self.pad_id if begins_with_pad else self.id_of(self.target, self.told.eos)


def open_folder(folder: Path) -> Opened:
    """Read a folder's vocabularies. Raises InputError where they are missing, damaged or do not fit ``config.json``."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    told = huggingface_files.describe(folder)
    files = {name: _bytes(folder / name) for name in _BESIDE if (folder / name).exists()}
    wanted = [
        *_VOCABULARIES[told.kind],
        *(["target_vocab.json"] if told.flag("separate_vocabs") else []),
    ]
    missing = [name for name in wanted if not (folder / name).is_file()]
    # Marian's and M2M100's own files are what transformers reads, beside a tokenizer.json that others may have made
    own = told.kind in (Kind.MARIAN, Kind.M2M_100)
    if (folder / "tokenizer.json").exists() and (missing or not own):
        files["tokenizer.json"] = _bytes(folder / "tokenizer.json")
        source: Words = fast_words.from_json(
            folder / "tokenizer.json", files["tokenizer.json"], told
        )
        target = source
    elif missing:
        there = sorted(
            name
            for path in folder.iterdir()
            if (name := path.name).endswith((".json", ".spm", ".model", ".txt"))
        )
        needs = " and ".join(missing)
        raise InputError(
            f"{folder}: no {needs}{'' if own else ', nor tokenizer.json'}, for {told.kind.value}'s tokenizer (there: "
            f"{shown(', '.join(there) or 'nothing', 200)}); copy the tokenizer's files there"
        )
    else:
        files |= {name: _bytes(folder / name) for name in wanted}
        source, target = _own(folder, files, told)
    opened = Opened(told, source, target, files, _languages(told, source))
    _check(opened)
    return opened


def _bytes(path: Path) -> bytes:
    untrusted.check_readable(path)
    if path.stat().st_size > LONGEST:
        raise InputError(
            f"{path}: {path.stat().st_size:,} bytes, over the {LONGEST:,} that a tokenizer's file may have"
        )
    return path.read_bytes()


def _own(folder: Path, files: dict[str, bytes], told: Described) -> tuple[Words, Words]:
    """The vocabularies of source and target in the files of the family; one object where they are one."""
    if told.kind is Kind.BART:
        words: Words = fast_words.from_merges(
            folder / "vocab.json", files["vocab.json"], files["merges.txt"], told
        )
        return words, words
    if told.settings.get("sp_model_kwargs"):
        raise InputError(
            f"{folder / 'tokenizer_config.json'}: sp_model_kwargs is {shown(told.settings['sp_model_kwargs'])}; remove it"
        )
    models = {
        name: sentencepiece_model.load(folder / name, content)
        for name, content in files.items()
        if name.endswith((".spm", ".model"))
    }
    if told.kind not in (Kind.MARIAN, Kind.M2M_100):
        name, model = next(iter(models.items()))
        words = fast_words.from_pieces(folder / name, sentencepiece_model.apart(model), told)
        return words, words
    path = folder / "vocab.json"
    ids = huggingface_files.vocabulary(path, files["vocab.json"])
    if told.kind is Kind.M2M_100:
        codes = {"m2m100": language_codes.M2M100, "wmt21": language_codes.WMT21}.get(
            told.text("language_codes") or "m2m100"
        )
        if codes is None:
            raise InputError(
                f"{folder / 'tokenizer_config.json'}: language_codes is {shown(told.text('language_codes'))}, not m2m100 or wmt21"
            )
        ids = {f"__{code}__": len(ids) + i for i, code in enumerate(codes)} | ids
        words = piece_words.PieceWords(path, ids, models["sentencepiece.bpe.model"], told)
        return words, words
    reads, writes = models["source.spm"], models["target.spm"]
    if not told.flag(
        "separate_vocabs"
    ):  # transformers then joins the pieces of a target by the source's model
        return piece_words.PieceWords(path, ids, reads, told), piece_words.PieceWords(
            path, ids, writes, told, joins=reads
        )
    path = folder / "target_vocab.json"
    other = huggingface_files.vocabulary(path, files["target_vocab.json"])
    return piece_words.PieceWords(folder / "vocab.json", ids, reads, told), piece_words.PieceWords(
        path, other, writes, told
    )


def _languages(told: Described, words: Words) -> tuple[str, ...]:
    if told.kind not in _PATTERNS:
        return ()
    found = [match[1] for name in words.names() if (match := _PATTERNS[told.kind].fullmatch(name))]
    published = {
        Kind.MBART: language_codes.MBART,
        Kind.MBART50: language_codes.MBART50,
        Kind.NLLB: language_codes.NLLB,
    }.get(told.kind, [])
    return tuple(
        dict.fromkeys([*found, *(code for code in published if words.id_of(code) is not None)])
    )


def _check(opened: Opened) -> None:
    """Raises InputError where the model's configuration and the tokenizer are not of one model."""
    told, where = opened.told, opened.told.folder / "config.json"
    for name, words, key in (
        ("source", opened.source, "vocab_size"),
        ("target", opened.target, "decoder_vocab_size"),
    ):
        size = told.model.get(key if opened.separate else "vocab_size")
        if type(size) is int and size < words.size:
            raise InputError(
                f"{where}: a vocabulary of {size} is smaller than the tokenizer's of {words.size} ({name}); it is of another model"
            )
    for key, expected in (
        ("pad_token_id", opened.pad_id),
        ("eos_token_id", opened.id_of(opened.source, told.eos)),
    ):
        found = told.model.get(key)
        if type(found) is int and found != expected:
            raise InputError(
                f"{where}: {key} is {found}, and the tokenizer's {expected}; it is of another model"
            )
