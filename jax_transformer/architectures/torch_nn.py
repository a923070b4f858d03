"""torch.nn.Transformer, embeddings and an output layer, with names of "Lesson 10: Transformers II".

Source: torch/nn/modules/transformer.py and activation.py (MultiheadAttention) of PyTorch 2.13.
``pos_enc.pe`` (length, 1, d) is one buffer that both stacks read, so both hold a copy and the two
must agree.
"""

from dataclasses import replace
from typing import Any

from jax_transformer.architectures import base
from jax_transformer.architectures.base import Architecture, Arguments, Preset
from jax_transformer.config import StackConfig, TransformerConfig, enums
from jax_transformer.errors import ConfigError
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Alias, Rule, Table

_ATTENTION = {enums.Part.SELF: "self_attn", enums.Part.CROSS: "multihead_attn"}
_QUERIES = enums.Mask.QUERY_PADDING
# The fields that the twin takes, beside those that all take, and those of training alone
_TAKEN = """d_ff attention_dropout activation_dropout embedding_dropout norm_epsilon norm_placement
    bias output_bias embedding_scale tying decoder.cross_mask
    init encoder.init decoder.init""".split()
_TAKEN += [
    f"{stack}.{name}"
    for stack in ("encoder", "decoder")
    for name in ("attention_dropout", "activation", "positions", "final_norm")
]


def _stack(name: str, stack: StackConfig, *, bias: bool) -> Table:
    layer: Table = []
    for part in stack.parts:
        torch, flax = f"{name}.layers.{{i}}", f"{name}.blocks.{{i}}.{part.value}"
        if part is enums.Part.FFN:
            layer += rules.linear(f"{torch}.linear1", f"{flax}.up", bias=bias)
            layer += rules.linear(f"{torch}.linear2", f"{flax}.down", bias=bias)
        else:
            layer += rules.packed_attention(f"{torch}.{_ATTENTION[part]}", flax, bias=bias)
    for k in range(len(stack.branches)):
        norm = f"{name}.blocks.{{i}}.residuals.{k}.norm"
        layer += rules.layer_norm(f"{name}.layers.{{i}}.norm{k + 1}", norm, bias=bias)
    final = rules.layer_norm(f"{name}.norm", f"{name}.final_norm", bias=bias)
    return [*rules.repeat(stack.layers, layer), *(final if stack.final_norm else [])]


def weight_table(config: TransformerConfig) -> Table:
    source = rules.embedding("src_emb", "source_embedding")
    if config.tying is enums.Tying.ALL:
        source = [Alias("src_emb.weight", "tgt_emb.weight")]
    stored: list[str] = []
    learned: Table = []
    for name, own in (("encoder", "src_pos"), ("decoder", "tgt_pos")):
        kind, table = getattr(config, name).positions, f"{name}.positions.table"
        if kind is enums.Positions.SINUSOIDAL_STORED:
            stored.append(table)
        elif kind is enums.Positions.LEARNED:
            learned.append(Rule(f"{own}.weight", (table,)))
    shared: Table = [Rule("pos_enc.pe", stored, "l 1 d -> l d")]
    return [
        *rules.embedding("tgt_emb", "target_embedding"),
        *source,
        *(shared if stored else []),
        *learned,
        *_stack("encoder", config.encoder, bias=config.bias),
        *_stack("decoder", config.decoder, bias=config.bias),
        *base.output("linear", "tgt_emb.weight", config, bias=config.output_bias),
    ]


def sizes(config: TransformerConfig) -> dict[str, Any]:
    """Return the sizes that torch.nn.Transformer takes, by the names of its arguments."""
    return {
        "src_vocab_size": config.source_vocab_size,
        "tgt_vocab_size": config.target_vocab_size,
        "src_pad_idx": config.source_pad_id,
        "tgt_pad_idx": config.target_pad_id,
        "max_sequence_length": config.max_length,
        "d_model": config.d_model,
        "nhead": config.num_heads,
        "num_encoder_layers": config.encoder.layers,
        "num_decoder_layers": config.decoder.layers,
        "dim_feedforward": config.d_ff,
        "dropout": config.dropout,
    }


