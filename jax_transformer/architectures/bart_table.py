"""The names of transformers' BART and of the families that follow it: mBART, Marian, M2M100 with NLLB, Pegasus.

These are the names of a whole ``state_dict()``, tied copies included; what a saved file leaves out is put back before the table is used.
"""

from jax_transformer.config import Part, Positions, TransformerConfig, Tying
from jax_transformer.weights.rules import (
    Alias,
    Each,
    Rule,
    Table,
    attention,
    embedding,
    layer_norm,
    linear,
    repeat,
)

_LINEARS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
_ATTENTIONS = {Part.SELF: "self_attn", Part.CROSS: "encoder_attn"}


def _stack(name: str, config: TransformerConfig) -> Table:
    stack = getattr(config, name)
    torch, flax = f"model.{name}", f"{name}.blocks.{{i}}"
    layer: Table = []
    for branch, (part,) in enumerate(branch.parts for branch in stack.branches):
        norm = f"{flax}.residuals.{branch}.norm"
        if part is Part.FFN:
            layer += linear(f"{torch}.layers.{{i}}.fc1", f"{flax}.feed_forward.up")
            layer += linear(f"{torch}.layers.{{i}}.fc2", f"{flax}.feed_forward.down")
            layer += layer_norm(f"{torch}.layers.{{i}}.final_layer_norm", norm)
        else:
            layer += attention(
                f"{torch}.layers.{{i}}.{_ATTENTIONS[part]}", f"{flax}.{part.value}", _LINEARS
            )
            layer += layer_norm(f"{torch}.layers.{{i}}.{_ATTENTIONS[part]}_layer_norm", norm)
    stored = stack.positions in (Positions.SINUSOIDAL_STORED, Positions.LEARNED)
    return [
        *(
            [Rule(f"{torch}.embed_positions.weight", (f"{name}.positions.table",))]
            if stored
            else []
        ),
        *(
            layer_norm(f"{torch}.layernorm_embedding", f"{name}.embedding_norm")
            if stack.embedding_norm
            else []
        ),
        *repeat(stack.layers, layer),
        *(layer_norm(f"{torch}.layer_norm", f"{name}.final_norm") if stack.final_norm else []),
    ]


def _embeddings(config: TransformerConfig) -> Table:
    if config.tying in (Tying.ALL, Tying.EMBEDDINGS):
        copies = [
            Alias(f"model.{stack}.embed_tokens.weight", "model.shared.weight")
            for stack in ("encoder", "decoder")
        ]
        return [*embedding("model.shared", "target_embedding"), *copies]
    return [
        *embedding("model.encoder.embed_tokens", "source_embedding"),
        *embedding("model.decoder.embed_tokens", "target_embedding"),
    ]


def _output(config: TransformerConfig) -> Table:
    if config.tying in (Tying.NONE, Tying.EMBEDDINGS):
        return linear("lm_head", "output", bias=False)
    return [
        Alias(
            "lm_head.weight",
            "model.shared.weight"
            if config.tying is Tying.ALL
            else "model.decoder.embed_tokens.weight",
        )
    ]


def table(config: TransformerConfig) -> Table:
    """The rules for a model of ``config``."""
    bias = (
        [Rule("final_logits_bias", ("logits_bias",), Each.SQUEEZE_0)] if config.logits_bias else []
    )
    return [
        *bias,
        *_embeddings(config),
        *_stack("encoder", config),
        *_stack("decoder", config),
        *_output(config),
    ]
