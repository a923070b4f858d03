"""torch.nn.Transformer with embeddings around it, under the names of "Lesson 10: Transformers II", which subclasses it.

Source: torch/nn/modules/transformer.py and activation.py (MultiheadAttention) of PyTorch 2.13. ``pos_enc.pe`` (length, 1, d) is one buffer that
both stacks read, so both hold a copy and the two must agree.
"""

from jax_transformer.config import Part, Positions, StackConfig, TransformerConfig, Tying
from jax_transformer.weights.rules import (
    Alias,
    Each,
    Rule,
    Several,
    Table,
    embedding,
    layer_norm,
    linear,
    packed_attention,
    repeat,
)

_ATTENTION = {Part.SELF: "self_attn", Part.CROSS: "multihead_attn"}


def _stack(name: str, stack: StackConfig, *, bias: bool) -> Table:
    layer: Table = []
    for part in stack.parts:
        torch, flax = f"{name}.layers.{{i}}", f"{name}.blocks.{{i}}.{part.value}"
        if part is Part.FFN:
            layer += [
                *linear(f"{torch}.linear1", f"{flax}.up", bias=bias),
                *linear(f"{torch}.linear2", f"{flax}.down", bias=bias),
            ]
        else:
            layer += packed_attention(f"{torch}.{_ATTENTION[part]}", flax, bias=bias)
    for k in range(len(stack.branches)):
        layer += layer_norm(
            f"{name}.layers.{{i}}.norm{k + 1}", f"{name}.blocks.{{i}}.residuals.{k}.norm", bias=bias
        )
    final = layer_norm(f"{name}.norm", f"{name}.final_norm", bias=bias) if stack.final_norm else []
    return [*repeat(stack.layers, layer), *final]


def _positions(config: TransformerConfig) -> Table:
    kinds = {"encoder": config.encoder.positions, "decoder": config.decoder.positions}
    stored = tuple(
        f"{name}.positions.table"
        for name, kind in kinds.items()
        if kind is Positions.SINUSOIDAL_STORED
    )
    rules: Table = [Rule("pos_enc.pe", stored, Each.SQUEEZE_1, Several.COPY)] if stored else []
    learned = {"encoder": "src_pos", "decoder": "tgt_pos"}
    return rules + [
        Rule(f"{learned[name]}.weight", (f"{name}.positions.table",))
        for name, kind in kinds.items()
        if kind is Positions.LEARNED
    ]


def _output(config: TransformerConfig) -> Table:
    if config.tying is Tying.NONE:
        return linear("linear", "output", bias=config.output_bias)
    bias: Table = [Rule("linear.bias", ("output_bias",))] if config.output_bias else []
    return [Alias("linear.weight", "tgt_emb.weight"), *bias]


def table(config: TransformerConfig) -> Table:
    """The rules for a model of ``config``."""
    tied = config.tying is Tying.ALL
    source: Table = (
        [Alias("src_emb.weight", "tgt_emb.weight")]
        if tied
        else embedding("src_emb", "source_embedding")
    )
    return [
        *embedding("tgt_emb", "target_embedding"),
        *source,
        *_positions(config),
        *_stack("encoder", config.encoder, bias=config.bias),
        *_stack("decoder", config.decoder, bias=config.bias),
        *_output(config),
    ]
