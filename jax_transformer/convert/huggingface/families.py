"""What each family of Hugging Face models is, said as a configuration of the one model.

Facts from the families' classes in transformers 5.23 (``configuration_*.py``, ``modeling_*.py``).
"""

from collections.abc import Mapping
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
    Layout.MBART: {"positions": Positions.LEARNED, "position_offset": 2, "embedding_norm": True, "final_norm": True},
    Layout.MARIAN: {"positions": Positions.SINUSOIDAL_STORED, "sinusoids": Sinusoids.HALVES},
    Layout.PEGASUS: {"positions": Positions.SINUSOIDAL_STORED, "sinusoids": Sinusoids.HALVES, "final_norm": True},
    Layout.M2M_100: {
        "positions": Positions.SINUSOIDAL,
        "sinusoids": Sinusoids.TENSOR2TENSOR,
        "position_index": PositionIndex.NOT_PADDING,
        "position_offset": 2,
        "final_norm": True,
    },
}


def from_attributes(values: Mapping[str, Any], *, untied: bool = False) -> TransformerConfig:
    """The configuration of a model with these attributes, which are all there.

    ``untied`` tells that the weights hold an output layer of their own, which T5's attributes do not say.
    """
    layout = Layout(values["model_type"])
    return _t5(layout, values, untied) if layout in (Layout.T5, Layout.MT5, Layout.UMT5) else _bart(layout, values)


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
    tied = {True: Tying.ALL, False: Tying.EMBEDDINGS} if shared else {True: Tying.OUTPUT, False: Tying.NONE}
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
        embedding_scale=EmbeddingScale.SQRT_D_MODEL if values["scale_embedding"] else EmbeddingScale.NONE,
        tying=tied[values["tie_word_embeddings"]],
        dropout=values["dropout"],
        attention_dropout=values["attention_dropout"],
        activation_dropout=values["activation_dropout"],
        embedding_dropout=values["dropout"],
        layout=layout,
        source_pad_id=values["pad_token_id"],
        target_pad_id=values["pad_token_id"],
        bos_id=values["decoder_start_token_id"],
        eos_id=values["eos_token_id"],
        encoder=stacks["encoder"],
        decoder=stacks["decoder"],
    )


def _t5(layout: Layout, values: Mapping[str, Any], untied: bool) -> TransformerConfig:
    gated, _, name = values["feed_forward_proj"].rpartition("-")
    # The one exception of its configuration: gated GELU is the approximation
    activation = Activation.GELU_TANH if (gated, name) == ("gated", "gelu") else _activation(name)
    layers = {"encoder": values["num_layers"], "decoder": values["num_decoder_layers"] or values["num_layers"]}
    stacks = {
        name: StackConfig(
            layers[name],
            branches,
            positions=Positions.RELATIVE_PER_BLOCK if layout is Layout.UMT5 else Positions.RELATIVE,
            relative_buckets=values["relative_attention_num_buckets"],
            relative_max_distance=values["relative_attention_max_distance"],
            activation=activation,
            gated=bool(gated),
            final_norm=True,
            **_MASKS[name],
        )
        for name, branches in (("encoder", _ENCODER), ("decoder", _DECODER))
    }
    rate = values["dropout_rate"]
    scaled = values.get("scale_decoder_outputs", False)
    return TransformerConfig(
        source_vocab_size=values["vocab_size"],
        target_vocab_size=values["vocab_size"],
        d_model=values["d_model"],
        num_heads=values["num_heads"],
        head_dim=values["d_kv"],
        d_ff=values["d_ff"],
        max_length=values.get("n_positions") or 512,
        norm=Norm.RMS,
        norm_placement=NormPlacement.PRE,
        norm_epsilon=values["layer_norm_epsilon"],
        bias=False,
        output_bias=False,
        logit_scale=LogitScale.INVERSE_SQRT_D_MODEL if scaled else LogitScale.NONE,
        score_scale=ScoreScale.NONE,
        embedding_scale=EmbeddingScale.NONE,
        tying=Tying.EMBEDDINGS if untied else Tying.ALL,
        dropout=rate,
        attention_dropout=rate,
        activation_dropout=rate,
        embedding_dropout=rate,
        final_dropout=True,
        layout=layout,
        source_pad_id=values["pad_token_id"],
        target_pad_id=values["pad_token_id"],
        bos_id=values["decoder_start_token_id"],
        eos_id=values["eos_token_id"],
        encoder=stacks["encoder"],
        decoder=stacks["decoder"],
    )
