"""The base of the Hugging Face families: everything that the shared code must know of one of them.

A family is one file of this folder: a class that overrides what differs from :class:`.bart`'s
family, from :class:`.t5`'s, or from :class:`HuggingFaceFamily`, and a :class:`.TokenizerRecipe` for
each of its tokenizers. The code that reads and writes is shared: :mod:`.huggingface_config`,
:mod:`.huggingface_state`, and ``data``.
"""

import abc
import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from jax_transformer.architectures import base, registry
from jax_transformer.architectures.base import Architecture, Preset
from jax_transformer.architectures.tokenizer_recipe import TokenizerRecipe
from jax_transformer.config import Mask, StackConfig, TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.weights.rules import Table

STACKS = ("encoder", "decoder")
AreEqual = Callable[[str, str], bool]
"""Returns True if two tensors of a file, given by name, are equal."""


def stack(name: str, layers: int, **fields: Any) -> StackConfig:
    """Return the paper's encoder or decoder, with other fields of ``StackConfig`` as given.

    transformers does not mask the decoder's padding: in some families the start token is padding.
    """
    if name == "encoder":
        return base.encoder(layers, **fields)
    return base.decoder(layers, **{"self_mask": (Mask.CAUSAL,), **fields})


def special_tokens(
    *, pad: int | None, bos: int | None, eos: int | None, start: int | None
) -> dict[str, int | None]:
    """Return the attributes of the special tokens' ids."""
    ids = {"pad_token_id": pad, "bos_token_id": bos, "eos_token_id": eos}
    return ids | {"decoder_start_token_id": start}


