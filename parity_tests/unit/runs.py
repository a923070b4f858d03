"""A tiny model on tiny text, trained through the command line."""

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import os
import random
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jax_transformer import cli
from jax_transformer.storage import checkpoint
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import run as training_run
from jax_transformer.training import step

ROOT = Path(__file__).resolve().parents[2]
STEPS = 200  # the same everywhere: it is a constant of the compiled step
CHECKPOINTS = (100, 200)
ENGLISH = "the cat dog sees a red house small bird and"
GERMAN = "die Katze Hund sieht eine rote Haus kleine Vogel und"
WORDS = dict(zip(ENGLISH.split(), GERMAN.split(), strict=True))
OPTIONS = [
    *"--model.d-model 16 --model.num-heads 2 --model.d-ff 32 --model.encoder-layers 1".split(),
    *"--model.decoder-layers 1 --model.max-length 40".split(),
    *"--data.vocab-size 300 --data.buckets 2 --data.tokens-per-batch 128".split(),
    *"--optimizer.warmup-steps 20 --optimizer.learning-rate 0.01".split(),
    *f"--steps {STEPS} --eval-every 100 --log-every 1".split(),
]


def write_text(folder: Path) -> list[str]:
    """Write the four files of text, and return the flags that name them."""
    choose, flags = random.Random(0), []
    for split, count in (("train", 60), ("valid", 8)):
        lines = [
            [choose.choice(list(WORDS)) for _ in range(choose.randint(1, 6))] for _ in range(count)
        ]
        translated = [[WORDS[word] for word in line] for line in lines]
        for side, text in (("source", lines), ("target", translated)):
            path = folder / f"{split}.{side}"
            path.write_text("".join(" ".join(line) + "\n" for line in text), encoding="utf-8")
            flags += [f"--data.{split}-{side}", str(path)]
    return flags


def install(folder: Path, group: str, **points: str) -> None:
    """Make ``folder`` a place of installed packages, one of which has these entry points."""
    metadata = folder / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    importlib.invalidate_caches()


def fields_of(flags: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the fields of DataOptions that the flags of :func:`write_text` give."""
    names = [flag.removeprefix("--data.").replace("-", "_") for flag in flags[::2]]
    return {name: (path,) for name, path in zip(names, flags[1::2], strict=True)}


def last_of_each(arguments: Sequence[str | Path]) -> list[str]:
    """Return the arguments without a flag, and its values, that comes again."""
    uses: list[list[str]] = [[]]
    for word in map(str, arguments):
        uses += [[]] if word.startswith("--") else []
        uses[-1].append(word)
    last = {use[0]: use for use in uses[1:]}
    return [*uses[0], *itertools.chain(*last.values())]


def with_option(arguments: list[str], name: str, value: Any) -> list[str]:
    """Return the arguments with one flag's value changed."""
    where = arguments.index(name) + 1
    return [*arguments[:where], str(value), *arguments[where + 1 :]]


# Running commands


@contextlib.contextmanager
def as_a_user() -> Iterator[None]:
    """Configure JAX as the command line does, without the tests' strictness and 64 bits."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision(None),
    ):
        yield


def main(*arguments: str | Path) -> int:
    """Run a command in this process and return its exit code."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:  # as the interpreter does
        return int(stop.code or 0)


def environment() -> dict[str, str]:
    """Return the environment of a separate process, with usual buffering."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {
        "PYTHONPATH": str(ROOT)
    }


def free_port() -> int:
    """Return the number of a port that nothing listens at."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def start(
    *arguments: str | Path, program: tuple[str, ...] = ("-m", "jax_transformer"), **options: Any
) -> subprocess.Popen:
    """Start a command in a separate process, with pipes of text."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, *program, *last_of_each(arguments)]
    return subprocess.Popen(command, text=True, **({"env": environment()} | pipes | options))


def python(
    *arguments: str | Path, stdin: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a separate process, with these variables in its environment."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment() | variables,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=500,
    )


@dataclass
class CommandResult:
    """A command's exit code, output, and number of programs compiled for each train step."""

    code: int
    out: str
    err: str
    programs: list[int]


