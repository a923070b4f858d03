"""The configuration of one encoder-decoder: its fields, checked, and their JSON."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Any

from jax_transformer.config import checks, codec
from jax_transformer.config.fields import StackConfig, TransformerFields
from jax_transformer.errors import ConfigError, nearest

EXECUTION = ("attention_backend", "remat", "scan_layers")
"""The fields of TransformerConfig that say how the same numbers are computed.

No weight depends on them, and a run may be resumed with others."""


@dataclass(frozen=True)
class TransformerConfig(TransformerFields):
    """A whole encoder-decoder.

    ``dataclasses.replace`` or :meth:`with_sizes` make variants; both check the result.
    """

    def __post_init__(self) -> None:
        checks.check(self)

    @property
    def portable(self) -> "TransformerConfig":
        """The configuration without :data:`EXECUTION`: what a run and an export record."""
        defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: defaults[name] for name in EXECUTION})

    def to_json(self) -> str:
        """Return JSON text; :meth:`from_json` gives an equal config back."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "TransformerConfig":
        """Return the configuration of a JSON text, the inverse of :meth:`to_json`.

        Raises ConfigError that names an unknown, missing or mistyped key.
        """
        return codec.from_json(cls, text)

    def with_sizes(self, **changes: Any) -> "TransformerConfig":
        """Return a copy with fields changed by name.

        Names are fields, a stack's as ``**{"encoder.positions": "learned"}``,
        ``num_layers`` (both stacks), ``encoder_layers``, ``decoder_layers``, ``vocab_size`` and
        ``pad_id`` (both sides). Enums may be given by value. Raises ConfigError for an unknown
        name.
        """
        fields = {field.name for field in dataclasses.fields(self)}
        nested = {
            f"{stack}.{field.name}"
            for stack in ("encoder", "decoder")
            for field in dataclasses.fields(StackConfig)
        }
        known = sorted(fields | nested | set(_SHORTHANDS))
        former = dict(self.RENAMED) | {
            f"{stack}.{old}": f"{stack}.{new}"
            for stack in ("encoder", "decoder")
            for old, new in StackConfig.RENAMED.items()
        }
        expanded: dict[str, Any] = {}
        for name, value in changes.items():
            if name in former:
                print(f"{name} is now called {former[name]}", file=sys.stderr)
                name = former[name]
            if name not in known:
                raise ConfigError(f"unknown configuration field {name!r}{nearest(name, known)}")
            expanded |= dict.fromkeys(_SHORTHANDS.get(name, (name,)), value)
        data = dataclasses.asdict(self)
        for name, value in expanded.items():
            owner, _, leaf = name.rpartition(".")
            (data[owner] if owner else data)[leaf] = (
                _plain(value) if dataclasses.is_dataclass(value) else value
            )
        return codec.from_json(type(self), json.dumps(data, default=_plain))


def _plain(value: Any) -> Any:
    """Return a plain value for a branch, or for a NumPy number given as a size."""
    return (
        dataclasses.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
        else value.item()
    )


_SHORTHANDS = {
    "encoder_layers": ("encoder.layers",),
    "decoder_layers": ("decoder.layers",),
    "num_layers": ("encoder.layers", "decoder.layers"),
    "vocab_size": ("source_vocab_size", "target_vocab_size"),
    "pad_id": ("source_pad_id", "target_pad_id"),
}
