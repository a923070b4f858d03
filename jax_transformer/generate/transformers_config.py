"""Hugging Face's generation_config.json as a :class:`GenerationConfig`, and back.

Old config.json files have the same keys. Facts from ``generation/configuration_utils.py`` and
``generation/utils.py`` of transformers 5.23. Lengths include the start token there and not here.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jax_transformer.architectures.registry import usual_length
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.generate.generation_config import (
    BeamScorer,
    Constraints,
    EarlyStopping,
    GenerationConfig,
)
from jax_transformer.storage import huggingface_folder, untrusted

_Table = dict[str, tuple[type, Any]]
# Keys with the names of our own fields, each with its type and transformers' default
_SETTINGS: _Table = {
    "num_beams": (int, 1),
    "length_penalty": (float, 1.0),
    "num_return_sequences": (int, 1),
    "forced_bos_token_id": (int, None),
}
_SAMPLING: _Table = {"temperature": (float, 1.0), "top_k": (int, 50), "top_p": (float, 1.0)}
_CONSTRAINTS: _Table = {
    "repetition_penalty": (float, 1.0),
    "no_repeat_ngram_size": (int, 0),
    "encoder_no_repeat_ngram_size": (int, 0),
    "renormalize_logits": (bool, False),
}
_TOKENS = ("suppress_tokens", "begin_suppress_tokens")
_OTHERS = """bad_words_ids bos_token_id decoder_start_token_id do_sample early_stopping eos_token_id
    forced_eos_token_id max_length max_new_tokens min_length min_new_tokens""".split()

# Keys that have no effect on the text
_IGNORED = [
    # How it is computed, not what comes out
    *"use_cache cache_implementation cache_config max_cache_len prefill_chunk_size".split(),
    *"low_memory compile_config disable_compile continuous_batching_config".split(),
    # What is returned next to the tokens
    *"output_attentions output_hidden_states output_scores output_logits".split(),
    "return_dict_in_generate",
    # Assisted generation, which needs an assistant or prompt_lookup_num_tokens
    *"is_assistant num_assistant_tokens num_assistant_tokens_schedule".split(),
    *"assistant_confidence_threshold max_matching_ngram_size assistant_lookbehind".split(),
    *"target_lookbehind assistant_ensemble_weight speculation_type".split(),
    # The padding after the end (the model's own is in its config.json), and the file's origin
    *"pad_token_id transformers_version _from_model_config _commit_hash".split(),
]
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        """assistant_early_exit constraints dola_layers exponential_decay_length_penalty
        force_words_ids max_time prompt_lookup_num_tokens sequence_bias stop_strings
        watermarking_config""".split(),
        (),
    ),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beam_groups"), (1,)),
    **dict.fromkeys(("remove_invalid_values", "token_healing", "use_mtp"), (False,)),
}
"""Keys of what is not supported, each with the values (next to null) that do nothing."""

_NEUTRAL_IN_SAMPLING: dict[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_p": (),
    "top_h": (),
    "typical_p": (1,),
}
"""The same for keys that have an effect only in sampling."""
KNOWN = {
    *(*_SETTINGS, *_SAMPLING, *_CONSTRAINTS, *_TOKENS, *_OTHERS),
    *(*_IGNORED, *_NEUTRAL, *_NEUTRAL_IN_SAMPLING),
}
"""Every attribute of transformers' ``GenerationConfig``."""

_STOPPING = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.FULL, "never": EarlyStopping.NEVER}
_DEFAULT_LENGTH = 20  # new tokens, if the file has no length


