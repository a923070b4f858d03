"""The tokenizers of Hugging Face folders, with what each family puts around a line.

Facts from transformers 5.23 (``models/*/tokenization_*.py``); ids and text are those of its own classes.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsInt

from jax_transformer.data import huggingface_words
from jax_transformer.data.huggingface_files import Kind
from jax_transformer.data.huggingface_words import Opened, Words
from jax_transformer.data.tokenizer import HUGGINGFACE_FOLDER, Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import atomic, json_text
from jax_transformer.storage.untrusted import shown

LANGUAGES_FILE = "languages.json"  # of a run folder: what its tokenizer was loaded with
Around = tuple[tuple[int, ...], tuple[int, ...]]


class Side(Tokenizer):
    """What reads sources or writes targets: a ``Tokenizer`` with ids of its own around a line."""

    def __init__(
        self,
        words: Words,
        around: Around | ConfigError,
        *,
        pad_id: int,
        bos_id: int,
        eos_id: int,
        digest: str,
    ) -> None:
        self._words, self._around, self._digest = words, around, digest
        self.pad_id, self.bos_id, self.eos_id = pad_id, bos_id, eos_id
        self.vocab_size = words.size

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids that a batch puts before those of a line. Raises ConfigError where a language has to be given first."""
        return self._checked()[0]

    @property
    def suffix(self) -> tuple[int, ...]:
        """The ids that a batch puts behind those of a line. Raises ConfigError where a language has to be given first."""
        return self._checked()[1]

    def _checked(self) -> Around:
        if isinstance(self._around, ConfigError):
            raise self._around
        return self._around

    def encode(self, line: str) -> list[int]:
        """The ids of a line, without those around it. The text of a special token becomes that token, as in transformers."""
        return self._words.encode(line)

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """``encode`` of each line."""
        return self._words.encode_batch(lines)

    def fewest_tokens(self, line: str) -> int:
        """0: normalization may shrink any text."""
        return 0

    def beginning(self, line: str, tokens: int) -> str:
        """All of the line: normalization may shrink any text."""
        return line

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of ids; special tokens are dropped."""
        return self._words.decode([int(i) for i in ids])

    @property
    def hash(self) -> str:
        """SHA-256 of the files that decide ids, and of what stands around a line."""
        return self._digest

    def save(self, path: str | Path) -> None:
        """Raises ConfigError: the files belong to both sides."""
        raise ConfigError(
            f"{path}: one side of a Hugging Face tokenizer is not saved alone; use HuggingFaceTokenizer.save"
        )


@dataclass(frozen=True)
class HuggingFaceTokenizer(TokenizerPair):
    """The tokenizer of a folder: it reads sources in one language and writes targets in another, with one vocabulary or two."""

    source: Side
    target: Side
    opened: Opened
    source_lang: str | None
    target_lang: str | None

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that it can be given, by the codes that its family uses; none where it has none."""
        return self.opened.languages

    @property
    def separate(self) -> bool:
        """Whether each side has a vocabulary of its own."""
        return self.opened.separate

    @property
    def bos_id(self) -> int:
        """What the decoder begins with."""
        return self.target.bos_id

    @property
    def vocab_size(self) -> int:
        """One above the largest id of a source; the model's vocabulary may be larger."""
        return self.source.vocab_size

    def beginning(self, line: str, tokens: int) -> str:
        """All of the line."""
        return self.source.beginning(line, tokens)

    def with_languages(
        self, source_lang: str | None = None, target_lang: str | None = None
    ) -> "HuggingFaceTokenizer":
        """The same between other languages; one that is None stays. Raises ConfigError for a language that it has not."""
        _check_languages(self.opened, source_lang, target_lang)
        return _assembled(
            self.opened, source_lang or self.source_lang, target_lang or self.target_lang
        )

    def forced_bos_id(self, target_lang: str | None = None) -> int | None:
        """The id that a translation into ``target_lang`` has to begin with, behind the decoder's start.

        The language's own of mBART-50, M2M100 and NLLB. None for other families, and where no target language is given here or before: then the
        model's ``forced_bos_token_id`` stands. mBART's decoder starts with the language instead, which is ``bos_id``. Raises ConfigError for a
        language that it has not.
        """
        chosen = target_lang or self.target_lang
        if chosen is None or self.opened.told.kind not in (Kind.MBART50, Kind.M2M_100, Kind.NLLB):
            if target_lang is not None:
                self.opened.language_id(self.opened.target, target_lang)
            return None
        return self.opened.language_id(self.opened.target, chosen)

    def save(self, folder: str | Path) -> None:
        """Write the files that it was read from, byte for byte, into a folder that is there."""
        for name, content in self.opened.files.items():
            with atomic.file(Path(folder) / name) as temporary:
                temporary.write_bytes(content)


