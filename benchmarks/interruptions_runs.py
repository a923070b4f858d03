"""Runs of interruptions.py: a tiny model on tiny text in processes of its own, and their
digests."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHILD = Path(__file__).resolve().parent / "interruptions_child.py"
STEPS, EVAL_EVERY, LOG_EVERY = 100, 20, 7
PHASES = (
    "interpreter",
    "imports",
    "data",
    "state",
    "compile",
    "steps",
    "validation",
    "save",
    "prune",
    "average",
    "end",
)
"""Phases in the order of a run.

``interpreter`` ends with the first line of our code, ``end`` begins after all work.
"""
COMMON = (
    "--model.d-model 16 --model.num-heads 2 --model.d-ff 32 --model.encoder-layers 1 --model.decoder-layers 1 --model.max-length 40 "
    "--data.vocab-size 300 --data.tokens-per-batch 128 --optimizer.warmup-steps 20 --optimizer.learning-rate 0.01 "
    f"--steps {STEPS} --eval-every {EVAL_EVERY} --log-every {LOG_EVERY} --average 3"
)
SETTINGS = {
    "ema": "--data.buckets 1 --optimizer.ema 0.9",
    "accumulate": "--data.buckets 2 --optimizer.accumulate 2",
}
ENGLISH, GERMAN = (
    "the cat dog sees a red house small bird and",
    "die Katze Hund sieht eine rote Haus kleine Vogel und",
)
LONGEST = 300.0  # seconds that a child may take before it is said to hang
RUN = "run"


def write_text(folder: Path) -> list[str]:
    """Four files of text, and the flags that name them."""
    words, choose, flags = (
        dict(zip(ENGLISH.split(), GERMAN.split(), strict=True)),
        random.Random(0),
        [],
    )
    for split, count in (("train", 60), ("valid", 8)):
        lines = [
            [choose.choice(list(words)) for _ in range(choose.randint(1, 6))] for _ in range(count)
        ]
        for side, text in (
            ("source", lines),
            ("target", [[words[word] for word in line] for line in lines]),
        ):
            path = folder / f"{split}.{side}"
            path.write_text("".join(" ".join(line) + "\n" for line in text), encoding="utf-8")
            flags += [f"--data.{split}-{side}", str(path)]
    return flags


@dataclass(frozen=True)
class Moment:
    """The time of a signal: seconds after the n-th start of a phase, and perhaps of a second
    signal."""

    phase: str
    occurrence: int
    delay: float
    signals: tuple[signal.Signals, ...]
    between: float = 0.0


@dataclass
class Ended:
    """A process that has ended, and all that it told."""

    code: int
    out: str
    err: str
    words: list[tuple[float, str]]
    """Phases, calls and handlers, with the time at which each began."""
    sent: list[tuple[float, signal.Signals]] = field(default_factory=list)
    """The signals that were sent."""
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    hung: bool = False
    """It had not ended after :data:`LONGEST`, and was killed."""

    def phase(self, at: float) -> str:
        """The phase that was going on at a time."""
        return next(
            (word for began, word in reversed(self.words) if began <= at and word in PHASES),
            PHASES[0],
        )

    def handled(self, at: float) -> bool:
        """Whether signals had a handler at a time."""
        words = [
            word for began, word in self.words if began <= at and word in ("handled", "unhandled")
        ]
        return words[-1:] == ["handled"]

    @property
    def fault(self) -> tuple[str, str] | None:
        """The phase and the name of the call that was to fail or kill, where it came to that."""
        found = next(((at, word) for at, word in self.words if word.startswith("fault ")), None)
        return (self.phase(found[0]), found[1].removeprefix("fault ")) if found else None


@dataclass(frozen=True)
class Place:
    """A folder in which the same command is started until the run has ended.

    The run is always called ``run``, so that all messages are equal.
    """

    folder: Path
    arguments: Sequence[str]
    compiled: Path
    """The cache of compiled programs."""

    @property
    def run(self) -> Path:
        return self.folder / RUN

    def start(self, moment: Moment | None = None, **task: Any) -> Ended:
        """One start, to its end; ``task`` are fields of the child's task."""
        reader, writer = os.pipe()
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "XLA_", "JAX_"))
        }
        environment |= {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.compiled),
        }
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        command = [
            sys.executable,
            str(CHILD),
            json.dumps({"pipe": writer, **task}),
            "train",
            "--run",
            RUN,
            *self.arguments,
        ]
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        ended = Ended(0, "", "", [])
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, pass_fds=(writer,), **pipes
        )  # type: ignore[call-overload]
        os.close(writer)
        sender = Sender(process, moment, ended)
        follower = threading.Thread(target=sender.follow, args=(reader,))
        follower.start()
        try:
            ended.out, ended.err = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            process.kill()
            ended.out, ended.err = process.communicate()
            ended.hung = True
        finally:
            ended.ended = time.monotonic()
            sender.cancel()
            follower.join()
        ended.code = process.returncode
        return ended


