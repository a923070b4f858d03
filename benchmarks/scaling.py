"""Time and memory by depth, width, vocabulary, length and batch.

Every point is a training step and a greedy decoding of a model that differs from the others in one
size, each in a process of its own. Prints a table, and draws it with ``--plot FILE``. See
benchmarks/README.md.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import decode_export, train_step

HEAD_WIDTH = 64
BASE = {"layers": 3, "width": 256, "vocabulary": 8000, "length": 32, "batch": 32}
AXES = {
    "layers": (1, 2, 3, 6, 12),
    "width": (64, 128, 256, 512, 1024),
    "vocabulary": (1000, 4000, 8000, 16000, 32000),
    "length": (16, 32, 64, 128, 256, 512),
    "batch": (1, 8, 32, 64, 128),
}
TITLES = {
    "layers": "layers of each stack",
    "width": "d_model",
    "vocabulary": "vocabulary",
    "length": "tokens of a sentence",
    "batch": "sentences",
}
POINT = "point"
"""The size of :data:`train_step.SIZES` that a process measures."""
STEP, DECODE = "training step", "greedy decoding"


class Cost(NamedTuple):
    """The cost of one point: the median time with its quartiles, and the peak of the process."""

    low: float
    seconds: float
    high: float
    memory: float
    """GB, with the libraries."""
    first: float
    """Seconds of the first call, which compiles."""


def measure(pipe: Any, kind: str, point: dict[str, int], times: int) -> None:
    """Time a point in this process, and send its cost."""
    from jax_transformer.runtime import process

    process.keep_freed_memory()
    train_step.SIZES[POINT] = dict(
        d_model=point["width"],
        num_heads=max(1, point["width"] // HEAD_WIDTH),
        num_layers=point["layers"],
        d_ff=4 * point["width"],
        vocab_size=point["vocabulary"],
    )
    call = (step if kind == STEP else decoding)(point)
    first = train_step.seconds(call)
    call()
    taken = [train_step.seconds(call) for _ in range(times)]
    low, middle, high = statistics.quantiles(taken, n=4, method="inclusive")
    pipe.send(Cost(low, middle, high, train_step.resident(), first))


def step(point: dict[str, int]) -> Callable[[], object]:
    """A function that makes a training step as :mod:`benchmarks.train_step` times it."""
    import jax

    contender = train_step.ours(POINT, point["batch"], point["length"])
    jax.block_until_ready(contender.state)
    return lambda: contender.run(1)


def decoding(point: dict[str, int]) -> Callable[[], object]:
    """A function that decodes a batch as :mod:`benchmarks.decode` does: as many tokens as the
    source has, greedily.
    """
    from jax_transformer import generate

    shape = point["batch"], point["length"]
    model, sources = decode_export.random(train_step.SIZES[POINT], shape, max(128, shape[1]))
    weights = generate.split(model)
    config = generate.GenerationConfig(max_new_tokens=point["length"])
    return lambda: generate.generate(weights, sources, config)


def table(results: dict[str, dict[int, dict[str, Cost]]]) -> str:
    """The costs as markdown."""
    lines = [
        "| | | step, ms | quartiles | first, s | memory, GB | decoding, ms | quartiles "
        "| first, s | memory, GB |",
        "|" + "---|" * 10,
    ]
    for axis, points in results.items():
        for value, costs in points.items():
            cells = [
                f"{milliseconds(cost.seconds)} | {milliseconds(cost.low)} – "
                f"{milliseconds(cost.high)} | {cost.first:.1f} | {cost.memory:.2f}"
                for cost in costs.values()
            ]
            bold = "**" if value == BASE[axis] else ""
            lines.append(f"| {TITLES[axis]} | {bold}{value:,}{bold} | {' | '.join(cells)} |")
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """A time with three digits, or without a fraction."""
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"


def plot(results: dict[str, dict[int, dict[str, Cost]]], file: Path) -> None:
    """Draw time and memory over each size, both axes logarithmic."""
    import matplotlib.pyplot
    import matplotlib.style

    from jax_transformer.training import curves

    rows: list[tuple[str, Callable[[Cost], float]]] = [
        ("seconds", lambda cost: cost.seconds),
        ("peak memory, GB", lambda cost: cost.memory),
    ]
    colors = {STEP: curves.BLUE, DECODE: curves.ORANGE}
    with matplotlib.style.context(["default", curves.STYLE]):
        figure, panels = matplotlib.pyplot.subplots(
            2, len(results), figsize=(2.6 * len(results), 5.2), sharey="row", squeeze=False
        )
        for (label, figure_of), panels_of_row in zip(rows, panels, strict=True):
            panels_of_row[0].set_ylabel(label)
            for (axis, points), panel in zip(results.items(), panels_of_row, strict=True):
                for kind, color in colors.items():
                    costs = [figure_of(each[kind]) for each in points.values()]
                    panel.plot(list(points), costs, marker="o", markersize=4, color=color)
                panel.set(xscale="log", yscale="log", xlabel=TITLES[axis])
                panel.set_xticks(list(points), [f"{value:,}" for value in points])
                panel.yaxis.set_major_formatter("{x:g}")
                panel.minorticks_off()
                panel.tick_params(axis="x", labelrotation=45)
        lines = panels[0, 0].lines
        figure.legend(lines, list(colors), loc="upper center", ncols=2, frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 0.95))
        figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES), help="sizes to vary")
    parser.add_argument("--times", type=int, default=7, help="timed calls of each point")
    parser.add_argument("--plot", type=Path, help="draw the table into this picture")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    args = parser.parse_args()
    # First calls are compiled again
    os.environ |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    results: dict[str, dict[int, dict[str, Cost]]] = {}
    known: dict[str, dict[str, Cost]] = {}
    for axis in args.only:
        results[axis] = {}
        for value in AXES[axis]:
            point = BASE | {axis: value}
            name = json.dumps(point)
            if name not in known:
                known[name] = {}
                for kind in (STEP, DECODE):
                    print(f"{axis} {value}: {kind} ...", file=sys.stderr)
                    pipe = train_step.start(measure, kind, point, args.times)
                    known[name][kind] = pipe.recv()
                    time.sleep(0.5)
            results[axis][value] = known[name]
    print(table(results))
    if args.plot:
        plot(results, args.plot)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
