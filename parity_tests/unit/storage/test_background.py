"""Checkpoints are written while training goes on, and hold the state of their step."""

import errno
import logging
import sys
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.errors import CheckpointError
from jax_transformer.storage import checkpoint
from jax_transformer.storage.saving import BackgroundSaver
from parity_tests.unit import helpers, runs


@pytest.fixture
def gate(monkeypatch):
    """An event without which no checkpoint gets its hashes."""
    gate, sha256 = threading.Event(), checkpoint.sha256
    monkeypatch.setattr(checkpoint, "sha256", lambda path: gate.wait(60) and sha256(path))
    yield gate
    gate.set()


@pytest.fixture
def full(monkeypatch):
    """A disk that is full when the manifest is written."""
    monkeypatch.setattr(checkpoint, "sha256", helpers.failing(errno.ENOSPC))


@partial(jax.jit, donate_argnums=0)
def advance(state):
    return jax.tree.map(lambda x: x + 1, state)


def test_steps_that_take_over_the_memory_do_not_change_the_checkpoint(tmp_path, gate):
    state = {"a": jnp.arange(4000.0), "n": jnp.zeros((), jnp.int32)}
    done, of_host = threading.Event(), np.arange(4000.0)
    with BackgroundSaver() as saver:
        saver.save(tmp_path, 3, state | {"h": of_host}, about={}, then=done.set)
        of_host += 1
        for _ in range(3):
            state = advance(state)
        saver.check()  # it has not failed
        assert checkpoint.steps(tmp_path) == [] and not done.is_set()
        gate.set()
        saver.wait()
        assert done.is_set()
    saved = checkpoint.open(tmp_path, 3).arrays()
    assert np.array_equal(saved["a"], np.arange(4000.0)) and saved["n"] == 0
    assert np.array_equal(saved["h"], np.arange(4000.0))
    assert state["n"] == 3


def test_saves_follow_one_another(tmp_path, monkeypatch):
    order: list[int] = []
    hooks = threading.excepthook, sys.unraisablehook
    logs = [logging.getLogger(name) for name in ("absl", "asyncio")]
    monkeypatch.setattr(logs[1], "disabled", True)  # by the user
    with BackgroundSaver() as saver:
        for step in (1, 2, 3):
            after = partial(order.append, step)
            saver.save(tmp_path, step, {"a": jnp.ones(3)}, about={}, then=after)
    assert order == checkpoint.steps(tmp_path) == [1, 2, 3]
    assert (threading.excepthook, sys.unraisablehook) == hooks
    assert [log.disabled for log in logs] == [False, True]


@pytest.mark.parametrize("noticed", ["check", "wait", "save", "end"])
def test_a_failure_is_raised_by_the_next_call(tmp_path, full, noticed):
    saver, after = BackgroundSaver(), []
    save = partial(saver.save, tmp_path, 3, {"a": jnp.ones(3)}, about={}, then=after.clear)
    with pytest.raises(CheckpointError, match=r"3: could not be written .*No space left"), saver:
        save()
        if noticed == "save":
            save()
        elif noticed == "wait":
            saver.wait()
        while noticed == "check":
            saver.check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("error", "steps"), [(ZeroDivisionError, [3]), (KeyboardInterrupt, [])])
def test_another_error_waits_for_the_checkpoint_and_an_interrupt_does_not(
    tmp_path, gate, error, steps
):
    ends = threading.Timer(0.2 if steps else 10, gate.set)  # an interrupt does not wait so long
    ends.start()
    with pytest.raises(error), BackgroundSaver() as saver:
        saver.save(tmp_path, 3, {"a": jnp.ones(3)}, about={}, then=lambda: None)
        raise error
    assert checkpoint.steps(tmp_path) == steps
    ends.cancel()
    gate.set()
    saver.wait()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The first checkpoint is complete only when the metrics of a later step are written."""
    run, sha256, deadline = tmp_path / "run", checkpoint.sha256, time.monotonic() + 60
    first: list[int] = []

    def after_a_later_step(path):
        while not first and time.monotonic() < deadline:
            first.extend(line["step"] for line in runs.metrics(run) if line["step"] > 100)
        return sha256(path)

    monkeypatch.setattr(checkpoint, "sha256", after_a_later_step)
    with runs.as_a_user():
        result = runs.train("--run", run, *runs.write_text(tmp_path), *runs.OPTIONS)
    assert result.code == 0, result.err
    assert first and checkpoint.steps(run / "checkpoints") == [100, 200]
    assert checkpoint.open(run / "checkpoints", 100).arrays({"step"})["step"] == 100
