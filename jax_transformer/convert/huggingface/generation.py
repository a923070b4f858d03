"""Hugging Face's generation_config.json, and the generation keys that old config.json files carry, as :class:`Decoding`, and back."""

from collections.abc import Mapping
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding import Decoding


def from_generation_config(data: Mapping[str, Any], config: TransformerConfig, *, where: str = "generation_config.json") -> Decoding:
    """What transformers' ``generate`` does with this ``generation_config.json`` and no arguments."""
    raise NotImplementedError


def from_model_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in the place of a ``generation_config.json`` that is not there: the generation keys of this ``config.json``."""
    raise NotImplementedError


def to_generation_config(how: Decoding, config: TransformerConfig) -> dict[str, Any]:
    """The ``generation_config.json`` with which transformers decodes as ``how`` says."""
    raise NotImplementedError
