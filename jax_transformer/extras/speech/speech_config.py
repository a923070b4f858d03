"""The files of a Hugging Face folder of Whisper as a :class:`.SpeechConfig`.

Facts from ``generation_whisper.py`` of transformers 5.23.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError, about_file
from jax_transformer.extras.speech import log_mel
from jax_transformer.extras.speech.speech_settings import SpeechConfig
from jax_transformer.generate import transformers_config
from jax_transformer.storage import huggingface_folder as folders
from jax_transformer.storage import untrusted
from jax_transformer.storage.untrusted import shown

_READ = {
    "forced_decoder_ids",
    "is_multilingual",
    "lang_to_id",
    "language",
    "max_initial_timestamp_index",
    "max_length",
    "min_length",
    "no_timestamps_token_id",
    "return_timestamps",
    "task",
    "task_to_id",
}
_IGNORED = {
    "alignment_heads",  # of the times of words, which are not computed here
    "do_sample",  # transformers samples only in a call with a temperature
    "encoder_no_repeat_ngram_size",  # of a source of tokens
    "median_filter_width",  # as alignment_heads
    "num_return_sequences",  # a transcript is one text
    "prev_sot_token_id",  # of a prompt of earlier text
    "temperature",  # as do_sample
    "top_k",  # as do_sample
    "top_p",  # as do_sample
}
_REFUSED = (
    "compression_ratio_threshold",
    "condition_on_prev_tokens",
    "logprob_threshold",
    "no_speech_threshold",
)


def read(folder: Path, config: TransformerConfig) -> SpeechConfig:
    """The settings in the files of a folder.

    A folder without a maximum length has that of the model's positions (transformers: twenty tokens
    in the first window). Raises InputError, naming the file, for settings that are not supported.
    """
    data, file = transformers_config.read(folder)
    _check_features(folder, config)
    own = {key: value for key, value in data.items() if key in {*_READ, *_IGNORED, *_REFUSED}}
    for key in _REFUSED:
        if own.get(key) is not None and own[key] is not False:
            raise InputError(f"{file}: {key}={own[key]!r} is not supported: leave it out")
    others = {key: value for key, value in data.items() if key not in own}
    others |= _lengths(file, own, others)
    generation = transformers_config.from_generation_config(others, config, where=str(file))
    if others.get("max_new_tokens") is None:
        generation = dataclasses.replace(generation, max_new_tokens=None)
    vocabulary = config.target_vocab_size
    languages = (
        _ids(file, own, "lang_to_id", vocabulary) if own.get("is_multilingual", True) else {}
    )
    tasks = _ids(file, own, "task_to_id", vocabulary) if languages else {}
    if languages and not tasks:
        raise InputError(f"{file}: has lang_to_id and no task_to_id: add the token of transcribe")
    forced = own.get("forced_decoder_ids")
    if forced is None:
        forced = folders.configuration(folder).get("forced_decoder_ids")
    settings = SpeechConfig(
        generation,
        {name.removeprefix("<|").removesuffix("|>"): index for name, index in languages.items()},
        tasks,
        _value(file, own, "language", str),
        _value(file, own, "task", str),
        bool(_value(file, own, "return_timestamps", bool)),
        _id(file, own, "no_timestamps_token_id", vocabulary),
        _id(file, own, "max_initial_timestamp_index", vocabulary),
        _forced(file, forced or [], vocabulary, detects=bool(languages)),
    )
    with about_file(file):
        settings.request(None, None)
    return settings


def _lengths(file: Path, own: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The maximum length as ``max_new_tokens``: Whisper's ``max_length`` does not count the prompt,
    and its ``min_length`` does.
    """
    if _value(file, own, "min_length", int) and others.get("min_new_tokens") is None:
        raise InputError(
            f"{file}: min_length={own['min_length']} counts the prompt, which every call chooses:"
            " give min_new_tokens"
        )
    longest = _value(file, own, "max_length", int)
    if longest is None or others.get("max_new_tokens") is not None:
        return {}
    if longest < 1:
        raise InputError(f"{file}: max_length={longest} leaves no room for a token")
    return {"max_new_tokens": longest}


def _value(file: Path, data: Mapping[str, Any], key: str, kind: type) -> Any:
    """The value of a key, which may be missing or null."""
    value = data.get(key)
    if value is None or type(value) is kind:
        return value
    raise InputError(f"{file}: {key}={shown(value)} is not of type {kind.__name__}")


def _id(file: Path, data: Mapping[str, Any], key: str, vocabulary: int) -> int | None:
    value = data.get(key)
    if value is None or _is_id(value, vocabulary):
        return value
    raise InputError(f"{file}: {key}={value!r} is no number below the vocabulary of {vocabulary}")


def _is_id(value: Any, vocabulary: int) -> bool:
    return type(value) is int and 0 <= value < vocabulary


def _ids(file: Path, data: Mapping[str, Any], key: str, vocabulary: int) -> dict[str, int]:
    value = data.get(key) or {}
    if not isinstance(value, dict):
        raise InputError(f"{file}: {key} is no object of token ids")
    for token, index in value.items():
        if not _is_id(index, vocabulary):
            raise InputError(
                f"{file}: {key}: {shown(token)} is {shown(index)}, and no number below the"
                f" vocabulary of {vocabulary}"
            )
    return value


def _forced(file: Path, pairs: Any, vocabulary: int, *, detects: bool) -> tuple[int | None, ...]:
    """The tokens of pairs of a position and a token, from position 1 on.

    Those without a token are left out, but the first if the model detects languages.
    """
    try:
        tokens = [token for _, token in pairs]
        in_order = [position for position, _ in pairs] == list(range(1, len(pairs) + 1))
    except (TypeError, ValueError):
        in_order, tokens = False, []
    if not in_order or not all(token is None or _is_id(token, vocabulary) for token in tokens):
        raise InputError(f"{file}: forced_decoder_ids={pairs!r} are no pairs of position and token")
    return tuple(
        token for i, token in enumerate(tokens) if token is not None or (detects and i == 0)
    )


def _check_features(folder: Path, config: TransformerConfig) -> None:
    """Raise InputError if the folder's spectrograms are others than those computed here."""
    expected = {
        "feature_size": config.mel_bins,
        "sampling_rate": log_mel.SAMPLE_RATE,
        "hop_length": log_mel.HOP,
        "n_fft": log_mel.FRAME,
        "dither": 0.0,
        "padding_value": 0.0,
        "do_normalize": False,
    }
    for name in ("processor_config.json", "preprocessor_config.json"):
        if not (folder / name).is_file():
            continue
        data = untrusted.read_json(folder / name)
        if isinstance(data, dict):
            data = data.get("feature_extractor", data)
        if not isinstance(data, dict):
            raise InputError(f"{folder / name}: is no JSON object")
        for key, value in expected.items():
            if data.get(key) not in (None, value):
                raise InputError(f"{folder / name}: {key}={data[key]!r}: only {value} is supported")
