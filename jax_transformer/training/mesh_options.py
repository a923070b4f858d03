"""The options of the mesh of devices: ``--mesh.*`` of ``train``."""

from dataclasses import dataclass

from jax_transformer.errors import ConfigError


@dataclass(frozen=True)
class MeshOptions:
    """Axes that divide the weights over devices; the other devices divide the batch only."""

    fsdp: int = 1
    """Devices that share a copy of the weights and divide the batch."""
    tensor: int = 1
    """Devices that divide heads, feed-forward and vocabulary."""

    def __post_init__(self) -> None:
        for name in ("fsdp", "tensor"):
            if getattr(self, name) < 1:
                raise ConfigError(f"mesh.{name}={getattr(self, name)} must be at least 1")
