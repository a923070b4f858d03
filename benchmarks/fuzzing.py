"""Parts of the commands that damage files and read them: a reader is watched, files are counted."""

import argparse
import contextlib
import functools
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jax_transformer.errors import InputError, UnsafeFileError

MEMORY = 4_000_000  # bytes, in addition to 100 times the file's
SECONDS = 10.0  # with memory traced, on a busy machine
HARMLESS = (
    "mmap.__new__",  # of a file that was opened
    "open",
    "builtins.id",
    "os.scandir",
    "os.listdir",
    "pathlib.Path.glob",
    "sys._getframe",
    "gc.",
    "cpython.",
    "tempfile.",
)
_events: list[str] | None = None
"""Events while a reader is watched; None otherwise."""


@dataclass
class Watched:
    """The outcome of a reader, with its time and memory."""

    outcome: str = "read"
    seconds: float = 0.0
    memory: int = 0


@functools.cache
def _install() -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _events is not None and not event.startswith(HARMLESS):
            _events.append(f"{event} {arguments!r}"[:200])

    sys.addaudithook(hook)


@contextlib.contextmanager
def watched(size: int) -> Iterator[Watched]:
    """Watch a reader of files of ``size`` bytes; a refusal is its outcome.

    Raises AssertionError if it took more memory than 100 times the size and 4 MB, or more than 10
    seconds, did more than read, or refused in several lines; and whatever else the reader raised.
    """
    global _events
    _install()
    result, began = Watched(), time.monotonic()
    _events = seen = []
    tracemalloc.start()
    try:
        yield result
    except (InputError, UnsafeFileError) as error:
        result.outcome = f"exit code {error.exit_code}"
        assert str(error).isprintable() and len(str(error)) < 1000, "not one line"
    finally:
        _events = None
        result.memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    result.seconds = time.monotonic() - began
    assert result.memory < MEMORY + 100 * size, f"{result.memory:,} bytes for files of {size:,}"
    assert result.seconds < SECONDS, f"{result.seconds:.1f} s"
    assert not seen, f"audit events: {seen}"


Change = Callable[[Random, str, bytes, list[bytes]], bytes]


def table(outcomes: Mapping[tuple[str, str], int], kinds: Sequence[str]) -> str:
    """The outcomes as a table in Markdown."""
    lines = ["| kind | files | read | exit code 3 | exit code 4 |\n|---|---|---|---|---|"]
    for kind in kinds:
        numbers = [outcomes[kind, outcome] for outcome in ("read", "exit code 3", "exit code 4")]
        columns = " | ".join(f"{number:,}" for number in numbers)
        lines.append(f"| {kind} | {sum(numbers):,} | {columns} |")
    return "\n".join(lines)


def options(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags of a command that changes each file ``--count`` times."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="files of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the changes (%(default)s)")
    parser.add_argument(
        "--keep", type=Path, default=Path("runs/fuzz"), help="folder for findings (%(default)s)"
    )
    return parser.parse_args(arguments)


def count(
    options: argparse.Namespace,
    prepare: Callable[[Path], Mapping[str, Path]],
    changed: Change,
    judged: Callable[[str, Path], Watched],
) -> int:
    """Change one file at a time, judge it, print the outcomes, and return the exit code.

    Args:
        options: of :func:`options`.
        prepare: writes valid files into a folder, and returns the one of each kind.
        changed: returns the damaged bytes, of a random source, the kind, its valid bytes, and those
            of all kinds.
        judged: reads the files of a kind, watched.
    """
    draw, outcomes, findings = Random(options.seed), Counter[tuple[str, str]](), set[str]()
    with tempfile.TemporaryDirectory() as name:
        files = prepare(Path(name))
        contents = {kind: path.read_bytes() for kind, path in files.items()}
        for kind, path in files.items():
            assert judged(kind, path).outcome == "read", f"a valid file is refused: {kind}"
            for number in range(options.count):
                content = changed(draw, kind, contents[kind], list(contents.values()))
                path.write_bytes(content)
                try:
                    outcomes[kind, judged(kind, path).outcome] += 1
                except Exception as error:
                    finding = f"{kind}: {type(error).__name__}: {error}"[:300]
                    if finding not in findings:
                        findings.add(finding)
                        options.keep.mkdir(parents=True, exist_ok=True)
                        (options.keep / f"{options.seed}-{number}.{kind}").write_bytes(content)
                        print(finding, file=sys.stderr, flush=True)
            path.write_bytes(contents[kind])
    print(table(outcomes, list(files)))
    print(f"{len(findings)} findings")
    return 1 if findings else 0
