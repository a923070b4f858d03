"""Settings of a model that writes down speech, languages, tasks and times; and how they are read
from the files of a Hugging Face folder of Whisper.

Facts from ``generation_whisper.py`` of transformers 5.23.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError, InputError, about_file, nearest
from jax_transformer.extras.speech import sound
from jax_transformer.extras.speech.timestamps import TimestampRules
from jax_transformer.generate import transformers_config
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.storage import huggingface_folder, untrusted
from jax_transformer.storage.untrusted import shown

_LANGUAGES = """
af afrikaans, am amharic, ar arabic, as assamese, az azerbaijani, ba bashkir, be belarusian,
bg bulgarian, bn bengali, bo tibetan, br breton, bs bosnian, ca catalan, ca valencian, cs czech,
cy welsh, da danish, de german, el greek, en english, es castilian, es spanish, et estonian,
eu basque, fa persian, fi finnish, fo faroese, fr french, gl galician, gu gujarati, ha hausa,
haw hawaiian, he hebrew, hi hindi, hr croatian, ht haitian, ht haitian creole, hu hungarian,
hy armenian, id indonesian, is icelandic, it italian, ja japanese, jw javanese, ka georgian,
kk kazakh, km khmer, kn kannada, ko korean, la latin, lb letzeburgesch, lb luxembourgish,
ln lingala, lo lao, lt lithuanian, lv latvian, mg malagasy, mi maori, mk macedonian, ml malayalam,
mn mongolian, mr marathi, ms malay, mt maltese, my burmese, my myanmar, ne nepali, nl dutch,
nl flemish, nn nynorsk, no norwegian, oc occitan, pa panjabi, pa punjabi, pl polish, ps pashto,
ps pushto, pt portuguese, ro moldavian, ro moldovan, ro romanian, ru russian, sa sanskrit,
sd sindhi, si sinhala, si sinhalese, sk slovak, sl slovenian, sn shona, so somali, sq albanian,
sr serbian, su sundanese, sv swedish, sw swahili, ta tamil, te telugu, tg tajik, th thai,
tk turkmen, tl tagalog, tr turkish, tt tatar, uk ukrainian, ur urdu, uz uzbek, vi vietnamese,
yi yiddish, yo yoruba, yue cantonese, zh chinese, zh mandarin
"""
_ENTRIES = (entry.split(maxsplit=1) for entry in _LANGUAGES.split(","))
LANGUAGE_CODES = {name.strip(): code for code, name in _ENTRIES}
"""The codes of Whisper's languages by their English names, of ``tokenization_whisper.py``."""


@dataclass(frozen=True)
class SpeechConfig:
    """The settings of a model that writes down speech."""

    generation: GenerationConfig
    """Settings of the search; the length counts neither the prompt nor the start token."""
    languages: Mapping[str, int]
    """The token of each language by its code (``de``); empty for a model of English only."""
    tasks: Mapping[str, int]
    """The token of each task: ``transcribe``, and ``translate`` to English."""
    language: str | None
    """The language if a call names none; None detects it."""
    task: str | None
    """The task if a call names none; None is ``transcribe``."""
    timestamps: bool
    """Times are written if a call does not say."""
    no_timestamps_id: int | None
    """The token that says that no times follow; None if the model writes none."""
    max_initial: int | None
    """The latest time that a text may begin with, see :class:`TimestampRules`."""
    forced: tuple[int | None, ...]
    """The tokens after the start if no language or task is named; None is the detected language."""

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

    def language_id(self, language: str) -> int:
        """Return the token of a language, by code, token or English name. Raises ConfigError."""
        if not self.languages:
            raise ConfigError(f"language {language!r}: this model has one language; leave it out")
        name = language.removeprefix("<|").removesuffix("|>").lower()
        return _known("language", language, LANGUAGE_CODES.get(name, name), self.languages)

    def request(self, language: str | None, task: str | None) -> tuple[int | None, ...]:
        """Return the tokens after the start that say the language and the task; None is the token
        of a language that must be detected.

        As in transformers, ``forced_decoder_ids`` counts only if nothing else names one of them.
        Raises ConfigError for a language or a task that the model does not have.
        """
        language = self.language if language is None else language
        task = self.task if task is None else task
        spoken = None if language is None else self.language_id(language)
        if not self.languages and task not in (None, "transcribe"):
            raise ConfigError(f"task {task!r}: this model can only transcribe")
        if not self.languages or (self.forced and language is None and task is None):
            return self.forced
        task = "transcribe" if task is None else task
        return spoken, _known("task", task, task, self.tasks)

    def prompt(self, start: int, request: Sequence[int], *, timestamps: bool) -> tuple[int, ...]:
        """Return the decoder's inputs before a text, for a :meth:`request` with a language."""
        tokens = (start, *(token for token in request if token != self.no_timestamps_id))
        if timestamps or self.no_timestamps_id is None:
            return tokens
        return *tokens, self.no_timestamps_id


def _known(what: str, named: str, name: str, ids: Mapping[str, int]) -> int:
    """Return the token of a name. Raises ConfigError if the model does not have it."""
    if name not in ids:
        hint = nearest(name, list(ids))
        raise ConfigError(f"unknown {what} {named!r}{hint}; known are {', '.join(ids)}")
    return ids[name]