class HuggingFaceFamily(Architecture, abc.ABC):
    """One family of transformers' encoder-decoders.

    ``name`` is the value of ``model_type`` in ``config.json``. The arguments of an instance
    describe its preset, see :meth:`preset`; without any it has none.
    """

    title: str
    """The published models, in words."""
    model_class: str
    """The class with an output layer: the entry of ``architectures`` that is written."""

    # config.json
    defaults: Mapping[str, Any]
    """The attributes that are read, with the values that a file which does not name them means."""
    derived: Mapping[str, Any] = {}
    """Attributes that are read if a file names them, and follow from others otherwise, with a value
    of each type.
    """
    aliases: Mapping[str, str] = {}
    """Second names of attributes."""
    fixed: Mapping[str, Any] = {}
    """Attributes that have one value in this family."""
    ignored: Mapping[str, str] = {}
    """Attributes of this family that have no effect on what a model computes, with the reason."""
    not_written: tuple[str, ...] = tuple(
        """dropout attention_dropout activation_dropout embedding_dropout dropout_masks init
        padding_frozen compute_dtype""".split()
    )
    """Fields without an attribute: they act only in training, or are the precision of numbers."""

    # tensors
    prefix: str = ""
    """The beginning of the names of all tensors but those of the output."""
    embedding_tensors: tuple[str, ...]
    """The tensors of which one is in every file: an embedding of tokens."""
    output_tensor: str = "lm_head.weight"
    """The tensor of the output layer."""
    unused_tensors: Mapping[str, str] = {}
    """Tensors of old files that the model has no use for (without the prefix), with the reason."""

    tensors_decide_tie: bool = False
    """A file's tensors say if the output layer is tied, whatever ``tie_word_embeddings`` says."""
    ties_always: bool = False
    """The embeddings are tied even if the output layer is not."""
    saves_positions: bool = True
    """A file holds the module's sinusoids; otherwise transformers computes them."""
    shared_rates: tuple[str, ...] = ("embedding_dropout",)
    """The rates that transformers' module has only as ``dropout``."""
    tokenizers: tuple[TokenizerRecipe, ...]
    """The recipes of its tokenizers, the family's own one first."""
    presets: Mapping[str, Preset] = {}
    reference = "torch_reference.huggingface:twin"

    def __init__(self, source: str = "", **attributes: Any) -> None:
        # The base is a frozen dataclass, whose fields are attributes of the subclass here
        if source:
            object.__setattr__(self, "presets", {self.name: self.preset(source, **attributes)})

    @abc.abstractmethod
    def weight_table(self, config: TransformerConfig) -> Table:
        """Return the rules for every name of the module's ``state_dict()``, tied copies too."""

    @abc.abstractmethod
    def to_transformer_config(self, values: Mapping[str, Any]) -> TransformerConfig:
        """Return the configuration of a model with these attributes, which hold all ``defaults``.

        ``tie_word_embeddings`` says whether the output layer is the embedding. Raises ConfigError
        for values that no model has.
        """

    @abc.abstractmethod
    def to_attributes(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the attributes that are read, as they must be for ``config``."""

    @property
    def base_class(self) -> str:
        """The class without an output layer, whose files are read as well."""
        return self.model_class.removesuffix("ForConditionalGeneration") + "Model"

    @property
    def classes(self) -> tuple[str, ...]:
        """The entries of ``architectures`` whose weights make the model."""
        return (self.model_class, self.base_class)

    def complete(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes with those that follow from others."""
        return dict(values)

    def output_embedding(self, values: Mapping[str, Any]) -> str:
        """Return the name of the tensor to which the output layer may be tied."""
        return self.embedding_tensors[0]

    def recipe(self, files: Collection[str]) -> TokenizerRecipe:
        """Return the recipe for a folder with these files that names no tokenizer class."""
        return self.tokenizers[0]

    def preset(
        self,
        source: str,
        last_ids: tuple[str, ...] = (),
        padding_frozen: bool = False,
        **attributes: Any,
    ) -> Preset:
        """Return a preset for training from scratch: the family's model with these attributes.

        Both stacks take their heads and inner widths from the model, so that one number changes
        both. ``source`` and ``last_ids`` are fields of :class:`.base.Preset`, and
        ``padding_frozen`` is the configuration's field, for which transformers has no attribute.
        """
        config = self.to_transformer_config(self.complete({**self.defaults, **attributes}))
        encoder, decoder = (
            replace(stack, num_heads=None, d_ff=None) for stack in (config.encoder, config.decoder)
        )
        config = replace(
            config, head_dim=None, encoder=encoder, decoder=decoder, padding_frozen=padding_frozen
        )
        return Preset(config, source, last_ids=last_ids)


def families() -> dict[str, HuggingFaceFamily]:
    """Return every registered family by its ``model_type``."""
    known = registry.architectures()
    return {each.name: each for each in known if isinstance(each, HuggingFaceFamily)}


def find_family(model_type: object) -> HuggingFaceFamily | None:
    """Return the family of that ``model_type``, or None; no other family is imported."""
    with contextlib.suppress(ConfigError):  # an installed package that cannot be loaded
        known = registry.find(model_type) if isinstance(model_type, str) else None
        if isinstance(known, HuggingFaceFamily):
            return known
    return None


def family_of(config: TransformerConfig) -> HuggingFaceFamily:
    """Return the family of a configuration. Raises ConfigError if its architecture is not one."""
    family = find_family(config.architecture)
    if family is None:
        raise ConfigError(
            f"architecture {config.architecture!r} is not a Hugging Face family: only models of"
            f" {', '.join(families())} can be exported"
        )
    return family


def tokenizer_recipes() -> dict[str, TokenizerRecipe]:
    """Return every recipe by the name of a class of transformers."""
    recipes: dict[str, TokenizerRecipe] = {}
    for family in families().values():
        for recipe in family.tokenizers:
            recipes |= dict.fromkeys((recipe.class_name, *recipe.other_classes), recipe)
    return recipes


def find_recipe(class_name: str, family: HuggingFaceFamily | None = None) -> TokenizerRecipe | None:
    """Return the recipe of a class of transformers, or None; ``family`` is asked first,
    and the other families are imported only if it has none.
    """
    name = class_name.removesuffix("Fast")
    for recipe in family.tokenizers if family is not None else ():
        if name in (recipe.class_name, *recipe.other_classes):
            return recipe
    return tokenizer_recipes().get(name)


def published_codes() -> set[str]:
    """Return the codes (``en``, ``ceb``) of all languages of these families' published models."""
    codes: set[str] = set()
    for family in registry.built_in().values():
        for recipe in family.tokenizers if isinstance(family, HuggingFaceFamily) else ():
            if recipe.languages is not None:
                codes.update(recipe.languages.published, *recipe.languages.sets.values())
    return {code for code in codes if len(code) <= 3}
