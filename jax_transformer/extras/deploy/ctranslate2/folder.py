"""CTranslate2's model folder: ``model.bin``, ``config.json``, and a vocabulary or two."""

import enum
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.extras.deploy.ctranslate2 import checks

if TYPE_CHECKING:
    from jax_transformer.extras.deploy.ctranslate2.vocabulary import Vocabularies

MODEL = "model.bin"


class Quantization(enum.StrEnum):
    """The numbers that a folder stores, by CTranslate2's names."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"  # matrices, with a scale for each row; the rest stays float32


def check_installed(purpose: str) -> None:
    """Raise ConfigError unless CTranslate2 can be imported."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise ConfigError(f"{purpose} needs CTranslate2: pip install 'jax-seq2seq[ctranslate2]'")


def quantization(name: str | None) -> Quantization:
    """Return the quantization of this name, float32 if None. Raises ConfigError for another."""
    try:
        return Quantization(name or "float32")
    except ValueError:
        known = ", ".join(Quantization)
        raise ConfigError(f"--quantization {name} is not one of {known}") from None


def write(
    folder: Path,
    config: TransformerConfig,
    arrays: Mapping[str, np.ndarray],
    vocabularies: "Vocabularies",
    quantization: Quantization,
) -> None:
    """Create ``folder`` with the model, which is in memory about twice meanwhile.

    Raises ConfigError for a configuration that cannot be expressed, before anything is written.
    """
    from jax_transformer.extras.deploy.ctranslate2 import spec  # loads jax

    checks.check(config)
    model: Any = spec.build(config, arrays)
    model.register_source_vocabulary(vocabularies.source)
    model.register_target_vocabulary(vocabularies.target)
    for name, value in vocabularies.settings.items():
        setattr(model.config, name, value)
    model.validate()
    model.optimize(None if quantization is Quantization.FLOAT32 else quantization.value)
    folder.mkdir()
    model.save(str(folder))
