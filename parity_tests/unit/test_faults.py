"""The table of the documents' faults: equal settings, runs that are not repeated, means."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import faults
from jax_transformer.architectures import registry
from jax_transformer.cli import arguments
from jax_transformer.training import resume
from jax_transformer.training.options import TrainOptions

NAMES = [preset + suffix for preset in faults.FAULTS for suffix in ("", faults.REPAIRED)]


def result(preset: str, seed: int, **figures: float) -> faults.Result:
    """Return a result whose other figures are 1."""
    figures = dict.fromkeys(faults.FIGURES, 1.0) | {"seconds": 2} | figures
    return faults.identity(preset, seed, 20) | figures


def test_every_documented_pair_is_measured():
    known = registry.preset_names()
    documented = [n for n in known if n.removesuffix("_repaired") + "_repaired" in known]
    assert documented == NAMES


@pytest.mark.parametrize("preset", NAMES)
def test_all_runs_have_the_same_settings(tmp_path, preset):
    """Only the preset and the seed differ, parsed as the command line parses them."""
    one, other = (
        train_options(faults.command(tmp_path, name, seed, 20))
        for name, seed in ((preset, 1), ("lesson10", 0))
    )
    assert set(resume.differences(one, other)) <= {"run", "seed", "model.preset"}
    config = one.model.config(1000, 1000)
    sizes = config.d_model, config.num_heads, config.d_ff, config.longest
    assert sizes == (128, 8, 512, 40)
    assert config.encoder.layers == config.decoder.layers == 2
    rates = [name for name in vars(config) if name.endswith("dropout") and name != "final_dropout"]
    assert len(rates) == 4 and not any(getattr(config, name) for name in rates)


def train_options(command: list[str]) -> TrainOptions:
    return arguments.parse("train", TrainOptions, command[2:])


def test_a_finished_run_is_not_repeated(tmp_path, monkeypatch):
    started = []

    def run(command, **_):
        """A stand-in for a training process."""
        options = train_options(command)
        started.append((options.model.preset, options.seed))
        figures = {"step": 20, "exact_match": 50.0, "bleu": 60.0, "valid_loss": 0.5}
        folder = tmp_path / f"{options.model.preset}-20-{options.seed}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps(figures) + "\n")
        return SimpleNamespace(returncode=0 if options.seed < 2 else 6)

    monkeypatch.setattr(subprocess, "run", run)

    def measured(seeds: list[int]) -> list:
        options = SimpleNamespace(out=tmp_path, presets=["lesson10"], seeds=seeds, steps=20)
        return list(faults.measure(options, faults.Results(tmp_path / "results.jsonl")))

    first = measured([0])
    assert started == [("lesson10", 0), ("lesson10_repaired", 0)]
    assert [each["bleu"] for each in first] == [60.0, 60.0]
    assert measured([0, 1])[:2] == first
    assert started[2:] == [("lesson10", 1), ("lesson10_repaired", 1)]
    monkeypatch.setattr(faults, "SETTINGS", faults.SETTINGS.replace("3e-3", "2e-3"))
    assert faults.Results(tmp_path / "results.jsonl").find("lesson10", 0, 20) is None
    # a failed run is reported, and the others go on
    assert all("exit code 6" in each for each in measured([2]))


def test_the_table_has_means_and_deviations_of_complete_pairs():
    results = [result("lesson10", seed, bleu=bleu) for seed, bleu in ((1, 12.0), (0, 10.0))]
    assert len(list(faults.table(results))) == 1, "a pair without its other half has no row"
    results += [result("lesson10_repaired", 0, bleu=30.0)]
    head, row = faults.table(results)
    assert head.count("|", 0, head.index("\n")) == row.count("|") == head.count("|") // 2
    assert row.startswith("| `lesson10` | the decoder attends to source padding |")
    assert "| 11.0 ± 1.4 → 30.0 |" in row


def test_the_picture_has_a_bar_for_each_preset_and_a_dot_for_each_seed(tmp_path):
    results = [result(preset, seed) for preset in NAMES[:4] for seed in (0, 1)]
    figure = faults.figure(results, "a title")
    for axes in figure.axes:
        assert len(axes.patches) == 4
        assert sum(len(dots.get_xdata()) for dots in axes.lines) == 8
