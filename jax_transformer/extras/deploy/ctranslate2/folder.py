"""CTranslate2's model folder: ``model.bin``, ``config.json`` and a vocabulary or two, written and
checked.

Its matrices are (outputs, inputs), as in PyTorch; query, key and value of self-attention are one.
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer import transformer
from jax_transformer.architectures.tokenizer_recipe import TargetStart
from jax_transformer.config import StackConfig, TransformerConfig, enums
from jax_transformer.config.fields import position_row
from jax_transformer.convert import conversion
from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import DifferentError
from jax_transformer.extras.deploy.ctranslate2 import checks
from jax_transformer.extras.deploy.ctranslate2.checks import RELATIVE, Quantization
from jax_transformer.nn import attention, embeddings

Arrays = Mapping[str, np.ndarray]

_ACTIVATIONS = {
    enums.Activation.RELU: "RELU",
    enums.Activation.GELU: "GELU",
    enums.Activation.GELU_TANH: "GELUTanh",
    enums.Activation.SILU: "SWISH",
}
_LONGEST = 7
"""Tokens of the longest line of the self-check."""
_BOUND = 1e-3
"""Relative to the largest number, for float32. Correct folders differ by about 1e-6."""


@dataclass(frozen=True)
class Vocabularies:
    """Both sides' tokens by id, all different, and ``config.json``'s settings that name some."""

    source: list[str]
    target: list[str]
    settings: Mapping[str, Any]


def vocabularies(
    config: TransformerConfig,
    tokenizer: Tokenizer | TokenizerPair | None,
    *,
    explicit: bool = False,
) -> Vocabularies:
    """Return the vocabularies of a model.

    Without a tokenizer, a token is its id in decimal. Our own tokenizers put nothing around a line
    but its end, which the engine then adds itself (``add_source_eos``). Tokenizers of
    Hugging Face folders add special tokens themselves, as with CTranslate2's own converters.
    If ``explicit``, the decoder's start is given with each line, and so it is if a translation
    starts with its language.
    """
    sides = (None, None) if tokenizer is None else (tokenizer.source, tokenizer.target)
    source, target = (
        _texts(None if side is None else side.tokens(), size)
        for side, size in zip(
            sides, (config.source_vocab_size, config.target_vocab_size), strict=True
        )
    )
    bos, eos = target[config.bos_id], target[config.eos_id]
    unknown, ends = None, False
    if isinstance(tokenizer, HuggingFaceTokenizer):
        settings = tokenizer.files.settings
        unknown = settings.special_tokens.get("unk_token")
        languages = settings.recipe.languages if tokenizer.languages else None
        if languages is not None and languages.target_start is TargetStart.DECODER_START:
            explicit = True
    elif tokenizer is not None:
        ends = [source[i] for i in tokenizer.suffix] == [eos]
    # Its engine appends an unknown token to a vocabulary that has none, and knows one for both
    known = unknown is not None and unknown.content in source
    config_json = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unknown.content if unknown is not None and known else eos,
        "decoder_start_token": None if explicit else bos,
        "add_source_bos": False,
        "add_source_eos": ends,
    }
    return Vocabularies(source, target, config_json)


def _texts(tokens: Mapping[int, str] | None, size: int) -> list[str]:
    """Return a text for each id: a new one without a token, or with the text of another."""
    texts: dict[str, None] = {}
    for i in range(size):
        text = str(i) if tokens is None else tokens.get(i, f"<unused{i}>")
        texts[f"{text}<{i}>" if text in texts else text] = None
    return list(texts)


def write(
    folder: Path,
    config: TransformerConfig,
    arrays: Arrays,
    vocabularies: Vocabularies,
    quantization: Quantization,
) -> None:
    """Create ``folder`` with the model, which is in memory about twice meanwhile.

    Raises ConfigError for a configuration that cannot be expressed, before anything is written.
    """
    checks.check(config)
    model: Any = _spec(config, arrays)
    model.register_source_vocabulary(vocabularies.source)
    model.register_target_vocabulary(vocabularies.target)
    for name, value in vocabularies.settings.items():
        setattr(model.config, name, value)
    model.validate()
    model.optimize(None if quantization is Quantization.FLOAT32 else quantization.value)
    folder.mkdir()
    model.save(str(folder))


# The specification


def _spec(config: TransformerConfig, arrays: Arrays) -> Any:
    """Return the ``ctranslate2.specs.TransformerSpec`` of a model, in float32."""
    from ctranslate2.specs import transformer_spec

    arrays = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    encoder = transformer_spec.TransformerEncoderSpec(**_options(config, config.encoder))
    decoder = transformer_spec.TransformerDecoderSpec(**_options(config, config.decoder))
    target = arrays["target_embedding.embedding"]
    encoder.embeddings[0].weight = arrays.get("source_embedding.embedding", target)
    decoder.embeddings.weight = target
    _stack(encoder, "encoder", config.encoder, config, arrays)
    _stack(decoder, "decoder", config.decoder, config, arrays)
    table = target if config.tying.tied_output else arrays["output.kernel"].T
    decoder.projection.weight = np.ascontiguousarray(table)
    names = ("output.bias", "output_bias", "logits_bias")
    if biases := [arrays[name] for name in names if name in arrays]:
        decoder.projection.bias = np.sum(biases, axis=0)
    if config.logit_scale is enums.LogitScale.INVERSE_SQRT_D_MODEL:
        decoder.scale_outputs = np.float32(config.d_model**-0.5)
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
        "rms_norm": config.norm is enums.Norm.RMS,
        "head_dim": config.head_width_of(stack),
    }


def _stack(
    spec: Any, name: str, stack: StackConfig, config: TransformerConfig, arrays: Arrays
) -> None:
    spec.pre_norm = config.norm_placement is enums.NormPlacement.PRE
    spec.scale_embeddings = config.embedding_scale is enums.EmbeddingScale.SQRT_D_MODEL
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
        for j, part in enumerate(attentions):
            here = ("self_attention", "cross_attention")[j]
            into = [f"{block}.{here}.{each}" for each in ("query", "key", "value")]
            joined = [into] if len(part.linear) == 2 else [into[:1], into[1:]]
            for linear, names in zip(part.linear, [*joined, [f"{block}.{here}.out"]], strict=True):
                _linear(linear, arrays, *names)
            part.queries_scale = np.float32(scale)
            _norm(part.layer_norm, f"{block}.residuals.{j}.norm", arrays)
        if stack.positions in RELATIVE:
            owner = name if stack.positions is enums.Positions.RELATIVE else block
            layer.self_attention.relative_attention_bias = arrays[f"{owner}.relative.embedding"]
            layer.self_attention.relative_attention_max_distance = np.int32(
                stack.relative_max_distance
            )
        _linear(layer.ffn.linear_0, arrays, f"{block}.feed_forward.up")
        if stack.gated:
            _linear(layer.ffn.linear_0_noact, arrays, f"{block}.feed_forward.gate")
        _linear(layer.ffn.linear_1, arrays, f"{block}.feed_forward.down")
        _norm(layer.ffn.layer_norm, f"{block}.residuals.{len(attentions)}.norm", arrays)


def _linear(spec: Any, arrays: Arrays, *names: str) -> None:
    """Set a linear layer, which computes the layers of these names side by side."""
    spec.weight = np.concatenate([arrays[f"{name}.kernel"].T for name in names])
    if f"{names[0]}.bias" in arrays:
        spec.bias = np.concatenate([arrays[f"{name}.bias"] for name in names])


def _norm(spec: Any, name: str, arrays: Arrays) -> None:
    spec.gamma = arrays[f"{name}.scale"]
    if hasattr(spec, "beta"):  # without one, its engine would compute a root mean square
        spec.beta = arrays.get(f"{name}.bias", np.zeros_like(spec.gamma))


def _position_table(
    name: str, stack: StackConfig, config: TransformerConfig, arrays: Arrays
) -> np.ndarray:
    """Return the vectors of all positions (n, d), in float32; the engine's own would be others."""
    rows = [position_row(stack.position_index, i) for i in range(config.longest)]
    if stack.positions is enums.Positions.NONE:
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


