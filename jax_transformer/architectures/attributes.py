"""What may stand in a ``config.json`` of each family: every attribute is read, is without effect on the numbers for a reason given here, or
must have the one value that the family computes with.

Facts from the configuration classes of transformers 5.23, and for attributes that it reads no more from those of transformers 2 to 4.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jax_transformer.config import Layout
from jax_transformer.errors import nearest

BART_LIKE = (Layout.BART, Layout.MBART, Layout.MARIAN, Layout.M2M_100, Layout.PEGASUS)
T5_LIKE = (Layout.T5, Layout.MT5, Layout.UMT5)
LAYOUTS = (*BART_LIKE, *T5_LIKE)

_BART: dict[str, Any] = {
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "d_model": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_decoder_layers": None,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,  # T5Config has none; every T5 starts with padding
}
_MT5 = _T5 | {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}

DEFAULTS: dict[Layout, dict[str, Any]] = {
    Layout.BART: _BART,
    Layout.MBART: _BART | {"decoder_start_token_id": None},
    Layout.MARIAN: _BART
    | {
        "vocab_size": 58101,
        "decoder_vocab_size": None,
        "share_encoder_decoder_embeddings": True,
        "pad_token_id": 58100,
        "bos_token_id": None,
        "eos_token_id": 0,
        "decoder_start_token_id": 58100,
    },
    Layout.M2M_100: _BART
    | {
        "vocab_size": 128112,
        "activation_function": "relu",
        "attention_dropout": 0.1,
        "scale_embedding": True,
    },
    Layout.PEGASUS: _BART
    | {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "decoder_start_token_id": 0},
    Layout.T5: _T5,
    Layout.MT5: _MT5,
    Layout.UMT5: _MT5,
}
"""What an attribute is where a file does not name it; these are the attributes that are read."""

# Read where they are given. What they say follows from other attributes where they are not
_DERIVED = {
    Layout.T5: {"scale_decoder_outputs": True, "dense_act_fn": "relu", "is_gated_act": False},
    Layout.MT5: {"dense_act_fn": "relu", "is_gated_act": False},
    Layout.UMT5: {"dense_act_fn": "relu", "is_gated_act": False},
}

_WIDTH = {"hidden_size": "d_model"}
_BART_NAMES = _WIDTH | {
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
_T5_NAMES = _WIDTH | {
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
OTHER_NAMES: dict[Layout, dict[str, str]] = dict.fromkeys(BART_LIKE, _BART_NAMES) | dict.fromkeys(
    T5_LIKE, _T5_NAMES
)
"""Second names of attributes, by family."""

_TRAINING = (
    "acts only in training with transformers, which drops whole layers or draws fresh weights by it"
)
_HEAD = "belongs to a head for classification or question answering"
_CALL = "says what a call of transformers returns or keeps, not what is computed"
_FILE = "describes the file, not the model"
_OLD = "is read by no class of transformers any more"
IGNORED: dict[str, str] = {
    **dict.fromkeys(
        (
            "encoder_layerdrop",
            "decoder_layerdrop",
            "layerdrop",
            "init_std",
            "initializer_factor",
            "initializer_range",
        ),
        _TRAINING,
    ),
    **dict.fromkeys(
        (
            "classifier_dropout",
            "classif_dropout",
            "id2label",
            "label2id",
            "num_labels",
            "_num_labels",
            "problem_type",
            "finetuning_task",
        ),
        _HEAD,
    ),
    **dict.fromkeys(
        (
            "use_cache",
            "output_attentions",
            "output_hidden_states",
            "return_dict",
            "torchscript",
            "output_past",
            "tie_last_hidden_states",
        ),
        _CALL,
    ),
    **dict.fromkeys(
        (
            "gradient_checkpointing",
            "chunk_size_feed_forward",
            "_attn_implementation",
            "attn_implementation",
        ),
        _CALL,
    ),
    **dict.fromkeys(
        (
            "_attn_implementation_autoset",
            "_experts_implementation",
            "_output_attentions",
            "use_bfloat16",
        ),
        _CALL,
    ),
    **dict.fromkeys(
        (
            "_name_or_path",
            "name_or_path",
            "_commit_hash",
            "transformers_version",
            "dtype",
            "torch_dtype",
        ),
        _FILE,
    ),
    **dict.fromkeys(
        (
            "task_specific_params",
            "tokenizer_class",
            "model_max_length",
            "language",
            "finetuned_from",
        ),
        _FILE,
    ),
    **dict.fromkeys(
        ("add_bias_logits", "save_step", "encoder_no_repeat_ngram", "cross_attention_hidden_size"),
        _OLD,
    ),
    **dict.fromkeys(
        ("sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id"),
        "names a token, which the tokenizer knows itself",
    ),
    "n_positions": "bounds nothing: T5 has distances, not a table of positions",
}
"""Attributes without effect on what a model computes, each with the reason."""

GENERATION = frozenset(
    """max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
    top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids force_words_ids
    num_return_sequences output_scores output_logits return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    renormalize_logits exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias epsilon_cutoff
    eta_cutoff encoder_repetition_penalty num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_lookbehind target_lookbehind penalty_alpha prefix
    force_bos_token_to_be_generated""".split()
)
"""Defaults of decoding that older files keep beside the model: :mod:`.generation` reads them."""

# What must be so because the family has it so; a value of None says nothing
_FIXED: dict[str, Any] = {
    "is_encoder_decoder": True,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "quantization_config": None,
    "per_layer_config": None,
    "forced_decoder_ids": None,
    "auto_map": None,  # code of the file's own
    "extra_pos_embeddings": 2,
    "do_blenderbot_90_layernorm": False,
}
_PRE_NORM = (Layout.MBART, Layout.M2M_100, Layout.PEGASUS)
_COMPUTED_POSITIONS = (Layout.MARIAN, Layout.M2M_100, Layout.PEGASUS)


def fixed(layout: Layout) -> dict[str, Any]:
    """The attributes that have one value in this family, and that value."""
    if layout in T5_LIKE:
        own = {
            name: value
            for name, value in _FIXED.items()
            if name not in ("extra_pos_embeddings", "do_blenderbot_90_layernorm")
        }
        # In the published UMT5 files, for a table of distances in every block; transformers' class, which has these always, does not read it
        return own | ({"scalable_attention": True} if layout is Layout.UMT5 else {})
    own = _FIXED | {
        "normalize_before": layout in _PRE_NORM,
        "add_final_layer_norm": layout in _PRE_NORM,
        "normalize_embedding": layout in (Layout.BART, Layout.MBART),
        "static_position_embeddings": layout in _COMPUTED_POSITIONS,
    }
    if layout in _COMPUTED_POSITIONS:
        del own["extra_pos_embeddings"]  # whose tables had no such rows
    return own


def classes(layout: Layout) -> tuple[str, ...]:
    """The names in ``architectures`` whose weights make the whole model: with its output layer, or without one that is tied to embeddings."""
    prefix = {
        Layout.BART: "Bart",
        Layout.MBART: "MBart",
        Layout.MARIAN: "Marian",
        Layout.M2M_100: "M2M100",
        Layout.PEGASUS: "Pegasus",
    }.get(layout, layout.value.upper())
    whole = "MarianMTModel" if layout is Layout.MARIAN else f"{prefix}ForConditionalGeneration"
    return (whole, f"{prefix}Model", *(["T5WithLMHeadModel"] if layout is Layout.T5 else []))


def read(layout: Layout, data: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that are read, defaults filled in, with those of :data:`_DERIVED` that are given. ``data`` has passed :func:`problems`."""
    names = {name: OTHER_NAMES[layout].get(name, name) for name in data}
    known = DEFAULTS[layout] | _DERIVED.get(layout, {})
    return DEFAULTS[layout] | {
        names[name]: value for name, value in data.items() if names[name] in known
    }


