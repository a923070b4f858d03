"""What each family of Hugging Face models is, said as a configuration of the one model.

Facts from the families' classes in transformers 5.23 (``configuration_*.py``, ``modeling_*.py``).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax_transformer.config import (
    Activation,
    Branch,
    EmbeddingScale,
    Layout,
    LogitScale,
    Mask,
    Norm,
    NormPlacement,
    Part,
    PositionIndex,
    Positions,
    ScoreScale,
    Sinusoids,
    StackConfig,
    TransformerConfig,
    Tying,
)
from jax_transformer.errors import ConfigError

_ENCODER = (Branch((Part.SELF,)), Branch((Part.FFN,)))
_DECODER = (Branch((Part.SELF,)), Branch((Part.CROSS,)), Branch((Part.FFN,)))
_MASKS: dict[str, Any] = {"encoder": {"self_mask": (Mask.SOURCE_PADDING,)}}
# transformers gives the decoder no mask of its padding, so neither the start token, which is padding in some families, is hidden
_MASKS["decoder"] = {"self_mask": (Mask.CAUSAL,), "cross_mask": (Mask.SOURCE_PADDING,)}

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "swish": Activation.SILU,
    "silu": Activation.SILU,
}

# What the stacks of the BART-like families have
_BART_LIKE: dict[Layout, dict[str, Any]] = {
    Layout.BART: {"positions": Positions.LEARNED, "position_offset": 2, "embedding_norm": True},
    Layout.MBART: {
        "positions": Positions.LEARNED,
        "position_offset": 2,
        "embedding_norm": True,
        "final_norm": True,
    },
    Layout.MARIAN: {"positions": Positions.SINUSOIDAL_STORED, "sinusoids": Sinusoids.HALVES},
    Layout.PEGASUS: {
        "positions": Positions.SINUSOIDAL_STORED,
        "sinusoids": Sinusoids.HALVES,
        "final_norm": True,
    },
    Layout.M2M_100: {
        "positions": Positions.SINUSOIDAL,
        "sinusoids": Sinusoids.TENSOR2TENSOR,
        "position_index": PositionIndex.NOT_PADDING,
        "position_offset": 2,
        "final_norm": True,
    },
}


# T5, mT5 and UMT5 bound no sequence: they add nothing to embeddings, and all long distances share a bucket
UNBOUNDED = 32_768
_TRAINED = 512
"""Tokens of a side that they were trained with."""


def usual_length(config: TransformerConfig) -> int:
    """The longest source and target where nobody says one: as far as the positions reach, or where these end nowhere, 512 tokens."""
    return _TRAINED if config.max_length == UNBOUNDED else config.longest


def from_attributes(values: Mapping[str, Any]) -> TransformerConfig:
    """The configuration of a model with these attributes, which are all there. ``tie_word_embeddings`` tells whether the output layer is the
    embedding, in all families. Raises ConfigError where that is no model."""
    layout = Layout(values["model_type"])
    return (
        _t5(layout, values)
        if layout in (Layout.T5, Layout.MT5, Layout.UMT5)
        else _bart(layout, values)
    )


def flat(config: TransformerConfig) -> dict[str, Any]:
    """Every field by dotted name, with the stacks' own numbers in the place of those that they take from the model."""
    found = {
        name: value
        for name, value in vars(config).items()
        if name not in ("encoder", "decoder", "num_heads", "d_ff", "head_dim")
    }
    found["attention_bias"] = (
        config.bias if config.attention_bias is None else config.attention_bias
    )
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        own = vars(stack) | {
            "num_heads": config.heads(stack),
            "d_ff": stack.d_ff or config.d_ff,
            "head_dim": config.head_width_of(stack),
        }
        found |= {f"{name}.{field}": value for field, value in own.items()}
    return found


def without_dropout(config: TransformerConfig) -> TransformerConfig:
    """The same model with every rate 0."""
    encoder, decoder = (
        replace(
            stack,
            attention_dropout=None,
            branches=tuple(replace(branch, dropout=None) for branch in stack.branches),
        )
        for stack in (config.encoder, config.decoder)
    )
    rates = replace(
        config, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, embedding_dropout=0.0
    )
    return replace(rates, encoder=encoder, decoder=decoder)


