"""The request for a conversion, and the description of a model whose file has no config."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_transformer.architectures import huggingface_config, registry
from jax_transformer.architectures.base import Architecture
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import infer
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.pretrained import Pretrained
from jax_transformer.storage import kinds, untrusted


@dataclass(frozen=True)
class ModelDescription:
    """A configuration file, or a preset with sizes that no shape shows."""

    config: str | None = None
    """Path of a config.json, of this package or of transformers."""
    preset: str | None = None
    """Name of a preset."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields to change, by name (``--set``)."""

    def settle(
        self, source: Pretrained, architecture: Architecture | str | None = None
    ) -> infer.Inferred:
        """Return the configuration; the sizes of a preset are read from the source's shapes.

        PyTorch names are those of ``architecture``, or of the preset's own if it is None.
        Raises ConfigError unless there is either a file or a preset.
        """
        if (self.config is None) == (self.preset is None):
            raise ConfigError(
                "a file of weights does not tell its architecture: "
                "give either --config config.json or --preset NAME"
            )
        if self.preset is not None:
            names = "torch" if source.kind.has_torch_names else "flax"
            shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
            return infer.infer(
                registry.find_preset(self.preset, architecture),
                self.changes,
                shapes,
                lambda config: _shapes(config, architecture)[names],
            )
        config = _from_file(Path(self.config or ""), source)
        return infer.Inferred(config.with_sizes(**self.changes), {}, {})


@dataclass(frozen=True)
class Request:
    """Arguments of a conversion, as on the command line."""

    source: str
    destination: str
    description: ModelDescription = ModelDescription()
    dtype: str | None = None
    weights: str = "auto"
    key: str | None = None
    strip_prefix: str = ""
    force: bool = False
    check: bool = True
    to: str | None = None
    """Kind of folder to write, ``hf`` or ``run``, if the name does not show it."""
    shard_size: str | None = None
    """Maximum size of one file of weights in a Hugging Face folder, e.g. ``5GB``."""
    architecture: Architecture | str | None = None
    """The architecture whose names the PyTorch weights have; that of the configuration if None."""


def _shapes(config: TransformerConfig, architecture: Architecture | str | None) -> Any:
    from jax_transformer import state_dict

    return state_dict.model_weights(config, architecture).shapes


def _from_file(path: Path, source: Pretrained) -> TransformerConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    try:
        data = untrusted.read_json(path)
        if isinstance(data, dict) and kinds.is_huggingface(data):
            return huggingface_config.from_config(data, names=source.tensors)
        return TransformerConfig.from_json(text)
    except ConfigError as error:
        raise InputError(f"{path}: {error}") from None
