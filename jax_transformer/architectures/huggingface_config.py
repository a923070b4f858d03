"""``config.json`` of a Hugging Face folder: to a configuration of the one model, and back.

Every attribute is read, is without effect on the numbers for a reason given here or in the family's
file, or must have the one value that the family computes with. Facts from the configuration classes
of transformers 5.23, and from transformers 2 to 4 for attributes that it no longer reads.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from jax_transformer.architectures import huggingface
from jax_transformer.architectures.huggingface import AreEqual, HuggingFaceFamily
from jax_transformer.config import Activation, TransformerConfig
from jax_transformer.errors import ConfigError, InputError, nearest

_REASONS = {
    "acts only in training with transformers: layers are dropped, or fresh weights are drawn": (
        "encoder_layerdrop decoder_layerdrop layerdrop init_std initializer_factor"
        " initializer_range"
    ),
    "belongs to a head for classification or question answering": (
        "classifier_dropout classif_dropout id2label label2id num_labels _num_labels problem_type"
        " finetuning_task"
    ),
    "says what a call of transformers returns or keeps, not what is computed": (
        "use_cache output_attentions output_hidden_states return_dict torchscript output_past"
        " tie_last_hidden_states gradient_checkpointing chunk_size_feed_forward"
        " _attn_implementation attn_implementation _attn_implementation_autoset"
        " _experts_implementation _output_attentions use_bfloat16"
    ),
    "describes the file, not the model": (
        "_name_or_path name_or_path _commit_hash transformers_version dtype torch_dtype"
        " task_specific_params tokenizer_class model_max_length language finetuned_from"
    ),
    "is not read by any class of transformers now": (
        "add_bias_logits save_step encoder_no_repeat_ngram cross_attention_hidden_size"
    ),
    "names a token, which the tokenizer knows itself": (
        "sep_token_id cls_token_id mask_token_id unk_token_id"
    ),
}
IGNORED: dict[str, str] = {
    name: reason for reason, names in _REASONS.items() for name in names.split()
}
"""Attributes of every family that have no effect on what a model computes, with the reason."""

GENERATION = frozenset(
    """
    max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids force_words_ids
    num_return_sequences output_scores output_logits return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values renormalize_logits exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens sequence_bias epsilon_cutoff eta_cutoff
    encoder_repetition_penalty num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_lookbehind target_lookbehind penalty_alpha prefix
    force_bos_token_to_be_generated
    """.split()
)
"""Defaults of decoding that older files keep next to the model: read by ``generate.huggingface``.
"""

FIXED: dict[str, Any] = {
    "is_encoder_decoder": True,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "quantization_config": None,
    "per_layer_config": None,
    "forced_decoder_ids": None,
    "auto_map": None,  # Python code that comes with the file
}
"""Attributes that have one value in every family; null in a file is always accepted."""

_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
_ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "swish": Activation.SILU,
    "silu": Activation.SILU,
}


def from_config(
    data: Mapping[str, Any], *, names: Collection[str] | None = None, same: AreEqual | None = None
) -> TransformerConfig:
    """Return the configuration of the model that a ``config.json`` describes.

    An attribute that it does not name has its class's default. The file's tensors decide whether
    the output layer is tied to the embeddings, as transformers 5 decides it: what is missing is
    tied, and what is equal if ``tie_word_embeddings`` is true.

    ``names`` are the file's tensors; without them ``tie_word_embeddings`` decides. ``same`` returns
    True if two tensors are equal; without it the attribute decides about a file that holds both.
    Raises InputError that names every attribute which is unknown, mistyped, or has a value that no
    model here has.
    """
    model_type = data.get("model_type")
    family = huggingface.find_family(model_type)
    if family is None:
        known = list(huggingface.families())
        close = nearest(model_type, known) if isinstance(model_type, str) else ""
        raise InputError(
            f"config.json: model_type={model_type!r} is none of the families"
            f" {', '.join(known)}{close}"
        )
    wrong = list(problems(family, data))
    if wrong:
        raise InputError(f"config.json: {'; '.join(wrong)}")
    values = family.complete(read(family, data))
    tied = asked = values["tie_word_embeddings"]
    if names is not None and (asked or family.tensors_decide_tie):
        embedding = family.output_embedding(values)
        if family.output_tensor not in names or embedding not in names:
            tied = True
        elif same is not None:
            tied = same(family.output_tensor, embedding)
    try:
        return family.to_transformer_config(values | {"tie_word_embeddings": tied})
    except ConfigError as error:
        raise InputError(f"config.json: {error}") from None


def to_config(
    config: TransformerConfig, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the ``config.json`` with which transformers computes as a model of ``config``.

    The inverse of :func:`from_config`. Left out are fields that act only in training here and have
    no attribute there (dropouts other than the family's, masks, initialisation, dtypes), and the
    longest sequence of families whose positions have no end. If the model came from an
    ``original``, that is returned with what has changed since. Raises ConfigError that names the
    fields which no model of the family has so.
    """
    family = huggingface.family_of(config)
    attributes = {
        "model_type": family.name,
        "architectures": [family.model_class],
        **_attributes(family, config),
        "is_encoder_decoder": True,
        "use_cache": True,
    }
    wrong = [
        f"{name}={ours}: {family.name} of transformers has {theirs}"
        for name, ours, theirs in differences(config, from_config(attributes))
    ]
    if wrong:
        raise ConfigError(f"this model is none of the family: {'; '.join(wrong)}")
    if original is None:
        return attributes
    before = from_config(original)
    if family.tensors_decide_tie:
        before = replace(before, tying=config.tying)  # not the attribute, but the tensors decide
    old, new = _attributes(family, before), _attributes(family, config)
    changed = {name: new[name] for name in sorted(new) if new[name] != old.get(name)}
    attributes = dict(original)
    for name in original:
        attributes[name] = changed.get(family.aliases.get(name, name), original[name])
    return attributes | changed


