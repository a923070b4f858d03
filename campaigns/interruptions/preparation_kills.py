"""The campaign ``preparation-kills``: SIGKILL ends ``prepare``, a real process.

A case is one preparation, in one process or in two, killed at moments by the clock until it ends.
What the killed processes left stays there, and the corpus must have the files of a preparation that
nothing kills, byte for byte. See docs/reliability.md. Linux.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from campaigns.case import Campaign, Case

KILLS = 25
"""Starts of one case, at most; the last one is not killed."""
SECONDS = "seconds.json"
START = (
    "from jax_transformer.training import preparation; preparation.BLOCK = {block}; "
    "from jax_transformer import cli; cli.process()"
)
LINES, BLOCK = 60_000, 1000
WORDS = "the a red blue cat dog house sees and 12 eats".split()


def prepare(shared: Path) -> None:
    """Write the text, and prepare it once in one process and once in two."""
    draw = random.Random(0)
    for name, count in (("train.tsv", LINES), ("valid.tsv", 20)):
        sides = [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(count)]
        text = "".join(f"{side}\t{side.upper()}\n" for side in sides)
        (shared / name).write_text(text, encoding="utf-8")
    seconds = {}
    for count in (1, 2):
        began = time.monotonic()
        process = begun(shared, shared / f"corpus-{count}", count)
        if process.wait():
            raise SystemExit(f"prepare ended with {process.returncode}")
        seconds[count] = time.monotonic() - began
    (shared / SECONDS).write_text(json.dumps(seconds))


def begun(shared: Path, folder: Path, processes: int) -> subprocess.Popen:
    """Start ``prepare``, in a process group of its own."""
    command = [sys.executable, "-c", START.format(block=BLOCK), "prepare", str(folder)]
    for split in ("train", "valid"):
        command += [f"--data.{split}", str(shared / f"{split}.tsv")]
    command += ["--data.vocab-size", "300", "--processes", str(processes)]
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, start_new_session=True)


def cases(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """Kills of one preparation, and the files that it makes in the end."""
    processes, draw = 1 + number % 2, random.Random(f"{seed} {number}")
    seconds = json.loads((shared / SECONDS).read_text())[str(processes)]
    folder, title = scratch / "corpus", f"{processes} processes"
    for start in range(KILLS):
        delay = draw.uniform(0, seconds) if start < KILLS - 1 else None
        process = begun(shared, folder, processes)
        try:
            code = process.wait(delay)
        except subprocess.TimeoutExpired:
            # The first process alone, or with the others that it has started
            group = draw.random() < 0.5
            (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
            process.wait()
            yield Case(title, "killed", f"after {delay:.3f} s", ())
            continue
        wrong = different(shared / f"corpus-{processes}", folder) if code == 0 else [f"exit {code}"]
        yield Case(title, "complete", f"start {start + 1}", tuple(wrong))
        return


def different(expected: Path, folder: Path) -> list[str]:
    """The broken promise if the files of a corpus are not those of the other."""
    one, other = (
        {path.name: path.read_bytes() for path in each.iterdir()} for each in (expected, folder)
    )
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return [f"{name}: missing, changed or left behind" for name in names]


PREPARATION_KILLS = Campaign(
    "preparations are killed, and go on to the same files", prepare, cases, small=2, nightly=80
)
