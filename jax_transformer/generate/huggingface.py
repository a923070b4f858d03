"""Hugging Face's generation_config.json, and the generation keys that old config.json files carry, as :class:`GenerationConfig`, and back.

Facts from ``generation/configuration_utils.py`` and ``generation/utils.py`` of transformers 5.23. Lengths count the start token there and not here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_transformer.architectures.huggingface import usual_length
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.generate.generation_config import (
    BeamScorer,
    Constraints,
    EarlyStopping,
    GenerationConfig,
)
from jax_transformer.storage import huggingface, json_text

_SAMPLING = ("temperature", "top_k", "top_p")
_HANDLED = {
    *(
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "num_beams",
        "length_penalty",
        "early_stopping",
        "num_return_sequences",
    ),
    *(
        "do_sample",
        *_SAMPLING,
        "eos_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
    ),
    *(
        "repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
    ),
    *("suppress_tokens", "begin_suppress_tokens", "renormalize_logits"),
}
_COMPUTED = "how it is computed, not what comes out"
_RETURNED = "what is returned beside the tokens"
_ASSISTED = "of assisted generation, which needs an assistant or prompt_lookup_num_tokens"
IGNORED = {
    **dict.fromkeys(
        (
            "use_cache",
            "cache_implementation",
            "cache_config",
            "max_cache_len",
            "prefill_chunk_size",
            "low_memory",
        ),
        _COMPUTED,
    ),
    **dict.fromkeys(("compile_config", "disable_compile", "continuous_batching_config"), _COMPUTED),
    **dict.fromkeys(
        (
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "output_logits",
            "return_dict_in_generate",
        ),
        _RETURNED,
    ),
    **dict.fromkeys(
        (
            "is_assistant",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
        ),
        _ASSISTED,
    ),
    **dict.fromkeys(
        (
            "max_matching_ngram_size",
            "assistant_lookbehind",
            "target_lookbehind",
            "assistant_ensemble_weight",
        ),
        _ASSISTED,
    ),
    "speculation_type": _ASSISTED,
    "pad_token_id": "what stands behind the end; the padding that the model knows is its config.json's",
    "transformers_version": "who wrote the file",
    "_from_model_config": "where the values came from",
    "_commit_hash": "where the file came from",
}
"""What has no bearing on the text, each with the reason."""
# What is not done here, with the values, beside null, that ask for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "max_time",
            "stop_strings",
            "constraints",
            "force_words_ids",
            "dola_layers",
            "watermarking_config",
            "sequence_bias",
        ),
        (),
    ),
    **dict.fromkeys(
        ("exponential_decay_length_penalty", "prompt_lookup_num_tokens", "assistant_early_exit"), ()
    ),
    **dict.fromkeys(("use_mtp", "remove_invalid_values", "token_healing"), (False,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beam_groups"), (1,)),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha"), (0,)),
}
# The same of what only drawing looks at
_NEUTRAL_DRAWS: dict[str, tuple[Any, ...]] = {
    "min_p": (),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
KNOWN = {*_HANDLED, *IGNORED, *_NEUTRAL, *_NEUTRAL_DRAWS}
"""Every attribute of ``GenerationConfig``."""

_STOPPING = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.FULL, "never": EarlyStopping.NEVER}
# New tokens where the file says nothing of the length
_DEFAULT_LENGTH = 20
# Of top_k where tokens are drawn and the file says nothing
_DEFAULT_TOP_K = 50


def from_generation_config(
    data: Mapping[str, Any], config: TransformerConfig, *, where: str = "generation_config.json"
) -> GenerationConfig:
    """What transformers' ``generate`` does with this ``generation_config.json`` and no arguments.

    ``config`` is the model's, for what the file leaves to it; ``where`` names the file in messages. Raises InputError for a key that is not known, a
    value that is none, and what cannot be done, by its name.
    """
    given = {key: value for key, value in data.items() if value is not None}
    sample = _value(given, "do_sample", bool, False, where)
    _refuse(given, where, drawn=sample)
    beam = _value(given, "num_beams", int, 1, where)
    if beam < 1:
        raise InputError(f"{where}: num_beams={beam} must be at least 1")
    if sample and beam > 1:
        raise InputError(
            f"{where}: do_sample with num_beams={beam} is not done here: give one of them"
        )
    eos = _ids(given, "eos_token_id", where) or (config.eos_id,)
    if len(eos) > 1:
        raise InputError(
            f"{where}: eos_token_id has {len(eos)} tokens, and only one can end a translation here"
        )
    start = _value(
        given,
        "decoder_start_token_id",
        int,
        _value(given, "bos_token_id", int, config.bos_id, where),
        where,
    )
    several = _value(given, "num_return_sequences", int, 1, where)
    stopping = given.get("early_stopping", False)
    if not isinstance(stopping, bool) and stopping != "never":
        raise InputError(f'{where}: early_stopping={stopping!r} is not true, false or "never"')
    try:
        return GenerationConfig(
            num_beams=beam,
            length_penalty=_value(given, "length_penalty", float, 1.0, where),
            num_return_sequences=several,
            max_new_tokens=_max_new_tokens(given, config, where),
            beam_scorer=BeamScorer.AVERAGE,
            early_stopping=_STOPPING[stopping],
            constraints=_constraints(given, where),
            forced_bos_token_id=_value(given, "forced_bos_token_id", int, None, where),
            decoder_start_token_id=None if start == config.bos_id else start,
            eos_token_id=None if eos[0] == config.eos_id else eos[0],
            **_draws(given, where, drawn=sample),
        )
    except ConfigError as error:
        raise InputError(f"{where}: {error}") from None


def read(path: Path) -> tuple[dict[str, Any], Path]:
    """What a folder says of decoding, and the file that says it. Raises InputError where that is none."""
    file = path / huggingface.GENERATION
    if not file.is_file():
        return from_model_config(huggingface.configuration(path)), path / huggingface.CONFIG
    data = json_text.read(file)
    if not isinstance(data, dict):
        raise InputError(f"{file}: is no JSON object")
    return data, file


def says_length(data: Mapping[str, Any]) -> bool:
    """Whether it is said how long a translation may be; else it is twenty tokens."""
    return any(data.get(key) is not None for key in ("max_length", "max_new_tokens"))


def from_model_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in the place of a ``generation_config.json`` that is not there: the generation keys of this ``config.json``."""
    found = {key: value for key, value in data.items() if key in KNOWN and value is not None}
    if data.get("force_bos_token_to_be_generated"):  # BART's, before there was forced_bos_token_id
        found["forced_bos_token_id"] = data.get("bos_token_id")
    return found


