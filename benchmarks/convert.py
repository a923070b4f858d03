"""Time and memory of conversions: ``python benchmarks/convert.py --gigabytes 4``.

Makes a Hugging Face folder of UMT5 with random float32 numbers in shards, stores the same weights
in every other kind, and converts each kind into each. Prints the seconds with and without start-up,
processor time, multiples of ``cp`` of the same bytes, and how much memory the conversion takes more
than one of a tiny model. What comes out is compared with what went in; exit code 1 if it differs,
or if memory exceeds the bound of docs/convert.md. ``--kinds hf run`` measures those only; ``t5x``
and ``t5x-scanned``, which have gzip's time, have to be named. ``--by-hand`` adds what a user would
write.
"""

import argparse
import filecmp
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import convert_folders  # noqa: E402
from benchmarks.convert_folders import SHARD  # noqa: E402
from jax_transformer.storage import pt, tensors  # noqa: E402

MARGIN = 256 << 20
KINDS = {
    "safetensors": "weights.safetensors",
    "shards": "hf/model.safetensors.index.json",
    "hf": "hf",
    "run": "run",
    "checkpoint": "run/checkpoints/0",
    "pt": "weights.pt",
    "t5x": "checkpoint_0",
    "t5x-scanned": "scanned/checkpoint_0",
}
"""The weights in each kind, in the folder of a model. Shards are read, and written in hf."""
TORCH_NAMES = ("safetensors", "shards", "hf", "pt")
TARGETS = {
    "safetensors": ("out.safetensors",),
    "hf": ("out", "--to", "hf", "--shard-size", SHARD),
    "run": ("out",),
    "checkpoint": ("1",),
    "pt": ("out.pt",),
    "t5x": ("out", "--to", "t5x"),
    "t5x-scanned": ("out", "--to", "t5x", "--scan-layers"),
}
BY_HAND = {
    "torch.load, save_file": ("pt", "safetensors", convert_folders.TORCH),
    "from_pretrained, save_pretrained": ("hf", "hf", convert_folders.TRANSFORMERS),
}


@dataclass(frozen=True)
class Cost:
    """What one conversion took."""

    start: float
    """Seconds of the whole command with a tiny model."""
    seconds: float
    """Seconds of the conversion in a process that has converted a tiny model before."""
    processor: float
    """Seconds of processor time, as ``seconds``."""
    memory: int
    """Peak of resident bytes, less the peak that the tiny model left."""
    sha256: str
    """The hash that the command prints, of the file or of the folder's weights."""


def arguments(folder: Path, source: str, target: str) -> list[str]:
    """The command that converts a kind into another, in the folder of one model."""
    name, *options = TARGETS[target]
    command = ["convert", str(folder / KINDS[source]), str(folder / name), *options]
    bare = source in ("safetensors", "shards", "pt") and target not in ("safetensors", "pt")
    config = ["--config", str(folder / "hf/config.json")] if bare else []
    return [*command, *config, "--no-check", "--json"]


