"""Our arrays in CTranslate2's specification of a Transformer.

Its matrices are (outputs, inputs), as in PyTorch; query, key and value of self-attention are one.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_transformer.config import (
    Activation,
    EmbeddingScale,
    LogitScale,
    Norm,
    NormPlacement,
    Positions,
    StackConfig,
    TransformerConfig,
)
from jax_transformer.config.fields import position_row
from jax_transformer.extras.deploy.ctranslate2.checks import RELATIVE
from jax_transformer.nn import attention, embeddings

Arrays = Mapping[str, np.ndarray]

_ACTIVATIONS = {
    Activation.RELU: "RELU",
    Activation.GELU: "GELU",
    Activation.GELU_TANH: "GELUTanh",
    Activation.SILU: "SWISH",
}


def build(config: TransformerConfig, arrays: Arrays) -> Any:
    """Return the ``ctranslate2.specs.TransformerSpec`` of a model, in float32.

    Args:
        config: a configuration that :func:`.checks.check` accepts.
        arrays: the model's arrays, by the paths of :func:`jax_transformer.transformer.flatten`.
    """
    from ctranslate2.specs import transformer_spec

    arrays = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    encoder = transformer_spec.TransformerEncoderSpec(**_options(config, config.encoder))
    decoder = transformer_spec.TransformerDecoderSpec(**_options(config, config.decoder))
    target = arrays["target_embedding.embedding"]
    encoder.embeddings[0].weight = arrays.get("source_embedding.embedding", target)
    decoder.embeddings.weight = target
    _stack(encoder, "encoder", config.encoder, config, arrays)
    _stack(decoder, "decoder", config.decoder, config, arrays)
    _head(decoder, config, arrays)
    spec = transformer_spec.TransformerSpec(encoder, decoder)
    spec.config.layer_norm_epsilon = config.norm_epsilon
    return spec


def _options(config: TransformerConfig, stack: StackConfig) -> dict[str, Any]:
    from ctranslate2.specs import common_spec

    return {
        "num_layers": stack.layers,
        "num_heads": config.heads(stack),
        # A norm after the last layer exists in its specification only if norms come first. In the
        # engine the two are independent, so ``pre_norm`` is set afterwards
        "pre_norm": True,
        "no_final_norm": not stack.final_norm,
        "activation": common_spec.Activation[_ACTIVATIONS[stack.activation]],
        "layernorm_embedding": stack.embedding_norm,
        "relative_attention_bias": stack.positions in RELATIVE,
        "ffn_glu": stack.gated,
        "rms_norm": config.norm is Norm.RMS,
        "head_dim": config.head_width_of(stack),
    }


def _stack(
    spec: Any, name: str, stack: StackConfig, config: TransformerConfig, arrays: Arrays
) -> None:
    spec.pre_norm = config.norm_placement is NormPlacement.PRE
    spec.scale_embeddings = config.embedding_scale is EmbeddingScale.SQRT_D_MODEL
    if stack.positions not in RELATIVE:
        spec.position_encodings.encodings = _position_table(name, stack, config, arrays)
    if stack.embedding_norm:
        _norm(spec.layernorm_embedding, f"{name}.embedding_norm", arrays)
    if stack.final_norm:
        _norm(spec.layer_norm, f"{name}.final_norm", arrays)
    scale = attention.score_scale(config, stack)
    for i, layer in enumerate(spec.layer):
        block = f"{name}.blocks.{i}"
        attentions = [layer.self_attention, *([layer.attention] if name == "decoder" else [])]
        for j, (part, here) in enumerate(
            zip(attentions, ("self_attention", "cross_attention"), strict=False)
        ):
            _attention(part, f"{block}.{here}", arrays, scale)
            _norm(part.layer_norm, f"{block}.residuals.{j}.norm", arrays)
        if stack.positions in RELATIVE:
            table = f"{name}.relative" if stack.positions is Positions.RELATIVE else block
            table += ".relative" if stack.positions is Positions.RELATIVE_PER_BLOCK else ""
            layer.self_attention.relative_attention_bias = arrays[f"{table}.embedding"]
            layer.self_attention.relative_attention_max_distance = np.int32(
                stack.relative_max_distance
            )
        _linear(layer.ffn.linear_0, arrays, f"{block}.feed_forward.up")
        if stack.gated:
            _linear(layer.ffn.linear_0_noact, arrays, f"{block}.feed_forward.gate")
        _linear(layer.ffn.linear_1, arrays, f"{block}.feed_forward.down")
        _norm(layer.ffn.layer_norm, f"{block}.residuals.{len(attentions)}.norm", arrays)


def _attention(spec: Any, name: str, arrays: Arrays, scale: float) -> None:
    query, key, value = (f"{name}.{part}" for part in ("query", "key", "value"))
    if len(spec.linear) == 2:
        _linear(spec.linear[0], arrays, query, key, value)
    else:
        _linear(spec.linear[0], arrays, query)
        _linear(spec.linear[1], arrays, key, value)
    _linear(spec.linear[-1], arrays, f"{name}.out")
    spec.queries_scale = np.float32(scale)


def _linear(spec: Any, arrays: Arrays, *names: str) -> None:
    """Set a linear layer, which computes the layers of these names side by side."""
    spec.weight = np.concatenate([arrays[f"{name}.kernel"].T for name in names])
    if f"{names[0]}.bias" in arrays:
        spec.bias = np.concatenate([arrays[f"{name}.bias"] for name in names])


def _norm(spec: Any, name: str, arrays: Arrays) -> None:
    spec.gamma = arrays[f"{name}.scale"]
    if hasattr(spec, "beta"):  # without one, its engine would compute a root mean square
        spec.beta = arrays.get(f"{name}.bias", np.zeros_like(spec.gamma))


def _head(spec: Any, config: TransformerConfig, arrays: Arrays) -> None:
    tied = config.tying.tied_output
    table = arrays["target_embedding.embedding"] if tied else arrays["output.kernel"].T
    spec.projection.weight = np.ascontiguousarray(table)
    biases = [
        arrays[name] for name in ("output.bias", "output_bias", "logits_bias") if name in arrays
    ]
    if biases:
        spec.projection.bias = np.sum(biases, axis=0)
    if config.logit_scale is LogitScale.INVERSE_SQRT_D_MODEL:
        spec.scale_outputs = np.float32(config.d_model**-0.5)


def _position_table(
    name: str, stack: StackConfig, config: TransformerConfig, arrays: Arrays
) -> np.ndarray:
    """Return the vector of every position that the model has (n, d), in float32.

    Without a table, its engine would compute one.
    """
    rows = [position_row(stack.position_index, i) for i in range(config.longest)]
    if stack.positions is Positions.NONE:
        return np.zeros((len(rows), config.d_model), np.float32)
    table = arrays.get(f"{name}.positions.table")
    if table is None:
        table = embeddings.sinusoids(
            config.max_length + stack.position_offset,
            config.d_model,
            stack.position_exponent,
            stack.sinusoids,
        )
    return np.asarray(table, np.float32)[np.array(rows) + stack.position_offset]