def problems(layout: Layout, data: Mapping[str, Any]) -> Iterator[str]:
    """Everything that is wrong with the attributes of a file, each in words."""
    readable, one_value, others = (
        DEFAULTS[layout] | _DERIVED.get(layout, {}),
        fixed(layout),
        OTHER_NAMES[layout],
    )
    unimportant = set(IGNORED) | set(GENERATION) | {"model_type", "architectures"}
    if layout in _COMPUTED_POSITIONS:
        unimportant.add("extra_pos_embeddings")
    for name, value in data.items():
        own = others.get(name, name)
        if own in readable:
            if not _fits(own, value, readable[own]):
                yield f"{name}={value!r} is not {_kind(own, readable[own])}"
            elif own != name and data.get(own, value) != value:
                yield f"{name}={value!r} and {own}={data[own]!r} are two names of one attribute, and differ"
        elif name in one_value:
            if value is not None and value != one_value[name]:
                yield f"{name}={value!r}: a model of the family {layout.value} with that is not supported, only {one_value[name]!r} is"
        elif name not in unimportant:
            close = nearest(
                name, sorted(set(readable) | set(one_value) | set(others) | unimportant)
            )
            yield f"unknown attribute {name!r}{close}: what it would change is not known"
    wanted = classes(layout)
    for name in data.get("architectures") or []:
        if str(name).removeprefix("TF").removeprefix("Flax") not in wanted:
            yield f"architectures has {name!r}, which is not one of {', '.join(wanted)}"


_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


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
