"""Trackers: contents, no duplicates after a resume, missing packages; lines of progress."""

import importlib.util
import json
import struct
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import metrics_logger
from jax_transformer.training.options import TrainOptions
from parity_tests.unit import helpers


def train(step: int) -> dict:
    rates = {"learning_rate": step / 1e5, "tokens_per_second": 4000.0}
    return {"step": step, "loss": 9 - step / 100, "gradient_norm": 0.5, **rates}


def valid(step: int, **more) -> dict:
    scores = {"bleu": step / 10, "chrf": 30.0, "exact_match": 0, "signatures": {"bleu": "x"}}
    return {"step": step, "valid_loss": 8 - step / 100, **scores, **more}


def test_every_metric_has_a_tag():
    rates = {"train/learning_rate": 5e-4, "train/tokens_per_second": 4000.0}
    expected = {"train/loss": 8.5, "train/gradient_norm": 0.5, **rates}
    assert metrics_logger.scalars(train(50)) == expected
    expected = {"loss": 7.5, "bleu": 5.0, "chrf": 30.0, "exact_match": 0}
    for prefix, line in (("valid", valid(50)), ("averaged", valid(50, weights="averaged"))):
        scores = {f"{prefix}/{name}": value for name, value in expected.items()}
        assert metrics_logger.scalars(line) == scores


def test_no_tracker_is_the_default(tmp_path):
    assert metrics_logger.trackers(RunFolder(tmp_path), TrainOptions()) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "module"),
    [({"tensorboard": True}, "tensorboardX"), ({"wandb": "project"}, "wandb")],
)
def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch, options, module):
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else known(name)
    )
    (name,) = options
    trackers = partial(metrics_logger.trackers, RunFolder(tmp_path))
    for ask in (metrics_logger.check_trackers, trackers):
        message = rf"^{name} needs the package {module}: pip install 'jax-seq2seq\[{name}\]'$"
        with pytest.raises(ConfigError, match=message):
            ask(TrainOptions(**options))
    metrics_logger.check_trackers(TrainOptions())


