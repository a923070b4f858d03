"""The description of one architecture: source, presets, names of weights, and PyTorch twin.

A twin is the PyTorch module that computes what the Flax model of the same configuration computes.
Nothing here imports torch: a twin is named by a string, or returned by a function that imports it.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError, nearest
from jax_transformer.weights.rules import Table

if TYPE_CHECKING:
    from jax_transformer.architectures.huggingface import HuggingFaceFamily

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a twin's class."""


@dataclass(frozen=True)
class Preset:
    """A named configuration and where it is published."""

    config: TransformerConfig
    source: str
    multiples: Mapping[str, int] = field(default_factory=dict)
    """Sizes that the source gives as a multiple of ``d_model``, such as ``{"d_ff": 4}``."""

    def with_sizes(self, **sizes: Any) -> TransformerConfig:
        """Return the configuration with fields changed as by ``TransformerConfig.with_sizes``.

        A size that is not given keeps the number of the source, or its multiple of ``d_model``.
        """
        d_model = sizes.get("d_model", self.config.d_model)
        derived = (
            {size: multiple * d_model for size, multiple in self.multiples.items()}
            if isinstance(d_model, Integral)
            else {}
        )
        return self.config.with_sizes(**(derived | sizes))


@dataclass(frozen=True, eq=False)
class Architecture:
    """Everything that is known of one architecture."""

    name: str
    """The value of ``TransformerConfig.architecture``."""
    source: str
    """Author, title and date of the publication, or a sentence if there is none."""
    weight_table: Callable[[TransformerConfig], Table]
    """Returns the rules that join the PyTorch state_dict of a configuration to the Flax arrays."""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    reference: str | Callable[[], type] | None = None
    """The twin's class as ``"package.module:Class"``, or a function that imports and returns it."""
    reference_arguments: Callable[[TransformerConfig], Arguments] | None = None
    """Returns the arguments that give the twin a configuration.

    Raises ConfigError that names every field which the twin cannot be set to.
    """
    huggingface: "HuggingFaceFamily | None" = None
    """The family of Hugging Face transformers that this architecture is, or None."""


def reference_class(architecture: Architecture) -> type:
    """Import and return the class of the PyTorch twin.

    Raises:
        ConfigError: the architecture has no twin, or its module or class cannot be imported.
    """
    reference = architecture.reference
    if reference is None:
        raise ConfigError(
            f"architecture {architecture.name!r} has no PyTorch twin: set its field `reference`"
        )
    if not isinstance(reference, str):
        return reference()
    module_name, _, class_name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # in a user's file
        raise ConfigError(
            f"architecture {architecture.name!r}: cannot import its twin {reference}:"
            f" {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, class_name)
    except AttributeError:
        close = nearest(class_name, dir(module))
        raise ConfigError(
            f"architecture {architecture.name!r}: {module_name} has no class {class_name!r}{close}"
        ) from None
