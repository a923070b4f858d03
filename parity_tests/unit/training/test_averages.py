"""The mean of several checkpoints' weights, and the lines of metrics, each weighing its tokens."""

import contextlib
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.errors import NonFiniteLossError
from jax_transformer.formats import registry
from jax_transformer.storage import saving
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import metrics_logger
from jax_transformer.training import run as training_run
from jax_transformer.training.metrics_logger import MetricsLogger
from jax_transformer.training.options import TrainOptions
from jax_transformer.training.resume import mean_weights
from jax_transformer.training.step import TrainState
from parity_tests.unit import helpers

SAVED = {10: 1.0, 20: 2.0**-24, 30: 2.0**-24}
"""A number in the checkpoint of each step. The sum in float32 is 1, and in float64 1 + 2^-23."""


def state(number: int, value: float, *, ema: bool = False) -> TrainState:
    """Return a state whose moving average, if it has one, is ``value`` and whose weight is not."""
    arrays = {"kernel": jnp.asarray([value, -value], jnp.float32)}
    raw = {"kernel": jnp.asarray([7.0, 7.0], jnp.float32)} if ema else arrays
    frozen = {"table": jnp.asarray([5.0], jnp.float32)}
    return TrainState(jnp.asarray(number, jnp.int32), raw, frozen, (), arrays if ema else {})


@pytest.fixture(scope="module", params=[False, True], ids=["weights", "moving average"])
def saved(request, tmp_path_factory) -> tuple[RunFolder, TrainState]:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    for step, value in SAVED.items():
        here = state(step, value, ema=request.param)
        saving.save(folder.checkpoints, step, here, about={})
    return folder, here


def test_the_line_of_an_average_is_synced_before_the_average_is_saved(saved, monkeypatch):
    """A saved average is not validated again, so its line must survive a loss of power."""
    calls: list[str] = []
    devices = SimpleNamespace(place=lambda tree: tree)
    logger = SimpleNamespace(sync=lambda: calls.append("sync"))
    of = dict(options=TrainOptions(average=3), folder=saved[0], devices=devices, logger=logger)
    run = helpers.stand_in(training_run.Run, **of)
    monkeypatch.setattr(training_run.resume, "to_average", lambda *_: list(SAVED))
    monkeypatch.setattr(training_run.Run, "_validate", lambda *_: calls.append("line"))
    monkeypatch.setattr(saving, "save", lambda *_, **__: calls.append("save"))
    run._average(saved[1])
    assert calls == ["line", "sync", "save"]


def test_the_mean_is_that_of_the_validated_weights_in_float64_rounded_once(saved):
    mean = mean_weights(saved[0], list(SAVED), saved[1])
    expected = np.float32(sum(SAVED.values()) / 3)
    assert expected != np.float32(1 / 3), "a sum in float32 would be another"
    assert mean.keys() == {"kernel"} and mean["kernel"].dtype == np.float32
    assert mean["kernel"].tolist() == [expected, -expected]


def test_the_mean_is_over_the_chosen_steps_only(saved):
    assert mean_weights(saved[0], [10], saved[1])["kernel"].tolist() == [1.0, -1.0]
    assert mean_weights(saved[0], [20, 30], saved[1])["kernel"].tolist() == [2.0**-24, -(2.0**-24)]


def test_what_a_checkpoint_has_besides_weights_is_named_with_its_reason(saved):
    folder, state = saved
    notes = {note.name: note.reason for note in registry.open(folder.checkpoints / "10").dropped}
    expected = {"step": "the place in training"}
    if state.ema:
        average = "the moving average of the weights is taken instead"
        expected["params/ (1 arrays)"] = average
    assert notes == expected


def measured(loss: float, tokens: int, norm: float = 1.0, nll_loss: float = 0.0) -> dict:
    values = dict(loss=loss, nll_loss=nll_loss, gradient_norm=norm)
    values = {name: jnp.float32(value) for name, value in values.items()}
    return values | {"tokens": jnp.int32(tokens)}


@pytest.fixture
def logger(tmp_path):
    """A logger of a run that began at step 4, with one step since its last line."""
    before = [{"loss": 8.0, "nll_loss": 4.0, "gradient_norm": 9.0, "tokens": 1}]
    options, folder = TrainOptions(steps=100), RunFolder(tmp_path)
    with contextlib.closing(MetricsLogger(options, folder, lambda n: n / 10, 4, before)) as logger:
        yield logger


def test_a_line_weighs_the_losses_by_tokens_and_holds_steps_before_a_resume(logger, monkeypatch):
    clock = [102.0]
    monkeypatch.setattr(metrics_logger.time, "monotonic", lambda: clock[0])
    logger.since = 100.0
    logger.pending = [measured(2.0, 2, norm=3.0, nll_loss=1.0), measured(1.0, 1, norm=5.0)]
    logger.flush(6)
    logger.pending, clock[0] = [measured(0.5, 3)], 103.5
    logger.flush(7)
    first, second = [json.loads(line) for line in logger.folder.metrics.read_text().splitlines()]
    assert first.pop("tokens_per_second") == 4 / 2 == second["tokens_per_second"]  # 3 in 1.5 s
    assert first == {
        "step": 6,
        "loss": (8.0 * 1 + 2.0 * 2 + 1.0 * 1) / 4,
        "nll_loss": (4.0 * 1 + 1.0 * 2) / 4,
        "gradient_norm": 5.0,
        "learning_rate": 0.5,
    }
    assert (second["step"], second["loss"], second["learning_rate"]) == (7, 0.5, 0.6)


@pytest.mark.parametrize(
    ("name", "loss", "norm", "value"),
    [("loss", float("nan"), 1.0, "nan"), ("gradient norm", 1.0, float("inf"), "inf")],
)
def test_the_step_of_a_number_that_is_not_finite_is_named(logger, name, loss, norm, value):
    logger.pending = [measured(1.0, 2), measured(loss, 2, norm), measured(1.0, 2)]
    with pytest.raises(NonFiniteLossError, match=rf"^the {name} of step 6 is {value}; "):
        logger.flush(7)
    assert not logger.folder.metrics.exists()