# Reading

_TYPES = {
    "lang_to_id": dict,
    "language": str,
    "max_initial_timestamp_index": int,
    "max_length": int,
    "min_length": int,
    "no_timestamps_token_id": int,
    "return_timestamps": bool,
    "task": str,
    "task_to_id": dict,
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
_REFUSED = """compression_ratio_threshold condition_on_prev_tokens logprob_threshold
    no_speech_threshold""".split()


def read(folder: Path, config: TransformerConfig) -> SpeechConfig:
    """Return the settings in the files of a folder.

    Without a maximum length, it is the number of the model's positions (transformers: twenty tokens
    in the first window). Raises InputError, naming the file, for settings that are not supported.
    """
    data, file = transformers_config.read(folder)
    _check_features(folder, config)
    for key in _REFUSED:
        if data.get(key) is not None and data[key] is not False:
            raise InputError(f"{file}: {key}={data[key]!r} is not supported: leave it out")
    for key, kind in _TYPES.items():
        if data.get(key) is not None and type(data[key]) is not kind:
            raise InputError(f"{file}: {key}={shown(data[key])} is not of type {kind.__name__}")
    own = {"is_multilingual", "forced_decoder_ids", *_TYPES, *_IGNORED, *_REFUSED}
    others = {key: value for key, value in data.items() if key not in own}
    others |= _lengths(file, data)
    generation = transformers_config.from_generation_config(others, config, where=str(file))
    if others.get("max_new_tokens") is None:
        generation = dataclasses.replace(generation, max_new_tokens=None)
    vocabulary = config.target_vocab_size
    for key in ("no_timestamps_token_id", "max_initial_timestamp_index"):
        if data.get(key) is not None and not _is_id(data[key], vocabulary):
            raise InputError(
                f"{file}: {key}={data[key]} is not a number below the vocabulary of {vocabulary}"
            )
    languages, tasks = _ids(file, data, vocabulary)
    forced = data.get("forced_decoder_ids")
    if forced is None:
        forced = huggingface_folder.configuration(folder).get("forced_decoder_ids")
    settings = SpeechConfig(
        generation,
        {name.removeprefix("<|").removesuffix("|>"): index for name, index in languages.items()},
        tasks,
        data.get("language"),
        data.get("task"),
        bool(data.get("return_timestamps")),
        data.get("no_timestamps_token_id"),
        data.get("max_initial_timestamp_index"),
        _forced(file, forced or [], vocabulary, detects=bool(languages)),
    )
    with about_file(file):
        settings.request(None, None)
    return settings


def _lengths(file: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``max_new_tokens``: ``max_length`` excludes the prompt, ``min_length`` counts it."""
    if data.get("min_length") and data.get("min_new_tokens") is None:
        raise InputError(
            f"{file}: min_length={data['min_length']} counts the prompt, which every call chooses:"
            " give min_new_tokens"
        )
    longest = data.get("max_length")
    if longest is None or data.get("max_new_tokens") is not None:
        return {}
    if longest < 1:
        raise InputError(f"{file}: max_length={longest} leaves no room for a token")
    return {"max_new_tokens": longest}


def _is_id(value: Any, vocabulary: int) -> bool:
    return type(value) is int and 0 <= value < vocabulary


def _ids(
    file: Path, data: Mapping[str, Any], vocabulary: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tokens of languages and tasks; none for a model of one language."""
    languages = (data.get("lang_to_id") or {}) if data.get("is_multilingual", True) else {}
    tasks = (data.get("task_to_id") or {}) if languages else {}
    for key, ids in (("lang_to_id", languages), ("task_to_id", tasks)):
        for token, index in ids.items():
            if not _is_id(index, vocabulary):
                raise InputError(
                    f"{file}: {key}: {shown(token)} is {shown(index)}, and not a number below the"
                    f" vocabulary of {vocabulary}"
                )
    if languages and not tasks:
        raise InputError(f"{file}: has lang_to_id and no task_to_id: add the token of transcribe")
    return languages, tasks


def _forced(file: Path, pairs: Any, vocabulary: int, *, detects: bool) -> tuple[int | None, ...]:
    """Return the tokens of pairs (position, token); one without a token only if detected, first."""
    try:
        tokens = [token for _, token in pairs]
        in_order = [position for position, _ in pairs] == list(range(1, len(pairs) + 1))
    except (TypeError, ValueError):
        in_order, tokens = False, []
    if not in_order or not all(token is None or _is_id(token, vocabulary) for token in tokens):
        raise InputError(
            f"{file}: forced_decoder_ids={pairs!r} are not pairs of position and token"
        )
    return tuple(
        token for i, token in enumerate(tokens) if token is not None or (detects and i == 0)
    )


def _check_features(folder: Path, config: TransformerConfig) -> None:
    """Raise InputError if the folder's spectrograms differ from those computed here."""
    expected = {
        "feature_size": config.mel_bins,
        "sampling_rate": sound.SAMPLE_RATE,
        "hop_length": sound.HOP,
        "n_fft": sound.FRAME,
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
            raise InputError(f"{folder / name}: is not a JSON object")
        for key, value in expected.items():
            if data.get(key) not in (None, value):
                raise InputError(f"{folder / name}: {key}={data[key]!r}: only {value} is supported")