def to_generation_config(
    generation_config: GenerationConfig, config: TransformerConfig
) -> dict[str, Any]:
    """The ``generation_config.json`` with which transformers decodes as ``generation_config`` says, without what is its default.

    Where ``generation_config`` has no greatest length, it is the model's. Raises ConfigError for what transformers cannot do: our own beam search, and a seed.
    """
    if generation_config.num_beams > 1 and generation_config.beam_scorer is not BeamScorer.AVERAGE:
        raise ConfigError(
            f"a beam search with beam_scorer={generation_config.beam_scorer} is not one of transformers: give beam_scorer=average, or num_beams=1"
        )
    if generation_config.seed:
        raise ConfigError(f"seed={generation_config.seed} has no place in a generation_config.json")
    constraints, average = (
        generation_config.constraints,
        generation_config.beam_scorer is BeamScorer.AVERAGE,
    )
    values = {
        "decoder_start_token_id": config.bos_id
        if generation_config.decoder_start_token_id is None
        else generation_config.decoder_start_token_id,
        "eos_token_id": config.eos_id
        if generation_config.eos_token_id is None
        else generation_config.eos_token_id,
        "pad_token_id": config.target_pad_id,
        "max_length": usual_length(config)
        if generation_config.max_new_tokens is None
        else generation_config.max_new_tokens + 1,
    }
    written: dict[str, tuple[Any, Any]] = {
        "num_beams": (generation_config.num_beams, 1),
        "length_penalty": (generation_config.length_penalty if average else 1.0, 1.0),
        "early_stopping": (
            {kind: value for value, kind in _STOPPING.items()}[generation_config.early_stopping],
            False,
        ),
        "num_return_sequences": (generation_config.num_return_sequences, 1),
        "forced_bos_token_id": (generation_config.forced_bos_token_id, None),
        "forced_eos_token_id": (_one_or_list(constraints.forced_eos_token_ids), None),
        "min_new_tokens": (constraints.min_new_tokens, 0),
        "repetition_penalty": (constraints.repetition_penalty, 1.0),
        "no_repeat_ngram_size": (constraints.no_repeat_ngram_size, 0),
        "encoder_no_repeat_ngram_size": (constraints.encoder_no_repeat_ngram_size, 0),
        "bad_words_ids": ([list(word) for word in constraints.bad_words_ids], []),
        "suppress_tokens": (list(constraints.suppress_tokens), []),
        "begin_suppress_tokens": (list(constraints.begin_suppress_tokens), []),
        "renormalize_logits": (constraints.renormalize_logits, False),
        "do_sample": (generation_config.do_sample, False),
        "temperature": (generation_config.temperature, 1.0),
        "top_k": (generation_config.top_k, _DEFAULT_TOP_K if generation_config.do_sample else 0),
        "top_p": (generation_config.top_p, 1.0),
    }
    return values | {key: value for key, (value, default) in written.items() if value != default}


