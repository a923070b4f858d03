"""Byte-level BPE, by Hugging Face ``tokenizers``: any text becomes ids and comes back unchanged."""

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, SupportsInt

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jax_transformer import errors
from jax_transformer.storage import atomic

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SENTINEL = "<extra_id_{}>"
"""Text of T5's sentinels, which stand for replaced spans."""
MASK = "<mask>"
"""Text of BART's mask, which stands for a replaced span."""
SENTINELS = 100
"""Number of sentinels of T5, and of a tokenizer that is trained for span corruption."""
BYTES = 256
# Bounds for a line without spaces: the trainer's time grows with line length x merges, and a run of
# one character would otherwise be learned as tokens of thousands of bytes.
TRAINING_CHARACTERS_PER_LINE = 10_000
LONGEST_TOKEN = 64
# No merge crosses these: a target-language tag such as <2de> (Johnson et al. 2017), one digit, and
# GPT-2's words, punctuation and spaces.
PIECES = r"<2[A-Za-z_]+>|\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class SpecialTokens(NamedTuple):
    """The ids before and after a line."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.prefix) + len(self.suffix)


class Tokenizer:
    """Text to ids and back.

    Special tokens are added where batches are built; in text, ``<eos>`` is five characters.
    ``path`` is the file of the model, for messages.
    """

    def __init__(self, model: tokenizers.Tokenizer, path: str | Path = "tokenizer") -> None:
        vocabulary = model.get_vocab(with_added_tokens=True)
        if PAD not in vocabulary or EOS not in vocabulary:
            missing = [text for text in (PAD, EOS) if text not in vocabulary]
            raise errors.InputError(f"the tokenizer has no token {', '.join(missing)}")
        # Not part of the saved file: without it, "<eos>" in a line would become the end-of-sentence
        # id
        model.encode_special_tokens = True
        # A file made elsewhere may ask for these; lengths are decided where batches are built
        model.no_truncation()
        model.no_padding()
        self._model, self._path = model, path
        self.pad_id, self.eos_id = vocabulary[PAD], vocabulary[EOS]
        # Without a token of its own for that, a target begins with padding, as in Marian and T5
        self.bos_id = vocabulary.get(BOS, self.pad_id)
        self.vocab_size = max(vocabulary.values()) + 1
        # A file with a post-processor says what ends a line
        ends = model.post_processor is None
        self._suffix = (self.eos_id,) if ends else tuple(model.encode("").ids)
        # In byte-level BPE each character of a token is one byte of text; a normalizer may shrink
        # text first
        lossless = model.normalizer is None and isinstance(model.decoder, decoders.ByteLevel)
        self._longest_token = max(map(len, vocabulary)) if lossless else None

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        vocab_size: int,
        *,
        pad_id: int,
        bos_id: int,
        eos_id: int,
        sentinels: int = 0,
        mask: bool = False,
    ) -> "Tokenizer":
        """Learn merges from ``lines``, digits apart and language tags whole.

        Ids below the largest special that no special takes become ``<unused0>`` and so on. If
        ``bos_id`` is ``pad_id``, there is no token for it. If ``pad_id`` is the last id, it is
        added after what was learned, which may be less than ``vocab_size``. ``sentinels`` are the
        last ids, in descending order as in T5, and a ``mask`` is the last one.
        """
        vocab_size -= sentinels + mask
        specials = {bos_id: BOS, pad_id: PAD, eos_id: EOS}
        if eos_id in (pad_id, bos_id) or min(specials) < 0:
            raise errors.ConfigError(
                f"pad_id={pad_id}, bos_id={bos_id} and eos_id={eos_id} must be distinct, unless"
                " targets begin with padding, and not negative"
            )
        pad_is_last = pad_id == vocab_size - 1
        if pad_is_last:
            del specials[pad_id]
            vocab_size -= 1
        least = max(specials) + 1 + BYTES
        if vocab_size < least:
            raise errors.ConfigError(
                f"vocab_size={vocab_size} is too small: the {BYTES} bytes and the special ids up to"
                f" {max(specials)} need at least {least}"
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
        if pad_is_last:
            model.add_special_tokens([PAD])
        model.add_special_tokens([SENTINEL.format(i) for i in reversed(range(sentinels))])
        model.add_special_tokens([MASK] * mask)
        return cls(model)

    def encode(self, line: str) -> list[int]:
        """Return the ids of a line, without special tokens."""
        with guarded(self._path):
            return self._model.encode(line, add_special_tokens=False).ids

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return :meth:`encode` of each line, on all cores."""
        with guarded(self._path):
            encodings = self._model.encode_batch_fast(list(lines), add_special_tokens=False)
        return list(map(attrgetter("ids"), encodings))

    def fewest_tokens(self, line: str) -> int:
        """Return a lower bound of the number of tokens, without encoding.

        Encoding a line of 10 MB takes seconds and gigabytes, only to be thrown away.
        """
        return 0 if self._longest_token is None else -(-len(line) // self._longest_token)

    def beginning(self, line: str, tokens: int) -> str:
        """Return a beginning of the line that has at least that many tokens, without encoding.

        All of the line if that cannot be known.
        """
        return line if self._longest_token is None else line[: tokens * self._longest_token]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text of ids; special tokens are dropped.

        Ids that end within a character give U+FFFD.
        """
        with guarded(self._path):
            return self._model.decode(list(map(int, ids)), skip_special_tokens=True)

    def tokens(self) -> dict[int, str]:
        """Return the text of every token by its id, as the vocabulary spells it."""
        return {index: text for text, index in self._model.get_vocab().items()}

    @property
    def sentinels(self) -> tuple[int, ...]:
        """The ids of the sentinels, the first one first."""
        ids = {text: index for index, text in self.tokens().items()}
        present = itertools.takewhile(ids.__contains__, map(SENTINEL.format, itertools.count()))
        return tuple(map(ids.__getitem__, present))

    @property
    def bpe(self) -> tokenizers.Tokenizer | None:
        """The tokenizer of the library, if its model is byte-pair encoding."""
        return self._model if isinstance(self._model.model, models.BPE) else None

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids before a line in a batch: none."""
        return ()

    @property
    def suffix(self) -> tuple[int, ...]:
        """The ids after a line in a batch: the end, unless the file says otherwise."""
        return self._suffix

    @property
    def source(self) -> "Tokenizer":
        """This tokenizer: one vocabulary for both sides."""
        return self

    target = source

    @property
    def hash(self) -> str:
        """SHA-256 of the JSON, and so of the saved file."""
        return hashlib.sha256(self._model.to_str().encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a ``tokenizer.json``, complete or not at all."""
        atomic.write_text(path, self._model.to_str())

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a ``tokenizer.json``; special tokens are recognized by their text."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise errors.InputError(f"{path}: cannot be read: {error.strerror or error}") from error
        text = text_of(path, content, "not a tokenizer file: ")
        with guarded(path):
            return cls(tokenizers.Tokenizer.from_str(text), path)


def text_of(path: str | Path, content: bytes, problem: str = "") -> str:
    """Return the text of a file's content. Raises InputError if it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise errors.InputError(f"{path}: {problem}not valid UTF-8") from error


@contextlib.contextmanager
def guarded(path: str | Path) -> Iterator[None]:
    """Raise InputError in one line that names the file for whatever the library raises over it.

    That is a bare Exception, sometimes with a message of several lines, or a panic of its Rust
    code, which is not an Exception.
    """
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
    """A vocabulary for each side instead of a shared one: it reads sources and writes targets.

    So ids, prefix and suffix are the source's, and :meth:`decode` returns the text of a target.
    """

    source: Tokenizer
    target: Tokenizer

    @property
    def pad_id(self) -> int:
        return self.source.pad_id

    @property
    def eos_id(self) -> int:
        return self.source.eos_id

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.source.prefix

    @property
    def suffix(self) -> tuple[int, ...]:
        return self.source.suffix

    def encode(self, line: str) -> list[int]:
        return self.source.encode(line)

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        return self.source.encode_batch(lines)

    def fewest_tokens(self, line: str) -> int:
        return self.source.fewest_tokens(line)

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        return self.target.decode(ids)

    @property
    def hash(self) -> str:
        """SHA-256 of both hashes, source first."""
        return hashlib.sha256((self.source.hash + self.target.hash).encode()).hexdigest()
