"""Transcription: sound in, text out, by a model that reads spectrograms."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.extras.speech import sound, speech_config, timestamps
from jax_transformer.extras.speech.timestamps import Phrase, TimestampRules
from jax_transformer.formats import registry
from jax_transformer.generate import decoding, generation_config, prepare
from jax_transformer.generate.prepare import ModelStructure
from jax_transformer.inference import translation
from jax_transformer.shapes import Features
from jax_transformer.storage import huggingface_folder
from jax_transformer.transformer import Transformer


class Segment(NamedTuple):
    """A phrase with its times in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Transcript:
    """The text of a recording."""

    text: str
    segments: tuple[Segment, ...]
    """Its phrases; one for the whole window if no times were asked for."""
    language: str | None
    """The code of the language; None if the model has one."""
    tokens: tuple[int, ...]
    """The tokens of all phrases, without the end token."""


class Transcriber:
    """Writes down what is said in WAV files, with a model and its folder's own settings.

    ``Transcriber.load("whisper-tiny")("talk.wav").text`` is what ``jax-transformer transcribe``
    prints. Sound up to the model's window (30 seconds) is one search. Longer sound is read window
    by window, each from the last time that the model wrote in the one before: the algorithm of
    Radford et al. 2022, section 3.8, as transformers' ``generate`` has it without options, that is
    without its repetitions at higher temperatures.
    """

    def __init__(self, model: Transformer, tokenizer: Any, config: speech_config.SpeechConfig):
        if model.config.mel_bins is None:
            raise ConfigError("transcribe reads sound, and this model reads text: use translate")
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.split_model = prepare.split(model)

    @classmethod
    def load(
        cls,
        path: str | Path,
        weights: str = "auto",
        *,
        precision: str | None = None,
        **options: Any,
    ) -> "Transcriber":
        """Return the transcriber of a Hugging Face folder, ``hf:owner/name``, or a run of one.

        ``precision`` is the dtype to compute in; None is the dtype of the files. ``options`` change
        the folder's settings of generation (``beam_size=5``). Raises the errors of
        :func:`.registry.open`, and ConfigError for options without an effect.
        """
        changes = generation_config.canonical(options)
        if (count := changes.get("num_return_sequences", 1)) != 1:
            raise ConfigError(
                f"num_return_sequences={count}: a transcript is one text; leave it out"
            )
        if "forced_bos_token_id" in changes:
            raise ConfigError("forced_bos_token_id: the first tokens say the language and the task")
        opened = registry.open(path, weights)
        if opened.config is None or opened.config.mel_bins is None:
            raise ConfigError(
                f"{opened.path}: transcribe reads sound, and this model reads text: use translate"
            )
        file = opened.extra_files.get(huggingface_folder.CONFIG)
        if file is None:
            raise InputError(f"{opened.path}: has no config.json of a Hugging Face folder")
        config = speech_config.read(file.parent, opened.config)
        config = replace(config, generation=config.generation.overridden(options))
        tokenizer = opened.tokenizer()
        return cls(translation.load_model(opened, precision), tokenizer, config)

    def __call__(
        self,
        source: str | Path | np.ndarray,
        *,
        language: str | None = None,
        task: str | None = None,
        timestamps: bool | None = None,
    ) -> Transcript:
        """Return the transcript of a WAV file, or of samples (n,) at 16 kHz between -1 and 1.

        Args:
            source: the file or the samples, floating-point numbers.
            language: a code (``de``) or an English name (``german``); None is the folder's,
                otherwise it is detected in the first window.
            task: ``transcribe``, or ``translate`` to English; None is the folder's, otherwise
                ``transcribe``.
            timestamps: return the times of phrases; None is as the folder says, otherwise False.
                Sound over a window has them in any case.

        Raises InputError if the file cannot be read or the samples are not sound; ConfigError if
        the model does not have the language or the task, or knows no times.
        """
        samples = sound.read(source) if isinstance(source, str | Path) else _checked(source)
        windows = _Windows(samples, self.model)
        timestamps = self.config.timestamps if timestamps is None else timestamps
        timestamps = timestamps or windows.several
        request = [
            self._detected(windows) if token is None else token
            for token in self.config.request(language, task)
        ]
        codes = {index: code for code, index in self.config.languages.items()}
        code = codes.get(request[0]) if request else None
        start, _ = self.config.generation.start_and_end(self.model.config)
        prompt = np.array([self.config.prompt(start, request, timestamps=timestamps)], np.int32)
        rules = self.config.rules if timestamps else None
        segments, tokens = [], []
        for phrase in self._phrases(windows, prompt, rules):
            tokens += phrase.tokens
            segments.append(Segment(*phrase.times, self.tokenizer.decode(phrase.tokens)))
        return Transcript(self.tokenizer.decode(tokens), tuple(segments), code, tuple(tokens))

    def _detected(self, windows: "_Windows") -> int:
        """Return the token of the likeliest language in the first window."""
        ids = np.array([*self.config.languages.values()])
        start_id, _ = self.config.generation.start_and_end(self.model.config)
        start = jnp.full((1, 1), start_id, jnp.int32)
        structure, arrays = self.split_model.structure, self.split_model.arrays
        scores = np.asarray(_first_logits(structure, arrays, windows.at(0), start))[0, ids]
        return int(ids[scores.argmax()])

    def _phrases(
        self, windows: "_Windows", prompt: np.ndarray, rules: TimestampRules | None
    ) -> Iterator[Phrase]:
        """Yield the phrases of all windows; a text is as long as positions reach."""
        room = self.model.config.longest - prompt.shape[1]
        settings = self.config.generation
        length, (_, eos_id) = settings.max_new_tokens, settings.start_and_end(self.model.config)
        settings = replace(
            settings,
            max_new_tokens=room if length is None else min(room, length),
            eos_token_id=eos_id,
            constraints=replace(settings.constraints, processors=() if rules is None else (rules,)),
        )
        seek = 0
        while seek < windows.frames:
            ids, _ = decoding.generate(self.split_model, windows.at(seek), settings, prompt=prompt)
            tokens = list(itertools.takewhile(lambda i: i != eos_id, ids[0, 0].tolist()))
            frames = min(windows.frames - seek, windows.length)
            spoken, moved = timestamps.split(tokens, self.config.first_time, seek, frames)
            yield from spoken
            seek += moved


