"""The architecture of "Transformer from scratch": a decoder layer is a masked attention and a whole
transformer block.

The positions of the linked commit are learned and belong to the checkpoint. A later version of the
same code computes sinusoids instead and stores no table: with ``positions`` set so, the same rules
read and write its checkpoints.
"""

from jax_transformer.architectures import base
from jax_transformer.architectures.base import Architecture, Arguments, Preset
from jax_transformer.config import TransformerConfig, enums
from jax_transformer.errors import ConfigError
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Alias, Rule, Table

_LINEARS = {
    "query": "queries_transform",
    "key": "keys_transform",
    "value": "values_transform",
    "out": "linear_out",
}


def _attention(torch: str, flax: str, config: TransformerConfig) -> Table:
    bias = config.bias if config.attention_bias is None else config.attention_bias
    return rules.attention(torch, flax, _LINEARS, bias=bias)


def _transformer_block(
    torch: str, flax: str, part: enums.Part, first: int, config: TransformerConfig
) -> Table:
    """Return an attention and the feed-forward; branch ``first`` is the attention's."""
    bias = config.bias
    return [
        *_attention(f"{torch}.self_attention", f"{flax}.{part.value}", config),
        *rules.layer_norm(f"{torch}.norm1", f"{flax}.residuals.{first}.norm", bias=bias),
        *rules.linear(f"{torch}.feed_forward.0", f"{flax}.feed_forward.up", bias=bias),
        *rules.linear(f"{torch}.feed_forward.2", f"{flax}.feed_forward.down", bias=bias),
        *rules.layer_norm(f"{torch}.norm2", f"{flax}.residuals.{first + 1}.norm", bias=bias),
    ]


def _decoder_block(config: TransformerConfig) -> Table:
    torch, flax = "decoder.layers.{i}", "decoder.blocks.{i}"
    return [
        *_attention(f"{torch}.self_attention", f"{flax}.{enums.Part.SELF.value}", config),
        *rules.layer_norm(f"{torch}.norm", f"{flax}.residuals.0.norm", bias=config.bias),
        *_transformer_block(f"{torch}.transformer_block", flax, enums.Part.CROSS, 1, config),
    ]


def weight_table(config: TransformerConfig) -> Table:
    target = "decoder.word_embedding.weight"
    source = rules.embedding("encoder.word_embedding", "source_embedding")
    if config.tying is enums.Tying.ALL:
        source = [Alias("encoder.word_embedding.weight", target)]
    encoder = _transformer_block(
        "encoder.layers.{i}", "encoder.blocks.{i}", enums.Part.SELF, 0, config
    )
    return [
        *rules.embedding("decoder.word_embedding", "target_embedding"),
        *source,
        *(
            Rule(f"{name}.position_embedding.weight", f"{name}.positions.table")
            for name in ("encoder", "decoder")
            if getattr(config, name).positions is enums.Positions.LEARNED
        ),
        *rules.repeat(config.encoder.layers, encoder),
        *rules.repeat(config.decoder.layers, _decoder_block(config)),
        *base.output("decoder.fc_out", target, config, bias=config.output_bias),
    ]


def _config(score_scale: enums.ScoreScale) -> TransformerConfig:
    positions = enums.Positions.LEARNED
    return TransformerConfig(
        source_vocab_size=10_000,
        target_vocab_size=10_000,
        d_model=512,
        num_heads=8,
        d_ff=2048,
        max_length=100,
        encoder=base.encoder(6, positions=positions),
        decoder=base.decoder(6, self_mask=(enums.Mask.CAUSAL,), positions=positions),
        score_scale=score_scale,
        mask_fill=enums.MaskFill.MINUS_1E20,
        embedding_scale=enums.EmbeddingScale.NONE,
        dropout=0.0,
        embedding_dropout=0.0,
        dropout_site=enums.DropoutSite.AFTER_NORM,
        init=enums.Init.TORCH,
        architecture="from_scratch",
    )


_FAITHFUL = Preset(
    _config(enums.ScoreScale.D_MODEL),
    '"Transformer from scratch". Faithful: scores are divided by the root of d_model.',
    {"d_ff": 4},
)
_REPAIRED = Preset(
    _config(enums.ScoreScale.HEAD_DIM),
    '"Transformer from scratch" with scores divided by the root of the head width, as its text'
    " says.",
    {"d_ff": 4},
)


def _arguments(config: TransformerConfig) -> Arguments:
    repaired = base.is_repaired(config, _FAITHFUL, _REPAIRED, "embedding_dropout", "d_ff")
    expansion, rest = divmod(config.d_ff, config.d_model)
    if rest:
        multiples = f"{base.twin_of(config)} has only multiples of d_model={config.d_model}"
        raise ConfigError(f"d_ff={config.d_ff}: {multiples}")
    return tuple(base.vocabularies(config)), {
        "embed_size": config.d_model,
        "num_layers": base.one_depth(config),
        "forward_expansion": expansion,
        "heads": config.num_heads,
        "dropout": base.one_rate(config, "embedding_dropout"),
        "max_length": config.max_length,
        "repaired": repaired,
    }


ARCHITECTURE = Architecture(
    name="from_scratch",
    source='"Transformer from scratch", six components described by diagrams, with links to code.',
    weight_table=weight_table,
    presets={"from_scratch": _FAITHFUL, "from_scratch_repaired": _REPAIRED},
    reference="torch_reference.from_scratch:Transformer",
    reference_arguments=_arguments,
)
