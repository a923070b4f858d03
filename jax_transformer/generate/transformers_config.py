"""Hugging Face's generation_config.json as a :class:`GenerationConfig`, and back.

Old config.json files have the same keys. Facts from ``generation/configuration_utils.py`` and
``generation/utils.py`` of transformers 5.23. Lengths include the start token there and not here.
"""

from collections.abc import Mapping
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
from jax_transformer.generate.transformers_keys import IGNORED, NEUTRAL, NEUTRAL_IN_SAMPLING
from jax_transformer.storage import huggingface_folder, untrusted

_READ = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "decoder_start_token_id",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "num_return_sequences",
    "renormalize_logits",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
}
KNOWN = {*_READ, *IGNORED, *NEUTRAL, *NEUTRAL_IN_SAMPLING}
"""Every attribute of transformers' ``GenerationConfig``."""

_STOPPING = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.FULL, "never": EarlyStopping.NEVER}
_STOPPING_VALUES = {stopping: value for value, stopping in _STOPPING.items()}
_DEFAULT_LENGTH = 20  # new tokens, if the file has no length
_DEFAULT_TOP_K = 50  # of sampling, if the file has none


class _Values(NamedTuple):
    """The keys of a file that are not null, and the file's name for messages."""

    data: Mapping[str, Any]
    where: str

    def get(self, key: str, kind: type, default: Any) -> Any:
        """The value of ``key``. Raises InputError if it is not of the type ``kind``."""
        value = self.data.get(key, default)
        if value is None or _is(value, kind):
            return value
        if kind is float and _is(value, int) and abs(value) < 2**53:
            return float(value)
        article = "an" if kind is int else "a"
        raise InputError(f"{self.where}: {key}={value!r} is not {article} {kind.__name__}")

    def ids(self, key: str) -> tuple[int, ...]:
        """A token or a list of tokens; none without the key."""
        return self.as_ids(key, self.data.get(key, []))

    def as_ids(self, key: str, value: Any) -> tuple[int, ...]:
        """``value``, a token or a list of tokens."""
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
    """The settings of transformers' ``generate`` with this file and no arguments.

    ``config`` is the model's, for what the file leaves to it; ``where`` names the file in messages.
    Raises InputError for unknown keys, values of a wrong type, and settings that are not supported.
    """
    values = _Values({key: value for key, value in data.items() if value is not None}, where)
    do_sample = values.get("do_sample", bool, False)
    _refuse(values, do_sample=do_sample)
    num_beams = values.get("num_beams", int, 1)
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
            num_beams=num_beams,
            length_penalty=values.get("length_penalty", float, 1.0),
            num_return_sequences=values.get("num_return_sequences", int, 1),
            max_new_tokens=_max_new_tokens(values, config),
            beam_scorer=BeamScorer.AVERAGE,
            early_stopping=_STOPPING[stopping],
            constraints=_constraints(values),
            forced_bos_token_id=values.get("forced_bos_token_id", int, None),
            decoder_start_token_id=None if start == config.bos_id else start,
            eos_token_id=None if eos[0] == config.eos_id else eos[0],
            **(_sampling(values) if do_sample else {}),
        )
    except ConfigError as error:
        raise InputError(f"{where}: {error}") from None


def read(path: Path) -> tuple[dict[str, Any], Path]:
    """A folder's generation keys, and the file that they are in.

    Raises InputError if it is damaged.
    """
    file = path / huggingface_folder.GENERATION
    if not file.is_file():
        return from_model_config(
            huggingface_folder.configuration(path)
        ), path / huggingface_folder.CONFIG
    data = untrusted.read_json(file)
    if not isinstance(data, dict):
        raise InputError(f"{file}: is no JSON object")
    return data, file


def has_length(data: Mapping[str, Any]) -> bool:
    """True if the file limits the length of a translation; otherwise it is twenty tokens."""
    return any(data.get(key) is not None for key in ("max_length", "max_new_tokens"))