# The self-check


def check(
    folder: Path,
    config: TransformerConfig,
    arrays: Arrays,
    vocabularies: Vocabularies,
    quantization: Quantization,
) -> float:
    """Return the largest difference of the log-probabilities of random targets.

    Raises DifferentError if it is not finite, or if rounding in float32 does not explain that of a
    folder in float32.
    """
    import ctranslate2

    source, target = conversion.random_batch(config, 0, min(_LONGEST, config.longest))
    target = target[:, :-1]  # the decoder reads the start token as well
    settings = vocabularies.settings
    ends = settings["add_source_eos"]  # the engine appends it to each line
    if ends:
        last = (source != config.source_pad_id).sum(axis=1) - 1
        source[np.arange(len(source)), last] = vocabularies.source.index(settings["eos_token"])
    ours = np.concatenate(_ours(config, arrays, source, target))
    start = [] if settings["decoder_start_token"] is not None else [config.bos_id]
    engine = ctranslate2.Translator(str(folder), device="cpu", intra_threads=1)
    sources = [row[:-1] if ends else row for row in _rows(source, config.source_pad_id)]
    targets = [[*start, *row] for row in _rows(target, config.target_pad_id)]
    scored = engine.score_batch(
        [[vocabularies.source[i] for i in row] for row in sources],
        [[vocabularies.target[i] for i in row] for row in targets],
        max_input_length=0,
    )
    theirs = np.concatenate([result.log_probs for result in scored])
    error = float(np.abs(ours - theirs).max())
    bound = _BOUND * max(1.0, float(np.abs(ours).max()))
    if quantization is not Quantization.FLOAT32:
        bound = sys.float_info.max
    if not error <= bound:
        raise DifferentError(
            f"self-check: CTranslate2's log-probabilities differ by {error:.2g}; "
            "nothing was written"
        )
    return error


def _rows(ids: np.ndarray, pad_id: int) -> list[list[int]]:
    """Return the ids of each row without padding."""
    return [row[row != pad_id].tolist() for row in ids]


def _ours(
    config: TransformerConfig, arrays: Arrays, source: np.ndarray, target: np.ndarray
) -> list[np.ndarray]:
    """Return the log-probabilities of each target and of the end after it, in float32."""
    config = dataclasses.replace(config.portable, compute_dtype=None)
    model = transformer.unflatten(
        config, {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
    )
    inputs = np.insert(target, 0, config.bos_id, axis=1)

    def log_probs(model: transformer.Transformer) -> jax.Array:
        logits = model(source, inputs)
        assert isinstance(logits, jax.Array), "without return_attention"
        return jax.nn.log_softmax(logits)

    computed = np.asarray(jax.jit(log_probs)(model))
    return [
        row_probs[np.arange(len(row) + 1), [*row, config.eos_id]]
        for row_probs, row in zip(computed, _rows(target, config.target_pad_id), strict=True)
    ]
