"""The command line: ``jax-transformer COMMAND``. Results go to stdout, progress and messages to stderr, refusals are one line."""

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tyro

import jax_transformer
from jax_transformer.arguments import Inline, flags, parse
from jax_transformer.errors import ConfigError, InputError, Refusal, nearest
from jax_transformer.training.options import TrainOptions

__all__ = ["COMMANDS", "flags", "main", "parse"]


@dataclass(frozen=True)
class TrainCommand:
    """Train an encoder-decoder on parallel text."""

    config: str | None = None
    """A YAML file of the options below, nested where their names have dots, or the train_config.json of a run; flags win over it."""
    options: Inline[TrainOptions] = field(default_factory=TrainOptions)

    @classmethod
    def from_file(cls, path: str) -> "TrainCommand":
        """What flags are put on top of; what several options must be together is checked when they are."""
        from jax_transformer import config_file

        return cls(path, config_file.read(TrainOptions, path))


@dataclass(frozen=True)
class TranslateOptions:
    """Translate lines from standard input to standard output, one out for each in."""

    run: str
    """The run folder."""
    beam: int = 1
    """Hypotheses kept by beam search; 1 is greedy."""
    length_penalty: float = 0.6
    """Exponent of beam search's length penalty."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Score a run on a test set: BLEU, chrF, exact match, and loss."""

    run: str
    """The run folder."""
    source: str
    """Lines to translate; plain or gzip."""
    target: str
    """Their references, line by line."""
    beam: int = 1
    """Hypotheses kept by beam search; 1 is greedy."""
    length_penalty: float = 0.6
    """Exponent of beam search's length penalty."""
    json: bool = False
    """Print one JSON object instead of lines."""


@dataclass(frozen=True)
class ConvertOptions:
    """Convert weights between a run folder and PyTorch's names in a .safetensors file."""

    source: tyro.conf.Positional[str]
    """A run folder or a .safetensors file."""
    destination: tyro.conf.Positional[str]
    """A .safetensors file or a new folder; never overwritten."""
    config: str | None = None
    """The model's config.json, where the source is a file of weights."""
    preset: str | None = None
    """Or the preset that it is of,"""
    set: tuple[str, ...] = ()
    """with these sizes, as d_model=16 num_layers=2."""
    dtype: str | None = None
    """Cast the weights to this dtype; they keep their own without it."""


@dataclass(frozen=True)
class InspectOptions:
    """Show what is in a .safetensors file or a run folder: names, shapes, dtypes, hashes. Loads no weights into a model."""

    path: tyro.conf.Positional[str]
    """A .safetensors file or a run folder."""


def train(command: TrainCommand) -> int:
    """Train, and print the run folder."""
    from jax_transformer.training import recipe

    print(recipe.train(command.options).path)
    return 0


def translate(options: TranslateOptions) -> int:
    """Lines in, lines out."""
    from jax_transformer import translation
    from jax_transformer.data import parallel_text
    from jax_transformer.training import trained

    run = trained.load_run(options.run)
    content = sys.stdin.buffer.read()
    lines = parallel_text.split_lines(content, "standard input") if content else []
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # as the lines that came in, whatever the locale
    beam = {"beam_size": options.beam, "length_penalty": options.length_penalty}
    for line in translation.translate(run.model, run.tokenizer, lines, widths=run.widths, **beam):  # type: ignore[arg-type]
        sys.stdout.write(line.replace("\n", " ") + "\n")  # one line for each, whatever the model says
    return 0


def evaluate(options: EvaluateOptions) -> int:
    """Scores of a test set."""
    from jax_transformer.training import evaluation

    report = evaluation.evaluate(options.run, options.source, options.target, beam_size=options.beam, length_penalty=options.length_penalty)
    if options.json:
        print(json.dumps(report))
        return 0
    for name, value in report.items():
        print(f"{name:12} {value:.4f}" if isinstance(value, float) else f"{name:12} {value}")
    return 0


def convert(options: ConvertOptions) -> int:
    """Weights from one kind of file to another."""
    from jax_transformer.training import exchange

    for pair in options.set:
        if "=" not in pair:
            raise ConfigError(f"--set {pair}: give name=value")
    changes = {name: _value(text) for name, _, text in (pair.partition("=") for pair in options.set)}
    given = exchange.Description(options.config, options.preset, changes)
    for line in exchange.convert(options.source, options.destination, given, options.dtype):
        print(line)
    return 0


def inspect(options: InspectOptions) -> int:
    """What is in a file."""
    from jax_transformer.training import exchange

    for line in exchange.inspect(options.path):
        print(line)
    return 0


def _value(text: str) -> Any:
    """The value after ``=`` in --set: JSON where it is JSON, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "train": (TrainCommand, train),
    "translate": (TranslateOptions, translate),
    "evaluate": (EvaluateOptions, evaluate),
    "convert": (ConvertOptions, convert),
    "inspect": (InspectOptions, inspect),
}


def _usage() -> str:
    lines = [f"  {name:10} {(kind.__doc__ or '').splitlines()[0]}" for name, (kind, _) in COMMANDS.items()]
    return "\n".join(
        ["usage: jax-transformer COMMAND [options]", "", *lines, "", "jax-transformer COMMAND --help lists the options of one;"]
    ) + ("\n--version prints the version; --debug shows the traceback of an error.")


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"jax-transformer {jax_transformer.__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        raise ConfigError(f"unknown command {arguments[0]!r}{nearest(arguments[0], list(COMMANDS))}; known: {', '.join(COMMANDS)}")
    kind, command = COMMANDS[arguments[0]]
    return command(parse(arguments[0], kind, arguments[1:]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here, where a reader that is gone is no error, and not at exit
        return code
    except Refusal as error:
        if debug:
            raise
        print(f"jax-transformer: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output is gone: nothing is left to say, to it or at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a disk that is full, a folder that cannot be written
        if debug:
            raise
        print(f"jax-transformer: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        return InputError.exit_code
