"""One file per architecture, and the registry that knows them all."""

from jax_transformer.architectures.base import Architecture, Preset
from jax_transformer.architectures.registry import names, preset, preset_names, register, resolve

__all__ = ["Architecture", "Preset", "names", "preset", "preset_names", "register", "resolve"]