class _Values(NamedTuple):
    """The keys of a file that are not null, and the file's name for messages."""

    data: Mapping[str, Any]
    where: str

    def get(self, key: str, kind: type, default: Any) -> Any:
        """Return the value of ``key``. Raises InputError if it is not of the type ``kind``."""
        value = self.data.get(key, default)
        if value is None or _is(value, kind):
            return value
        if kind is float and _is(value, int) and abs(value) < 2**53:
            return float(value)
        article = "an" if kind is int else "a"
        raise InputError(f"{self.where}: {key}={value!r} is not {article} {kind.__name__}")

    def table(self, keys: _Table) -> dict[str, Any]:
        """Return the values of several keys."""
        return {key: self.get(key, *entry) for key, entry in keys.items()}

    def ids(self, key: str, value: Any = None) -> tuple[int, ...]:
        """Return the token or the list of tokens at ``key``, or ``value`` as such; none without."""
        value = self.data.get(key, []) if value is None else value
        ids = value if isinstance(value, list) else [value]
        if not all(_is(token, int) for token in ids):
            raise InputError(
                f"{self.where}: {key}={value!r} is neither a token id nor a list of token ids"
            )
        return tuple(ids)


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def from_generation_config(
    data: Mapping[str, Any], config: TransformerConfig, *, where: str = "generation_config.json"
) -> GenerationConfig:
    """Return the settings of transformers' ``generate`` with this file and no arguments.

    ``config`` is the model's, for what the file leaves to it; ``where`` names the file in messages.
    Raises InputError for unknown keys, values of a wrong type, and settings that are not supported.
    """
    values = _Values({key: value for key, value in data.items() if value is not None}, where)
    do_sample = values.get("do_sample", bool, False)
    _refuse(values, do_sample=do_sample)
    settings = values.table(_SETTINGS)
    num_beams = settings["num_beams"]
    if num_beams < 1:
        raise InputError(f"{where}: num_beams={num_beams} must be at least 1")
    if do_sample and num_beams > 1:
        raise InputError(
            f"{where}: do_sample with num_beams={num_beams} is not supported: give one of them"
        )
    eos = values.ids("eos_token_id") or (config.eos_id,)
    if len(eos) > 1:
        raise InputError(
            f"{where}: eos_token_id has {len(eos)} tokens; only one end token is supported"
        )
    bos = values.get("bos_token_id", int, config.bos_id)
    start = values.get("decoder_start_token_id", int, bos)
    stopping = values.data.get("early_stopping", False)
    if not isinstance(stopping, bool) and stopping != "never":
        raise InputError(f'{where}: early_stopping={stopping!r} is not true, false or "never"')
    try:
        return GenerationConfig(
            do_sample=do_sample,
            max_new_tokens=_max_new_tokens(values, config),
            beam_scorer=BeamScorer.AVERAGE,
            early_stopping=_STOPPING[stopping],
            constraints=_constraints(values),
            decoder_start_token_id=None if start == config.bos_id else start,
            eos_token_id=None if eos[0] == config.eos_id else eos[0],
            **settings,
            **(values.table(_SAMPLING) if do_sample else {}),
        )
    except ConfigError as error:
        raise InputError(f"{where}: {error}") from None


def read(path: Path) -> tuple[dict[str, Any], Path]:
    """Return a folder's generation keys, and the file that they are in.

    Raises InputError if it is damaged.
    """
    file = path / huggingface_folder.GENERATION
    if not file.is_file():
        model = huggingface_folder.configuration(path)
        return from_model_config(model), path / huggingface_folder.CONFIG
    data = untrusted.read_json(file)
    if not isinstance(data, dict):
        raise InputError(f"{file}: is not a JSON object")
    return data, file


def of_folder(folder: Path, config: TransformerConfig, tokenizer: Any = None) -> GenerationConfig:
    """Return the settings of transformers' ``generate`` in the files of ``folder``, with the target
    language of ``tokenizer``.

    Raises InputError, naming the file, for settings that are not supported.
    """
    from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer

    data, file = read(folder)
    generation = from_generation_config(data, config, where=str(file))
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.target_lang is None:
        return generation
    forced = tokenizer.forced_bos_id()
    return replace(
        generation,
        decoder_start_token_id=tokenizer.bos_id,
        forced_bos_token_id=generation.forced_bos_token_id if forced is None else forced,
    )


def has_length(data: Mapping[str, Any]) -> bool:
    """Return True if the file limits the length of a translation; otherwise it is twenty tokens."""
    return any(data.get(key) is not None for key in ("max_length", "max_new_tokens"))


