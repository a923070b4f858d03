"""The plot of a run: its contents, and that no failure of it disturbs or stops training."""

import errno
import json
import logging
import math
import re
import struct
import warnings
from pathlib import Path

import pytest

from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import curves
from parity_tests.unit import helpers, runs


def entries(steps: int = 1000, averaged: bool = True) -> list[dict]:
    """Return lines every 50 steps, validations every 200; loss is best at 600, scores last."""
    lines: list[dict] = []
    for step in range(50, steps + 1, 50):
        rates = {"gradient_norm": 1 / step, "learning_rate": step * 1e-6}
        lines.append({"step": step, "loss": 2 + 500 / step, **rates, "tokens_per_second": 4e3})
        if step % 200 == 0:
            scores = {"bleu": step / 40, "chrf": step / 20, "exact_match": step / 100}
            valid = {"step": step, "valid_loss": 2 + abs(step - 600) / 1000}
            lines.append(valid | scores | {"signatures": {"bleu": "…"}})
    if averaged:
        scores = {"bleu": 27.0, "chrf": 51.0, "exact_match": 11.0}
        lines.append({"step": steps, "weights": "averaged", "valid_loss": 1.5, **scores})
    return lines


@pytest.fixture
def draw(tmp_path, capsys):
    """Draw the text of a metrics.jsonl, and return the picture and stderr."""

    def drawn(text: str, title: str = "phrases-001") -> tuple[Path, str]:
        folder = RunFolder(tmp_path / title)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.metrics.write_text(text, encoding="utf-8")
        curves.draw(folder)
        return folder.curves, "".join(capsys.readouterr())

    return drawn


def text(lines: list[dict]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def is_a_picture(path: Path) -> bool:
    """Return True if the file is a complete PNG of the requested size."""
    content = path.read_bytes()
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []
    size = struct.unpack(">II", content[16:24])
    ends = content[:8], content[-8:-4]
    return (size, ends) == ((1500, 1125), (b"\x89PNG\r\n\x1a\n", b"IEND"))


def panels(lines: list[dict]) -> dict[str, dict[str, tuple[list, list]]]:
    """Return the labelled lines of each panel of the picture, by titles and labels."""
    lines_by_panel = {}
    for axes in curves.figure(lines, "run").axes:
        named = [line for line in axes.lines if not line.get_label().startswith("_")]
        lines_by_panel[axes.get_title(loc="left")] = {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in named
        }
    return lines_by_panel


def test_every_metric_is_in_its_panel_and_the_best_is_named():
    lines = entries()
    validations = [line for line in lines if "valid_loss" in line and "weights" not in line]
    drawn = panels(lines)
    assert {title: list(named) for title, named in drawn.items()} == {
        "Loss": ["training", "validation: best 2.000 at step 600; averaged 1.500"],
        "Scores on validation examples": [
            "BLEU: best 25.0 at step 1,000; averaged 27.0",
            "chrF: best 50.0 at step 1,000; averaged 51.0",
            "exact match: best 10.0 at step 1,000; averaged 11.0",
        ],
        "Learning rate": ["learning rate"],
        "Global norm of the gradient, before clipping": ["gradient norm"],
    }
    steps = [*range(50, 1001, 50)]
    assert drawn["Loss"]["training"] == (steps, [2 + 500 / step for step in steps])
    for panel, i, name in (
        ("Loss", 1, "valid_loss"),
        *(("Scores on validation examples", i, curves.SCORES[i][0]) for i in range(3)),
    ):
        expected = ([200, 400, 600, 800, 1000], [line[name] for line in validations])
        assert list(drawn[panel].values())[i] == expected
    figure = curves.figure(lines, "run")
    assert figure.get_suptitle() == "run, step 1,000"
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 1020)}
    assert drawn["Learning rate"]["learning rate"] == (steps, [step * 1e-6 for step in steps])


def test_the_training_loss_is_drawn_with_and_without_label_smoothing():
    steps = [{"step": step, "loss": 3.0, "nll_loss": 2.0} for step in (50, 100)]
    assert panels(steps)["Loss"] == {
        "training, label smoothing included": ([50, 100], [3.0, 3.0]),
        "training": ([50, 100], [2.0, 2.0]),
    }
    equal = [step | {"loss": 2.0} for step in steps]
    assert panels(equal)["Loss"] == {"training": ([50, 100], [2.0, 2.0])}


def test_the_best_and_the_averaged_are_marked():
    best = {("o", 600, 2.0)}
    for averaged, marks in ((True, {*best, ("D", 1000, 1.5)}), (False, best)):
        lines = curves.figure(entries(averaged=averaged), "run").axes[0].lines
        drawn = [(line.get_marker(), *line.get_xdata(), *line.get_ydata()) for line in lines]
        assert {mark for mark in drawn if len(mark) == 3} == marks


