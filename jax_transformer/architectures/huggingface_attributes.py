"""The attributes of ``config.json``: those that every family shares, and the check of a file's.

Every attribute is read, is without effect on the numbers for a reason given here or in the family's
file, or must have the one value that the family computes with. Facts from the configuration classes
of transformers 5.23, and from those of transformers 2 to 4 for attributes that it no longer reads.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jax_transformer.errors import nearest

if TYPE_CHECKING:
    from jax_transformer.architectures.huggingface import HuggingFaceFamily

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


def read(family: "HuggingFaceFamily", data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that decide the model, with defaults filled in.

    Args:
        family: the family of the file.
        data: the file's attributes, for which :func:`problems` lists nothing.
    """
    known = {**family.defaults, **family.derived}
    named = {family.aliases.get(name, name): value for name, value in data.items()}
    return dict(family.defaults) | {name: value for name, value in named.items() if name in known}


def problems(family: "HuggingFaceFamily", data: Mapping[str, Any]) -> Iterator[str]:
    """List everything that is wrong with the attributes of a file."""
    readable, fixed = {**family.defaults, **family.derived}, {**FIXED, **family.fixed}
    without_effect = {*IGNORED, *GENERATION, *family.ignored, "model_type", "architectures"}
    for name, value in data.items():
        own = family.aliases.get(name, name)
        if own in readable:
            if not _fits(own, value, readable[own]):
                yield f"{name}={value!r} is not {_kind(own, readable[own])}"
            elif own != name and data.get(own, value) != value:
                yield (
                    f"{name}={value!r} and {own}={data[own]!r} are two names of one attribute, and"
                    " differ"
                )
        elif name in fixed:
            if value is not None and value != fixed[name]:
                yield (
                    f"{name}={value!r}: a model of the family {family.model_type} with that is not"
                    f" supported, only {fixed[name]!r} is"
                )
        elif name not in without_effect:
            known = sorted({*readable, *fixed, *family.aliases, *without_effect})
            yield f"unknown attribute {name!r}{nearest(name, known)}: its effect is not known"
    for name in data.get("architectures") or []:
        if str(name).removeprefix("TF").removeprefix("Flax") not in family.classes:
            yield f"architectures has {name!r}, which is not one of {', '.join(family.classes)}"


def _fits(name: str, value: Any, default: Any) -> bool:
    if value is None:
        return default is None or name in _TOKENS
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str if isinstance(default, str) else int) and not isinstance(
        value, bool
    )


def _kind(name: str, default: Any) -> str:
    if name in _TOKENS:
        return "the id of one token"
    return {bool: "true or false", float: "a number", str: "a name"}.get(
        type(default), "a whole number"
    )
