"""The file that ``--config`` names: a config.json of this package, or of transformers."""

from collections.abc import Collection
from pathlib import Path

from jax_transformer.architectures import huggingface_config
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import kinds
from jax_transformer.storage import untrusted


def read(path: Path, names: Collection[str]) -> TransformerConfig:
    """Read a config.json of this package, or of transformers for a file with these tensors."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    try:
        data = untrusted.read_json(path)
        if isinstance(data, dict) and kinds.is_huggingface(data):
            return huggingface_config.from_config(data, names=names)
        return TransformerConfig.from_json(text)
    except ConfigError as error:
        raise InputError(f"{path}: {error}") from None
