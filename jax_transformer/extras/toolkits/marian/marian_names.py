"""The models of Marian itself: its options as a configuration, and its arrays under the names that
transformers' ``marian`` has for them.

Facts from ``src/models/transformer.h``, ``src/layers/generic.h``, ``src/layers/output.cpp`` and
``src/tensors/cpu/tensor_operators.cpp`` of marian-dev 1.12. Marian has no token for padding and
begins a translation with an embedding of zeros: here both are the id after its vocabulary, as in
transformers, whose row of zeros is added to the embeddings.

transformers' ``marian`` computes something else: sinusoids of other wavelengths (10000^(2i/d) for
Marian's 10000^(2i/(d-2))), and norms with 1e-5 for Marian's 1e-6.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jax_transformer.architectures import huggingface
from jax_transformer.config import TYINGS, StackConfig, TransformerConfig, enums
from jax_transformer.errors import InputError
from jax_transformer.extras.toolkits.toolkit import Options
from jax_transformer.storage import tensors
from jax_transformer.storage.tensors import LazyState, LazyTensor, Shape, TensorInfo
from jax_transformer.storage.untrusted import shown
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Rule, Table

LONGEST = 1024
"""The longest line in tokens: Marian computes positions without an end."""
_DROPOUT = 0.1
"""The rate in training, which no model names."""
_ACTIVATIONS = {
    "relu": enums.Activation.RELU,
    "swish": enums.Activation.SILU,
    "gelu": enums.Activation.GELU,
}
_READ = frozenset(
    """dim-vocabs dim-emb enc-depth dec-depth transformer-heads transformer-dim-ffn
    transformer-decoder-dim-ffn transformer-ffn-activation transformer-preprocess
    transformer-postprocess transformer-postprocess-emb transformer-postprocess-top
    tied-embeddings tied-embeddings-src tied-embeddings-all output-omit-bias""".split()
)
_FIXED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-ffn-depth": ("2",),
    "transformer-decoder-ffn-depth": ("0", "2"),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-tied-layers": ([],),
    "transformer-attention-mask": ("default",),
    "lemma-dependency": ("",),
    "input-types": ([], ["sequence", "sequence"]),
    **dict.fromkeys(
        """right-left transformer-no-projection transformer-train-position-embeddings
        transformer-train-positions transformer-disable-position-embeddings transformer-pool
        transformer-no-bias transformer-no-affine ulr""".split(),
        ("false",),
    ),
    **dict.fromkeys(("lemma-dim-emb", "factors-dim-emb", "ulr-dim-emb"), ("0",)),
}
"""Options that have one value in the models that are read; the first one is Marian's default."""
_WITHOUT_EFFECT = (
    *("version", "skip", "best-deep", "layer-normalization", "original-type", "factors-combine"),
    *("enc-type", "enc-cell", "dec-cell", "dim-rnn", "bert-", "char-", "comet-", "bleurt-"),
    *("input-reorder", "input-join-fields", "separator-symbol", "ulr-", "embedding-"),
    *("transformer-aan-", "transformer-dim-aan", "transformer-rnn-projection", "num-devices"),
    *("transformer-guided-alignment-layer", "transformer-depth-scaling", "transformer-alibi-"),
)
"""Beginnings of options of other models, and of training, as are those of dropout."""
_ATTENTIONS = {
    enums.Part.SELF: ("self", "self_attn"),
    enums.Part.CROSS: ("context", "encoder_attn"),
}


_OUTPUT_BIAS = "final_logits_bias"
_Row = tuple[Rule, Shape]
"""A rule from an array of Marian to transformers' tensor, and the shape of the latter."""


