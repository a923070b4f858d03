"""The base of the Hugging Face families: everything that the shared code must know of one of them.

A family is one file of this folder. It describes its ``config.json``, the tensors of its files and
its defaults by an object of :class:`HuggingFaceFamily`, and its tokenizers by a
:class:`TokenizerRecipe` for each class of transformers. The code that reads and writes is shared:
:mod:`.huggingface_config`, :mod:`.huggingface_state`, ``data`` and ``torch_bridge``.
"""

import abc
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jax_transformer.architectures import base, registry
from jax_transformer.config import Mask, TransformerConfig
from jax_transformer.errors import ConfigError

BRANCHES = {"encoder": base.ENCODER_BLOCK, "decoder": base.DECODER_BLOCK}
# transformers does not mask the decoder's padding: in some families the start token is padding
MASKS: dict[str, dict[str, Any]] = {
    "encoder": {"self_mask": (Mask.SOURCE_PADDING,)},
    "decoder": {"self_mask": (Mask.CAUSAL,), "cross_mask": (Mask.SOURCE_PADDING,)},
}

# Tokenizers

Scored = list[tuple[str, float]]
"""Pieces of a SentencePiece model with their scores, in the order of their ids."""


@runtime_checkable
class Settings(Protocol):
    """The settings of one tokenizer, as a family's functions see them."""

    def number(self, name: str, default: int) -> int:
        """A setting that is a count."""
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


def _none(settings: Settings) -> Sequence[str]:
    return ()


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
    separate: bool = False
    """Each side has a vocabulary of its own."""
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
    own_tokens: Callable[[Settings], Sequence[str]] = _none
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

    @property
    def class_name(self) -> str:
        """The class in transformers."""
        return f"{self.name}Tokenizer"


# Families


@dataclass(frozen=True, kw_only=True, eq=False)
class HuggingFaceFamily(abc.ABC):
    """One family of transformers' encoder-decoders."""

    model_type: str
    """The value of ``model_type`` in ``config.json``, and the name of the architecture."""
    title: str
    """The published models, in words."""

    # config.json
    model_class: str
    """The class with an output layer: the entry of ``architectures`` that is written."""
    base_class: str
    """The class without one, whose files are read, too."""
    older_classes: tuple[str, ...] = ()
    """Names of the same classes in older versions of transformers."""
    defaults: Mapping[str, Any]
    """The attributes that are read, with the values that a file which does not name them means."""
    derived: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that are read if a file names them, and follow from others otherwise, with a value
    of each type.
    """
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second names of attributes."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that have one value in this family."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Attributes of this family that have no effect on what a model computes, with the reason."""

    # tensors
    prefix: str = ""
    """The beginning of the names of all tensors but those of the output."""
    embedding_tensors: tuple[str, ...]
    """The tensors of which one is in every file: an embedding of tokens."""
    output_tensor: str = "lm_head.weight"
    """The tensor of the output layer."""
    unused_tensors: Mapping[str, str] = field(default_factory=dict)
    """Tensors of old files that the model has no use for (without the prefix), with the reason."""
    output_tied_by_file: bool = False
    """transformers ties the output layer unless a file has another one, whatever
    ``tie_word_embeddings`` says.
    """
    embeddings_always_tied: bool = False
    """A file leaves copies of the embedding out even if the output layer is not one of them."""
    saves_computed_positions: bool = True
    """A file holds the sines and cosines that the module keeps; otherwise transformers computes
    them again.
    """

    # tokenizers and lengths
    tokenizers: tuple[TokenizerRecipe, ...]
    """The recipes of its tokenizers, the family's own one first."""
    unbounded_length: int | None = None
    """The ``max_length`` that stands for positions without an end, or None."""
    usual_length: int | None = None
    """The longest source and target, in tokens, if positions have no end and no length is given."""

    # the transformers module
    one_rate: tuple[str, ...] = ("embedding_dropout",)
    """The rates that its module has only as ``dropout``."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The entries of ``architectures`` whose weights make the model."""
        return (self.model_class, self.base_class, *self.older_classes)

    @abc.abstractmethod
    def to_transformer_config(self, values: Mapping[str, Any]) -> TransformerConfig:
        """Return the configuration of a model with these attributes, all of ``defaults`` among
        them.

        ``tie_word_embeddings`` says whether the output layer is the embedding. Raises ConfigError
        for values that no model has.
        """

    @abc.abstractmethod
    def to_attributes(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the attributes that are read, as they must be for ``config``."""

    def complete(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes with those that follow from others."""
        return dict(values)

    def output_embedding(self, values: Mapping[str, Any]) -> str:
        """Return the name of the tensor to which the output layer may be tied."""
        return self.embedding_tensors[0]

    def recipe(self, files: Collection[str]) -> TokenizerRecipe:
        """Return the recipe for a folder with these files that does not name its
        tokenizer's class.
        """
        return self.tokenizers[0]


def families() -> dict[str, HuggingFaceFamily]:
    """Return every registered family by its ``model_type``."""
    return {
        architecture.name: architecture.huggingface
        for architecture in registry.architectures()
        if architecture.huggingface is not None
    }


def family_or_none(config: TransformerConfig) -> HuggingFaceFamily | None:
    """Return the family of a configuration, or None if its architecture is not a Hugging Face
    family.
    """
    try:
        return registry.get(config.architecture).huggingface
    except ConfigError:  # an architecture that is passed as an object need not be registered
        return None


def family_of(config: TransformerConfig) -> HuggingFaceFamily:
    """Return the family of a configuration. Raises ConfigError if its architecture is none."""
    family = family_or_none(config)
    if family is None:
        raise ConfigError(
            f"architecture {config.architecture!r} is not a Hugging Face family: only models of"
            f" {', '.join(families())} can be exported"
        )
    return family


def tokenizer_recipes() -> dict[str, TokenizerRecipe]:
    """Return every recipe by the name of a class of transformers."""
    return {
        name: recipe
        for family in families().values()
        for recipe in family.tokenizers
        for name in (recipe.class_name, *recipe.other_classes)
    }


def published_codes() -> set[str]:
    """Return the short codes (``en``, ``ceb``) of all languages of the published models."""
    recipes = tokenizer_recipes().values()
    languages = [recipe.languages for recipe in recipes if recipe.languages is not None]
    codes = {code for one in languages for code in one.published}
    codes |= {code for one in languages for names in one.sets.values() for code in names}
    return {code for code in codes if len(code) <= 3}


def usual_length(config: TransformerConfig) -> int:
    """Return the longest source and target if none is given: as far as positions reach.

    If they have no end, the length that the family was trained with.
    """
    family = family_or_none(config)
    if family is None or family.usual_length is None:
        return config.longest
    return family.usual_length if config.max_length == family.unbounded_length else config.longest