def _attributes(family: HuggingFaceFamily, config: TransformerConfig) -> dict[str, Any]:
    """Return the attributes that are read, as they must be for ``config``."""
    common = {
        "vocab_size": config.source_vocab_size,
        "d_model": config.d_model,
        "pad_token_id": config.source_pad_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.bos_id,
        "tie_word_embeddings": config.tying.tied_output,
    }
    read = {name: value for name, value in common.items() if name in family.defaults}
    return read | family.to_attributes(config)


def differences(
    config: TransformerConfig, read_back: TransformerConfig
) -> list[tuple[str, Any, Any]]:
    """Return the name and both values of each field that differs, but those that the family of
    ``config`` does not write."""
    ours, theirs = flat(config.portable), flat(read_back)
    family = huggingface.family_of(config)
    return [
        (name, ours[name], theirs[name])
        for name in ours
        if name.rpartition(".")[2] not in family.not_written and ours[name] != theirs[name]
    ]


def flat(config: TransformerConfig) -> dict[str, Any]:
    """Return every field by dotted name; a stack's number taken from the model is the model's."""
    fields = dict(vars(config))
    for name in ("encoder", "decoder", "num_heads", "d_ff", "head_dim"):
        del fields[name]
    if config.attention_bias is None:
        fields["attention_bias"] = config.bias
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        own = vars(stack) | {
            "num_heads": config.heads(stack),
            "d_ff": stack.d_ff or config.d_ff,
            "head_dim": config.head_width_of(stack),
        }
        fields |= {f"{name}.{field}": value for field, value in own.items()}
    return fields


# Attributes


def read(family: HuggingFaceFamily, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a valid file that decide the model, with defaults filled in."""
    own = {family.aliases.get(name, name): value for name, value in data.items()}
    known = {**family.defaults, **family.derived}
    return {**family.defaults, **{name: own[name] for name in own if name in known}}


def problems(family: HuggingFaceFamily, data: Mapping[str, Any]) -> Iterator[str]:
    """List everything that is wrong with the attributes of a file."""
    readable, fixed = {**family.defaults, **family.derived}, {**FIXED, **family.fixed}
    without_effect = {*IGNORED, *GENERATION, *family.ignored, "model_type", "architectures"}
    for name, value in data.items():
        own = family.aliases.get(name, name)
        if own in readable:
            if not _fits(own, value, readable[own]):
                yield f"{name}={value!r} is not {_kind(own, readable[own])}"
            elif own != name and data.get(own, value) != value:
                both = f"{name}={value!r} and {own}={data[own]!r}"
                yield f"{both} are two names of one attribute, and differ"
        elif name in fixed and name not in family.ignored:
            if value is not None and value != fixed[name]:
                that = f"a model of the family {family.name} with that"
                yield f"{name}={value!r}: {that} is not supported, only {fixed[name]!r} is"
        elif name not in without_effect:
            known = sorted({*readable, *fixed, *family.aliases, *without_effect})
            yield f"unknown attribute {name!r}{nearest(name, known)}: its effect is not known"
    for name in data.get("architectures") or []:
        if str(name).removeprefix("TF").removeprefix("Flax") not in family.classes:
            yield f"architectures has {name!r}, which is not one of {', '.join(family.classes)}"


def _fits(name: str, value: Any, default: Any) -> bool:
    if value is None:
        return default is None or name in _TOKENS
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    return isinstance(value, str if isinstance(default, str) else int)


def _kind(name: str, default: Any) -> str:
    if name in _TOKENS:
        return "the id of one token"
    return {bool: "true or false", float: "a number", str: "a name"}.get(
        type(default), "a whole number"
    )


def special_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the special tokens.

    Decoding begins with ``bos_token_id`` if ``decoder_start_token_id`` is null, as in transformers'
    generate(). Raises ConfigError that names every token which is missing.
    """
    ids = {name: values[name] for name in ("pad_token_id", "eos_token_id")}
    start = values["decoder_start_token_id"]
    ids["decoder_start_token_id"] = values["bos_token_id"] if start is None else start
    if missing := " and ".join(name for name, value in ids.items() if value is None):
        raise ConfigError(f"{missing} must be given: the model's batches are made with it")
    pad, end, start = ids.values()
    return {"source_pad_id": pad, "target_pad_id": pad, "bos_id": start, "eos_id": end}


def activation_named(name: str) -> Activation:
    """Return the activation of that name. Raises ConfigError for an unknown one."""
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def activation_name(value: Activation) -> str:
    """Return the first name that transformers has for an activation."""
    return next(name for name, other in _ACTIVATIONS.items() if other is value)
