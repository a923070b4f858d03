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
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import convert_folders  # noqa: E402
from benchmarks.convert_folders import SHARD  # noqa: E402
from jax_transformer.storage import pt, safetensors, tensors  # noqa: E402

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
FILES = ("safetensors", "pt")
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


@dataclass(frozen=True)
class Pair:
    """A conversion that is measured: of our command, or of another program."""

    source: str
    target: str
    code: str = convert_folders.COMMAND
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or f"{self.source} -> {self.target}"

    @property
    def bounded(self) -> bool:
        return self.code is convert_folders.COMMAND

    @property
    def copies(self) -> bool:
        """True if a tensor is in memory twice: it is read from a run, or transposed for one."""
        return not {self.source, self.target} <= {*TORCH_NAMES}


BY_HAND = [
    Pair("pt", "safetensors", convert_folders.TORCH, "torch.load, save_file"),
    Pair("hf", "hf", convert_folders.TRANSFORMERS, "from_pretrained, save_pretrained"),
]


class Row(NamedTuple):
    """The cost of a pair: medians, and the largest memory."""

    start: float
    seconds: float
    processor: float
    times: float
    times_synced: float
    memory: int

    def __str__(self) -> str:
        *numbers, memory = self
        return " | ".join([*(f"{number:.1f}" for number in numbers), f"{memory / 2**20:,.0f}"])


@dataclass(frozen=True)
class Cost:
    """The cost of one conversion."""

    start: float
    """Seconds of the whole command with a tiny model."""
    seconds: float
    """Seconds of the conversion in a process that has converted a tiny model before."""
    processor: float
    """Seconds of processor time, as ``seconds``."""
    memory: int
    """Peak of resident bytes, less the peak that the tiny model left."""
    sha256: str
    """The hash that the command prints."""


def arguments(folder: Path, source: str, target: str) -> list[str]:
    """The command that converts a kind into another, in the folder of one model."""
    name, *options = TARGETS[target]
    command = ["convert", str(folder / KINDS[source]), str(folder / name), *options]
    bare = source in FILES and target not in FILES
    config = ["--config", str(folder / "hf/config.json")] if bare else []
    return [*command, *config, "--no-check", "--json"]