def configuration(options: Mapping[str, Any]) -> TransformerConfig:
    """Return what Marian computes. Raises InputError naming options that no model here has, and
    ConfigError for numbers that do not go together.
    """
    values = Options(options)
    values.check_fixed(_FIXED)
    others = (name for name in options if name.startswith(_WITHOUT_EFFECT))
    values.check_known([*_FIXED, *_READ, *others])
    sizes = options.get("dim-vocabs")
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise InputError(f"dim-vocabs={shown(sizes)}: a model of two vocabularies is supported")
    source, target = (Options({"dim-vocabs": size}).number("dim-vocabs") for size in sizes)
    pre_norm = "n" in _operations(values, "transformer-preprocess", ("", "n"))
    _operations(values, "transformer-postprocess", ("a",) if pre_norm else ("an",))
    d_ff = values.number("transformer-dim-ffn")
    shared: dict[str, Any] = {
        "activation": values.choice("transformer-ffn-activation", _ACTIVATIONS, "relu"),
        "positions": enums.Positions.SINUSOIDAL_STORED,
        "sinusoids": enums.Sinusoids.TENSOR2TENSOR,
        "embedding_norm": "n" in _operations(values, "transformer-postprocess-emb", ("", "n")),
        "final_norm": "n" in _operations(values, "transformer-postprocess-top", ("", "n")),
    }
    widths = {"encoder": d_ff, "decoder": values.number("transformer-decoder-dim-ffn", 0) or d_ff}
    stacks = {
        name: huggingface.stack(
            name, values.number(f"{name[:3]}-depth"), d_ff=widths[name], **shared
        )
        for name in huggingface.STACKS
    }
    tied_all = values.flag("tied-embeddings-all", False)
    dropped = "d" in options.get("transformer-postprocess-emb", "")
    one_embedding = tied_all or values.flag("tied-embeddings-src", False)
    tied_output = tied_all or values.flag("tied-embeddings", False)
    if one_embedding and source != target:
        raise InputError(f"dim-vocabs={source}, {target}: one embedding has one vocabulary")
    return TransformerConfig(
        source_vocab_size=source + 1,
        target_vocab_size=target + 1,
        source_pad_id=source,
        target_pad_id=target,
        bos_id=target,
        eos_id=0,
        d_model=values.number("dim-emb"),
        num_heads=values.number("transformer-heads"),
        d_ff=d_ff,
        max_length=LONGEST,
        norm_placement=enums.NormPlacement.PRE if pre_norm else enums.NormPlacement.POST,
        norm_epsilon=1e-6,
        output_bias=False,
        logits_bias=True,
        padding_trained=False,
        padding_frozen=True,
        embedding_scale=enums.EmbeddingScale.SQRT_D_MODEL,
        tying=TYINGS[one_embedding, tied_output],
        dropout=_DROPOUT,
        embedding_dropout=_DROPOUT if dropped else 0.0,
        architecture="marian",
        encoder=stacks["encoder"],
        decoder=stacks["decoder"],
    )


def as_transformers_computes(config: TransformerConfig) -> TransformerConfig:
    """Return the configuration with the sinusoids and the norms of transformers' ``marian``."""
    stacks = {
        name: replace(getattr(config, name), sinusoids=enums.Sinusoids.HALVES)
        for name in huggingface.STACKS
    }
    return replace(config, norm_epsilon=1e-5, **stacks)


def _operations(options: Options, name: str, known: tuple[str, ...]) -> str:
    """Return the operations without dropout: n is a norm, a the residual connection."""
    value = options.values.get(name, "")
    if not isinstance(value, str) or value.replace("d", "") not in known:
        operations = " or ".join(repr(one) for one in known)
        raise InputError(f"{name}={shown(value)}: supported is {operations}, with d or without")
    return value.replace("d", "")


# Arrays