def test_a_folder_named_wandb_is_not_taken_for_the_package(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()
    with pytest.raises(ConfigError, match="needs the package wandb"):
        metrics_logger.check_trackers(TrainOptions(wandb="project"))


def shown(folder: Path) -> dict[tuple[str, int], float]:
    """Return the scalars that TensorBoard shows, without those voided by a later session."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    scalars: dict[tuple[str, int], float] = {}
    for path in sorted(folder.iterdir()):
        content, at = path.read_bytes(), 0
        # a record: its size, a checksum of that, the bytes, a checksum of them
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + size])
            at += size + 16
            if event.session_log.status == SessionLog.START:
                scalars = {key: value for key, value in scalars.items() if key[1] < event.step}
            for value in event.summary.value:
                assert (value.tag, event.step) not in scalars, "drawn twice"
                scalars[value.tag, event.step] = value.simple_value
    return scalars


def written(lines: list[dict]) -> dict[tuple[str, int], float]:
    return {
        (name, line["step"]): pytest.approx(value)
        for line in lines
        for name, value in metrics_logger.scalars(line).items()
    }


def test_tensorboard_shows_every_line_once_however_often_the_run_was_interrupted(tmp_path):
    pytest.importorskip("tensorboardX")
    lines = [train(50), train(100), valid(100), train(150), train(200), valid(200)]
    lines.append(valid(200, weights="averaged"))
    # killed, killed again, stopped, resumed from before, killed before a validation, ended
    sessions = [lines[:5], lines[3:5], lines[5:6], lines[3:4], lines[4:5], lines[5:]]
    for session in sessions:
        (board,) = metrics_logger.trackers(RunFolder(tmp_path), TrainOptions(tensorboard=True))
        for line in session:
            board.add(line["step"], metrics_logger.scalars(line))
        board.close()
    assert shown(tmp_path / "tensorboard") == written(lines)
    assert len(list((tmp_path / "tensorboard").iterdir())) == len(sessions)


# Weights & Biases: a stand-in with the part of its interface that is used

FAKE = """
from types import SimpleNamespace
runs, asked = {}, []

class Error(Exception):
    pass

def init(*, project, dir, name, config, resume, id=None):
    if project == "closed":
        raise Error("No API key configured.\\nUse `wandb login` to log in.")
    asked.append(dict(project=project, dir=dir, name=name, config=config, resume=resume, id=id))
    key = id or f"run{len(runs)}"
    entries = runs.setdefault(key, [])
    def log(values, step):
        if not entries or step >= entries[-1][0]:  # older steps are dropped
            entries.append((step, values))
    return SimpleNamespace(id=key, log=log, finish=lambda: entries.append(("finished",)))
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    yield wandb
    del sys.modules["wandb"]


def test_a_resumed_run_goes_on_in_the_same_run_of_weights_and_biases(tmp_path, wandb):
    folder, options = RunFolder(tmp_path / "run"), TrainOptions(wandb="project", steps=7)
    folder.path.mkdir()
    for line in (train(50), train(100)):  # two sessions, and between them one of another user
        (board,) = metrics_logger.trackers(folder, options)
        board.add(line["step"], metrics_logger.scalars(line))
        wandb.init(project="other", dir=".", name="other", config={}, resume="allow")
    board.close()
    logged = [(step, metrics_logger.scalars(train(step))) for step in (50, 100)]
    assert wandb.runs["run0"] == [*logged, ("finished",)]
    recorded = json.loads((folder.path / "wandb.json").read_text())
    assert recorded == {"project": "project", "id": "run0"}
    first, _, second, _ = wandb.asked
    assert first | {"id": "run0"} == second and first["id"] is None
    expected = dict(project="project", name="run", resume="allow", dir=str(folder.path))
    assert expected.items() <= first.items()
    assert first["config"]["steps"] == 7 and first["config"]["optimizer"]["schedule"] == "cosine"


def test_errors_of_weights_and_biases_are_one_line(tmp_path, wandb):
    message = r"^wandb=closed: No API key configured\. Use `wandb login` to log in\.$"
    with pytest.raises(ConfigError, match=message):
        metrics_logger.trackers(RunFolder(tmp_path), TrainOptions(wandb="closed"))
    (tmp_path / "wandb.json").write_text("{")
    with pytest.raises(InputError, match=r"wandb\.json: "):
        metrics_logger.trackers(RunFolder(tmp_path), TrainOptions(wandb="project"))


def test_progress_shows_both_losses_and_hours(capsys, monkeypatch):
    monkeypatch.setattr(metrics_logger.time, "monotonic", lambda: 0.0)
    progress = metrics_logger.Progress(0, 1001)
    progress.step += 1
    monkeypatch.setattr(metrics_logger.time, "monotonic", lambda: 3.723)
    progress.show(train(1) | {"nll_loss": 8.5})
    progress.show(train(1) | {"loss": 8.5, "nll_loss": 8.5})
    assert capsys.readouterr().err.splitlines() == [
        "step 1/1001  loss 8.990 (8.500 without label smoothing)  4,000 tokens/s  1:02:03 left",
        "step 1/1001  loss 8.500  4,000 tokens/s  1:02:03 left",
    ]
    resumed = metrics_logger.Progress(500, 1001)
    resumed.began, resumed.step = 0.0, 501
    resumed.show(train(501))
    assert capsys.readouterr().err.endswith("  31:01 left\n"), "3.723 s a step"


def test_a_bar_and_the_lines_above_it_are_on_standard_error(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = metrics_logger.Progress(0, 3)
    progress.say("a line")
    closed: list[int] = []
    each = [SimpleNamespace(close=partial(closed.append, i)) for i in range(2)]
    helpers.stand_in(metrics_logger.MetricsLogger, progress=progress, trackers=each).close()
    assert closed == [0, 1] and progress.bar.disable
    out, err = capsys.readouterr()
    assert (out, err.count("a line\n")) == ("", 1) and "0/3" in err