def from_model_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation keys of a ``config.json``, for a folder without a file of them."""
    keys = {key: value for key, value in data.items() if key in KNOWN and value is not None}
    if data.get("force_bos_token_to_be_generated"):  # BART's, before there was forced_bos_token_id
        keys["forced_bos_token_id"] = data.get("bos_token_id")
    return keys


def to_generation_config(generation: GenerationConfig, config: TransformerConfig) -> dict[str, Any]:
    """Return the ``generation_config.json`` with which transformers does the same.

    It leaves out transformers' defaults. If ``generation`` has no maximum length, it is the
    model's. Raises ConfigError for what transformers does not have: our own beam search, and a
    seed.
    """
    if generation.num_beams > 1 and generation.beam_scorer is not BeamScorer.AVERAGE:
        raise ConfigError(
            f"transformers has no beam_scorer={generation.beam_scorer}: "
            "give beam_scorer=average, or num_beams=1"
        )
    if generation.seed:
        raise ConfigError(f"seed={generation.seed}: a generation_config.json has no seed")
    start, end = generation.start_and_end(config)
    length, constraints = generation.max_new_tokens, generation.constraints
    written: dict[str, Any] = {
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "pad_token_id": config.target_pad_id,
        "max_length": usual_length(config) if length is None else length + 1,
    }
    average = generation.beam_scorer is BeamScorer.AVERAGE
    if generation.early_stopping is not EarlyStopping.HEURISTIC:
        values_of = {stopping: value for value, stopping in _STOPPING.items()}
        written["early_stopping"] = values_of[generation.early_stopping]
    if generation.do_sample:
        written["do_sample"] = True
    for values, keys in (
        (generation, _SETTINGS | (_SAMPLING if generation.do_sample else {})),
        (constraints, _CONSTRAINTS | {"min_new_tokens": (int, 0)}),
    ):
        for key, (_, default) in keys.items():
            if getattr(values, key) != default and (average or key != "length_penalty"):
                written[key] = getattr(values, key)
    forced = constraints.forced_eos_token_ids
    lists = {
        "forced_eos_token_id": forced[0] if len(forced) == 1 else list(forced),
        "bad_words_ids": [list(word) for word in constraints.bad_words_ids],
    } | {key: list(getattr(constraints, key)) for key in _TOKENS}
    return written | {key: value for key, value in lists.items() if value != []}


def _refuse(values: _Values, *, do_sample: bool) -> None:
    """Raise one InputError for all keys that are unknown or not supported."""
    unknown = [key for key in values.data if key not in KNOWN]
    wrong = [f"unknown key {key!r}{nearest(key, sorted(KNOWN))}" for key in unknown]
    neutral = _NEUTRAL | (_NEUTRAL_IN_SAMPLING if do_sample else {})
    wrong += [
        f"{key}={value!r} is not supported: leave it out"
        for key, value in values.data.items()
        if key in neutral and value not in neutral[key]
    ]
    if wrong:
        raise InputError(f"{values.where}: {'; '.join(wrong)}")


def _max_new_tokens(values: _Values, config: TransformerConfig) -> int:
    """Return the length of the file, otherwise twenty, within the table of positions."""
    new = values.get("max_new_tokens", int, None)
    longest = values.get("max_length", int, None)
    if new is not None:
        length, name = new, f"max_new_tokens={new}"
    elif longest is not None:
        length = longest - 1
        name = f"max_length={longest}, which counts the start token,"
    else:
        length, name = min(_DEFAULT_LENGTH, config.max_length - 1), "max_length"
    if length < 1:
        raise InputError(f"{values.where}: {name} leaves no room for a token")
    return length


def _constraints(values: _Values) -> Constraints:
    words = values.data.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        raise InputError(
            f"{values.where}: bad_words_ids={words!r} is not a list of lists of token ids"
        )
    min_length = max(0, values.get("min_length", int, 0) - 1)
    return Constraints(
        bad_words_ids=tuple(values.ids("bad_words_ids", word) for word in words),
        min_new_tokens=values.get("min_new_tokens", int, min_length),
        forced_eos_token_ids=values.ids("forced_eos_token_id"),
        **values.table(_CONSTRAINTS),
        suppress_tokens=values.ids("suppress_tokens"),
        begin_suppress_tokens=values.ids("begin_suppress_tokens"),
    )
