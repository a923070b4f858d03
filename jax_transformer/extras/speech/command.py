"""``jax-transformer transcribe``: WAV files in, text out."""

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from jax_transformer.cli import translate
from jax_transformer.cli.arguments import Command
from jax_transformer.cli.translate import NumBeams, Precision, with_precision
from jax_transformer.config import option
from jax_transformer.config.option import Option
from jax_transformer.storage import atomic

if TYPE_CHECKING:
    from jax_transformer.extras.speech.transcription import Transcript


class Task(enum.StrEnum):
    """The text that is made of speech."""

    TRANSCRIBE = "transcribe"
    TRANSLATE = "translate"


@dataclass(frozen=True)
class TranscribeOptions:
    """Write down what is said in a WAV file, to standard output."""

    audio: Annotated[option.Positional[str], Option(group="input and output")]
    """A WAV file of 8, 16, 24 or 32 bits (PCM), of 4 to 192 kHz and up to 32 channels."""
    run: Annotated[option.ModelPath, Option(group="model")]
    """The model: a Hugging Face folder, hf:owner/name, or a run that was made from one."""
    weights: option.Weights = "auto"
    """Weights of the run: averaged, best, last, a step, or auto (the first that exists)."""
    precision: Precision | None = None
    """Dtype to compute in, or medium as in translate (default: the model's)."""
    language: Annotated[str | None, Option(group="input and output", metavar="TAG")] = None
    """Language of the speech, de or german (default: the folder's, otherwise detected)."""
    task: Annotated[Task | None, Option(group="decoding")] = None
    """Transcribe, or translate to English (default: the folder's, otherwise transcribe)."""
    timestamps: Annotated[bool | None, Option(group="input and output")] = None
    """Write a line for each phrase, with its times (default: as the folder says)."""
    num_beams: Annotated[NumBeams | None, Option(group="decoding")] = None
    """Beam size; 1 is greedy (default: the folder's)."""
    output: Annotated[option.PathText | None, Option(group="input and output")] = None
    """Write the text to this file instead of standard output."""
    json: bool = False
    """Print one JSON object: text, language, and phrases with their times."""


@with_precision
def run(options: TranscribeOptions) -> int:
    """Write the transcript and return the exit code."""
    from jax_transformer.extras.speech import transcription
    from jax_transformer.runtime import process

    process.use_program_cache()
    atomic.check_output(options.output)
    transcriber = transcription.Transcriber.load(
        options.run, options.weights, precision=options.precision, beam=options.num_beams
    )
    timestamps = transcriber.config.timestamps if options.timestamps is None else options.timestamps
    transcript = transcriber(
        options.audio,
        language=options.language,
        task=options.task,
        timestamps=timestamps or options.json,
    )
    with translate.output(options.output) as file:
        translate.write(file, _lines(transcript, timestamps, options))
    return 0


def _lines(transcript: "Transcript", timestamps: bool, options: TranscribeOptions) -> Iterator[str]:
    if options.json:
        segments = [segment._asdict() for segment in transcript.segments]
        yield json.dumps(
            {"text": transcript.text, "language": transcript.language, "segments": segments},
            ensure_ascii=False,
        )
    elif timestamps:
        for segment in transcript.segments:
            yield f"[{_time(segment.start)} --> {_time(segment.end)}] {segment.text.strip()}"
    else:
        yield transcript.text.strip()


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(1000 * seconds), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest / 1000:06.3f}"


COMMAND = Command(
    TranscribeOptions,
    run,
    examples=(
        "transcribe talk.wav --run whisper-tiny",
        "transcribe talk.wav --run hf:openai/whisper-small --language de --timestamps",
    ),
)
