"""The command line: ``jax-transformer COMMAND``.

Results go to stdout, progress and messages to stderr; a refusal is one line. A command is imported
when it is looked up, so that it starts without what the others need.

An installed package adds a command by an entry point of the group ``jax_transformer.commands``,
whose value is a :class:`Command`; so do this package's own extras.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TextIO

import jax_transformer
from jax_transformer import errors
from jax_transformer.cli.arguments import Command, flags, parse
from jax_transformer.runtime import supervisor
from jax_transformer.runtime.process import entry_points, load_entry_point, start, started

__all__ = ["COMMANDS", "flags", "main", "parse", "process"]


ENTRY_POINTS = "jax_transformer.commands"
_CORE = {
    "train": "Train an encoder-decoder on parallel text.",
    "prepare": "Encode text once, for training on corpora that are larger than memory.",
    "translate": "Translate lines from standard input to standard output, one line out for each "
    "line in.",
    "evaluate": "Score a model on a test set: BLEU, chrF, TER, exact match, and loss.",
    "convert": "Convert weights between PyTorch, safetensors, Hugging Face folders, runs and "
    "checkpoints.",
    "inspect": "List a file or folder of weights: names, shapes, dtypes, ties, hashes. Loads no "
    "weights.",
    "parity": "Compare a model with PyTorch module by module, and name the first module that "
    "differs.",
    "propose": "Propose a weight table between a PyTorch model and a JAX model, and prove it.",
    "golden": "Record the outputs of a PyTorch model, to compare with where torch is not "
    "installed.",
    "completion": "Print the script that completes commands, options and paths in a shell.",
}
"""The summary of each command, which the help needs without importing it."""
_EXTRAS = {
    "estimate": "Compile a training step for hardware that need not be there: memory, FLOPs, time.",
    "serve": "Answer translation requests over HTTP, with a page for a browser.",
    "transcribe": "Write down what is said in a WAV file, to standard output.",
}
"""The same of our own extras, if their entry points are installed."""


class _Commands(Mapping[str, Command]):
    """The ``COMMAND`` of each module of that name, and those of entry points."""

    def __getitem__(self, name: str) -> Command:
        if name in _CORE:
            command: Command = importlib.import_module(f"jax_transformer.cli.{name}").COMMAND
            return command
        added: Command = load_entry_point(entry_points(ENTRY_POINTS)[name], Command)
        return added

    def __contains__(self, name: object) -> bool:
        return name in _CORE or name in entry_points(ENTRY_POINTS)

    def __iter__(self) -> Iterator[str]:
        return iter((*_CORE, *entry_points(ENTRY_POINTS)))

    def loadable(self, without: Collection[str] = ()) -> Iterator[tuple[str, Command]]:
        """Yield the commands by name; one that cannot be imported is a line on standard error."""
        for name in filter(lambda name: name not in without, self):
            try:
                yield name, self[name]
            except errors.ConfigError as error:
                print(f"skipped an installed command: {error}", file=sys.stderr)

    def __len__(self) -> int:
        return sum(1 for _ in self)


COMMANDS = _Commands()
"""The commands by name, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    while "--debug" in arguments:
        arguments.remove("--debug")
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here and not at exit: a reader that has gone is not an error
        return code
    except errors.ReportedError as error:
        return error.exit_code
    except errors.Refusal as error:
        if debug:
            for detail in error.details:
                error.add_note(detail)
            raise
        if error.details and "--json" in arguments:
            print(json.dumps({"error": str(error), "problems": error.details}))
        _report(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone: write nothing more, even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder without write permission
        if debug:
            raise
        reason = error.strerror or error
        name = error.filename or ("input or output" if _flush(sys.stdout) else "standard output")
        _report(f"{name}: {reason}", f"{error.filename or 'standard error'}: {reason}")
        return errors.InputError.exit_code
    except (MemoryError, RuntimeError) as error:
        if debug or not errors.is_out_of_memory(error):
            raise
        reason = (str(error).splitlines() or ["no more can be taken"])[0]
        _report(
            f"out of memory ({reason[:300]}): smaller batches need less, and "
            "docs/accelerators.md lists what else does"
        )
        return errors.ConfigError.exit_code
    except (KeyboardInterrupt, ValueError) as error:
        # jaxlib makes a ValueError of an exception that comes while it compares static arguments
        if isinstance(error, ValueError) and KeyboardInterrupt.__name__ not in str(error):
            raise
        _report("stopped at once")
        return 128 + signal.SIGINT


def _report(error: str, on_stdout: str | None = None) -> None:
    """Print an error on standard error, or on standard output if a full disk has the former."""
    for stream, text in ((sys.stderr, error), (sys.stdout, on_stdout or error)):
        with contextlib.suppress(OSError):
            print(f"jax-transformer: {text}", file=stream, flush=True)
            return


def _flush(stream: TextIO) -> bool:
    """Write what a stream holds back; False if it cannot be written."""
    with contextlib.suppress(OSError):
        stream.flush()
        return True
    return False


def process(*before: str) -> NoReturn:
    """Run the command of this process, ``before`` in front of its arguments, and exit.

    After an error the process ends at once: a failed save can leave threads of Orbax waiting, and
    Python would wait for them for ever.
    """
    start()
    code = main([*before, *sys.argv[1:]])
    supervisor.end(code)
    if code:
        _flush(sys.stdout)
        _flush(sys.stderr)
        os._exit(code)
    gc.freeze()  # at its end Python would look for garbage in all modules, several times
    sys.exit(0)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"jax-transformer {jax_transformer.__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        synonyms = {
            word: f" (did you mean {name!r}?)"
            for name, command in COMMANDS.loadable()
            for word in command.synonyms.split()
        }
        hint = synonyms.get(arguments[0]) or errors.nearest(arguments[0], list(COMMANDS))
        raise errors.ConfigError(
            f"unknown command {arguments[0]!r}{hint}; known: {', '.join(COMMANDS)}"
        )
    name, command, rest = arguments[0], COMMANDS[arguments[0]], arguments[1:]
    if {"--help", "-h", "--help-all"} & {*rest}:
        from jax_transformer.cli import help_text

        print(help_text.help_text(name, command, rest), end="")
        return 0
    options: Any = parse(name, command.kind, rest)
    if (architecture := getattr(options, "architecture", None)) is not None:
        from jax_transformer.architectures import registry

        registry.load_from(architecture)
    distributed = getattr(options, "distributed", None)
    if distributed is not None and distributed.several():
        code = supervisor.supervise()
        if code is not None:
            return code
    if not command.calls_started:
        started()
    return command.run(options)


def _usage() -> str:
    lines = ["usage: jax-transformer COMMAND [options]", ""]
    summaries = _CORE | {name: text for name, text in _EXTRAS.items() if name in COMMANDS}
    for name, command in COMMANDS.loadable(without=summaries):
        summaries[name] = (command.kind.__doc__ or "").splitlines()[0]
    lines += [f"  {name:10} {summary}" for name, summary in summaries.items()]
    lines += [
        "",
        "jax-transformer help COMMAND, or COMMAND --help, lists the options of a command.",
        "--version prints the version; --debug shows the traceback of an error.",
    ]
    return "\n".join(lines)