def from_model_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The generation keys of this ``config.json``, if there is no ``generation_config.json``."""
    keys = {key: value for key, value in data.items() if key in KNOWN and value is not None}
    if data.get("force_bos_token_to_be_generated"):  # BART's, before there was forced_bos_token_id
        keys["forced_bos_token_id"] = data.get("bos_token_id")
    return keys


def to_generation_config(generation: GenerationConfig, config: TransformerConfig) -> dict[str, Any]:
    """The ``generation_config.json`` with which transformers does the same, without its defaults.

    If ``generation`` has no maximum length, it is the model's. Raises ConfigError for what
    transformers does not have: our own beam search, and a seed.
    """
    if generation.num_beams > 1 and generation.beam_scorer is not BeamScorer.AVERAGE:
        raise ConfigError(
            f"transformers has no beam_scorer={generation.beam_scorer}: "
            "give beam_scorer=average, or num_beams=1"
        )
    if generation.seed:
        raise ConfigError(f"seed={generation.seed}: a generation_config.json has no seed")
    start, eos = generation.decoder_start_token_id, generation.eos_token_id
    length = generation.max_new_tokens
    values = {
        "decoder_start_token_id": config.bos_id if start is None else start,
        "eos_token_id": config.eos_id if eos is None else eos,
        "pad_token_id": config.target_pad_id,
        "max_length": usual_length(config) if length is None else length + 1,
    }
    written = _written(generation)
    return values | {key: value for key, (value, default) in written.items() if value != default}


def _written(generation: GenerationConfig) -> dict[str, tuple[Any, Any]]:
    """The values of other keys, each with transformers' default."""
    constraints = generation.constraints
    average = generation.beam_scorer is BeamScorer.AVERAGE
    eos = constraints.forced_eos_token_ids
    return {
        "num_beams": (generation.num_beams, 1),
        "length_penalty": (generation.length_penalty if average else 1.0, 1.0),
        "early_stopping": (_STOPPING_VALUES[generation.early_stopping], False),
        "num_return_sequences": (generation.num_return_sequences, 1),
        "forced_bos_token_id": (generation.forced_bos_token_id, None),
        "forced_eos_token_id": (None if not eos else eos[0] if len(eos) == 1 else list(eos), None),
        "min_new_tokens": (constraints.min_new_tokens, 0),
        "repetition_penalty": (constraints.repetition_penalty, 1.0),
        "no_repeat_ngram_size": (constraints.no_repeat_ngram_size, 0),
        "encoder_no_repeat_ngram_size": (constraints.encoder_no_repeat_ngram_size, 0),
        "bad_words_ids": ([list(word) for word in constraints.bad_words_ids], []),
        "suppress_tokens": (list(constraints.suppress_tokens), []),
        "begin_suppress_tokens": (list(constraints.begin_suppress_tokens), []),
        "renormalize_logits": (constraints.renormalize_logits, False),
        "do_sample": (generation.do_sample, False),
        "temperature": (generation.temperature, 1.0),
        "top_k": (generation.top_k, _DEFAULT_TOP_K if generation.do_sample else 0),
        "top_p": (generation.top_p, 1.0),
    }


def _refuse(values: _Values, *, do_sample: bool) -> None:
    """Raise one InputError for all keys that are unknown or not supported."""
    unknown = [
        f"unknown key {key!r}{nearest(key, sorted(KNOWN))}"
        for key in values.data
        if key not in KNOWN
    ]
    neutral = NEUTRAL | (NEUTRAL_IN_SAMPLING if do_sample else {})
    unsupported = [
        f"{key}={value!r} is not supported: leave it out"
        for key, value in values.data.items()
        if key in neutral and value not in neutral[key]
    ]
    if unknown or unsupported:
        raise InputError(f"{values.where}: {'; '.join(unknown + unsupported)}")


def _max_new_tokens(values: _Values, config: TransformerConfig) -> int:
    """Twenty, within the table of positions, if the file has no length."""
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
        repetition_penalty=values.get("repetition_penalty", float, 1.0),
        no_repeat_ngram_size=values.get("no_repeat_ngram_size", int, 0),
        encoder_no_repeat_ngram_size=values.get("encoder_no_repeat_ngram_size", int, 0),
        bad_words_ids=tuple(values.as_ids("bad_words_ids", word) for word in words),
        min_new_tokens=values.get("min_new_tokens", int, min_length),
        forced_eos_token_ids=values.ids("forced_eos_token_id"),
        suppress_tokens=values.ids("suppress_tokens"),
        begin_suppress_tokens=values.ids("begin_suppress_tokens"),
        renormalize_logits=values.get("renormalize_logits", bool, False),
    )


def _sampling(values: _Values) -> dict[str, Any]:
    return {
        "do_sample": True,
        "temperature": values.get("temperature", float, 1.0),
        "top_k": values.get("top_k", int, _DEFAULT_TOP_K),
        "top_p": values.get("top_p", float, 1.0),
    }
