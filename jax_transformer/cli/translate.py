"""``jax-transformer translate``: lines in as they come, translations out."""

import contextlib
import enum
import io
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jax_transformer.cli.arguments import Command
from jax_transformer.config import option
from jax_transformer.config.option import Option
from jax_transformer.data import parallel_text
from jax_transformer.data.options import LongLine
from jax_transformer.errors import ConfigError, Refusal, counted
from jax_transformer.generate.generation_config import BeamScorer, EarlyStopping
from jax_transformer.inference import Engine
from jax_transformer.runtime import process
from jax_transformer.storage import atomic

if TYPE_CHECKING:
    from jax_transformer.inference.translation import Line, Translator

WAIT = 0.1
"""Seconds to wait for more lines after the first of a window."""


class Precision(enum.StrEnum):
    """A dtype to compute in."""

    FLOAT32 = "float32"
    MEDIUM = "medium"  # float32, with factors of products rounded to bfloat16
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


NumBeams = Annotated[int, Option(flag="beam", synonyms="beams beam_size beam_width")]


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search. A Hugging Face folder brings defaults of its own."""

    max_length: Annotated[
        int | None, Option(synonyms="max_new_tokens max_len max_target_length")
    ] = None
    """Longest translation, in tokens (default: twice the padded source)."""
    num_beams: NumBeams | None = None
    """Beam size; 1 is greedy (default: 1)."""
    length_penalty: float | None = None
    """Exponent of the length penalty (default: 0.6)."""
    penalty: BeamScorer | None = None
    """Divisor of a score: gnmt ((5 + length) / 6) ** exponent, or average, length ** exponent."""
    early_stopping: EarlyStopping | None = None
    """End of the average search, as False, True, "never" in transformers (default: heuristic)."""
    no_repeat_ngram_size: int | None = None
    """Forbid repeated n-grams of this size (0: off)."""
    encoder_no_repeat_ngram_size: int | None = None
    """Forbid n-grams of the source of this size (0: off)."""
    repetition_penalty: float | None = None
    """Penalise tokens that were already generated (> 1)."""
    min_new_tokens: Annotated[int | None, Option(synonyms="min_length min_len")] = None
    """Fewest tokens before the end token."""


@dataclass(frozen=True)
class SamplingOptions:
    """Options of drawing tokens at random instead of searching."""

    sample: Annotated[bool | None, Option(synonyms="do_sample sampling")] = None
    """Draw tokens at random instead of searching."""
    temperature: float | None = None
    """Divide logits by this before drawing (default: 1)."""
    top_k: int | None = None
    """Draw from the k most likely tokens; 0 draws from all (default: 0)."""
    top_p: float | None = None
    """Draw from the most likely tokens whose probabilities sum to this (default: 1)."""
    seed: int | None = None
    """Seed of the draws (default: 0)."""


@dataclass(frozen=True)
class ModelOptions:
    """The model that translates, for translate and evaluate."""

    run: Annotated[option.ModelPath, Option(group="model")]
    """The model: a run folder, a Hugging Face folder, or hf:owner/name."""
    weights: option.Weights = "auto"
    """Weights of the run: averaged, best, last, a step, or auto (the first that exists)."""
    ensemble: option.Repeatable[tuple[option.PathText, ...]] = ()
    """Another model with the same tokenizer: the mean of the probabilities decides. Repeatable."""
    precision: Precision | None = None
    """Dtype to compute in (default: the model's); medium is float32 with factors of products
    rounded to bfloat16, which some CPUs multiply faster."""
    engine: Engine = Engine.JAX
    """Program that translates: jax, or ctranslate2 on the CPU, which converts the model once and
    gives no loss."""
    quantization: option.Dtype | None = None
    """Numbers of the engine ctranslate2: float32, float16 or int8 (default: float32)."""
    tokens_per_batch: int = 4096
    """Positions of the source in a batch, padding and all beams included."""
    architecture: option.Architecture | None = None
    """Register an architecture of yours, my_file.py:NAME or package.module:NAME."""
    source_lang: Annotated[option.SourceLanguage | None, Option(group="input and output")] = None
    """Source language of a multilingual Hugging Face model: eng_Latn, en_XX, en."""
    target_lang: option.TargetLanguage | None = None
    """Target language of a multilingual Hugging Face model."""


@dataclass(frozen=True)
class TranslateOptions(ModelOptions):
    """Translate lines from standard input to standard output, one line out for each line in."""

    input: Annotated[option.PathText | None, Option(synonyms="in in_file input_file")] = None
    """Read lines from this file, plain or gzip, instead of standard input."""
    output: Annotated[option.PathText | None, Option(synonyms="out out_file output_file")] = None
    """Write translations to this file instead of standard output."""
    buffer: Annotated[int, Option(synonyms="buffer_size batch_size batch")] = 8192
    """Collect at most N lines before they are translated, sorted by length."""
    too_long: LongLine = LongLine.REFUSE
    """Refuse, cut or skip (translate to an empty line) a line that is too long for the model."""
    attention: option.PathText | None = None
    """Also write an HTML page with the attention weights of the first 50 lines."""
    search: Annotated[option.Inline[SearchOptions], Option(group="decoding")] = field(
        default_factory=SearchOptions
    )
    num_return_sequences: Annotated[
        int | None, Option(flag="n_best", synonyms="nbest num_hypotheses")
    ] = None
    """Write the best N of the beam: `line ||| text ||| score` (0: only the best text)."""
    sampling: Annotated[option.Inline[SamplingOptions], Option(group="sampling")] = field(
        default_factory=SamplingOptions
    )


def with_precision(run: Callable[[Any], int]) -> Callable[[Any], int]:
    """Return a command that runs with JAX's 64 bits if its ``precision`` is float64."""

    @wraps(run)
    def wrapped(options: Any) -> int:
        import jax

        with jax.enable_x64(True) if options.precision is Precision.FLOAT64 else nullcontext():
            return run(options)

    return wrapped


@with_precision
def run(options: TranslateOptions) -> int:
    """Translate the lines as they come and return the exit code."""
    from jax_transformer.formats import registry
    from jax_transformer.inference import translation

    process.use_program_cache()
    overrides = vars(options.search) | vars(options.sampling)
    overrides["n_best"] = options.num_return_sequences
    for path in filter(None, (options.output, options.attention)):
        atomic.check_output(path)
    if options.attention is not None and options.ensemble:
        raise ConfigError("--attention shows the weights of one model: leave out --ensemble")
    if options.attention is not None and options.engine is not Engine.JAX:
        raise ConfigError(f"--engine {options.engine} has no attention: leave out --attention")
    if options.buffer < 1:
        raise ConfigError(f"buffer={options.buffer} must be at least 1")
    paths = (options.run, *options.ensemble)
    opened = [registry.open(path, options.weights) for path in paths]
    names = "engine quantization source_lang target_lang precision tokens_per_batch"
    settings = {name: getattr(options, name) for name in names.split()}
    translator = translation.load(*opened, **settings | overrides)
    generation_config = translator.generation_config
    as_list = generation_config.num_return_sequences > 1 or bool(options.num_return_sequences)
    if as_list and generation_config.num_beams == 1:
        raise ConfigError("--n-best needs --beam of at least 2")
    shown = []
    for line in _translated(options, translator, as_list):
        if options.attention is not None:
            shown.append(line)
    if options.attention is not None:
        from jax_transformer.inference import attention_page

        lines, hypotheses = [x.source for x in shown], [x.hypotheses for x in shown]
        title = f"{options.run}, step {opened[0].step}"
        attention_page.write(options.attention, translator, lines, hypotheses, title=title)
    return 0


def _translated(
    options: TranslateOptions, translator: "Translator", as_list: bool
) -> Iterator["Line"]:
    """Yield the lines with their translations, after these are written."""
    from jax_transformer.inference.translation import n_best_lines

    path = None if options.input == "-" else options.input
    if path is None and sys.stdin.isatty():
        print("reading lines from the terminal; Ctrl-D ends", file=sys.stderr)
    count, too_long = 0, []
    try:
        with output(options.output) as file, interruptible() as asked:
            windows = windows_of(path, options.buffer)
            for lines in translator.stream(windows, options.buffer, too_long=options.too_long):
                if lines and count:
                    process.started()
                texts: list[str] = []
                for line in lines:
                    texts += n_best_lines(line) if as_list else [line.hypotheses[0].text]
                    if line.too_long:
                        too_long.append(f"{line.number + 1}")
                write(file, texts)
                count += len(lines)
                yield from lines
                if asked.is_set():
                    raise KeyboardInterrupt
    except (KeyboardInterrupt, Refusal, OSError) as error:
        if count and not isinstance(error, BrokenPipeError):
            name = str(getattr(file, "name", ""))
            where = f" in {name}" if name.endswith(atomic.PARTIAL) else ""
            print(
                f"translated {counted(count, 'line')}{where}; "
                f"to go on, translate the input from line {count + 1:,}",
                file=sys.stderr,
            )
        raise
    finally:
        if too_long:
            limit, names = translator.model.config.longest, ", ".join(too_long[:10])
            print(
                f"{'cut' if options.too_long is LongLine.CUT else 'skipped'} "
                f"{counted(len(too_long), 'line')} over max_length={limit}: {names}"
                f"{', ...' if len(too_long) > 10 else ''}",
                file=sys.stderr,
            )


# Lines out and in


@contextlib.contextmanager
def output(path: str | None) -> Iterator[io.TextIOBase]:
    """Standard output or a file for :func:`write`, in UTF-8 whatever the locale.

    Standard output is None or ``-``. Until all lines are written, those of a file are in
    FILE.partial, which stays after an error.
    """
    if path is None or path == atomic.STDOUT:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", newline="\n")
        stdout: Any = sys.stdout
        yield stdout
    else:
        with atomic.growing_file(Path(path)) as file:
            yield file


def write(file: io.TextIOBase, lines: Iterable[str]) -> None:
    """Write lines at once. A line feed within one becomes a space."""
    file.write("".join(line.replace("\n", " ") + "\n" for line in lines))
    file.flush()


def windows_of(path: str | None, size: int) -> Iterator[list[str]]:
    """Yield the lines of a file or of standard input as they come, at most ``size`` at a time.

    A window ends when it is full, or a short wait after its first line. A thread reads ahead.
    Raises InputError if a file cannot be read or is empty; standard input may be empty.
    """
    chunks: queue.Queue[list[str] | Exception | None] = queue.Queue(16)
    threading.Thread(target=_read, args=(path, chunks), daemon=True).start()
    lines: list[str] = []
    while True:
        until = None
        while len(lines) < size:
            if lines and until is None:
                until = time.monotonic() + WAIT
            try:
                chunk = chunks.get(timeout=until and max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(chunk, Exception):
                raise chunk
            if chunk is None:
                yield lines
                return
            lines += chunk
        yield lines[:size]
        lines = lines[size:]


def _read(path: str | None, chunks: "queue.Queue[list[str] | Exception | None]") -> None:
    """Put the lines of a file into a queue as they come, then None or the error that ended it."""
    try:
        if path is not None:
            for lines in parallel_text.read_chunks(path):
                chunks.put(lines)
        else:
            # Not Python's own buffer: at exit, Python aborts if a thread still waits in that
            buffer: Any = sys.stdin.buffer
            reader = io.BufferedReader(getattr(buffer, "raw", buffer))
            try:
                for lines in parallel_text.split_chunks(reader, "standard input"):
                    chunks.put(lines)
            finally:
                reader.detach()
        chunks.put(None)
    except Exception as error:
        chunks.put(error)


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt, and set an event.

    The event is to be looked at now and then: Python drops an exception that a signal raises in a
    callback of the garbage collector.
    """
    asked = threading.Event()

    def interrupt() -> None:
        asked.set()
        raise KeyboardInterrupt

    # A shell starts what runs in the background with SIGINT ignored, and so it stays
    heeded = [n for n in process.STOPPING if signal.getsignal(n) is not signal.SIG_IGN]
    with process.on_signals(interrupt, raising=KeyboardInterrupt, numbers=heeded):
        try:
            yield asked
        except ValueError as error:  # jaxlib makes it of an exception while it compares arguments
            if asked.is_set() and not isinstance(error, Refusal):
                raise KeyboardInterrupt from error
            raise


COMMAND = Command(
    TranslateOptions,
    run,
    examples=(
        "translate --run runs/phrases < lines.txt",
        "translate --run opus-mt-en-de --input lines.txt --output translations.txt --beam 4",
    ),
    synonyms="generate predict infer decode",
    calls_started=True,
)