def _start(values: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens. Decoding begins with ``bos_token_id`` where no token is named for it, as with generate() of transformers."""
    ids = {
        "pad_token_id": values["pad_token_id"],
        "eos_token_id": values["eos_token_id"],
        "decoder_start_token_id": values["decoder_start_token_id"],
    }
    if ids["decoder_start_token_id"] is None:
        ids["decoder_start_token_id"] = values["bos_token_id"]
    missing = [name for name, value in ids.items() if value is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be given: the model's batches are made with it"
        )
    pad, end, start = ids.values()
    return {"source_pad_id": pad, "target_pad_id": pad, "bos_id": start, "eos_id": end}


def _activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _bart(layout: Layout, values: Mapping[str, Any]) -> TransformerConfig:
    own, activation = _BART_LIKE[layout], _activation(values["activation_function"])
    stacks = {
        name: StackConfig(
            values[f"{name}_layers"],
            branches,
            num_heads=values[f"{name}_attention_heads"],
            d_ff=values[f"{name}_ffn_dim"],
            activation=activation,
            **_MASKS[name],
            **own,
        )
        for name, branches in (("encoder", _ENCODER), ("decoder", _DECODER))
    }
    shared = values.get("share_encoder_decoder_embeddings", True)
    tied = (
        {True: Tying.ALL, False: Tying.EMBEDDINGS}
        if shared
        else {True: Tying.OUTPUT, False: Tying.NONE}
    )
    return TransformerConfig(
        source_vocab_size=values["vocab_size"],
        target_vocab_size=values.get("decoder_vocab_size") or values["vocab_size"],
        d_model=values["d_model"],
        num_heads=values["encoder_attention_heads"],
        d_ff=values["encoder_ffn_dim"],
        max_length=values["max_position_embeddings"],
        norm_placement=NormPlacement.PRE if own.get("final_norm") else NormPlacement.POST,
        output_bias=False,
        logits_bias=layout is not Layout.M2M_100,
        padding_trained=False,
        embedding_scale=EmbeddingScale.SQRT_D_MODEL
        if values["scale_embedding"]
        else EmbeddingScale.NONE,
        tying=tied[values["tie_word_embeddings"]],
        dropout=values["dropout"],
        attention_dropout=values["attention_dropout"],
        activation_dropout=values["activation_dropout"],
        embedding_dropout=values["dropout"],
        architecture=layout.value,
        **_start(values),
        encoder=stacks["encoder"],
        decoder=stacks["decoder"],
    )


def _logit_scale(layout: Layout, values: Mapping[str, Any]) -> LogitScale:
    """UMT5 always scales, mT5 never; T5 where its attributes say so, as those of version 1 do by saying nothing."""
    scaled = {
        Layout.T5: values.get("scale_decoder_outputs", True),
        Layout.MT5: False,
        Layout.UMT5: True,
    }[layout]
    return LogitScale.INVERSE_SQRT_D_MODEL if scaled else LogitScale.NONE


def _feed_forward(values: Mapping[str, Any]) -> tuple[Activation, bool]:
    """The activation, and whether it is a gate; what files of later versions say of the two apart goes before."""
    gated, _, name = values["feed_forward_proj"].rpartition("-")
    if gated not in ("", "gated"):
        raise ConfigError(
            f"feed_forward_proj={values['feed_forward_proj']!r} is neither an activation nor gated- and one"
        )
    # The one exception of its configuration: gated GELU is the approximation
    named = "gelu_new" if (gated, name) == ("gated", "gelu") else name
    return _activation(values.get("dense_act_fn", named)), values.get("is_gated_act", bool(gated))


def _t5(layout: Layout, values: Mapping[str, Any]) -> TransformerConfig:
    activation, gated = _feed_forward(values)
    layers = {
        "encoder": values["num_layers"],
        "decoder": values["num_decoder_layers"] or values["num_layers"],
    }
    stacks = {
        name: StackConfig(
            layers[name],
            branches,
            positions=Positions.RELATIVE_PER_BLOCK if layout is Layout.UMT5 else Positions.RELATIVE,
            relative_buckets=values["relative_attention_num_buckets"],
            relative_max_distance=values["relative_attention_max_distance"],
            activation=activation,
            gated=gated,
            final_norm=True,
            **_MASKS[name],
        )
        for name, branches in (("encoder", _ENCODER), ("decoder", _DECODER))
    }
    rate = values["dropout_rate"]
    return TransformerConfig(
        source_vocab_size=values["vocab_size"],
        target_vocab_size=values["vocab_size"],
        d_model=values["d_model"],
        num_heads=values["num_heads"],
        head_dim=values["d_kv"],
        d_ff=values["d_ff"],
        max_length=UNBOUNDED,
        norm=Norm.RMS,
        norm_placement=NormPlacement.PRE,
        norm_epsilon=values["layer_norm_epsilon"],
        bias=False,
        output_bias=False,
        logit_scale=_logit_scale(layout, values),
        score_scale=ScoreScale.NONE,
        embedding_scale=EmbeddingScale.NONE,
        tying=Tying.ALL if values["tie_word_embeddings"] else Tying.EMBEDDINGS,
        dropout=rate,
        attention_dropout=rate,
        activation_dropout=rate,
        embedding_dropout=rate,
        final_dropout=True,
        architecture=layout.value,
        **_start(values),
        encoder=stacks["encoder"],
        decoder=stacks["decoder"],
    )
