"""The JAX home of encoder-decoder Transformers, and a bridge between them and PyTorch.

Importing this package loads neither jax nor torch: every name below is looked up on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOMES = {
    "Architecture": "architectures.base",
    "Preset": "architectures.base",
    "register": "architectures.registry",
    "preset": "architectures.registry",
    "preset_names": "architectures.registry",
    "TransformerConfig": "config",
    "Transformer": "transformer",
    "Transcriber": "extras.speech.transcription",
    "Translator": "inference.translation",
    "load": "formats.registry",
}
_MODULES = """architectures config convert data errors formats generate nn parity storage training
    transformer weights""".split()

__all__ = ["Architecture", "Preset", "Transcriber", "Transformer", "TransformerConfig"]
__all__ += ["Translator", "convert", "generate", "load", "parity", "preset", "preset_names"]
__all__ += ["register", "weights"]

if TYPE_CHECKING:
    from jax_transformer import convert, generate, parity, weights
    from jax_transformer.architectures.base import Architecture, Preset
    from jax_transformer.architectures.registry import preset, preset_names, register
    from jax_transformer.config import TransformerConfig
    from jax_transformer.extras.speech.transcription import Transcriber
    from jax_transformer.formats.registry import load
    from jax_transformer.inference.translation import Translator
    from jax_transformer.transformer import Transformer


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"jax_transformer.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"jax_transformer.{name}")
    raise AttributeError(f"module 'jax_transformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