def _no_curves(folder: RunFolder) -> None:
    folder.curves.touch()


def train(*arguments: str | Path, curves: bool = False) -> CommandResult:
    """Run ``train`` here; to draw curves.png takes a quarter of the time of such a run."""
    steps, out, err = [], io.StringIO(), io.StringIO()
    make_step = step.make_step

    def record(*arguments, **options):
        steps.append(make_step(*arguments, **options))
        return steps[-1]

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(step, "make_step", record)
        if not curves:
            patch.setattr(training_run.curves, "draw", _no_curves)
        code = main("train", *last_of_each(arguments))
    programs = [one.programs() for one in steps if isinstance(one, step.TrainStep)]
    return CommandResult(code, out.getvalue(), err.getvalue(), programs)


@dataclass
class Trained:
    """An uninterrupted run. Tests share it and must not change it."""

    path: Path
    arguments: list[str]
    """Its text and options, without --run."""
    result: CommandResult


def trained(temporary: Path) -> Trained:
    """Return the run that all tests share, also those of other processes; the first trains it.

    ``temporary`` is pytest's base folder, which xdist gives to each process inside a common one.
    """
    shared = temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary
    folder = shared / "trained"
    result = folder / "result.json"
    with filelock.FileLock(shared / "trained.lock"):
        if not result.exists():
            folder.mkdir()
            arguments = [*write_text(folder), *OPTIONS]
            done = train("--run", folder / "run", *arguments, curves=True)
            result.write_text(json.dumps([arguments, dataclasses.asdict(done)]))
    arguments, done = json.loads(result.read_text())
    return Trained(folder / "run", arguments, CommandResult(**done))


class Console:
    """Run commands with the given standard input."""

    def __init__(self, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def say(self, *arguments: str | Path, stdin: bytes = b"") -> tuple[int, str, str]:
        """Return the exit code, stdout and stderr of a command."""
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self.capsys.readouterr()
        return main(*arguments), *self.capsys.readouterr()

    def session(self, path: Path) -> str:
        """Run the commands of a recorded session, and return it with what they print today.

        A command's line begins with ``$``; ``cat`` shows a file, JSON in one line.
        """
        parts = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("$ "):
                continue
            name, *words = shlex.split(line[2:])
            if name == "cat":
                file, code, err = Path(*words), 0, ""
                out = file.read_text(encoding="utf-8") if file.exists() else "there is none\n"
                if file.suffix == ".json" and file.exists():
                    out = f"{json.dumps(json.loads(out))}\n"
            else:
                code, out, err = self.say(name, *words)
            parts.append(f"{line}\n{out}" + (f"{code}: {err}" if code or err else ""))
        return "".join(parts)

    def refused(
        self, code: int, words: list[str | Path], *command: str | Path, stdin: bytes = b""
    ) -> None:
        """Assert a refusal with this exit code, in one line that contains these words."""
        exit_code, out, err = self.say(*command, stdin=stdin)
        assert (exit_code, out) == (code, ""), err
        assert err.startswith("jax-transformer: ") and err.endswith("\n"), err
        assert err.count("\n") == 1, err
        assert not [word for word in words if str(word) not in err], err


# Files of a run


def arrays(run: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    """Return every array of a checkpoint by its path: parameters, frozen, moments, counts."""
    path = run / "checkpoints" / str(step)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        ocp.metadata(path).metadata,
    )
    leaves = jax.tree_util.tree_leaves_with_path(ocp.load(path, shapes))
    tensors_by_path = {
        jax.tree_util.keystr(name, simple=True, separator="/"): np.asarray(leaf)
        for name, leaf in leaves
    }
    assert tensors_by_path.keys() == checkpoint.open(run / "checkpoints", step).tensors.keys()
    return tensors_by_path


def differing(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> list[str]:
    """Return the names of arrays that are not bitwise equal."""
    missing = first.keys() ^ second.keys()
    both = first.keys() & second.keys()
    return sorted(missing | {name for name in both if bits(first[name]) != bits(second[name])})


def bits(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, array.tobytes()


def metrics(run: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without the one value that differs between any two runs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("tokens_per_second", None)
    return lines
