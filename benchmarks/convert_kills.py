"""Kill conversions at random moments: ``python benchmarks/convert_kills.py --count 40``.

For every kind of destination, ``--count`` conversions are killed with SIGKILL, each after a random
part of the time that it takes; every other one with ``--force`` onto an older result. The
destination must then be what it was before, byte for byte, or complete and new. Exit code 1 if one
is neither. Linux.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# Imported here, so that a forked process begins to convert at once
from orbax.checkpoint import v1  # noqa: E402, F401

from benchmarks import convert_folders  # noqa: E402
from jax_transformer import cli, transformer  # noqa: E402, F401

SIZES = {"d_model": 512, "d_kv": 64, "num_heads": 8, "d_ff": 1024, "vocab_size": 8000}
TARGETS: dict[str, tuple[str, ...]] = {
    "out.safetensors": (),
    "out.pt": (),
    "hf": ("--to", "hf", "--shard-size", "20MB"),
    "run": (),
    "1": (),
    "t5x": ("--to", "t5x"),
}


def started(*arguments: object) -> int:
    """Begin a command in a forked process and return its number."""
    child = os.fork()
    if not child:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os._exit(cli.main([str(argument) for argument in arguments]))
    return child


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def content(path: Path) -> dict[str, bytes]:
    """Every file at or below a path."""
    files = [path] if path.is_file() else [*path.rglob("*")]
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}


def is_new(target: Path, weights: Path, config: Path) -> bool:
    """True if the destination is complete: inspected, and converted back to the same weights."""
    back = target.parent / "back.safetensors"
    bare = target.is_file() or target.name.isdecimal()
    options = ["--config", config] if bare else []
    complete = code_of(started("inspect", target)) == 0 and (
        code_of(started("convert", target, back, "--no-check", *options)) == 0
        and back.read_bytes() == weights.read_bytes()
    )
    back.unlink(missing_ok=True)
    return complete


def kill(folder: Path, name: str, count: int, draw: random.Random) -> Counter[str]:
    """Kill conversions to one kind of destination; count what was there afterwards."""
    source, weights, old = folder / "source", folder / "weights.safetensors", folder / "old" / name
    here = folder / "here"
    target, options = here / name, TARGETS[name]
    command = ["convert", source, target, "--no-check", *options]
    old.parent.mkdir(exist_ok=True)
    assert not code_of(started("convert", source, old, *command[3:], "--dtype", "float16"))
    expected = content(old)
    seen: Counter[str] = Counter()
    durations: list[float] = []
    for number in range(count + 2):
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        exists = bool(number % 2)
        if exists:
            (shutil.copytree if old.is_dir() else shutil.copyfile)(old, target)
        begin = time.perf_counter()
        child = started(*command, *(["--force"] if exists else []))
        if number < 2:  # to know how long it takes
            assert code_of(child) == 0
            durations.append(time.perf_counter() - begin)
            continue
        time.sleep(draw.uniform(0, 1.05 * durations[exists]))
        os.kill(child, signal.SIGKILL)
        seen["killed" if code_of(child) == -signal.SIGKILL else "finished before"] += 1
        if target.exists() == exists and content(target) == (expected if exists else {}):
            seen["as it was"] += 1
        else:
            new = is_new(target, weights, source / "config.json")
            seen["complete and new" if new else "neither"] += 1
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40, help="kills for each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    columns = ("killed", "finished before", "as it was", "complete and new", "neither")
    print(f"| destination | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    draw = random.Random(options.seed)
    broken = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = os.fork()
        if not child:  # it uses jax, and no process that has used it is forked
            convert_folders.make(folder / "source", 0.06, **SIZES)
            os._exit(0)
        assert code_of(child) == 0
        weights = folder / "weights.safetensors"
        assert code_of(started("convert", folder / "source", weights, "--no-check")) == 0
        for target in TARGETS:
            seen = kill(folder, target, options.count, draw)
            broken += seen["neither"]
            print(
                f"| {target} | {' | '.join(str(seen[column]) for column in columns)} |", flush=True
            )
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
