"""The learning curves of a run in one picture, drawn from metrics.jsonl after every validation."""

import json
import logging
import math
import operator
import sys
import warnings
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jax_transformer.runtime import distributed
from jax_transformer.storage import atomic
from jax_transformer.storage.run_folder import RunFolder

# Okabe and Ito's colours for the colour-blind: https://jfly.uni-koeln.de/color/
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
SCORES = (
    ("bleu", "BLEU", BLUE, "o"),
    ("chrf", "chrF", ORANGE, "s"),
    ("exact_match", "exact match", GREEN, "^"),
)
STYLE = {
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.labelcolor": "#333333",
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "font.size": 10,
    "grid.color": "#e4e4e4",
    "legend.fontsize": 9.5,
    "lines.markersize": 4.5,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
}
_failed: set[Path] = set()

Points = list[tuple[int, float]]


def draw(folder: RunFolder) -> None:
    """Draw metrics.jsonl into the run's picture, atomically; in the first of several processes.

    A run is not lost for a picture: an error is one line on stderr, once per picture, and the
    previous picture stays.
    """
    if not distributed.first():
        return
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)  # no messages about its font cache, nor about missing glyphs
    try:
        # Text after the last newline is an incomplete line
        lines = folder.metrics.read_text(encoding="utf-8").split("\n")[:-1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = figure(list(map(json.loads, lines)), folder.path.name)
            with atomic.file(folder.curves) as temporary:
                drawn.savefig(temporary, format="png", dpi=150)
    except Exception as error:
        if folder.curves not in _failed:
            _failed.add(folder.curves)
            reason = " ".join(str(error).split()) or type(error).__name__
            tqdm.write(
                f"warning: {folder.curves} is not drawn, training goes on: {reason}",
                file=sys.stderr,
            )
    finally:
        logger.setLevel(level)


def _points(entries: list[dict[str, Any]], name: str, *, averaged: bool = False) -> Points:
    """Return the step and value of every line in which this figure is finite.

    Either for averaged weights or for the weights in training.
    """
    return [
        (entry["step"], entry[name])
        for entry in entries
        if ("weights" in entry) is averaged and math.isfinite(entry.get(name, math.nan))
    ]


def figure(entries: list[dict[str, Any]], title: str) -> Any:
    """Return a matplotlib figure of four panels, without pyplot and its state."""
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    last = max([0, *map(operator.itemgetter("step"), entries)])
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(10, 7.5))
        panels = figure.subplots(2, 2)
        figure.subplots_adjust(0.07, 0.065, 0.985, 0.895, wspace=0.18, hspace=0.62)
        font: dict[str, Any] = {"fontsize": 14, "fontweight": "bold", "parse_math": False}
        figure.suptitle(f"{title}, step {last:,}", x=0.07, y=0.975, ha="left", **font)
        _fill(panels, entries)
        for axes in panels.flat:
            axes.set_xlim(0, max(last, 1) * 1.02)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.set_xlabel("step")
            if not axes.lines:
                centre: dict[str, Any] = {"transform": axes.transAxes, "ha": "center"}
                axes.text(0.5, 0.5, "nothing measured yet", color="#777777", **centre)
    return figure


def _fill(panels: Any, entries: list[dict[str, Any]]) -> None:
    (losses, scores), (rate, gradient) = panels
    losses.set(title="Loss", ylabel="nats a target token")
    loss, nll_loss = _points(entries, "loss"), _points(entries, "nll_loss")
    if nll_loss and nll_loss != loss:
        _line(losses, loss, "training, label smoothing included", GREY)
    _line(losses, nll_loss or loss, "training", BLUE)
    _validated(losses, entries, "valid_loss", "validation", ORANGE, "o", best=min, digits=3)
    scores.set(title="Scores on validation examples", ylabel="BLEU, chrF; exact match in %")
    for name, label, color, marker in SCORES:
        _validated(scores, entries, name, label, color, marker, best=max, digits=1)
    scores.set_ylim(bottom=0)
    for axes in (losses, scores):
        if axes.lines:  # below the panel, so that it hides nothing
            axes.legend(
                loc="upper left", bbox_to_anchor=(-0.02, -0.19), borderaxespad=0, frameon=False
            )
    rate.set(title="Learning rate")
    _line(rate, _points(entries, "learning_rate"), "learning rate", BLUE)
    rate.set_ylim(bottom=0)
    rate.yaxis.set_major_formatter("{x:g}")
    points = _points(entries, "gradient_norm")
    gradient.set(title="Global norm of the gradient, before clipping")
    _line(gradient, points, "gradient norm", BLUE)
    norms = list(map(operator.itemgetter(1), points)) or [0]
    if 0 < 50 * min(norms) < max(norms):
        gradient.set_yscale("log")
    else:
        gradient.set_ylim(bottom=0)


def _line(axes: Any, points: Points, label: str, color: str, marker: str = ".") -> None:
    if points:
        marker, width = marker if len(points) <= 60 else "", 0.7 if len(points) > 600 else 1.6
        style = {"color": color, "marker": marker, "linewidth": width, "clip_on": False}
        axes.plot(*zip(*points, strict=True), label=label, **style)


def _validated(
    axes: Any,
    entries: list[dict[str, Any]],
    name: str,
    label: str,
    color: str,
    marker: str,
    *,
    best: Any,
    digits: int,
) -> None:
    """Plot a validation figure, with a ring around its best and a diamond for averaged weights."""
    points, averaged = _points(entries, name), _points(entries, name, averaged=True)
    if points:
        step, value = best(points, key=operator.itemgetter(1))
        label += f": best {value:.{digits}f} at step {step:,}"
        ring = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1.6}
        axes.plot(step, value, color=color, **ring, clip_on=False)
    for step, value in averaged:
        label += f"; averaged {value:.{digits}f}"
        axes.plot(step, value, color=color, marker="D", markersize=7, clip_on=False)
    _line(axes, points, label, color, marker)
