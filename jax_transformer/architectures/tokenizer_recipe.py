"""The facts that describe the tokenizer of a Hugging Face family; ``data`` reads and computes."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

Scored = list[tuple[str, float]]
"""Pieces of a SentencePiece model with their scores, in the order of their ids."""


@runtime_checkable
class Settings(Protocol):
    """The settings of one tokenizer, as a family's functions see them."""

    def number(self, name: str, default: int) -> int:
        """Return a setting that is a count."""
        ...

    @property
    def lists_tokens(self) -> bool:
        """True if the folder lists extra special tokens, or ids of added tokens."""
        ...


class Algorithm(enum.Enum):
    """The algorithm that cuts a line into subwords."""

    BYTE_BPE = "byte-level BPE"  # Radford et al. 2019: vocab.json and merges.txt
    REBUILT_PIECES = "a SentencePiece model that tokenizers rebuilds"  # Kudo and Richardson 2018
    PIECES = "a SentencePiece model, with ids in vocab.json"  # the library itself cuts
    ARRANGED_PIECES = "a SentencePiece model, with the family's ids"  # the library itself cuts
    MOSES_BPE = "byte-pair encoding of Moses' tokens"  # Koehn et al. 2007, Sennrich et al. 2016
    WORD_BPE = "byte-pair encoding of lower-cased words"  # Sennrich et al. 2016, Miller et al. 2017


class LanguagePlace(enum.Enum):
    """The place of a language's token in a line's ids."""

    FIRST = "lang X </s>"
    LAST = "X </s> lang"
    TARGET_BEFORE_SOURCE = "the target's language before a source"


class TargetStart(enum.Enum):
    """The way in which a translation is told its language."""

    DECODER_START = "the decoder starts with it"
    FORCED = "it is forced as the first token after the decoder's start"
    SOURCE = "the source says it"


@dataclass(frozen=True, kw_only=True)
class Languages:
    """The languages of a multilingual tokenizer."""

    token: str
    """A language as a token, such as ``__{}__``."""
    pattern: str
    """A regular expression of such tokens; its group is the language's code."""
    place: LanguagePlace
    last_if: str | None = None
    """The setting of ``tokenizer_config.json`` that puts the language last if it is true."""
    target_start: TargetStart
    published: Sequence[str] = ()
    """The codes of the published models, in the order of their ids."""
    sets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sets of codes that follow the vocabulary, by the setting ``language_codes``; the first is the
    default.
    """
    default_source: str | None = None
    """The source language if none is given."""
    default_sources: Mapping[str, str] = field(default_factory=dict)
    """The same for folders whose ``language_codes`` names one of these sets."""


@dataclass(frozen=True, kw_only=True)
class RebuiltPieces:
    """The vocabulary that transformers makes of a SentencePiece model.

    Of ``Algorithm.ARRANGED_PIECES`` it has only the order.
    """

    arrange: Callable[[Scored, Mapping[str, str], Sequence[str]], Scored]
    """Returns the pieces in the order of the model's ids.

    Its arguments are the file's pieces, the text of each special token by its role (``pad_token``),
    and the recipe's ``own_tokens``.
    """
    bpe: bool = False
    """True if pieces are merged, False for a unigram model."""
    unknown_id: int | None = None
    """The id of the unknown token; None looks it up."""
    normalizes: bool = True
    """Apply the file's own map of characters."""
    replaces: tuple[tuple[str, str], ...] = ()
    """Regular expressions and their replacements, applied after the map of characters."""
    replaces_without_map: tuple[tuple[str, str], ...] = ()
    """Replacements for a file that has no such map."""
    splits_words: bool = False
    """Split at white space before pieces are looked for."""


FIRST = ("bos_token", "pad_token", "eos_token", "unk_token")
"""The roles of the tokens with which fairseq's vocabularies begin."""


def arranged(first: Sequence[str], scored: Scored, last: Sequence[str] = ()) -> Scored:
    """Return a file's pieces between special tokens, whose scores are 0."""
    return [*((text, 0.0) for text in first), *scored, *((text, 0.0) for text in last)]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizerRecipe:
    """The facts about the tokenizers of one class."""

    name: str
    """The class in transformers without its last word: ``Marian`` for ``MarianTokenizer``."""
    other_classes: tuple[str, ...] = ()
    """Other classes whose folders are read in the same way."""
    algorithm: Algorithm
    files: tuple[str, ...]
    """The files of a folder's own vocabulary."""
    reads_own_files_first: bool = False
    """Read these files even if there is a ``tokenizer.json``, as transformers does."""
    pieces: RebuiltPieces | None = None
    """The vocabulary, for ``Algorithm.REBUILT_PIECES`` and ``ARRANGED_PIECES``."""
    cleans_up: bool = False
    """Decoded text has no spaces before punctuation, unless ``clean_up_tokenization_spaces`` says
    otherwise.
    """
    prefix_space: bool = False
    """Byte-level BPE begins every line with a space, unless ``add_prefix_space`` says otherwise."""
    code_brackets: tuple[str, str] | None = None
    """A text that begins with the first of these is one token as far as the second."""
    left_out: str | None = None
    """A regular expression of what decoded text does not have."""
    underlines_are_spaces: bool = False
    """Decoded text has a space for each of SentencePiece's underlines that is left."""
    tokens: Mapping[str, str]
    """The special tokens by role, if the folder does not name them."""
    token_flags: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """Flags of a special token that the folder names by its text only, by role."""
    own_tokens: Callable[[Settings], Sequence[str]] = lambda settings: ()
    """Returns special tokens that are not in the SentencePiece model."""
    added_last: str | None = None
    """The role of the token that is added after all others."""
    before: tuple[str, ...] = ()
    """Roles of the tokens before a line."""
    before_without_role: tuple[str, ...] = ()
    """Tokens before a line that have no role, by their text."""
    after: tuple[str, ...] = ("eos_token",)
    """Roles of the tokens after a line."""
    after_target: tuple[str, ...] | None = None
    """Roles of the tokens after a target, if they are others."""
    padding_is_unused: bool = False
    """Nothing is padded with the model's ``pad_token_id``, which may be another token than the
    tokenizer's.
    """
    start: str = "eos_token"
    """The role of the decoder's first token, if ``config.json`` does not name it."""
    languages: Languages | None = None

    class_name: str = field(init=False)
    """The class in transformers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_name", f"{self.name}Tokenizer")
