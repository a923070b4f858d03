"""Seconds that commands take to start, in docs/speed-details.md: see benchmarks/README.md.

Each command runs in a process of its own. What compiles programs, or Python's bytecode, runs once
before it is timed.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "jax_transformer"]


def seconds(words: list[str], until: str) -> float:
    """The time from a command's start to its first line that begins so; if that is any, to its
    end."""
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.monotonic()
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, **streams, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("March 3, 2024\n")
        process.stdin.close()
        if not any(line.startswith(until) for line in process.stdout):
            sys.exit(f"{' '.join(words)}: printed no {until!r}")
        if not until:
            process.wait()
        taken = time.monotonic() - began
        process.kill()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("run", help="run folder of the built-in task's model")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        new = map("{}/{}".format, itertools.repeat(folder), itertools.count())
        train = [sys.executable, "train.py", "--log-every", "1", "--run"]
        commands = {
            "`jax-transformer --help`": (lambda: [*COMMAND, "--help"], ""),
            "`translate` of one line": (lambda: [*COMMAND, "translate", "--run", args.run], ""),
            "`train.py`, to its first step": (lambda: [*train, next(new)], "step 1/"),
        }
        print("| | s, median (least to most) |\n|---|---|")
        for name, (words, until) in commands.items():
            seconds(words(), until)
            taken = sorted(seconds(words(), until) for _ in range(args.repeats))
            figures = f"{statistics.median(taken):.2f} ({taken[0]:.2f} to {taken[-1]:.2f})"
            print(f"| {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
