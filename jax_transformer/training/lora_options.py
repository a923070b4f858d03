"""The options of low-rank adapters: ``--lora.*`` of ``train``."""

from dataclasses import dataclass
from typing import Annotated

from jax_transformer.config.option import Option, Rare
from jax_transformer.errors import ConfigError


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (LoRA, Hu et al. 2021): train these instead of the model's parameters."""

    rank: int = 0
    """Rank of low-rank adapters (0: off)."""
    alpha: Rare[float] = 16.0
    """Scale of the adapters, times 1 / rank."""
    targets: Annotated[Rare[tuple[str, ...]], Option(metavar="PATTERN")] = (
        "*_attention.query.kernel",
        "*_attention.value.kernel",
    )
    """Names of the kernels to adapt."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"lora.rank={self.rank} must be at least 0")
        if self.alpha <= 0:
            raise ConfigError(f"lora.alpha={self.alpha} must be above 0")
        if self.rank and not self.targets:
            raise ConfigError("lora.targets: names no kernel to adapt")
