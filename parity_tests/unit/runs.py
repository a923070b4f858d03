"""A tiny model on tiny text, trained through the command line: what the tests of training and of the commands share."""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from orbax.checkpoint import v1 as ocp

from jax_transformer import cli
from jax_transformer.training import checkpoint

ROOT = Path(__file__).resolve().parents[2]
STEPS = 200  # one value everywhere: it is a constant of the compiled step
CHECKPOINTS = (100, 200)
ENGLISH, GERMAN = "the cat dog sees a red house small bird and", "die Katze Hund sieht eine rote Haus kleine Vogel und"
WORDS = dict(zip(ENGLISH.split(), GERMAN.split(), strict=True))
SIZES = "--model.d-model 16 --model.num-heads 2 --model.d-ff 32 --model.encoder-layers 1 --model.decoder-layers 1 --model.max-length 40".split()
OPTIONS = [
    *SIZES,
    *"--data.vocab-size 300 --data.buckets 2 --data.tokens-per-batch 128 --optimizer.warmup-steps 20 --optimizer.learning-rate 0.01".split(),
    *f"--steps {STEPS} --eval-every 100 --log-every 1".split(),
]


def write_text(folder: Path) -> list[str]:
    """The four files of text, and the flags that name them."""
    choose, flags = random.Random(0), []
    for split, count in (("train", 60), ("valid", 8)):
        lines = [[choose.choice(list(WORDS)) for _ in range(choose.randint(1, 6))] for _ in range(count)]
        for side, text in (("source", lines), ("target", [[WORDS[word] for word in line] for line in lines])):
            path = folder / f"{split}.{side}"
            path.write_text("".join(" ".join(line) + "\n" for line in text), encoding="utf-8")
            flags += [f"--data.{split}-{side}", str(path)]
    return flags


@contextlib.contextmanager
def as_a_user(temporary: Path) -> Iterator[None]:
    """JAX as the command line has it, without the tests' strictness and 64 bits; a program is compiled once for all tests and processes."""
    cache = {"jax_compilation_cache_dir": str(temporary / "compiled"), "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, name) for name in cache}
    with contextlib.ExitStack() as stack:
        for name, value in cache.items():
            jax.config.update(name, value)
            stack.callback(jax.config.update, name, before[name])
        compilation_cache.reset_cache()
        stack.callback(compilation_cache.reset_cache)
        stack.enter_context(jax.enable_x64(False))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.default_matmul_precision(None))
        yield


def main(*arguments: str | Path) -> int:
    """The exit code of a command, run in this process."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:  # as the interpreter understands it
        return int(stop.code or 0)


def start(*arguments: str | Path, program: tuple[str, ...] = ("-m", "jax_transformer"), **options) -> subprocess.Popen:
    """A command in a process of its own, with pipes of text, and the programs that :func:`as_a_user` has compiled."""
    cache = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(cache if cache["JAX_COMPILATION_CACHE_DIR"] else {})}
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def trained(temporary: Path) -> tuple[Path, list[str]]:
    """One trained run for all who only read it, and the flags of its text. Made once under ``temporary``."""
    folder = temporary / "trained"
    if not folder.exists():
        folder.mkdir()
        assert main("train", "--run", folder / "run", *write_text(folder), *OPTIONS) == 0
    flags = [(f"--data.{split}-{side}", str(folder / f"{split}.{side}")) for split in ("train", "valid") for side in ("source", "target")]
    return folder / "run", [word for flag in flags for word in flag]


def arrays(run: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by its path: parameters, carried arrays, both moments, and the counts."""
    leaves = jax.tree_util.tree_leaves_with_path(ocp.load(run / "checkpoints" / str(step)))
    found = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
    assert found.keys() == checkpoint.described(run / "checkpoints", step).keys()
    return found


def differing(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> list[str]:
    """The arrays that are not the same bit for bit."""
    names = sorted(first.keys() | second.keys())
    return [name for name in names if name not in first or name not in second or bits(first[name]) != bits(second[name])]


def bits(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, array.tobytes()


def metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl without the one figure that no two runs share."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]
