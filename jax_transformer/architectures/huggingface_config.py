"""``config.json`` of a Hugging Face folder: to a configuration of the one model, and back."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from jax_transformer.architectures import attributes, families
from jax_transformer.architectures.attributes import T5_LIKE
from jax_transformer.config import (
    Activation,
    EmbeddingScale,
    Layout,
    LogitScale,
    Positions,
    TransformerConfig,
    Tying,
)
from jax_transformer.errors import ConfigError, InputError, nearest

Same = Callable[[str, str], bool]


def is_huggingface(data: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is transformers': it names a model_type, and ours does not."""
    return "model_type" in data


def from_config(
    data: Mapping[str, Any], *, names: Collection[str] | None = None, same: Same | None = None
) -> TransformerConfig:
    """The configuration of the model that a ``config.json`` describes; an attribute that it does not name has its class's default.

    ``names`` are those of the file's tensors. They decide whether the output layer is tied to the embeddings as transformers 5 decides it,
    which ties only what is missing, or equal where it is told to tie: ``same(one, other)`` tells whether two of the tensors are equal, and
    where it is not given, ``tie_word_embeddings`` is believed. Raises InputError that names every attribute which is unknown, mistyped, or has
    a value that no model here computes with.
    """
    layout = _layout(data)
    wrong = list(attributes.problems(layout, data))
    if wrong:
        raise InputError(f"config.json: {'; '.join(wrong)}")
    values = {"model_type": layout.value} | attributes.read(layout, data)
    if layout is Layout.T5:
        values.setdefault("scale_decoder_outputs", values["tie_word_embeddings"])
    try:
        return families.from_attributes(
            values | {"tie_word_embeddings": _tied(layout, values, names, same)}
        )
    except ConfigError as error:
        raise InputError(f"config.json: {error}") from None


def _layout(data: Mapping[str, Any]) -> Layout:
    known = [layout.value for layout in attributes.LAYOUTS]
    found = data.get("model_type")
    if found not in known:
        close = nearest(found, known) if isinstance(found, str) else ""
        raise InputError(
            f"config.json: model_type={found!r} is none of the families {', '.join(known)}{close}"
        )
    return Layout(found)


def _tied(
    layout: Layout, values: Mapping[str, Any], names: Collection[str] | None, same: Same | None
) -> bool:
    """Whether the output layer is the embedding. T5, mT5 and UMT5 are always tied where the file allows, the others where told to."""
    told = values["tie_word_embeddings"]
    if names is None or not (told or layout in T5_LIKE):
        return told
    if layout in T5_LIKE:
        embedding = "shared.weight"
    else:
        embedding = (
            "model.shared.weight"
            if values.get("share_encoder_decoder_embeddings", True)
            else "model.decoder.embed_tokens.weight"
        )
    if "lm_head.weight" not in names or embedding not in names:
        return True
    return told if same is None else same("lm_head.weight", embedding)