def load_huggingface(
    folder: str | Path, *, source_lang: str | None = None, target_lang: str | None = None
) -> HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face folder.

    ``source_lang`` and ``target_lang`` are codes of its ``languages`` (``en_XX``, ``eng_Latn``, ``en``; of a Marian model with several target
    languages ``fra`` stands for its ``>>fra<<``); where None, those of ``tokenizer_config.json``. Raises InputError where files are missing, damaged
    or do not fit each other, ConfigError for a language that the tokenizer has not, or where SentencePiece has to be installed first.
    """
    opened = huggingface_words.open_folder(Path(folder))
    told = opened.told
    _check_languages(opened, source_lang, target_lang)
    return _assembled(
        opened, source_lang or told.text("src_lang"), target_lang or told.text("tgt_lang")
    )


def _check_languages(opened: Opened, source_lang: str | None, target_lang: str | None) -> None:
    """Raises ConfigError for a language that would be without effect."""
    if source_lang is not None and opened.told.kind is Kind.MARIAN:
        raise ConfigError(
            f"{opened.told.folder}: a Marian model reads one language; leave out source_lang={source_lang!r}"
        )
    for words, language in ((opened.source, source_lang), (opened.target, target_lang)):
        if language is not None and not opened.languages:
            opened.language_id(words, language)


def load_run(folder: Path) -> HuggingFaceTokenizer:
    """The tokenizer of a run folder that came of a Hugging Face folder, between the languages that it was saved with."""
    chosen = json_text.read(folder / LANGUAGES_FILE) if (folder / LANGUAGES_FILE).exists() else {}
    known = {"source_lang", "target_lang"}
    if (
        not isinstance(chosen, dict)
        or set(chosen) - known
        or not all(isinstance(code, str | None) for code in chosen.values())
    ):
        raise InputError(
            f"{folder / LANGUAGES_FILE}: {shown(chosen)} is no object of source_lang and target_lang"
        )
    return load_huggingface(folder / HUGGINGFACE_FOLDER, **chosen)


def save_run(tokenizer: HuggingFaceTokenizer, folder: Path) -> None:
    """Write what :func:`load_run` reads."""
    inner = folder / HUGGINGFACE_FOLDER
    inner.mkdir(exist_ok=True)
    tokenizer.save(inner)
    chosen = {"source_lang": tokenizer.source_lang, "target_lang": tokenizer.target_lang}
    if any(chosen.values()):
        with atomic.file(folder / LANGUAGES_FILE) as temporary:
            temporary.write_text(json.dumps(chosen) + "\n", encoding="utf-8")


def _assembled(
    opened: Opened, source_lang: str | None, target_lang: str | None
) -> HuggingFaceTokenizer:
    kind = opened.told.kind
    if kind is not Kind.MARIAN:
        source_lang = source_lang or opened.default_language
    sides: list[Side] = []
    for words, language in ((opened.source, source_lang), (opened.target, target_lang)):
        around = _around(opened, words, language, target_lang, reads=len(sides) == 0)
        digest = hashlib.sha256(opened.digest.encode() + repr(around).encode()).hexdigest()
        start = opened.start_id
        if kind is Kind.MBART and target_lang is not None:
            start = opened.language_id(opened.target, target_lang)
        sides.append(
            Side(
                words,
                around,
                pad_id=opened.pad_id,
                bos_id=start,
                eos_id=opened.id_of(words, opened.told.eos),
                digest=digest,
            )
        )
    source, target = sides
    return HuggingFaceTokenizer(source, target, opened, source_lang, target_lang)


def _around(
    opened: Opened, words: Words, language: str | None, target_lang: str | None, *, reads: bool
) -> Around | ConfigError:
    """What stands before and behind a line; an error to be raised by whoever asks for it where a language is missing."""
    told = opened.told
    end = (opened.id_of(words, told.eos),)
    match told.kind:
        case Kind.BART:
            return (opened.id_of(words, told.named["cls_token"].content),), (
                opened.id_of(words, told.named["sep_token"].content),
            )
        case Kind.MARIAN if reads and target_lang is not None and opened.languages:
            return (opened.language_id(words, target_lang),), end
        case Kind.MBART | Kind.MBART50 | Kind.NLLB | Kind.M2M_100:
            if language is None:
                side = "source_lang" if reads else "target_lang"
                return ConfigError(
                    f"{told.folder}: give {side}, one of {', '.join(opened.languages[:8])}, ..."
                )
            code = (opened.language_id(words, language),)
            behind = told.kind is Kind.MBART or (
                told.kind is Kind.NLLB and told.flag("legacy_behaviour")
            )
            return ((), end + code) if behind else (code, end)
    return (), end
