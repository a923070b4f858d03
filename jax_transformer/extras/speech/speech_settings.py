"""Settings of a model that writes down speech: languages, tasks and times.

Facts from ``generation_whisper.py`` of transformers 5.23.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_transformer.errors import ConfigError, nearest
from jax_transformer.extras.speech import language_names
from jax_transformer.extras.speech.timestamps import TimestampRules
from jax_transformer.generate.generation_config import GenerationConfig


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
    """The latest time that a text may begin with, as in :class:`TimestampRules`."""
    forced: tuple[int | None, ...]
    """The tokens after the start if neither a call nor the folder names a language or a task; None
    is the token of the detected language.
    """

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
        """The token of a language: its code, or its English name. Raises ConfigError if the model
        does not know it.
        """
        if not self.languages:
            raise ConfigError(f"language {language!r}: this model has one language; leave it out")
        code = language_names.code(language)
        if code not in self.languages:
            raise ConfigError(
                f"unknown language {language!r}{nearest(code, list(self.languages))}; known are"
                f" {', '.join(self.languages)}"
            )
        return self.languages[code]

    def task_id(self, task: str) -> int:
        """The token of a task. Raises ConfigError if the model does not have it."""
        if task not in self.tasks:
            raise ConfigError(
                f"unknown task {task!r}{nearest(task, list(self.tasks))}; known are"
                f" {', '.join(self.tasks)}"
            )
        return self.tasks[task]

    def request(self, language: str | None, task: str | None) -> tuple[int | None, ...]:
        """The tokens after the start that say the language and the task; None is the token of a
        language that must be detected.

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
        return spoken, self.task_id("transcribe" if task is None else task)

    def prompt(self, start: int, request: Sequence[int], *, timestamps: bool) -> tuple[int, ...]:
        """The decoder's inputs before a text, with a :meth:`request` whose language is known."""
        tokens = (start, *(token for token in request if token != self.no_timestamps_id))
        if timestamps or self.no_timestamps_id is None:
            return tokens
        return *tokens, self.no_timestamps_id
