"""The cost of the documents' faults: every faithful preset against its repaired one.

All are trained alike on the built-in task. See docs/faults.md.

``python benchmarks/faults.py`` trains 5 pairs with 3 seeds, each run in a process of its own,
prints a table and draws it. Runs that are in OUT/results.jsonl already are not repeated.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jax_transformer.architectures import registry
from jax_transformer.data import phrases
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.storage import atomic
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import curves

ROOT = Path(__file__).resolve().parent.parent
REPAIRED = "_repaired"
# Every document by its preset, with the faults that it keeps
FAULTS = {
    name: preset.source.partition("Faithful: ")[2].rstrip(".")
    for name, preset in registry.presets().items()
    if name + REPAIRED in registry.presets()
}
# No dropout, because no pair is met twice; if a branch has its own rate (0.5 in blog2023), that is
# part of the document
SETTINGS = (
    "--model.d-model 128 --model.num-heads 8 --model.d-ff 512 "
    "--model.encoder-layers 2 --model.decoder-layers 2 --model.max-length 40 "
    "--model.dropout 0 --model.attention-dropout 0 --model.activation-dropout 0 "
    "--model.embedding-dropout 0 "
    "--data.tokens-per-batch 512 --optimizer.learning-rate 3e-3 --optimizer.warmup-steps 100"
)
VOCABULARY = 1000
SEEDS = (0, 1, 2)
STEPS = 600
FIGURES = {
    "exact_match": ("exact match, %", 1),
    "bleu": ("BLEU", 1),
    "valid_loss": ("loss, nats per token", 3),
}

Result = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/faults"),
        help="folder of the runs and their results (%(default)s)",
    )
    parser.add_argument(
        "--presets",
        nargs="+",
        default=list(FAULTS),
        choices=list(FAULTS),
        help="pairs to train (all)",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=list(SEEDS),
        help="seeds: a run of each preset for each (0 1 2)",
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="updates of each run (%(default)s)"
    )
    parser.add_argument("--plot", type=Path, help="file of the figure (OUT/faults.png)")
    return parser.parse_args()


def command(out: Path, preset: str, seed: int, steps: int) -> list[str]:
    """The command that trains one preset.

    All runs share text, tokenizer, sizes and optimizer, and validate once, at the last step.
    """
    run = out / f"{preset}-{steps}-{seed}"
    files = ["--run", str(run), "--data.tokenizer", str(out / "tokenizer.json")]
    flags = (
        f"--model.preset {preset} --seed {seed} --steps {steps} --eval-every {steps} --samples 0"
        " --keep 1 --keep-best 0"
    )
    return [sys.executable, str(ROOT / "train.py"), *files, *flags.split(), *SETTINGS.split()]


def train(out: Path, preset: str, seed: int, steps: int) -> Result:
    """The figures of a finished run. Raises RuntimeError with the end of its log if it failed."""
    path, began = out / f"{preset}-{steps}-{seed}.log", time.monotonic()
    with open(path, "w", encoding="utf-8") as log:
        code = subprocess.run(
            command(out, preset, seed, steps), stdout=log, stderr=subprocess.STDOUT
        ).returncode
    if code:
        last = path.read_text(encoding="utf-8").strip().rpartition("\n")[2]
        raise RuntimeError(f"exit code {code}: {last} (see {path})")
    figures = RunFolder(out / f"{preset}-{steps}-{seed}").validations()[steps]
    result = identity(preset, seed, steps) | {name: figures[name] for name in FIGURES}
    return result | {"seconds": round(time.monotonic() - began)}


def identity(preset: str, seed: int, steps: int) -> Result:
    """The identity of a run: with other settings it is another run."""
    return {"preset": preset, "seed": seed, "steps": steps, "settings": SETTINGS}


class Results:
    """The lines of OUT/results.jsonl."""

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[Result] = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )

    def find(self, preset: str, seed: int, steps: int) -> Result | None:
        """The result of this run, or None."""
        key = identity(preset, seed, steps)
        return next(
            (line for line in self.lines if {name: line[name] for name in key} == key), None
        )

    def add(self, result: Result) -> None:
        """Append a result and rewrite the file."""
        self.lines.append(result)
        atomic.write_text(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))


def measure(options: argparse.Namespace, results: Results) -> Iterator[Result | str]:
    """The result of every run, or the reason why it failed; missing runs are trained first.

    Runs go seed by seed, so that pairs are complete early.
    """
    presets = [preset + suffix for preset in options.presets for suffix in ("", REPAIRED)]
    for seed, preset in itertools.product(options.seeds, presets):
        result = results.find(preset, seed, options.steps)
        if result is None:
            try:
                result = train(options.out, preset, seed, options.steps)
                results.add(result)
            except RuntimeError as error:
                yield f"{preset} seed {seed}: {error}"
                continue
        yield result


def line(result: Result) -> str:
    figures = ", ".join(
        f"{label.partition(',')[0]} {result[name]:.{digits}f}"
        for name, (label, digits) in FIGURES.items()
    )
    return f"{result['preset']} seed {result['seed']}: {figures} ({result['seconds']} s)"


def values(results: list[Result], preset: str, name: str) -> list[float]:
    """A figure of a preset, seed by seed."""
    return [
        result[name]
        for result in sorted(results, key=lambda result: result["seed"])
        if result["preset"] == preset
    ]


def spread(numbers: list[float], digits: int) -> str:
    """Mean and standard deviation."""
    mean = f"{statistics.mean(numbers):.{digits}f}"
    return f"{mean} ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else mean


def table(results: list[Result]) -> Iterator[str]:
    """Yield markdown: a row per pair, a cell per figure.

    faithful → repaired, mean ± standard deviation over the seeds.
    """
    labels = " | ".join(label for label, _ in FIGURES.values())
    yield f"| preset | its faults | {labels} |\n|---|---|{'---|' * len(FIGURES)}"
    for preset, fault in FAULTS.items():
        pairs = {
            name: [values(results, preset + suffix, name) for suffix in ("", REPAIRED)]
            for name in FIGURES
        }
        if all(both for pair in pairs.values() for both in pair):
            cells = [
                " → ".join(spread(numbers, FIGURES[name][1]) for numbers in pair)
                for name, pair in pairs.items()
            ]
            yield f"| `{preset}` | {fault} | {' | '.join(cells)} |"


def figure(results: list[Result], title: str) -> Any:
    """A panel for each figure: bars show means over seeds, dots the seeds."""
    import matplotlib.style
    from matplotlib.figure import Figure

    trained = {result["preset"] for result in results}
    shown = [preset for preset in FAULTS if {preset, preset + REPAIRED} <= trained]
    with matplotlib.style.context(["default", curves.STYLE]):
        drawn = Figure(figsize=(10, 8.5))
        drawn.suptitle(title, x=0.07, y=0.975, ha="left", fontsize=14, fontweight="bold")
        panels = drawn.subplots(len(FIGURES), 1)
        drawn.subplots_adjust(left=0.07, right=0.985, top=0.87, bottom=0.05, hspace=0.32)
        for axes, (name, (label, digits)) in zip(panels, FIGURES.items(), strict=True):
            axes.set_title(label[0].upper() + label[1:])
            axes.grid(visible=False, axis="x")
            axes.set_axisbelow(True)
            axes.set_xticks(range(len(shown)), shown)
            for side, suffix, colour, legend in (
                (-1, "", curves.ORANGE, "as documented"),
                (1, REPAIRED, curves.BLUE, "repaired"),
            ):
                for i, preset in enumerate(shown):
                    numbers = values(results, preset + suffix, name)
                    mean, place = statistics.mean(numbers), i + side * 0.2
                    label = legend if i == 0 else None
                    axes.bar(place, mean, 0.38, color=colour, alpha=0.55, label=label)
                    dots = dict(color=colour, markeredgecolor="white", clip_on=False)
                    axes.plot([place] * len(numbers), numbers, "o", **dots)
                    text = dict(textcoords="offset points", ha="center", fontsize=9)
                    at = place, max(numbers)
                    axes.annotate(f"{mean:.{digits}f}", at, (0, 5), **text)
            axes.margins(y=0.18)
            axes.set_ylim(bottom=0)
        panels[0].legend(
            loc="lower left", bbox_to_anchor=(-0.01, 1.18), borderaxespad=0, frameon=False, ncols=2
        )
    return drawn


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / "tokenizer.json").exists():
        lines = (text for pair in phrases.load()["train"] for text in pair)
        Tokenizer.train(lines, VOCABULARY, pad_id=0, bos_id=1, eos_id=2).save(
            options.out / "tokenizer.json"
        )
    results: list[Result] = []
    failed: list[str] = []
    for each in measure(options, Results(options.out / "results.jsonl")):
        print(each if isinstance(each, str) else line(each), file=sys.stderr, flush=True)
        (failed if isinstance(each, str) else results).append(each)  # type: ignore[arg-type]
    for row in table(results):
        print(row)
    picture = options.plot or options.out / "faults.png"
    figure(
        results, f"The cost of the documents' faults: {options.steps:,} steps on the built-in task"
    ).savefig(picture, dpi=150)
    print(picture, file=sys.stderr)
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
