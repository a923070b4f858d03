"""MyTranslator for jax-transformer: its configuration, the names of its weights, and its module."""

import jax_transformer as jt
from jax_transformer.config import (
    Activation,
    Branch,
    EmbeddingScale,
    Mask,
    NormPlacement,
    Part,
    Positions,
    StackConfig,
    TransformerConfig,
    Tying,
)
from jax_transformer.errors import ConfigError
from jax_transformer.weights.rules import (
    Alias,
    Rule,
    Table,
    embedding,
    layer_norm,
    linear,
    packed_attention,
    repeat,
)

SHARED = {"positions": Positions.LEARNED, "activation": Activation.GELU, "final_norm": True}
CONFIG = TransformerConfig(
    architecture="my_translator",
    source_vocab_size=8000,
    target_vocab_size=8000,
    d_model=256,
    num_heads=4,
    d_ff=1024,
    max_length=128,
    encoder=StackConfig(
        layers=4,
        branches=(Branch((Part.SELF,)), Branch((Part.FFN,))),
        self_mask=(Mask.SOURCE_PADDING,),
        **SHARED,
    ),
    decoder=StackConfig(
        layers=4,
        branches=(Branch((Part.SELF,)), Branch((Part.CROSS,)), Branch((Part.FFN,))),
        self_mask=(Mask.CAUSAL,),
        cross_mask=(Mask.SOURCE_PADDING,),
        **SHARED,
    ),
    norm_placement=NormPlacement.PRE,
    embedding_scale=EmbeddingScale.NONE,
    tying=Tying.ALL,  # one matrix: both embeddings and the output layer
    output_bias=False,
    dropout=0.1,
    attention_dropout=0.1,
    activation_dropout=0.1,
    embedding_dropout=0.1,
)


def layer(stack: str, attentions: dict[str, str]) -> Table:
    """The rules of one layer: on the left PyTorch's name, on the right that of the Flax model."""
    torch, flax = f"{stack}.layers.{{i}}", f"{stack}.blocks.{{i}}"
    rules: Table = []
    for theirs, ours in attentions.items():
        rules += packed_attention(f"{torch}.{theirs}", f"{flax}.{ours}")
    rules += linear(f"{torch}.linear1", f"{flax}.feed_forward.up")
    rules += linear(f"{torch}.linear2", f"{flax}.feed_forward.down")
    for k in range(len(attentions) + 1):
        rules += layer_norm(f"{torch}.norm{k + 1}", f"{flax}.residuals.{k}.norm")
    return rules


def weight_table(config: TransformerConfig) -> Table:
    """Every tensor of the state_dict once, and every array of the Flax model once."""
    encoder = layer("encoder", {"self_attn": "self_attention"})
    decoder = layer("decoder", {"self_attn": "self_attention", "multihead_attn": "cross_attention"})
    return [
        *embedding("words", "target_embedding"),
        Alias("to_words.weight", "words.weight"),
        Rule("places_in.weight", ("encoder.positions.table",)),
        Rule("places_out.weight", ("decoder.positions.table",)),
        *repeat(config.encoder.layers, encoder),
        *repeat(config.decoder.layers, decoder),
        *layer_norm("encoder.norm", "encoder.final_norm"),
        *layer_norm("decoder.norm", "decoder.final_norm"),
    ]


def reference_arguments(config: TransformerConfig) -> tuple[tuple, dict]:
    """The arguments that give MyTranslator the sizes of a configuration."""
    if config.encoder.layers != config.decoder.layers:
        raise ConfigError(
            f"encoder.layers={config.encoder.layers}, decoder.layers={config.decoder.layers}:"
            " MyTranslator has one depth"
        )
    return (), {
        "vocabulary": config.target_vocab_size,
        "width": config.d_model,
        "heads": config.num_heads,
        "layers": config.encoder.layers,
        "inner": config.d_ff,
        "longest": config.max_length,
    }


MY_TRANSLATOR = jt.Architecture(
    name="my_translator",
    source="Our translator, trained with PyTorch Lightning in 2025.",
    weight_table=weight_table,
    presets={"my_translator": jt.Preset(CONFIG, "The sizes that we trained.")},
    reference="my_model:MyTranslator",
    reference_arguments=reference_arguments,
)