def run(*arguments: str) -> str:
    """Run Python and return what it prints. Raises SystemExit if it fails."""
    command = [sys.executable, "-c", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{arguments[1:]}: {done.stdout[-500:]}{done.stderr[-1000:]}")
    return done.stdout


def measured(code: str, *commands: list[str]) -> Cost:
    """Run a program twice in one process: for a tiny model, and for the one that is measured."""
    texts = [json.dumps(command) for command in commands]
    begin = time.perf_counter()
    run(code, texts[0])
    start = time.perf_counter() - begin
    remove(commands[0][2])
    output = run(code, *texts)
    remove(commands[0][2])
    *_, report, figures = output.strip().splitlines()
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


def check_equal(target: str, hf: Path, result: Path, sha256: str, expected: str) -> None:
    """Raise SystemExit unless a result has the weights of the Hugging Face folder.

    Its shards are equal byte for byte, and so are all its tensors in a file; of other folders the
    hash of all names and bytes is compared, which the command printed for the first one.
    """
    if target == "hf":
        names = [path.name for path in hf.glob("*.safetensors*")]
        equal = filecmp.cmpfiles(hf, result, names, shallow=False)[0] == names
    elif target in FILES:
        tensors_in = safetensors.scan(hf / "model.safetensors.index.json")
        again = safetensors.scan(result) if target == "safetensors" else pt.scan(result)
        equal = all(
            tensors.same(one.read(), again[name].read()) for name, one in tensors_in.items()
        )
    else:
        equal = sha256 == expected
    if not equal:
        raise SystemExit(f"{result} is not equal to {hf}")


def remove(path: str | Path) -> None:
    path = Path(path)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def prepare(
    folder: Path, gigabytes: float, kinds: list[str], **sizes: Any
) -> tuple[int, dict[str, str]]:
    """Store a model in every kind; return its largest tensor's bytes, and each kind's hash."""
    folder.mkdir()
    largest = convert_folders.make(folder / "hf", gigabytes, **sizes)
    hashes = {"hf": ""}
    for kind in {"run" if kind == "checkpoint" else kind for kind in kinds if kind in TARGETS}:
        if kind != "hf":
            text = json.dumps(arguments(folder, "hf", kind))
            report = run(convert_folders.COMMAND, text).splitlines()[-2]
            hashes[kind] = json.loads(report)["sha256"]
            (folder / KINDS[kind]).parent.mkdir(exist_ok=True)
            (folder / TARGETS[kind][0]).rename(folder / KINDS[kind])
    return largest, hashes | {"checkpoint": hashes.get("run", "")}


def table(title: str, cells: dict[tuple[str, str], str]) -> None:
    """Print a table with a row for each source and a column for each destination."""
    targets = list(dict.fromkeys(target for _, target in cells))
    print(f"\n| {title} | {' | '.join(f'to {target}' for target in targets)} |")
    print(f"|---|{'---|' * len(targets)}")
    for source in dict.fromkeys(source for source, _ in cells):
        print(f"| {source} | {' | '.join(cells.get((source, target), '') for target in targets)} |")


def measure(folder: Path, pair: Pair, repeats: int, expected: str) -> Row:
    """Measure a pair several times, each next to ``cp`` of its source, and return the medians."""
    folders = [folder / "tiny", folder / "model"]
    result = folders[1] / TARGETS[pair.target][0]
    costs, ratios, synced = [], [], []
    for _ in range(repeats):
        copy = copied(folders[1] / KINDS[pair.source], folder / "copy")
        commands = [arguments(each, pair.source, pair.target) for each in folders]
        costs.append(measured(pair.code, *commands))
        ratios.append(costs[-1].seconds / copy[0])
        synced.append(costs[-1].seconds / copy[1])
        if pair.bounded:
            check_equal(pair.target, folders[1] / "hf", result, costs[-1].sha256, expected)
        remove(result)
    start, seconds, processor = (
        median(getattr(cost, field) for cost in costs)
        for field in ("start", "seconds", "processor")
    )
    most = max(cost.memory for cost in costs)
    return Row(start, seconds, processor, median(ratios), median(synced), most)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.4, help="size of the model")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/convert-benchmark"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS][:6])
    parser.add_argument("--only", nargs="+", help="some pairs of them, as hf:run run:hf")
    parser.add_argument("--repeats", type=int, default=1, help="measurements; medians are printed")
    parser.add_argument("--by-hand", action="store_true", help="also torch and transformers")
    options = parser.parse_args()
    options.folder.mkdir()
    try:
        prepare(options.folder / "tiny", 0, options.kinds, **convert_folders.TINY)
        largest, hashes = prepare(options.folder / "model", options.gigabytes, options.kinds)
        targets = [kind for kind in options.kinds if kind in TARGETS]
        pairs = [
            Pair(source, target)
            for source, target in itertools.product(options.kinds, targets)
            if (source != "shards" or target in FILES)  # without names that transformers ties
            and (options.only is None or f"{source}:{target}" in options.only)
        ]
        print("| | start-up | seconds | processor | times cp | times cp and sync | MiB |")
        print("|---|---|---|---|---|---|---|")
        times, memory, exceeded = {}, {}, []
        for pair in pairs + BY_HAND * options.by_hand:
            row = measure(options.folder, pair, options.repeats, hashes[pair.target])
            print(f"| {pair.name} | {row} |", flush=True)
            if pair.bounded:
                times[pair.source, pair.target] = f"{row.times:.1f}"
                memory[pair.source, pair.target] = f"{row.memory / 2**20:,.0f}"
                if row.memory > largest * (1 + pair.copies) + MARGIN:
                    exceeded.append(pair.name)
        table("times cp", times)
        table("MiB", memory)
        print(f"\nlargest tensor {largest / 2**20:,.0f} MiB; everything came back byte for byte")
        print(f"above the bound: {', '.join(exceeded) or 'none'}")
        return bool(exceeded)
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    raise SystemExit(main())
