"""The base of the Hugging Face families: everything that the shared code must know of one of them.

A family is one file of this folder. It describes its ``config.json``, the tensors of its files, its
tokenizers and its defaults by an object of :class:`HuggingFaceFamily`; the code that reads and
writes (:mod:`.huggingface_config`, :mod:`.huggingface_state`, ``data``, ``transformers_bridge``) is
shared.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax_transformer.architectures import registry
from jax_transformer.architectures.tokenizer_recipe import TokenizerRecipe
from jax_transformer.config import (
    Activation,
    Branch,
    Mask,
    Part,
    TransformerConfig,
)
from jax_transformer.errors import ConfigError

BRANCHES = {
    "encoder": (Branch((Part.SELF,)), Branch((Part.FFN,))),
    "decoder": (Branch((Part.SELF,)), Branch((Part.CROSS,)), Branch((Part.FFN,))),
}
# transformers does not mask the decoder's padding: in some families the start token is padding
MASKS: dict[str, dict[str, Any]] = {
    "encoder": {"self_mask": (Mask.SOURCE_PADDING,)},
    "decoder": {"self_mask": (Mask.CAUSAL,), "cross_mask": (Mask.SOURCE_PADDING,)},
}
_ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "swish": Activation.SILU,
    "silu": Activation.SILU,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class HuggingFaceFamily:
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

    def to_transformer_config(self, values: Mapping[str, Any]) -> TransformerConfig:
        """Return the configuration of a model with these attributes, all of ``defaults`` among
        them.

        ``tie_word_embeddings`` says whether the output layer is the embedding. Raises ConfigError
        for values that no model has.
        """
        raise NotImplementedError

    def to_attributes(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the attributes that are read, as they must be for ``config``."""
        raise NotImplementedError

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


def without_dropout(config: TransformerConfig) -> TransformerConfig:
    """Return the same model with every rate 0."""
    encoder, decoder = (
        replace(
            stack,
            attention_dropout=None,
            branches=tuple(replace(branch, dropout=None) for branch in stack.branches),
        )
        for stack in (config.encoder, config.decoder)
    )
    return replace(
        config,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        embedding_dropout=0.0,
        encoder=encoder,
        decoder=decoder,
    )


def special_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the special tokens.

    Decoding begins with ``bos_token_id`` if ``decoder_start_token_id`` is null, as in transformers'
    generate(). Raises ConfigError that names every token which is missing.
    """
    ids = {
        name: values[name] for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")
    }
    if ids["decoder_start_token_id"] is None:
        ids["decoder_start_token_id"] = values["bos_token_id"]
    missing = [name for name, value in ids.items() if value is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be given: the model's batches are made with it"
        )
    pad, end, start = ids.values()
    return {"source_pad_id": pad, "target_pad_id": pad, "bos_id": start, "eos_id": end}


def activation_named(name: str) -> Activation:
    """Return the activation of that name. Raises ConfigError for an unknown one."""
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def activation_name(value: Activation) -> str:
    """Return the first name that transformers has for an activation."""
    return next(name for name, other in _ACTIVATIONS.items() if other is value)
