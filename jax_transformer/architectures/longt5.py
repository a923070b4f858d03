"""LongT5: T5 v1.1 with an encoder whose attention is local, or local and transient-global.

Guo et al. 2022. Facts: ``configuration_longt5.py``, ``modeling_longt5.py`` of transformers 5.23.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax_transformer.architectures import t5
from jax_transformer.config import AttentionSpan, TransformerConfig
from jax_transformer.errors import ConfigError

_SPANS = {"local": AttentionSpan.LOCAL, "transient-global": AttentionSpan.TRANSIENT_GLOBAL}


class LongT5(t5.T5Family):
    name = "longt5"
    title = "LongT5"
    source = "Guo et al. 2022, LongT5 (transformers' longt5)"
    model_class = "LongT5ForConditionalGeneration"
    defaults = t5.DEFAULTS | {
        "local_radius": 127,
        "global_block_size": 16,
        "encoder_attention_type": "local",
    }
    longest = 4096

    def to_transformer_config(self, values: Mapping[str, Any]) -> TransformerConfig:
        kind = values["encoder_attention_type"]
        if kind not in _SPANS:
            raise ConfigError(f"encoder_attention_type={kind!r} is not {' or '.join(_SPANS)}")
        config = super().to_transformer_config(values)
        encoder = replace(
            config.encoder,
            attention_span=_SPANS[kind],
            local_radius=values["local_radius"],
            global_block_size=values["global_block_size"],
        )
        return replace(config, encoder=encoder)

    def to_attributes(self, config: TransformerConfig) -> dict[str, Any]:
        encoder = config.encoder
        kinds = [name for name, span in _SPANS.items() if span is encoder.attention_span]
        return super().to_attributes(config) | {
            "encoder_attention_type": kinds[0] if kinds else "local",  # full is none of them
            "local_radius": encoder.local_radius,
            "global_block_size": encoder.global_block_size,
        }


ARCHITECTURE = LongT5(
    "LongT5 base with transient-global attention (Guo et al. 2022), with heads of d_model /"
    " num_heads, and no limit of positions.",
    d_model=768,
    num_layers=12,
    num_heads=12,
    feed_forward_proj="gated-gelu",
    scale_decoder_outputs=False,
    encoder_attention_type="transient-global",
)
