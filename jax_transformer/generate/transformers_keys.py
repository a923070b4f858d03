"""Every key of Hugging Face's generation_config.json that is not read: ignored, or refused.

Facts from ``generation/configuration_utils.py`` of transformers 5.23.
"""

from typing import Any

_COMPUTATION = "how it is computed, not what comes out"
_OUTPUTS = "what is returned next to the tokens"
_ASSISTED = "of assisted generation, which needs an assistant or prompt_lookup_num_tokens"
_REASONS = {
    _COMPUTATION: (
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "low_memory",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
    ),
    _OUTPUTS: (
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
    ),
    _ASSISTED: (
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "max_matching_ngram_size",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
        "speculation_type",
    ),
}
IGNORED = {key: reason for reason, keys in _REASONS.items() for key in keys} | {
    "pad_token_id": "the padding after the end; the model's own is in its config.json",
    "transformers_version": "the version that wrote the file",
    "_from_model_config": "where the values came from",
    "_commit_hash": "where the file came from",
}
"""Keys that have no effect on the text, each with the reason."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (),
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "max_time": (),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "prompt_lookup_num_tokens": (),
    "remove_invalid_values": (False,),
    "sequence_bias": (),
    "stop_strings": (),
    "token_healing": (False,),
    "use_mtp": (False,),
    "watermarking_config": (),
}
"""Keys of what is not supported, each with the values (next to null) that do nothing."""

NEUTRAL_IN_SAMPLING: dict[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_p": (),
    "top_h": (),
    "typical_p": (1,),
}
"""The same for keys that have an effect only in sampling."""