def _refuse(given: Mapping[str, Any], where: str, *, drawn: bool) -> None:
    """Raises InputError for what is not known, or known and not done here, all in one."""
    unknown = [
        f"unknown key {key!r}{nearest(key, sorted(KNOWN))}" for key in given if key not in KNOWN
    ]
    neutral = _NEUTRAL | (_NEUTRAL_DRAWS if drawn else {})
    undone = [
        f"{key}={given[key]!r} is not done here: leave it out"
        for key in given
        if key in neutral and given[key] not in neutral[key]
    ]
    if unknown or undone:
        raise InputError(f"{where}: {'; '.join(unknown + undone)}")


def _value(given: Mapping[str, Any], key: str, kind: type, default: Any, where: str) -> Any:
    value = given.get(key, default)
    if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    raise InputError(
        f"{where}: {key}={value!r} is not {'an' if kind is int else 'a'} {kind.__name__}"
    )


def _ids(given: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    """A token or a list of tokens; none where the key is not there."""
    value = given.get(key, [])
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in found):
        raise InputError(f"{where}: {key}={value!r} is neither a token's number nor a list of such")
    return tuple(found)


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _max_new_tokens(given: Mapping[str, Any], config: TransformerConfig, where: str) -> int:
    """The most new tokens. Without a word in the file they are twenty, within the table of positions."""
    new = _value(given, "max_new_tokens", int, None, where)
    longest = _value(given, "max_length", int, None, where)
    found = (
        new
        if new is not None
        else min(_DEFAULT_LENGTH, config.max_length - 1)
        if longest is None
        else longest - 1
    )
    if found < 1:
        said = (
            f"max_length={longest}, which counts the start token,"
            if new is None
            else f"max_new_tokens={new}"
        )
        raise InputError(f"{where}: {said} leaves no room for a token")
    return found


def _constraints(given: Mapping[str, Any], where: str) -> Constraints:
    words = given.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        raise InputError(f"{where}: bad_words_ids={words!r} is not a list of lists of tokens")
    fewest = _value(given, "min_new_tokens", int, None, where)
    return Constraints(
        repetition_penalty=_value(given, "repetition_penalty", float, 1.0, where),
        no_repeat_ngram_size=_value(given, "no_repeat_ngram_size", int, 0, where),
        encoder_no_repeat_ngram_size=_value(given, "encoder_no_repeat_ngram_size", int, 0, where),
        bad_words_ids=tuple(
            _ids({"bad_words_ids": word}, "bad_words_ids", where) for word in words
        ),
        min_new_tokens=max(0, _value(given, "min_length", int, 0, where) - 1)
        if fewest is None
        else fewest,
        forced_eos_token_ids=_ids(given, "forced_eos_token_id", where),
        suppress_tokens=_ids(given, "suppress_tokens", where),
        begin_suppress_tokens=_ids(given, "begin_suppress_tokens", where),
        renormalize_logits=_value(given, "renormalize_logits", bool, False, where),
    )


def _draws(given: Mapping[str, Any], where: str, *, drawn: bool) -> dict[str, Any]:
    """What drawing looks at, and nothing where no token is drawn."""
    if not drawn:
        return {}
    return {
        "do_sample": True,
        "temperature": _value(given, "temperature", float, 1.0, where),
        "top_k": _value(given, "top_k", int, _DEFAULT_TOP_K, where),
        "top_p": _value(given, "top_p", float, 1.0, where),
    }