def _checked(samples: np.ndarray) -> Float[np.ndarray, " n"]:
    """Return the samples. Raises InputError unless they are finite floating-point numbers (n,)."""
    if not np.issubdtype(samples.dtype, np.floating) or samples.ndim != 1:
        raise InputError(
            f"samples are floating-point numbers (n,) between -1 and 1, not {samples.dtype}"
            f" {samples.shape}"
        )
    if not len(samples) or not np.isfinite(samples).all():
        raise InputError("samples: are not finite" if len(samples) else "samples: hold no sound")
    return samples


class _Windows:
    """The spectrogram of a recording, window by window.

    A recording that fits one window is followed by silence. The spectrogram of a longer one is made
    as a whole, since its loudest frame decides what is silence, and its last window is followed by
    zeros.
    """

    def __init__(self, samples: Float[np.ndarray, " n"], model: Transformer):
        assert model.config.mel_shape is not None, "checked when the model was taken"
        mel_bins, self.length = model.config.mel_shape
        samples = np.pad(samples, (0, max(0, self.length * sound.HOP - len(samples))))
        self._features = sound.log_mel(samples, mel_bins)
        self.frames = self._features.shape[1]
        self.several = self.frames > self.length

    def at(self, start: int) -> Features:
        """Return the window (1, c, w) that begins at this frame."""
        part = self._features[None, :, start : start + self.length]
        return np.pad(part, ((0, 0), (0, 0), (0, self.length - part.shape[2])))


@partial(jax.jit, static_argnames=("structure",))
def _first_logits(
    structure: ModelStructure, arrays: list[Array], features: Features, start: Array
) -> Float[Array, "b v"]:
    """Return the logits of the token after the start."""
    model = structure.merge(arrays)
    cache: Any = model.init_cache(features, 1)
    return model.decode_step(start, cache)[0][:, 0]
