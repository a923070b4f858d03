"""The vocabularies of Hugging Face folders, and those that ``tokenizers`` encodes with.

They come from a ``tokenizer.json`` or from the two files of byte-level BPE. What is built is as
transformers 5.23 builds it (``tokenization_*.py`` of the families), so that ids are the same.
"""

import copy
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, SupportsInt

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jax_transformer.data.tokenizer import Tokenizer, guarded, text_of
from jax_transformer.data.tokenizer_settings import TokenizerSettings
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import untrusted
from jax_transformer.storage.untrusted import shown


class LineEnds(NamedTuple):
    """The ids before and after a line."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


class Vocabulary(Tokenizer):
    """A vocabulary of a Hugging Face folder; with ids around a line, the tokenizer of a side.

    The text of a special token becomes that token, as in transformers. Normalization may shrink any
    text, so nothing is known of a line before it is encoded.
    """

    _longest_token = None
    _ids: dict[str, int]
    _line_ends: LineEnds | ConfigError
    _hash: str

    def with_ends(
        self,
        line_ends: LineEnds | ConfigError,
        *,
        pad_id: int,
        bos_id: int,
        eos_id: int,
        digest: str,
    ) -> "Vocabulary":
        """Return the tokenizer of a side. ``digest`` is a hash of the files.

        ``line_ends`` may be the error to raise once they are needed: a language must be given
        first.
        """
        side = copy.copy(self)
        side._line_ends, side.pad_id, side.bos_id, side.eos_id = line_ends, pad_id, bos_id, eos_id
        # Hashes are recorded in run folders: version 0.1 hashed a plain tuple
        hashed = repr(tuple(line_ends) if isinstance(line_ends, LineEnds) else line_ends)
        side._hash = hashlib.sha256((digest + hashed).encode()).hexdigest()
        return side

    def _known_line_ends(self) -> LineEnds:
        if isinstance(self._line_ends, ConfigError):
            raise self._line_ends
        return self._line_ends

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids before a line; raises ConfigError if a language must be given first."""
        return self._known_line_ends().prefix

    @property
    def suffix(self) -> tuple[int, ...]:
        """The ids after a line; raises ConfigError if a language must be given first."""
        return self._known_line_ends().suffix

    @property
    def hash(self) -> str:
        """SHA-256 of the files that decide ids, and of the ids around a line."""
        return self._hash

    def save(self, path: str | Path) -> None:
        """Raise ConfigError: the files belong to both sides."""
        raise ConfigError(
            f"{path}: the files of a Hugging Face tokenizer belong to both sides; use"
            " HuggingFaceTokenizer.save"
        )

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        return self._ids.get(token)

    def names(self) -> list[str]:
        """List the tokens that may be languages, by their text."""
        return list(self._ids)


class FastVocabulary(Vocabulary):
    """A vocabulary of a model of ``tokenizers``."""

    def __init__(
        self, path: Path, model: tokenizers.Tokenizer, settings: TokenizerSettings
    ) -> None:
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = settings.flag("split_special_tokens")
        self._path, self._model, self._left_out = path, model, settings.recipe.left_out
        with guarded(path):
            _add_tokens(model, settings)
            self._ids = model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values(), default=-1) + 1
        self._cleans_up = settings.flag("clean_up_tokenization_spaces") and self.bpe is None

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Return the text of ids, without special tokens."""
        text = super().decode(ids)
        if self._left_out is not None:
            text = re.sub(self._left_out, "", text)
        return cleaned_up(text) if self._cleans_up else text

    def names(self) -> list[str]:
        """List the tokens that are never cut, in the order of their ids."""
        added = self._model.get_added_tokens_decoder()
        return [token.content for _, token in sorted(added.items())]


def _add_tokens(model: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Mark the special tokens of the model, and add unknown ones with the ids that the folder
    names.
    """
    model.add_tokens([token for _, token in sorted(settings.added_tokens.items())])
    known = model.get_vocab(with_added_tokens=True)
    for index, token in settings.added_tokens.items():
        if known.get(token.content) != index:
            outcome = "cannot be added"
            if token.content in known:
                outcome = f"becomes {known[token.content]}"
            raise InputError(
                f"the added token {shown(token.content)} has the id {index}, and {outcome}"
            )
    present = {token.content for token in model.get_added_tokens_decoder().values()}
    special = [*settings.special_tokens.values(), *settings.extra_tokens]
    last = settings.special_tokens.get(settings.recipe.added_last or "")
    special.sort(key=lambda token: token is last)
    model.add_special_tokens([token for token in special if token.content not in present])


def from_json(path: Path, content: bytes, settings: TokenizerSettings) -> FastVocabulary:
    """Return the vocabulary of a ``tokenizer.json``, with its normalization and its words."""
    text = text_of(path, content, "not a tokenizer file: ")
    with guarded(path):
        model = tokenizers.Tokenizer.from_str(text)
    return FastVocabulary(path, model, settings)


def from_merges(
    path: Path, vocabulary: bytes, merges: bytes, settings: TokenizerSettings
) -> FastVocabulary:
    """Return the byte-level BPE of ``vocab.json`` (``path``) and ``merges.txt``."""
    ids = read_ids(path, vocabulary)
    merges_path = path.with_name("merges.txt")
    pairs = read_merges(merges_path, merges)
    with guarded(merges_path):
        model = tokenizers.Tokenizer(
            models.BPE(
                ids, pairs, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
            )
        )
    prefix_space = settings.flag("add_prefix_space", settings.recipe.prefix_space)
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    model.decoder = decoders.ByteLevel()
    return FastVocabulary(path, model, settings)


def read_ids(path: Path, content: bytes) -> dict[str, int]:
    """Return the tokens and ids of a ``vocab.json``. Raises InputError if it is not a
    vocabulary.
    """
    data = untrusted.parse_json(path, content)
    if not isinstance(data, dict) or not all(
        type(index) is int and 0 <= index < 2**31 for index in data.values()
    ):
        raise InputError(f"{path}: not a vocabulary: no object of ids")
    return data


def read_merges(path: Path, content: bytes, *, counted: bool = False) -> list[tuple[str, str]]:
    """Return the merges of a ``merges.txt``, in their order.

    ``counted`` lines may have a count after the two tokens. Raises InputError if a line is not two
    tokens.
    """
    pairs = []
    for number, line in enumerate(text_of(path, content).split("\n"), 1):
        tokens = line.split(" ")
        if line.startswith("#version") or not line.strip():
            continue
        if len(tokens) != 2 and not (counted and len(tokens) == 3):
            raise InputError(f"{path}: line {number} is {shown(line)}, not two tokens")
        pairs.append((tokens[0], tokens[1].rstrip("\r")))
    return pairs


# The replacements of transformers' ``clean_up_tokenization``, in its order
_CLEANED = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")] + [
    (f" {end}", end) for end in "n't 'm 's 've 're".split()
]


def cleaned_up(text: str) -> str:
    """Return text without spaces before punctuation, as ``clean_up_tokenization`` does."""
    for pattern, replacement in _CLEANED:
        text = text.replace(pattern, replacement)
    return text
