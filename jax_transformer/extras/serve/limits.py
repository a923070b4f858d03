"""Limits of the service: sizes of requests, the queue, and the batches. Standard library only."""

import dataclasses
import math
from dataclasses import dataclass

from jax_transformer.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Bounds on what one request, and all requests together, can ask for."""

    queue_size: int = 1024
    """Lines that wait for a batch, at most; requests beyond are answered 429."""
    timeout: float = 30.0
    """Seconds until a request is answered 504; a request can ask for less."""
    max_lines: int = 256
    """Lines of a request, at most."""
    max_characters: int = 100_000
    """Characters of a request's lines together, at most."""
    max_body_bytes: int = 1_000_000
    """Bytes of a request's body, at most."""
    max_beam: int = 16
    """Beam size that a request may ask for, at most."""
    max_configs: int = 16
    """Sets of decoding options to compile programs for, besides those compiled at the start."""
    batch_rows: int = 64
    """Lines of a batch, at most."""
    batch_wait: float = 0.005
    """Seconds that a line waits for others to share its batch while the device is free."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("max_configs", "batch_wait") else 1
            if field.name == "timeout":
                if not 0 < value < math.inf:
                    raise ConfigError(f"timeout={value} must be above 0 and finite")
            elif not least <= value < math.inf:
                raise ConfigError(f"{field.name}={value} must be at least {least} and finite")
        if self.max_lines > self.queue_size:
            raise ConfigError(
                f"max_lines={self.max_lines} is over queue_size={self.queue_size}: such a request "
                "would never fit the queue; lower the one or raise the other"
            )