def to_config(
    config: TransformerConfig, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The ``config.json`` that makes transformers compute what a model of ``config`` computes; :func:`from_config` is its inverse.

    ``carried`` is the ``config.json`` that the model came from: it comes back as it was, but for what has changed since. What acts only in
    training here and has no attribute there (dropouts other than the family's, masks, initialisation, dtypes) is left out. So is the longest
    sequence of T5, mT5 and UMT5, which have no bound. Raises ConfigError that names the fields which no model of the family has so.
    """
    if config.layout not in attributes.LAYOUTS:
        known = ", ".join(layout.value for layout in attributes.LAYOUTS)
        raise ConfigError(
            f"layout {config.layout.value!r} is no family of Hugging Face's: a model can be exported whose layout is one of {known}"
        )
    written = {
        "model_type": config.layout.value,
        "architectures": [attributes.classes(config.layout)[0]],
    } | _attributes(config)
    written |= {"is_encoder_decoder": True, "use_cache": True}
    _check_said(config, from_config(written))
    if carried is None:
        return written
    before = from_config(carried)
    if config.layout in T5_LIKE:
        before = replace(
            before, tying=config.tying
        )  # which the file's tensors say, not the attribute
    old, new = _attributes(before), _attributes(config)
    aliases = attributes.OTHER_NAMES[config.layout]
    changed = {name for name in new if new[name] != old.get(name)}
    kept = {
        name: new[own] if (own := aliases.get(name, name)) in changed else value
        for name, value in carried.items()
    }
    return kept | {name: new[name] for name in sorted(changed)}


def _attributes(config: TransformerConfig) -> dict[str, Any]:
    """Those that are read, as they must be for ``config``."""
    common = {
        "vocab_size": config.source_vocab_size,
        "d_model": config.d_model,
        "pad_token_id": config.source_pad_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.bos_id,
        "tie_word_embeddings": config.tying in (Tying.ALL, Tying.OUTPUT),
    }
    return common | (_t5(config) if config.layout in T5_LIKE else _bart(config))


def _bart(config: TransformerConfig) -> dict[str, Any]:
    stacks: dict[str, Any] = {}
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        stacks[f"{name}_layers"] = stack.layers
        stacks[f"{name}_attention_heads"] = config.heads(stack)
        stacks[f"{name}_ffn_dim"] = stack.d_ff or config.d_ff
    own = {
        "max_position_embeddings": config.max_length,
        "activation_function": _activation(config.encoder.activation),
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "scale_embedding": config.embedding_scale is EmbeddingScale.SQRT_D_MODEL,
    }
    if config.layout is Layout.MARIAN:
        own["decoder_vocab_size"] = config.target_vocab_size
        own["share_encoder_decoder_embeddings"] = config.tying in (Tying.ALL, Tying.EMBEDDINGS)
    return stacks | own


def _t5(config: TransformerConfig) -> dict[str, Any]:
    encoder, activation = config.encoder, config.encoder.activation
    # transformers reads gated GELU as the approximation, and GELU alone as exact
    name = (
        "gelu" if encoder.gated and activation is Activation.GELU_TANH else _activation(activation)
    )
    own = {
        "d_kv": config.head_width,
        "d_ff": encoder.d_ff or config.d_ff,
        "num_layers": encoder.layers,
        "num_decoder_layers": config.decoder.layers,
        "num_heads": config.heads(encoder),
        "relative_attention_num_buckets": encoder.relative_buckets,
        "relative_attention_max_distance": encoder.relative_max_distance,
        "dropout_rate": config.dropout,
        "layer_norm_epsilon": config.norm_epsilon,
        "feed_forward_proj": f"gated-{name}" if encoder.gated else name,
        "dense_act_fn": _activation(activation),
        "is_gated_act": encoder.gated,
    }
    if config.layout is Layout.T5:
        own["scale_decoder_outputs"] = config.logit_scale is LogitScale.INVERSE_SQRT_D_MODEL
    return own


def _activation(activation: Activation) -> str:
    return next(name for name, value in families.ACTIVATIONS.items() if value is activation)


# What acts in training alone, or says how numbers are held; and T5's bound
_UNSAID = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "embedding_dropout",
    "dropout_masks",
    "init",
    "compute_dtype",
)


def _check_said(config: TransformerConfig, read: TransformerConfig) -> None:
    """Raises ConfigError that names the fields in which what would be read differs from what is written."""
    unsaid = set(_UNSAID)
    if config.encoder.positions in (Positions.RELATIVE, Positions.RELATIVE_PER_BLOCK):
        unsaid.add("max_length")
    ours, theirs = (families.flat(value) for value in (config, read))
    wrong = [
        name
        for name in ours
        if name.rpartition(".")[2] not in unsaid and ours[name] != theirs[name]
    ]
    if wrong:
        known = "; ".join(
            f"{name}={ours[name]}: {config.layout.value} of transformers has {theirs[name]}"
            for name in wrong
        )
        raise ConfigError(f"this model is none of the family: {known}")