class Sender:
    """Reads what a child tells, and sends the signals at their moment."""

    def __init__(self, process: subprocess.Popen, moment: Moment | None, ended: Ended):
        self.process, self.moment, self.ended = process, moment, ended
        self.timer: threading.Timer | None = None
        self.over = threading.Event()
        self.left = moment.occurrence if moment else 0
        self._begun(PHASES[0])

    def follow(self, reader: int) -> None:
        with open(reader) as lines:
            for line in lines:
                at, word = line.rstrip("\n").split(" ", 1)
                self.ended.words.append((float(at), word))
                self._begun(word)

    def cancel(self) -> None:
        self.over.set()
        if self.timer:
            self.timer.cancel()
            if self.timer.is_alive():
                self.timer.join()

    def _begun(self, word: str) -> None:
        if self.moment and word == self.moment.phase and self.left:
            self.left -= 1
            if not self.left:
                self.timer = threading.Timer(self.moment.delay, self._send)
                self.timer.start()

    def _send(self) -> None:
        assert self.moment is not None
        for number in self.moment.signals:
            if self.process.poll() is not None:
                return
            self.ended.sent.append((time.monotonic(), number))
            self.process.send_signal(number)
            if self.over.wait(self.moment.between):
                return


# What a run leaves


def arrays(folder: Path, step: int) -> dict[str, str]:
    """A digest of every array of a checkpoint with its dtype and shape, by path."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    path, here = (
        (folder / str(step)).absolute(),
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        ocp.metadata(path).metadata,
    )
    found = {}
    for name, leaf in jax.tree_util.tree_leaves_with_path(ocp.load(path, shapes)):
        array = np.asarray(leaf)
        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        found[jax.tree_util.keystr(name, simple=True, separator="/")] = (
            f"{array.dtype} {array.shape} {digest}"
        )
    return found


def left(run: Path) -> dict[str, Any]:
    """Everything that is compared of a finished run, as a flat dict.

    File names, small files, metrics without speed, checkpoints and their manifests.
    """
    from jax_transformer.storage import checkpoint

    found: dict[str, Any] = {f"file {path.relative_to(run)}": True for path in run.iterdir()}
    for name in ("config.json", "train_config.json", "data.json", "tokenizer.json"):
        found[name] = (run / name).read_text() if (run / name).exists() else None
    for number, line in enumerate((run / "metrics.jsonl").read_text().splitlines(), 1):
        found[f"metrics.jsonl line {number}"] = {
            name: value for name, value in json.loads(line).items() if name != "tokens_per_second"
        }
    for folder in (run / "checkpoints", run / "averaged"):
        found |= {f"file {path.relative_to(run)}": True for path in folder.iterdir()}
        for step in checkpoint.steps(folder):
            name = f"{folder.name}/{step}"
            about = checkpoint.read_manifest(folder, step)
            found |= {
                f"{name} manifest {key}": value for key, value in about.items() if key != "sha256"
            }
            found |= {f"{name} {key}": value for key, value in arrays(folder, step).items()}
    return found


_one_at_a_time = threading.Lock()


def differences(run: Path, reference: dict[str, Any]) -> list[str]:
    """What is otherwise than in the uninterrupted run, by name; nothing where all is equal."""
    with _one_at_a_time:  # one JAX for all threads
        try:
            found = left(run)
        except Exception as error:  # whatever cannot be read is a difference
            return [f"cannot be compared: {type(error).__name__}: {error}"]
    names = [*reference, *(name for name in found if name not in reference)]
    return [
        _difference(name, found, reference)
        for name in names
        if name not in found or name not in reference or found[name] != reference[name]
    ]


def _difference(name: str, found: dict[str, Any], reference: dict[str, Any]) -> str:
    if name not in reference:
        return f"{name}: too many"
    return (
        f"{name}: missing"
        if name not in found
        else f"{name}: {str(found[name])[:80]} instead of {str(reference[name])[:80]}"
    )
