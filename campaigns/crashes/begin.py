"""A process that begins a training run again and again, up to its first step.

``python -m campaigns.crashes.begin ARGUMENTS`` reads the names of folders and trains in each with
the real command, of which two functions are replaced. ``run.start`` ends the command if the run
folder and the checkpoint to continue from are those of an earlier beginning: what follows is the
same. ``Run.train`` removes checkpoints as at its start and ends the command before the first step.
The answer is a digest of all that the rest depends on: the state, the metrics and the folder.
"""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from campaigns.interruptions import comparison
from campaigns.interruptions.tiny_run import RUN

VOLATILE = (".lock", ".holder.json")


@dataclass(frozen=True)
class Beginning:
    """The beginning of a command, or its early end."""

    code: int | None
    """The exit code if it ended before its first step."""
    error: str
    """The last line on stderr of such an end."""
    step: int = 0
    """The step of the checkpoint that it continues from; 0 if it begins anew."""
    digest: str = ""


class Beginner:
    """The process, seen from the campaign."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "campaigns.crashes.begin", json.dumps(list(arguments))],
            env=dict(environment),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def begin(self, folder: Path) -> Beginning:
        """Begin the command in a folder, which it changes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()
        return Beginning(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# In the process


class Begun(BaseException):
    """Ends a command whose beginning is known."""

    def __init__(self, beginning: Beginning):
        self.beginning = beginning


def begin(arguments: Sequence[str]) -> Beginning:
    """The beginning of the command in the current folder."""
    from jax_transformer import cli

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = cli.main(["train", "--run", RUN, *arguments])
    except Begun as begun:
        return begun.beginning
    except Exception as error:  # a traceback for the user
        return Beginning(1, f"{type(error).__name__}: {error}")
    return Beginning(code, errors.getvalue().strip().rpartition("\n")[2])


def stop_at_the_first_step() -> None:
    """Replace the functions."""
    from jax_transformer.training import run as training_run

    start = training_run.start
    known: dict[str, Beginning] = {}
    before = ""

    def started(options: Any, corpus: Any, devices: Any, saved: Any) -> Any:
        nonlocal before
        before = f"{0 if saved is None else saved.step} {folder_digest(Path(RUN))}"
        if before in known:
            raise Begun(known[before])
        return start(options, corpus, devices, saved)

    def train(run: Any, state: Any) -> None:
        run._prune()
        hashed = hashlib.sha256(folder_digest(run.folder.path).encode())
        hashed.update(comparison.state_digest(state).encode())
        known[before] = Beginning(None, "", int(state.step), hashed.hexdigest())
        raise Begun(known[before])

    training_run.start, training_run.Run.train = started, train  # type: ignore[method-assign]


def folder_digest(run: Path) -> str:
    """A digest of all files, without the speed in the metrics and the pictures of the curves."""
    hashed = hashlib.sha256()
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if name in VOLATILE:
            continue
        content = path.read_bytes() if path.is_file() and path.suffix != ".png" else b""
        if name == "metrics.jsonl":
            content = without_speed(content)
        hashed.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\0".encode())
    return hashed.hexdigest()


def without_speed(metrics: bytes) -> bytes:
    """The lines without their figures of speed; what is no line stays as it is."""
    lines = []
    for line in metrics.split(b"\n"):
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            entry.pop("tokens_per_second", None)
            line = json.dumps(entry).encode()
        lines.append(line)
    return b"\n".join(lines)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    stop_at_the_first_step()
    for line in sys.stdin:
        os.chdir(line.rstrip("\n"))
        print(json.dumps(asdict(begin(json.loads(sys.argv[1])))), file=answers, flush=True)


if __name__ == "__main__":
    main()
