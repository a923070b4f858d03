"""One file per architecture, and the registry that knows them all."""

from jax_transformer.architectures.base import Architecture, Preset
from jax_transformer.architectures.registry import get, names, preset, preset_names, register

__all__ = ["Architecture", "Preset", "get", "names", "preset", "preset_names", "register"]