def state(arrays: LazyState, config: TransformerConfig) -> dict[str, LazyTensor]:
    """Return the tensors under transformers' names. Raises InputError naming all wrong arrays."""
    layers = config.encoder.layers + config.decoder.layers
    if layers > len(arrays):
        raise InputError(f"enc-depth and dec-depth are {layers:,}, of {len(arrays):,} arrays")
    words = list(_words(config, "decoder_ff_logit_out_b" in arrays))
    rows = [*words, *_stack("encoder", config), *_stack("decoder", config)]
    table: Table = [rule for rule, _ in rows]
    shapes = {rule.flax[0]: shape for rule, shape in rows}
    infos = {name: array.info for name, array in arrays.items()}
    tensors.refuse(tensors.problems(infos, rules.torch_shapes(table, shapes)))
    named = rules.to_flax_lazily(table, arrays, shapes)
    for name in (rule.flax[0] for rule, _ in words):
        named[name] = _padded(named[name], axis=int(name == _OUTPUT_BIAS))
    return named


def _padded(tensor: LazyTensor, axis: int) -> LazyTensor:
    """Return a matrix with zeros for padding after the words along an axis."""
    shape, more = list(tensor.shape), [(0, 0), (0, 0)]
    shape[axis], more[axis] = shape[axis] + 1, (0, 1)
    return LazyTensor(TensorInfo(tuple(shape), tensor.dtype), lambda: np.pad(tensor.read(), more))


def _words(config: TransformerConfig, output_bias: bool) -> Iterator[_Row]:
    """Yield the arrays with a row or number for each word."""
    d, source, target = config.d_model, config.source_pad_id, config.target_pad_id
    if config.tying.one_embedding:
        yield Rule("Wemb", "model.shared.weight"), (target, d)
    else:
        for side, size in (("encoder", source), ("decoder", target)):
            yield Rule(f"{side}_Wemb", f"model.{side}.embed_tokens.weight"), (size, d)
    if not config.tying.tied_output:
        yield Rule("decoder_ff_logit_out_Wt", "lm_head.weight"), (target, d)
    if output_bias:
        yield Rule("decoder_ff_logit_out_b", _OUTPUT_BIAS), (1, target)


def _stack(side: str, config: TransformerConfig) -> Iterator[_Row]:
    stack: StackConfig = getattr(config, side)
    d, width = config.d_model, stack.d_ff or config.d_ff
    pre = "_pre" if config.norm_placement is enums.NormPlacement.PRE else ""
    if stack.embedding_norm:
        yield from _norm(f"{side}_emb", "_pre", f"model.{side}.layernorm_embedding", d)
    for i in range(stack.layers):
        stored, name = f"{side}_l{i + 1}", f"model.{side}.layers.{i}"
        for part in stack.parts:
            if part is enums.Part.FFN:
                for number, shape in (("1", (d, width)), ("2", (width, d))):
                    yield from _linear(f"{stored}_ffn", number, shape, f"{name}.fc{number}")
                yield from _norm(f"{stored}_ffn_ffn", pre, f"{name}.final_layer_norm", d)
                continue
            theirs, ours = _ATTENTIONS[part]
            for letter in "qkvo":
                linear = f"{name}.{ours}.{'out' if letter == 'o' else letter}_proj"
                yield from _linear(f"{stored}_{theirs}", letter, (d, d), linear)
            yield from _norm(f"{stored}_{theirs}_Wo", pre, f"{name}.{ours}_layer_norm", d)
    if stack.final_norm:
        yield from _norm(f"{side}_top", "", f"model.{side}.layer_norm", d)


def _linear(stored: str, suffix: str, shape: Shape, name: str) -> Iterator[_Row]:
    yield Rule(f"{stored}_W{suffix}", f"{name}.weight", "i o -> o i"), shape[::-1]
    yield Rule(f"{stored}_b{suffix}", f"{name}.bias", "1 o -> o"), shape[1:]


def _norm(stored: str, suffix: str, name: str, width: int) -> Iterator[_Row]:
    for theirs, ours in (("scale", "weight"), ("bias", "bias")):
        yield Rule(f"{stored}_ln_{theirs}{suffix}", f"{name}.{ours}", "1 d -> d"), (width,)
