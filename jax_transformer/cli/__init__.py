"""The command line: ``jax-transformer COMMAND``. Results go to stdout, progress and messages to stderr, refusals are one line."""

import dataclasses
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax_transformer
from jax_transformer.cli.arguments import flags, parse
from jax_transformer.cli.commands import (
    ConvertOptions,
    EvaluateOptions,
    GoldenOptions,
    InspectOptions,
    ParityOptions,
    TrainCommand,
    TranslateOptions,
)
from jax_transformer.errors import ConfigError, InputError, Refusal, nearest
from jax_transformer.generate.generation_config import OPTIONS, GenerationConfig
from jax_transformer.storage import atomic

__all__ = ["COMMANDS", "flags", "main", "parse"]


def train(command: TrainCommand) -> int:
    """Train, and print the run folder."""
    from jax_transformer.training import stops

    with stops.requests() as stop:  # from here on: importing JAX takes a second or two
        with stop.at_once("stopped before anything was begun"):
            from jax_transformer.training import recipe
        print(recipe.train(command.options, stop).path)
    return 0


def translate(options: TranslateOptions) -> int:
    """Lines in, lines out."""
    from jax_transformer import alignment, pretrained, translation
    from jax_transformer.data import parallel_text
    from jax_transformer.training import compilation

    compilation.use_cache()
    GenerationConfig().overridden(
        decoding_options(options)
    )  # what is wrong in itself is said before anything is loaded
    _check_folder(options.output)
    _check_folder(options.attention)
    run = pretrained.load_run(
        options.run,
        options.weights,
        source_lang=options.source_lang,
        target_lang=options.target_lang,
    )
    if message := translation.without_cache(run.model.config):
        print(message, file=sys.stderr)
    if options.input is not None:
        lines = parallel_text.read_lines(options.input)
    else:
        content = sys.stdin.buffer.read()
        lines = parallel_text.split_lines(content, "standard input") if content else []
    generation_config = run.decoding.overridden(decoding_options(options))
    as_list = generation_config.num_return_sequences > 1 or bool(options.n_best)
    if as_list and generation_config.num_beams == 1:
        raise ConfigError("--n-best needs --beam of at least 2")
    found = translation.hypotheses(
        run.model, run.tokenizer, lines, generation_config, widths=run.widths
    )
    _write(
        options.output,
        translation.n_best_lines(found) if as_list else [best[0].text for best in found],
    )
    if options.attention is not None:
        title = f"{options.run}, step {run.weights.step}"
        alignment.write(
            options.attention,
            run.model,
            run.tokenizer,
            lines,
            [best[0] for best in found],
            widths=run.widths,
            title=title,
        )
    return 0


def decoding_options(options: TranslateOptions | EvaluateOptions) -> dict[str, Any]:
    """Those of the options that say how to decode, None where one is not given."""
    given = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name in OPTIONS
    }
    return {
        name: None if value is False else value for name, value in given.items()
    }  # --sample is a flag: there, or not


def evaluate(options: EvaluateOptions) -> int:
    """Scores of a test set."""
    from jax_transformer.training import compilation, evaluation

    compilation.use_cache()
    how = decoding_options(options)
    GenerationConfig().overridden(how)
    _check_folder(options.hypotheses)
    languages = (options.source_lang, options.target_lang)
    report, hypotheses = evaluation.evaluate(
        options.run,
        options.source,
        options.target,
        how,
        weights=options.weights,
        bootstrap=options.bootstrap,
        languages=languages,
    )
    if options.hypotheses is not None:
        _write(options.hypotheses, hypotheses)
    if options.json:
        print(json.dumps(report))
        return 0
    for line in evaluation.readable(report):
        print(line)
    return 0