def measured(code: str, *commands: list[str]) -> Cost:
    """Run a program twice in one process: for a tiny model, and for the one that is measured."""
    texts = [json.dumps(command) for command in commands]
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, texts[0]], check=True, capture_output=True)
    start = time.perf_counter() - begin
    remove(commands[0][2])
    done = subprocess.run([sys.executable, "-c", code, *texts], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{commands[1]}: {done.stdout[-500:]}{done.stderr[-1000:]}")
    remove(commands[0][2])
    *_, report, figures = done.stdout.strip().splitlines()
    seconds, processor, before, after = map(float, figures.split())
    sha256 = json.loads(report)["sha256"] if report.startswith("{") else ""
    return Cost(start, seconds, processor, int(after - before) * 1024, sha256)


def copied(source: Path, target: Path) -> tuple[float, float]:
    """Seconds of ``cp`` of a file or folder, and of that with waiting for the disk."""
    files = [source]
    if source.suffix == ".json":
        files = sorted(source.parent.glob("*.safetensors"))
    remove(target)
    os.sync()
    begin = time.perf_counter()
    if len(files) > 1:
        target.mkdir()
    subprocess.run(["cp", "-r", *files, target], check=True)
    seconds = time.perf_counter() - begin
    os.sync()
    synced = time.perf_counter() - begin
    remove(target)
    return seconds, synced


def check_equal(kind: str, original: Path, result: Path) -> None:
    """Raise SystemExit unless the files of weights are equal, or for .pt the tensors in them."""
    if kind == "hf":
        for path in original.glob("*.safetensors*"):
            check_equal("safetensors", path, result / path.name)
    elif kind == "pt":
        one, other = pt.scan(original), pt.scan(result)
        equal = one.keys() == other.keys() and all(
            tensors.same(one[name].read(), other[name].read()) for name in one
        )
        if not equal:
            raise SystemExit(f"{original} and {result} differ")
    elif kind == "safetensors" and not filecmp.cmp(original, result, shallow=False):
        raise SystemExit(f"{original} and {result} differ")


def remove(path: str | Path) -> None:
    path = Path(path)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def prepare(
    folder: Path, gigabytes: float, kinds: list[str], sizes: dict[str, int]
) -> tuple[int, dict[str, str]]:
    """Store a model in every kind; return its largest tensor's bytes, and each kind's hash."""
    folder.mkdir()
    largest = convert_folders.make(folder / "hf", gigabytes, **sizes)
    hashes = {}
    for kind in {*kinds} & TARGETS.keys() | ({"run"} if "checkpoint" in kinds else set()):
        if kind == "checkpoint":
            continue
        command = arguments(folder, "hf", kind)
        done = subprocess.run(
            [sys.executable, "-m", "jax_transformer", *command],
            check=True,
            cwd=ROOT,
            capture_output=True,
        )
        hashes[kind] = json.loads(done.stdout)["sha256"]
        if kind == "hf":
            check_equal(kind, folder / "hf", folder / "out")
            remove(folder / "out")
            continue
        (folder / KINDS[kind]).parent.mkdir(exist_ok=True)
        (folder / TARGETS[kind][0]).rename(folder / KINDS[kind])
    return largest, hashes | ({"checkpoint": hashes["run"]} if "checkpoint" in kinds else {})


def table(title: str, cells: dict[tuple[str, str], str]) -> None:
    """Print a table with a row for each source and a column for each destination."""
    targets = list(dict.fromkeys(target for _, target in cells))
    print(f"\n| {title} | {' | '.join(f'to {target}' for target in targets)} |")
    print(f"|---|{'---|' * len(targets)}")
    for source in dict.fromkeys(source for source, _ in cells):
        print(f"| {source} | {' | '.join(cells[source, target] for target in targets)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.25, help="size of the model")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/convert-benchmark"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS][:6])
    parser.add_argument("--repeats", type=int, default=1, help="measurements; medians are printed")
    parser.add_argument("--by-hand", action="store_true", help="also torch and transformers")
    options = parser.parse_args()
    folders = [options.folder / "tiny", options.folder / "model"]
    options.folder.mkdir()
    try:
        prepare(folders[0], 0, options.kinds, convert_folders.TINY)
        largest, hashes = prepare(folders[1], options.gigabytes, options.kinds, {})
        targets = [kind for kind in options.kinds if kind in TARGETS]
        pairs = {
            f"{source} -> {target}": (source, target, convert_folders.COMMAND)
            for source, target in itertools.product(options.kinds, targets)
        }
        pairs |= BY_HAND if options.by_hand else {}
        print("| | start-up | seconds | processor | times cp | times cp and sync | MiB |")
        print("|---|---|---|---|---|---|---|")
        times, memory, exceeded = {}, {}, []
        for name, (source, target, code) in pairs.items():
            costs, ratios, synced = [], [], []
            result = folders[1] / TARGETS[target][0]
            for _ in range(options.repeats):
                copy = copied(folders[1] / KINDS[source], options.folder / "copy")
                costs.append(
                    measured(code, *(arguments(folder, source, target) for folder in folders))
                )
                ratios.append(costs[-1].seconds / copy[0])
                synced.append(costs[-1].seconds / copy[1])
                if code is convert_folders.COMMAND:
                    check_equal(target, folders[1] / KINDS[target], result)
                    if target != "pt" and costs[-1].sha256 != hashes[target]:
                        raise SystemExit(f"{name}: {costs[-1].sha256} is not {hashes[target]}")
                remove(result)
            start, seconds, processor = (
                median(getattr(cost, field) for cost in costs)
                for field in ("start", "seconds", "processor")
            )
            most = max(cost.memory for cost in costs)
            print(
                f"| {name} | {start:.2f} | {seconds:.2f} | {processor:.2f} | {median(ratios):.1f} "
                f"| {median(synced):.1f} | {most / 2**20:,.0f} |",
                flush=True,
            )
            if code is convert_folders.COMMAND:
                transposed = (source in TORCH_NAMES) != (target in TORCH_NAMES)
                times[source, target] = f"{median(ratios):.1f}"
                memory[source, target] = f"{most / 2**20:,.0f}"
                if most > largest * (1 + transposed) + MARGIN:
                    exceeded.append(name)
        table("times cp", times)
        table("MiB", memory)
        print(f"\nlargest tensor {largest / 2**20:,.0f} MiB; everything came back byte for byte")
        print(f"above the bound: {', '.join(exceeded) or 'none'}")
        return bool(exceeded)
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    raise SystemExit(main())