def _with_all_queries(stack: StackConfig) -> StackConfig:
    return replace(stack, self_mask=tuple(x for x in stack.self_mask if x is not _QUERIES))


def _arguments(config: TransformerConfig) -> Arguments:
    encoder, decoder, fill = config.encoder, config.decoder, config.mask_fill
    masks = (encoder.self_mask, decoder.self_mask, decoder.cross_mask)
    usual = replace(
        config,
        norm=enums.Norm.LAYER if config.norm is enums.Norm.LAYER_UNBIASED else config.norm,
        mask_fill=_SMALL.config.mask_fill if isinstance(fill, float) else fill,
        encoder=_with_all_queries(encoder),
        decoder=_with_all_queries(decoder),
    )
    base.check_fields(usual, _SMALL, *_TAKEN)
    if encoder.positions is not decoder.positions:
        both = f"encoder.positions='{encoder.positions}', decoder.positions='{decoder.positions}'"
        raise ConfigError(
            f"{both}: the stock PyTorch twin has one kind of positions for both stacks"
        )
    return (), {
        **sizes(config),
        "encoder_attention_dropout": config.attention_rate(encoder),
        "decoder_attention_dropout": config.attention_rate(decoder),
        "activation_dropout": config.activation_dropout,
        "embedding_dropout": config.embedding_dropout,
        "encoder_activation": encoder.activation.value,
        "decoder_activation": decoder.activation.value,
        "layer_norm_eps": config.norm_epsilon,
        "norm_first": config.norm_placement is enums.NormPlacement.PRE,
        "bias": config.bias,
        "encoder_norm": encoder.final_norm,
        "decoder_norm": decoder.final_norm,
        "scale_embedding": config.embedding_scale is enums.EmbeddingScale.SQRT_D_MODEL,
        "positions": encoder.positions.value,
        "mask_memory": enums.Mask.SOURCE_PADDING in decoder.cross_mask,
        "tie_output": config.tying is not enums.Tying.NONE,
        "tie_source": config.tying is enums.Tying.ALL,
        "output_bias": config.output_bias,
        "unbiased_norm": config.norm is enums.Norm.LAYER_UNBIASED,
        "mask_fill": fill if isinstance(fill, float) else None,
        "mask_queries": tuple(_QUERIES in kinds for kinds in masks),
    }


_VASWANI2017_BASE = Preset(
    TransformerConfig(
        source_vocab_size=37_000,
        target_vocab_size=37_000,
        d_model=512,
        num_heads=8,
        d_ff=2048,
        max_length=512,
        encoder=base.encoder(6),
        decoder=base.decoder(6),
        tying=enums.Tying.ALL,
        output_bias=False,
    ),
    "Vaswani et al. 2017, Attention Is All You Need, table 3, base: post-norm, three tied"
    " matrices, 63 M parameters.",
)
_SMALL = Preset(
    TransformerConfig(
        source_vocab_size=2_000,
        target_vocab_size=2_000,
        d_model=128,
        num_heads=4,
        d_ff=512,
        max_length=128,
        encoder=base.encoder(2, final_norm=True),
        decoder=base.decoder(2, final_norm=True),
        norm_placement=enums.NormPlacement.PRE,
        tying=enums.Tying.ALL,
        output_bias=False,
    ),
    "This project's own, for the built-in task: pre-norm (Xiong et al. 2020), three tied matrices,"
    " about a million parameters.",
)

ARCHITECTURE = Architecture(
    name="torch_nn",
    source="torch.nn.Transformer of PyTorch 2.13, with embeddings, positions and an output layer.",
    weight_table=weight_table,
    presets={"vaswani2017_base": _VASWANI2017_BASE, "small": _SMALL},
    reference="torch_reference.torch_nn:TorchTransformer",
    reference_arguments=_arguments,
)
