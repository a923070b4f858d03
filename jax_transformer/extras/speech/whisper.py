"""Whisper: speech recognition and translation (Radford et al. 2022).

Facts from ``configuration_whisper.py``, ``modeling_whisper.py`` and ``tokenization_whisper.py`` of
transformers 5.23, and from ``whisper/__init__.py`` and the ``ModelDimensions`` of openai/whisper.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from jax_transformer.architectures import bart, base
from jax_transformer.architectures.base import Preset
from jax_transformer.architectures.tokenizer_recipe import Algorithm, TokenizerRecipe
from jax_transformer.config import Mask, Positions, Sinusoids, TransformerConfig, Tying
from jax_transformer.weights.rules import Table, convolution, embedding

_END = "<|endoftext|>"


def _ids(end: int) -> dict[str, int]:
    """Return the special ids: ``<|endoftext|>`` has three roles, and the start is after it."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {**dict.fromkeys(names, end), "decoder_start_token_id": end + 1}


# The English models have one word less before <|endoftext|>: all special ids are one lower
_ENGLISH = {"vocab_size": 51864, **_ids(50256)}
_V3 = {"vocab_size": 51866, "num_mel_bins": 128, "pad_token_id": 50256}
_SIZES = {"tiny": (4, 384), "base": (6, 512), "small": (12, 768), "medium": (24, 1024)}


class Whisper(bart.BartFamily):
    name = "whisper"
    title = "Whisper"
    source = "Radford et al. 2022, Whisper (transformers' whisper)"
    model_class = "WhisperForConditionalGeneration"
    defaults = {
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "d_model": 384,
        **bart.sizes(layers=4, ffn_dim=1536, attention_heads=6),
        "activation_function": "gelu",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "tie_word_embeddings": True,
        **_ids(50256),
    }
    aliases = bart.ALIASES | {"num_key_value_heads": "encoder_attention_heads"}
    ignored = {
        "scale_embedding": "no class of Whisper multiplies by it",
        "forced_decoder_ids": "says how a transcription begins, which transcribe reads",
        **dict.fromkeys(
            """apply_spec_augment mask_time_prob mask_time_length mask_time_min_masks
            mask_feature_prob mask_feature_length mask_feature_min_masks""".split(),
            "acts only in training with transformers: parts of the spectrogram are masked",
        ),
        **dict.fromkeys(
            ("use_weighted_layer_sum", "classifier_proj_size"),
            "belongs to a head for classification",
        ),
        "median_filter_width": "smooths the times of words, which are not computed here",
    }
    stack = {"positions": Positions.LEARNED, "final_norm": True}
    logits_bias = False
    embedding_tensors = ("model.decoder.embed_tokens.weight",)
    output_tensor = "proj_out.weight"
    tokenizers = (
        TokenizerRecipe(
            name="Whisper",
            algorithm=Algorithm.BYTE_BPE,
            files=("vocab.json", "merges.txt"),
            tokens={"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": _END},
            left_out=r"<\|\d+\.\d+\|>",  # tokens of time
            before_without_role=("<|startoftranscript|>", "<|notimestamps|>"),
            padding_is_unused=True,
            start="bos_token",
        ),
    )

    def config_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        longest = values["max_target_positions"]
        fields = super().config_fields(
            {**values, "max_position_embeddings": longest, "scale_embedding": False}
        )
        encoder = replace(
            fields["encoder"],
            positions=Positions.SINUSOIDAL_STORED,
            sinusoids=Sinusoids.TENSOR2TENSOR,
            self_mask=(),
        )
        decoder = replace(fields["decoder"], self_mask=(Mask.CAUSAL,), cross_mask=())
        tying = Tying.OUTPUT if values["tie_word_embeddings"] else Tying.NONE
        return fields | {
            "mel_bins": values["num_mel_bins"],
            "mel_frames": 2 * values["max_source_positions"],
            "key_bias": False,
            "tying": tying,
            "encoder": encoder,
            "decoder": decoder,
        }

    def to_attributes(self, config: TransformerConfig) -> dict[str, Any]:
        attributes = super().to_attributes(config)
        for name in ("max_position_embeddings", "scale_embedding"):
            del attributes[name]
        return attributes | {
            "num_mel_bins": config.mel_bins,
            "max_source_positions": config.rows(config.encoder),
            "max_target_positions": config.max_length,
        }

    def weight_table(self, config: TransformerConfig) -> Table:
        return [
            *convolution("model.encoder.conv1", "stem.first", "x"),
            *convolution("model.encoder.conv2", "stem.second", "x"),
            *embedding("model.decoder.embed_tokens", "target_embedding"),
            *bart.stacks(config),
            *base.output("proj_out", self.embedding_tensors[0], config, bias=False),
        ]

    @cached_property
    def presets(self) -> Mapping[str, Preset]:  # type: ignore[override]
        """The published sizes."""
        return {
            **{f"whisper_{size}": self._published(size, *_SIZES[size]) for size in _SIZES},
            **{
                f"whisper_{size}_en": self._published(f"{size}.en", *numbers, **_ENGLISH)
                for size, numbers in _SIZES.items()
            },
            "whisper_large": self._published("large, and large-v2", 32, 1280),
            "whisper_large_v3": self._published("large-v3", 32, 1280, **_V3),
            "whisper_large_v3_turbo": self._published(
                "large-v3-turbo", 32, 1280, **_V3, decoder_layers=4
            ),
        }

    def _published(self, size: str, layers: int, d_model: int, **attributes: Any) -> Preset:
        """Return a published size: heads of 64 numbers, inner layers four times as wide."""
        sizes = bart.sizes(layers=layers, ffn_dim=4 * d_model, attention_heads=d_model // 64)
        return self.preset(
            f"Whisper {size} (Radford et al. 2022), which reads sound.",
            last_ids=("source_pad_id", "target_pad_id", "bos_id", "eos_id"),
            d_model=d_model,
            **(_ids(50257) | sizes | attributes),
        )


ARCHITECTURE = Whisper()