def _check_folder(path: str | None) -> None:
    """Before hours of work: whether the file that is to hold the result has a folder."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: {Path(path).parent} is no folder")


def _write(path: str | None, lines: Sequence[str]) -> None:
    """Lines in UTF-8, whatever the locale, to standard output, or to a file whole or not at all; one line for each, whatever the model says."""
    text = "".join(line.replace("\n", " ") + "\n" for line in lines)
    if path is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", newline="\n")
        sys.stdout.write(text)
        return
    atomic.write_text(path, text)


def convert(options: ConvertOptions) -> int:
    """Weights from one kind of file or folder to another."""
    from jax_transformer.convert import exchange, planning

    given = exchange.Description(options.config, options.preset, _changes(options.set))
    shared = [f.name for f in dataclasses.fields(exchange.Request) if f.name != "description"]
    request = exchange.Request(
        description=given, **{name: getattr(options, name) for name in shared}
    )
    if options.training:
        if options.dry_run:
            raise ConfigError("--dry-run plans weights: not with --training")
        _show(exchange.convert_training(request), as_json=options.json)
        return 0
    prepared = exchange.prepare(request)
    if options.dry_run:
        planning.refuse(prepared.wrong)
        _show(exchange.Planned(prepared.plan, prepared.kept), as_json=options.json)
    else:
        _show(exchange.convert(prepared), as_json=options.json)
    return 0


def inspect(options: InspectOptions) -> int:
    """What is in a file or folder."""
    from jax_transformer.convert import exchange

    _show(exchange.inspect(options.path), as_json=options.json)
    return 0


def parity(options: ParityOptions) -> int:
    """Two models that should be one, module by module."""
    parts = [] if options.lengths is None else options.lengths.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(
            f"--lengths {options.lengths}: give lengths with commas between them, as 1,7,31"
        )
    _check_folder(options.html)
    from jax_transformer.convert import exchange
    from jax_transformer.parity import command

    given = exchange.Description(options.config, options.preset, _changes(options.set))
    shared = {
        name: getattr(options, name)
        for name in ("model", "other", "weights", "dtype", "gradients", "seed", "html")
    }
    reports = command.compare(
        command.Asked(description=given, lengths=tuple(map(int, parts)), **shared)
    )
    if options.json:
        print(json.dumps([{"title": title} | report.to_data() for title, report in reports]))
    else:
        shown = command.chosen(reports)
        for title, report in reports:
            for line in (
                report.lines() if (title, report) == shown else [f"{title}: {report.summary()}"]
            ):
                print(line)
    command.check(reports)
    return 0


def golden(options: GoldenOptions) -> int:
    """Recorded numbers of a PyTorch model."""
    if options.action not in ("make", "check"):
        raise ConfigError(
            f"golden {options.action}: is neither make nor check{nearest(options.action, ['make', 'check'])}"
        )
    if (options.model is not None) != (options.action == "make"):
        raise ConfigError(
            "golden make FILE MODEL, or golden check FILE, which makes the numbers again of what FILE says it was made of"
        )
    from jax_transformer.parity import command
    from jax_transformer.parity.report import DifferentError

    if options.action == "make":
        _check_folder(options.file)
        made = command.make_golden(
            options.file,
            options.model or "",
            options.weights,
            options.python,
            options.batch,
            options.seed,
        )
        print(
            f"{options.file}: {len(made.arrays)} arrays, seed {made.seed}, torch {made.versions['torch']}"
        )
        return 0
    again = command.check_golden(options.file, options.python)
    for line in again.lines():
        print(line)
    if again.wrong:
        raise DifferentError(
            f"{options.file}: {len(again.wrong)} arrays are not what they were: {again.wrong[0]}"
        )
    return 0


def _changes(pairs: Sequence[str]) -> dict[str, Any]:
    """What --set says."""
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"--set {pair}: give name=value")
    return {name: _value(text) for name, _, text in (pair.partition("=") for pair in pairs)}


def _show(found: Any, *, as_json: bool) -> None:
    for line in [json.dumps(found.to_data())] if as_json else found.lines():
        print(line)


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
    "parity": (ParityOptions, parity),
    "golden": (GoldenOptions, golden),
}


def _usage() -> str:
    lines = [
        f"  {name:10} {(kind.__doc__ or '').splitlines()[0]}"
        for name, (kind, _) in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: jax-transformer COMMAND [options]",
            "",
            *lines,
            "",
            "jax-transformer COMMAND --help lists the options of one;",
        ]
    ) + ("\n--version prints the version; --debug shows the traceback of an error.")


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"jax-transformer {jax_transformer.__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        raise ConfigError(
            f"unknown command {arguments[0]!r}{nearest(arguments[0], list(COMMANDS))}; known: {', '.join(COMMANDS)}"
        )
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
    except (
        BrokenPipeError
    ):  # the reader of our output is gone: nothing is left to say, to it or at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("jax-transformer: stopped at once", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:  # a disk that is full, a folder that cannot be written
        if debug:
            raise
        print(
            f"jax-transformer: {error.filename or 'input or output'}: {error.strerror or error}",
            file=sys.stderr,
        )
        return InputError.exit_code


def process(*before: str) -> NoReturn:
    """The command of this process, and its end: :func:`main` with ``before`` in front of its arguments.

    After an error the process ends at once: a save that failed can leave threads of Orbax's waiting, and Python would wait for them for ever.
    """
    code = main([*before, *sys.argv[1:]])
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(0)
