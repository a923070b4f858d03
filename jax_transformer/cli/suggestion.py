"""Suggestions for an unknown option: by synonyms, by the part after the dot, by spelling."""

import difflib
from collections.abc import Iterable, Sequence

SYNONYMS = {
    "optimizer.learning_rate": "lr learning_rate max_lr",
    "data.tokens_per_batch": """batch_size batch max_tokens train_batch_size
        per_device_train_batch_size tokens""",
    "steps": "epochs num_epochs num_train_epochs max_epochs epoch max_steps train_steps max_update",
    "run": "output_dir save_dir model_dir model model_name_or_path checkpoint run_dir",
    "output": "out out_file output_file",
    "input": "in in_file input_file",
    "beam": "beams num_beams beam_size beam_width",
    "n_best": "nbest num_hypotheses num_return_sequences",
    "sample": "do_sample sampling",
    "max_length": "max_new_tokens max_len max_target_length",
    "min_new_tokens": "min_length min_len",
    "optimizer.accumulate": "gradient_accumulation_steps grad_accum update_freq",
    "optimizer.clip_norm": "max_grad_norm clip grad_clip",
    "optimizer.warmup_steps": "warmup num_warmup_steps warmup_updates",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type scheduler",
    "optimizer.name": "optimizer optim",
    "eval_every": "eval_steps valid_every save_steps save_interval",
    "log_every": "logging_steps log_interval",
    "keep": "save_total_limit keep_last",
    "patience": "early_stopping_patience",
    "init": "pretrained from_pretrained finetune finetune_from_model",
    "resume": "resume_from_checkpoint restore",
    "data.train_source": "source src train_src",
    "data.train_target": "target tgt trg train_tgt",
    "source": "src",
    "target": "tgt trg ref reference references",
    "source_lang": "src_lang",
    "target_lang": "tgt_lang",
    "data.source_lang": "src_lang",
    "data.target_lang": "tgt_lang",
    "model.precision": "dtype fp16 bf16 mixed_precision precision",
    "model.attention_backend": "attn_implementation attn_backend attention flash_attention",
    "model.remat": """gradient_checkpointing activation_checkpointing checkpoint_activations
        remat_policy""",
    "model.num_heads": "heads nhead n_heads",
    "model.encoder_layers": "layers num_layers n_layers num_encoder_layers",
    "model.decoder_layers": "num_decoder_layers",
    "model.d_ff": "ffn dim_feedforward",
    "model.preset": "arch architecture preset",
    "buffer": "buffer_size batch_size batch",
}
"""Names in other projects of the options of ours, which follow in the order of preference."""


def suggestion(name: str, known: Sequence[str]) -> str | None:
    """Return the known dotted name that ``name`` most probably means, or None.

    A section before the last dot of ``name`` is only looked at last.
    """
    word = name.replace("-", "_").rpartition(".")[2]
    by_word: dict[str, str] = {}
    for each in known:
        by_word.setdefault(each.rpartition(".")[2], each)
    if word in by_word:
        return by_word[word]
    for each, synonyms in SYNONYMS.items():
        if each in known and word in synonyms.split():
            return each
    return _nearest(name.replace("-", "_"), known) or by_word.get(_nearest(word, by_word) or "")


def did_you_mean(name: str, known: Sequence[str], shown: dict[str, str] | None = None) -> str:
    """Return `` (did you mean 'steps'?)``, or nothing; ``shown`` has other forms of known names."""
    known_name = suggestion(name, known)
    if known_name is None:
        return ""
    return f" (did you mean {(shown or {}).get(known_name, known_name)!r}?)"


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)
