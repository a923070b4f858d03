"""Pictures of trained runs and of a report, for the documentation.

    python tools/pictures.py curves docs/documents-curves.png RUN ...
    python tools/pictures.py attention docs/attention.png RUN "<2de> March 5, 2024"
    python tools/pictures.py parity docs/parity-map.png

The first takes the ten runs of the notebooks docs/notebooks/document_*.ipynb. The last makes a port
with one fault, and draws the report of its comparison.
"""

import argparse
import base64
import json
import zlib
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import torch
from flax import nnx
from matplotlib.figure import Figure

import jax_transformer as jt
from jax_transformer.architectures import twins
from jax_transformer.inference import attention_page
from jax_transformer.inference.translation import Translator
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import curves
from tools.notebooks import DOCUMENTS

SMOOTHED = 3
"""Lines of metrics.jsonl whose mean is a point of a curve."""


def losses(run: Path) -> np.ndarray:
    """Return steps and training losses of a run, smoothed."""
    lines = map(json.loads, RunFolder(run).metrics.read_text(encoding="utf-8").splitlines())
    steps, values = np.array([(x["step"], x["nll_loss"]) for x in lines if "nll_loss" in x]).T
    smooth = np.convolve(values, np.ones(SMOOTHED) / SMOOTHED, "valid")
    return np.array([steps[SMOOTHED - 1 :], smooth])


def draw_curves(runs: list[Path]) -> Figure:
    """One axis: a colour for each document, broken lines as documented and full ones repaired."""
    colours = [curves.BLUE, curves.ORANGE, curves.GREEN, "#CC79A7", "#555555"]
    by_name = {run.name: losses(run) for run in runs}
    with matplotlib.style.context(["default", curves.STYLE]):
        drawn = Figure(figsize=(9, 5.2), layout="constrained")
        axes = drawn.subplots()
        for preset, colour in zip(DOCUMENTS, colours, strict=True):
            for suffix, style in (("", "--"), ("_repaired", "-")):
                label = preset if suffix else None
                axes.plot(*by_name[preset + suffix], style, color=colour, lw=1.8, label=label)
        axes.plot([], [], "--", color="#888888", label="as documented")
        axes.plot([], [], "-", color="#888888", label="repaired")
        axes.set_title("Training loss of the five documents, faithful and repaired")
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats per token")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, ncols=2)
    return drawn


def draw_attention(run: Path, line: str) -> Figure:
    """Cross-attention of the last decoder layer, averaged over heads."""
    translator = Translator.load(run)
    hypothesis = translator.hypotheses([line])[0][0]
    cross: dict[str, Any] = attention_page.maps(translator, line, hypothesis)["cross"]
    levels = zlib.decompress(base64.b64decode(cross["weights"]))
    shape = cross["layers"], cross["heads"], len(cross["rows"]), len(cross["columns"])
    weights = np.frombuffer(levels, np.uint8).reshape(shape)[-1].mean(axis=0)
    with matplotlib.style.context(["default", curves.STYLE, {"axes.grid": False}]):
        size = 0.42 * len(cross["columns"]) + 1.6, 0.34 * len(cross["rows"]) + 1.2
        drawn = Figure(figsize=size, layout="constrained")
        axes = drawn.subplots()
        axes.imshow(weights, cmap="Blues", aspect="auto", vmin=0)
        axes.set_xticks(range(shape[3]), [repr(x)[1:-1] for x in cross["columns"]])
        axes.set_yticks(range(shape[2]), [repr(x)[1:-1] for x in cross["rows"]])
        axes.set_xlabel(line)
        axes.set_ylabel(hypothesis.text)
    return drawn


def draw_parity() -> Figure:
    """Largest difference of each output, in order, for a port with one fault; 0 is 1e-17."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64}
    port = jt.Transformer(jt.preset("lesson10", **sizes), rngs=nnx.Rngs(0))
    original = twins.twin(port.config).eval()
    jt.convert.into_torch(port, original)
    kernel = port.encoder.blocks[1].feed_forward.down.kernel
    kernel[...] = kernel[...].at[5, 3].add(1e-3)
    batch = [np.random.default_rng(seed).integers(4, 50, (2, 9)) for seed in (0, 1)]
    report = jt.parity.compare(port, original, batch, gradients=False)
    first = report.first_fault
    assert first is not None
    outputs = {entry.ours: entry.output for entry in report.entries if entry.output}
    values = [max(each.wide.max_abs, 1e-17) for each in outputs.values()]
    with matplotlib.style.context(["default", curves.STYLE]):
        drawn = Figure(figsize=(9, 4.6), layout="constrained")
        axes = drawn.subplots()
        at = list(outputs).index(first.ours)
        for agrees, colour in ((True, curves.BLUE), (False, curves.ORANGE)):
            chosen = [i for i, each in enumerate(outputs.values()) if each.agrees is agrees]
            label = "agrees" if agrees else "differs"
            axes.plot(chosen, [values[i] for i in chosen], "o", color=colour, label=label)
        axes.legend(frameon=False, loc="lower right")
        axes.set_yscale("log")
        axes.annotate(
            f"the first that differs:\n{first.ours}",
            (at, values[at]),
            (0.02, 0.72),
            textcoords="axes fraction",
            arrowprops={"arrowstyle": "->", "color": "#555555"},
        )
        axes.set_title("One weight of a port is wrong by 0.001")
        axes.set_xlabel("modules, in the order in which they end")
        axes.set_ylabel("largest difference in float64")
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="picture", required=True)
    for name, runs in (("curves", "+"), ("attention", 1), ("parity", 0)):
        each = commands.add_parser(name)
        each.add_argument("file", type=Path)
        if runs:
            each.add_argument("runs", type=Path, nargs=runs)
        if name == "attention":
            each.add_argument("line")
    options = parser.parse_args()
    if options.picture == "curves":
        drawn = draw_curves(options.runs)
    elif options.picture == "parity":
        drawn = draw_parity()
    else:
        drawn = draw_attention(options.runs[0], options.line)
    drawn.savefig(options.file, dpi=150)
    print(options.file)


if __name__ == "__main__":
    main()
