"""Settings of a model that writes down speech: languages, tasks and times, from the files of its
Hugging Face folder.

Facts from ``generation_whisper.py`` of transformers 5.23.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.data import log_mel
from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.generate import huggingface
from jax_transformer.generate.generation_config import GenerationConfig, TimestampRules
from jax_transformer.storage import huggingface as folders
from jax_transformer.storage import untrusted

_READ = {
    "forced_decoder_ids",
    "is_multilingual",
    "lang_to_id",
    "max_initial_timestamp_index",
    "no_timestamps_token_id",
    "task_to_id",
}
_IGNORED = {
    "alignment_heads",  # of the times of words, which are not computed here
    "language",  # an option of each call
    "median_filter_width",  # as alignment_heads
    "prev_sot_token_id",  # of a prompt of earlier text
    "return_timestamps",  # an option of each call
    "task",  # an option of each call
}
_REFUSED = (
    "compression_ratio_threshold",
    "condition_on_prev_tokens",
    "logprob_threshold",
    "no_speech_threshold",
)


@dataclass(frozen=True)
class SpeechConfig:
    """The settings of a model that writes down speech."""

    generation: GenerationConfig
    """Settings of the search; the length counts neither the prompt nor the start token."""
    languages: Mapping[str, int]
    """The token of each language by its code (``de``); empty for a model of English only."""
    tasks: Mapping[str, int]
    """The token of each task: ``transcribe``, and ``translate`` to English."""
    no_timestamps_id: int | None
    """The token that says that no times follow; None if the model writes none."""
    max_initial: int | None
    """The latest time that a text may begin with, as in :class:`TimestampRules`."""
    forced: tuple[int, ...]
    """The tokens after the start of a model that names no languages."""

    @property
    def first_time(self) -> int | None:
        """The first token of time; None if the model writes none."""
        return None if self.no_timestamps_id is None else self.no_timestamps_id + 1

    @property
    def rules(self) -> TimestampRules:
        """The rules of tokens of time. Raises ConfigError if the model writes none."""
        if self.first_time is None:
            raise ConfigError(
                "times, and sound that is longer than the model's window, need"
                " no_timestamps_token_id in generation_config.json"
            )
        return TimestampRules(self.first_time, self.max_initial)

    def language_id(self, code: str) -> int:
        """The token of a language. Raises ConfigError if the model does not know it."""
        if not self.languages:
            raise ConfigError(f"language {code!r}: this model has one language; leave it out")
        if code not in self.languages:
            raise ConfigError(
                f"unknown language {code!r}{nearest(code, list(self.languages))}; known are"
                f" {', '.join(self.languages)}"
            )
        return self.languages[code]

    def prompt(
        self, start: int, language: int | None, task: str, *, timestamps: bool
    ) -> tuple[int, ...]:
        """The decoder's inputs before a text.

        ``language`` is a token; None if the model has one language. Raises ConfigError for a task
        that the model does not have.
        """
        tokens = [start]
        if language is None:
            if task != "transcribe":
                raise ConfigError(f"task {task!r}: this model can only transcribe")
            tokens += [token for token in self.forced if token != self.no_timestamps_id]
        elif task not in self.tasks:
            raise ConfigError(
                f"unknown task {task!r}{nearest(task, list(self.tasks))}; known are"
                f" {', '.join(self.tasks)}"
            )
        else:
            tokens += [language, self.tasks[task]]
        if not timestamps and self.no_timestamps_id is not None:
            tokens.append(self.no_timestamps_id)
        return tuple(tokens)


def read(folder: Path, config: TransformerConfig) -> SpeechConfig:
    """The settings in the files of a folder.

    Raises InputError, naming the file, for settings that are not supported.
    """
    data, file = huggingface.read(folder)
    _check_features(folder, config)
    own = {key: value for key, value in data.items() if key in {*_READ, *_IGNORED, *_REFUSED}}
    for key in _REFUSED:
        if own.get(key) not in (None, False):
            raise InputError(f"{file}: {key}={own[key]!r} is not supported: leave it out")
    others = {key: value for key, value in data.items() if key not in own}
    if isinstance(others.get("max_length"), int):  # Whisper counts no start token in it
        others["max_length"] = min(others["max_length"], config.longest - 1) + 1
    generation = huggingface.from_generation_config(others, config, where=str(file))
    if not huggingface.has_length(others):
        generation = dataclasses.replace(generation, max_new_tokens=None)
    languages = _ids(file, own, "lang_to_id") if own.get("is_multilingual", True) else {}
    forced = own.get("forced_decoder_ids")
    if forced is None:
        forced = folders.configuration(folder).get("forced_decoder_ids")
    return SpeechConfig(
        generation,
        {name.removeprefix("<|").removesuffix("|>"): index for name, index in languages.items()},
        _ids(file, own, "task_to_id") if languages else {},
        _id(file, own, "no_timestamps_token_id", config.target_vocab_size),
        _id(file, own, "max_initial_timestamp_index", config.target_vocab_size),
        _forced(file, forced or [], config.target_vocab_size),
    )


def _id(file: Path, data: Mapping[str, Any], key: str, vocabulary: int) -> int | None:
    value = data.get(key)
    if value is None or (type(value) is int and 0 <= value < vocabulary):
        return value
    raise InputError(f"{file}: {key}={value!r} is no number below the vocabulary of {vocabulary}")


def _ids(file: Path, data: Mapping[str, Any], key: str) -> dict[str, int]:
    value = data.get(key) or {}
    if isinstance(value, dict) and all(type(index) is int for index in value.values()):
        return value
    raise InputError(f"{file}: {key} is no object of token ids")


def _forced(file: Path, pairs: Any, vocabulary: int) -> tuple[int, ...]:
    """The tokens of pairs of a position and a token, from position 1 on; those without are left
    out.
    """
    try:
        tokens = [token for _, token in pairs if token is not None]
        in_order = [position for position, _ in pairs] == list(range(1, len(pairs) + 1))
    except (TypeError, ValueError):
        in_order, tokens = False, []
    if not in_order or not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise InputError(f"{file}: forced_decoder_ids={pairs!r} are no pairs of position and token")
    return tuple(tokens)


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
