"""Byte-level BPE: any text becomes ids and comes back unchanged; a thin wrapper of Hugging Face ``tokenizers``."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsInt

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jax_transformer import errors
from jax_transformer.storage import atomic

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
BYTES = 256
# Bounds what one line without spaces can do: the trainer's time grows with line length x merges, and a run of one character would
# otherwise be learned as tokens of thousands of bytes.
TRAINING_CHARACTERS_PER_LINE = 10_000
LONGEST_TOKEN = 64
# No merge crosses these: a target-language tag such as <2de> (Johnson et al. 2017), one digit, and GPT-2's words, punctuation and spaces.
PIECES = r"<2[A-Za-z_]+>|\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Names in a run folder: of one vocabulary for both sides, or of two.
SHARED_FILE = "tokenizer.json"
SIDE_FILES = ("tokenizer.source.json", "tokenizer.target.json")
# A folder beside them with the files of a Hugging Face folder as they were, and those of them that are vocabularies
HUGGINGFACE_FOLDER = "huggingface"
HUGGINGFACE_FILES = (
    "tokenizer.json",
    "source.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
)


class Tokenizer:
    """Text to ids and back. Special tokens are added by whoever builds batches; in text, ``<eos>`` is five ordinary characters."""

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        vocabulary = model.get_vocab(with_added_tokens=True)
        missing = [text for text in (PAD, BOS, EOS) if text not in vocabulary]
        if missing:
            raise errors.InputError(f"the tokenizer has no token {', '.join(missing)}")
        # This switch is not part of the saved file: without it, "<eos>" in a line would become the end-of-sentence id.
        model.encode_special_tokens = True
        # A file made elsewhere may ask for these; lengths are the batches' business.
        model.no_truncation()
        model.no_padding()
        self._model = model
        self.pad_id, self.bos_id, self.eos_id = (vocabulary[text] for text in (PAD, BOS, EOS))
        self.vocab_size = max(vocabulary.values()) + 1
        # In byte-level BPE each character of a token's name is one byte of text; with a normalizer, text may shrink first.
        lossless = model.normalizer is None and isinstance(model.decoder, decoders.ByteLevel)
        self._longest_token = max(map(len, vocabulary)) if lossless else None

    @classmethod
    def train(
        cls, lines: Iterable[str], vocab_size: int, *, pad_id: int, bos_id: int, eos_id: int
    ) -> "Tokenizer":
        """Learn merges from ``lines``, digits apart and language tags whole.

        Ids below the largest special that no special takes become ``<unused0>`` and so on.
        """
        specials = {pad_id: PAD, bos_id: BOS, eos_id: EOS}
        if len(specials) < 3 or min(specials) < 0:
            raise errors.ConfigError(
                f"pad_id={pad_id}, bos_id={bos_id} and eos_id={eos_id} must be distinct and not negative"
            )
        least = max(specials) + 1 + BYTES
        if vocab_size < least:
            raise errors.ConfigError(
                f"vocab_size={vocab_size} is too small: the {BYTES} bytes and the special ids up to {max(specials)} need at least {least}"
            )
        model = tokenizers.Tokenizer(models.BPE())
        pieces = pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="isolated")
        model.pre_tokenizer = pre_tokenizers.Sequence(
            [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[specials.get(i, f"<unused{i}>") for i in range(max(specials) + 1)],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=LONGEST_TOKEN,
            show_progress=False,
        )
        model.train_from_iterator((line[:TRAINING_CHARACTERS_PER_LINE] for line in lines), trainer)
        return cls(model)

    def encode(self, line: str) -> list[int]:
        """The ids of a line, without special tokens."""
        return self._model.encode(line, add_special_tokens=False).ids

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """``encode`` of each line, on all cores."""
        return [
            encoding.ids
            for encoding in self._model.encode_batch_fast(list(lines), add_special_tokens=False)
        ]

    def fewest_tokens(self, line: str) -> int:
        """A count that ``encode`` cannot fall below, at no cost: encoding a 10 MB line takes seconds and gigabytes, to be thrown away."""
        return 0 if self._longest_token is None else -(-len(line) // self._longest_token)

    def beginning(self, line: str, tokens: int) -> str:
        """As much of a line's beginning as has at least that many tokens, told at no cost; all of it where that cannot be told."""
        return line if self._longest_token is None else line[: tokens * self._longest_token]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of ids; special tokens are dropped. Ids that end within a character give U+FFFD."""
        return self._model.decode([int(i) for i in ids], skip_special_tokens=True)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids that a batch puts before those of a line: none."""
        return ()

    @property
    def suffix(self) -> tuple[int, ...]:
        """The ids that a batch puts behind those of a line: the end."""
        return (self.eos_id,)

    @property
    def source(self) -> "Tokenizer":
        """Itself: one vocabulary for both sides."""
        return self

    @property
    def target(self) -> "Tokenizer":
        """Itself: one vocabulary for both sides."""
        return self

    @property
    def hash(self) -> str:
        """SHA-256 of the JSON, which is also that of the saved file."""
        return hashlib.sha256(self._model.to_str().encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a ``tokenizer.json``, complete or not at all."""
        atomic.write_text(path, self._model.to_str())

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a ``tokenizer.json``; special tokens are found by their text."""
        try:
            text = Path(path).read_bytes().decode("utf-8")
        except OSError as error:
            raise errors.InputError(f"{path}: cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise errors.InputError(f"{path}: not a tokenizer file: not valid UTF-8") from error
        with guarded(path):
            return cls(tokenizers.Tokenizer.from_str(text))


@contextlib.contextmanager
def guarded(path: str | Path) -> Iterator[None]:
    """What the library raises over a file, as one line that names it: a bare Exception, its message over several lines at times, or a panic of
    its Rust code, which is no Exception."""
    try:
        yield
    except errors.InputError as error:
        raise errors.InputError(f"{path}: {error}") from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise errors.InputError(f"{path}: not a tokenizer file: {reason}") from error


@dataclass(frozen=True)
class TokenizerPair:
    """A vocabulary for each side, where a shared one would stand: it reads sources and writes targets."""

    source: Tokenizer
    target: Tokenizer

    @property
    def pad_id(self) -> int:
        """The source's."""
        return self.source.pad_id

    @property
    def eos_id(self) -> int:
        """The source's."""
        return self.source.eos_id

    @property
    def prefix(self) -> tuple[int, ...]:
        """The source's: the ids before those of a source line."""
        return self.source.prefix

    @property
    def suffix(self) -> tuple[int, ...]:
        """The source's: the ids behind those of a source line."""
        return self.source.suffix

    def encode(self, line: str) -> list[int]:
        """The ids of a source line, without special tokens."""
        return self.source.encode(line)

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """``encode`` of each line, on all cores."""
        return self.source.encode_batch(lines)

    def fewest_tokens(self, line: str) -> int:
        """A count that ``encode`` cannot fall below, at no cost."""
        return self.source.fewest_tokens(line)

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of a target's ids; special tokens are dropped."""
        return self.target.decode(ids)

    @property
    def hash(self) -> str:
        """SHA-256 of both hashes, source first."""
        return hashlib.sha256((self.source.hash + self.target.hash).encode()).hexdigest()


def in_folder(path: str | Path) -> bool:
    """Whether a run folder holds a tokenizer, or at least one of two, or one that came of a Hugging Face folder."""
    return (
        any((Path(path) / name).exists() for name in (SHARED_FILE, *SIDE_FILES))
        or _huggingface(Path(path)) is not None
    )


def _huggingface(folder: Path) -> Path | None:
    """The folder in a run folder that holds a Hugging Face tokenizer's files."""
    inner = folder / HUGGINGFACE_FOLDER
    return inner if any((inner / name).exists() for name in HUGGINGFACE_FILES) else None


def load_folder(path: str | Path) -> Tokenizer | TokenizerPair:
    """The tokenizer that a run folder holds, or its two. Raises InputError that names a missing file."""
    folder = Path(path)
    present = [name for name in SIDE_FILES if (folder / name).exists()]
    if _huggingface(folder) is not None and not present and not (folder / SHARED_FILE).exists():
        from jax_transformer.data import huggingface_tokenizer  # it builds on the classes above

        return huggingface_tokenizer.load_run(folder)
    if (folder / SHARED_FILE).exists():
        if present:
            raise errors.InputError(
                f"{folder}: holds {SHARED_FILE} and {present[0]}; both sides share a vocabulary or each has its own"
            )
        return Tokenizer.load(folder / SHARED_FILE)
    if not present:
        raise errors.InputError(
            f"{folder / SHARED_FILE}: cannot be read: No such file or directory"
        )
    return TokenizerPair(*(Tokenizer.load(folder / name) for name in SIDE_FILES))


def save_folder(tokenizer: Tokenizer | TokenizerPair, path: str | Path) -> None:
    """Write the file that :func:`load_folder` reads, or the two."""
    from jax_transformer.data import huggingface_tokenizer  # it builds on the classes above

    folder = Path(path)
    if isinstance(tokenizer, huggingface_tokenizer.HuggingFaceTokenizer):
        huggingface_tokenizer.save_run(tokenizer, folder)
        return
    if isinstance(tokenizer, Tokenizer):
        tokenizer.save(folder / SHARED_FILE)
        return
    for side, name in zip((tokenizer.source, tokenizer.target), SIDE_FILES, strict=True):
        side.save(folder / name)
