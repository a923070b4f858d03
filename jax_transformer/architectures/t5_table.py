"""The names of transformers' T5, mT5 and UMT5: a layer is a list of branches, each a module and its norm.

T5 and mT5 keep a stack's table of relative positions in its first layer, UMT5 one in every layer. As in :mod:`.bart`, tied copies are named.
"""

from jax_transformer.config import Part, Positions, TransformerConfig, Tying
from jax_transformer.weights.rules import (
    Alias,
    Rule,
    Table,
    attention,
    embedding,
    layer_norm,
    linear,
    repeat,
)

_LINEARS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_ATTENTIONS = {Part.SELF: "SelfAttention", Part.CROSS: "EncDecAttention"}


def _stack(name: str, config: TransformerConfig) -> Table:
    stack = getattr(config, name)
    flax, layer = f"{name}.blocks.{{i}}", []
    for branch, (part,) in enumerate(branch.parts for branch in stack.branches):
        torch = f"{name}.block.{{i}}.layer.{branch}"
        if part is Part.FFN:
            inner = (
                {"up": "wi_0", "gate": "wi_1", "down": "wo"}
                if stack.gated
                else {"up": "wi", "down": "wo"}
            )
            for ours, theirs in inner.items():
                layer += linear(
                    f"{torch}.DenseReluDense.{theirs}", f"{flax}.feed_forward.{ours}", bias=False
                )
        else:
            layer += attention(
                f"{torch}.{_ATTENTIONS[part]}", f"{flax}.{part.value}", _LINEARS, bias=False
            )
        layer += layer_norm(f"{torch}.layer_norm", f"{flax}.residuals.{branch}.norm", bias=False)
    relative = f"{name}.block.{{i}}.layer.0.SelfAttention.relative_attention_bias.weight"
    if stack.positions is Positions.RELATIVE_PER_BLOCK:
        layer.append(Rule(relative, (f"{flax}.relative.embedding",)))
    shared = (
        [Rule(relative.format(i=0), (f"{name}.relative.embedding",))]
        if stack.positions is Positions.RELATIVE
        else []
    )
    return [
        *repeat(stack.layers, layer),
        *shared,
        *layer_norm(f"{name}.final_layer_norm", f"{name}.final_norm", bias=False),
    ]


def table(config: TransformerConfig) -> Table:
    """The rules for a model of ``config``."""
    copies = [
        Alias(f"{stack}.embed_tokens.weight", "shared.weight") for stack in ("encoder", "decoder")
    ]
    output: Table = (
        [Alias("lm_head.weight", "shared.weight")]
        if config.tying is Tying.ALL
        else linear("lm_head", "output", bias=False)
    )
    return [
        *embedding("shared", "target_embedding"),
        *copies,
        *_stack("encoder", config),
        *_stack("decoder", config),
        *output,
    ]