def test_a_run_is_drawn_and_drawn_again(draw):
    path, stderr = draw(text(entries(400)))
    assert is_a_picture(path) and stderr == ""
    first = path.read_bytes()
    # dollars are no mathematics, and the font lacks some letters
    path, stderr = draw(text(entries()), title="runs/$\\frac$ 日本")
    assert is_a_picture(path) and stderr == "" and path.read_bytes() != first


SCORES = ("bleu", "chrf", "exact_match")
FEW = {
    "nothing": "",
    "one line": text(entries(50, averaged=False)),
    "one validation": text([{"step": 7, "valid_loss": 2.5, **dict.fromkeys(SCORES, 0.0)}]),
    "a torn line": text(entries(400)) + '{"step": 450, "loss": 2',
    "not numbers": re.sub(r"\d+(\.\d+)?e-\d+|\d+\.\d+", "NaN", text(entries(400))),
    "infinite": text([{"step": 50, **dict.fromkeys(("loss", "gradient_norm"), math.inf)}]),
    "long": text(entries(40_000)),
}


@pytest.mark.parametrize("content", FEW.values(), ids=FEW)
def test_a_run_with_partial_metrics_is_drawn(draw, content):
    path, stderr = draw(content)
    assert is_a_picture(path) and stderr == ""


def test_values_that_are_not_finite_are_omitted():
    lines = [*entries(200, averaged=False), {"step": 250, "loss": math.nan}]
    lines.append({"step": 400, "valid_loss": math.nan, "bleu": 9.0})
    assert list(panels(lines)["Loss"]) == ["training", "validation: best 2.400 at step 200"]
    assert panels(lines)["Loss"]["training"][0] == [50, 100, 150, 200]


def test_a_failed_drawing_warns_once_and_the_last_picture_stays(draw, tmp_path, capsys):
    path, _ = draw(text(entries(400)))
    before = path.read_bytes()
    path, stderr = draw('{"step": 1}\nnot JSON\n{"step": 2}\n')
    assert stderr.startswith(f"warning: {path} is not drawn, training goes on: ")
    assert stderr.count("\n") == 1
    level = logging.getLogger("matplotlib").level
    assert draw("[1]\n") == (path, "")
    assert logging.getLogger("matplotlib").level == level < logging.ERROR
    assert path.read_bytes() == before and is_a_picture(path)
    # another picture, another line
    curves.draw(RunFolder(tmp_path / "none"))
    assert capsys.readouterr().err.count("\n") == 1


def test_a_failed_write_of_a_picture_leaves_no_partial_file(draw, monkeypatch):
    from matplotlib.figure import Figure

    full = helpers.failing(errno.ENOSPC)
    monkeypatch.setattr(
        Figure, "savefig", lambda _, path, **__: Path(path).write_bytes(b"half") and full()
    )
    path, stderr = draw(text(entries(400)))
    assert "No space left on device" in stderr
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_matplotlib_prints_nothing_and_its_settings_are_unchanged(draw, monkeypatch, caplog):
    import matplotlib
    from matplotlib.figure import Figure

    def loud(self, path, **options):
        logging.getLogger("matplotlib.font_manager").warning(
            "Matplotlib is building the font cache; this may take a moment."
        )
        warnings.warn("Glyph 26085 missing from font(s) DejaVu Sans.", stacklevel=1)
        return save(self, path, **options)

    save = Figure.savefig
    settings = dict(matplotlib.rcParams)
    level = logging.getLogger("matplotlib").level
    monkeypatch.setattr(Figure, "savefig", loud)
    path, stderr = draw(text(entries(400)))
    assert is_a_picture(path) and stderr == "" and caplog.records == []
    assert dict(matplotlib.rcParams) == settings and logging.getLogger("matplotlib").level == level


def test_the_first_picture_prints_nothing_and_loads_no_pyplot(tmp_path):
    """Without a font cache, and without a folder for one."""
    (tmp_path / "metrics.jsonl").write_text(text(entries(400)))
    program = (
        "import os, sys, pathlib; os.environ['MPLCONFIGDIR'] = '/dev/null/nowhere'\n"
        "from jax_transformer.training import curves; assert 'matplotlib' not in sys.modules\n"
        "from jax_transformer.storage.run_folder import RunFolder\n"
        f"curves.draw(RunFolder(pathlib.Path({str(tmp_path)!r})))\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    process = runs.start(program=("-c", program))
    assert process.communicate(timeout=120) == ("False\n", "") and process.returncode == 0
    assert is_a_picture(tmp_path / "curves.png")


@pytest.mark.parametrize(
    ("norms", "scale"),
    [((0.0, 9.0), "linear"), ((1.0, 50.0), "linear"), ((1.0, 51.0), "log"), ((), "linear")],
)
def test_norms_of_very_different_sizes_are_on_a_logarithmic_scale(norms, scale):
    entries = [{"step": step, "gradient_norm": norm} for step, norm in enumerate(norms, 1)]
    assert curves.figure(entries, "run").axes[3].get_yscale() == scale
