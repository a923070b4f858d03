"""One process in a run folder, and the effects of signals on it."""

import contextlib
import errno
import json
import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import jax
import pytest

from jax_transformer import cli
from jax_transformer.cli import translate
from jax_transformer.errors import LockedError, Preempted
from jax_transformer.runtime import process
from jax_transformer.storage import run_folder
from jax_transformer.training import devices, recipe
from jax_transformer.training.options import TrainOptions
from parity_tests.unit import helpers, runs


def test_a_second_holder_is_refused_and_the_first_is_named(tmp_path):
    with run_folder.lock(tmp_path / "run"):
        with pytest.raises(LockedError) as refused, run_folder.lock(tmp_path / "run"):
            pass
        holder = json.loads((tmp_path / "run/.holder.json").read_text())
        assert holder.keys() == {"process", "host", "since"} and holder["process"] == os.getpid()
        since = datetime.fromisoformat(holder["since"])
        assert abs((datetime.now(UTC) - since).total_seconds()) < 60
        for word in (f"process {os.getpid()} on {holder['host']}", tmp_path / "run", "another"):
            assert str(word) in str(refused.value)
    assert not (tmp_path / "run/.holder.json").exists()
    with run_folder.lock(tmp_path / "run"):
        pass


LOCK = """
import sys, time
from pathlib import Path
from jax_transformer.runtime import process
from jax_transformer.storage import run_folder
with run_folder.lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_dead_holder_s_lock_is_taken_over(tmp_path):
    process = runs.start(program=("-c", LOCK, str(tmp_path)))
    assert process.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match=f"process {process.pid} "), run_folder.lock(tmp_path):
        pass
    process.kill()
    process.communicate()
    with run_folder.lock(tmp_path):
        pass


def test_a_lock_file_without_a_holder_belongs_to_another_process(tmp_path):
    refused = pytest.raises(LockedError, match="in use by another process")
    with run_folder.lock(tmp_path):
        (tmp_path / ".holder.json").write_text('{"proc')
        with refused, run_folder.lock(tmp_path):
            pass


def test_the_lock_is_released_after_an_error_or_if_the_holder_s_name_stays(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError), run_folder.lock(tmp_path):
        raise RuntimeError
    with run_folder.lock(tmp_path):
        monkeypatch.setattr(os, "unlink", helpers.failing(errno.EIO))
    with run_folder.lock(tmp_path):
        pass


def test_a_full_disk_is_named_by_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", helpers.failing(errno.ENOSPC))
    with pytest.raises(OSError, match="holder"), run_folder.lock(tmp_path):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_requests_a_stop_and_the_second_has_its_default_effect(
    number, monkeypatch
):
    seen = []
    before = signal.signal(number, lambda *_: seen.append("before us"))
    try:
        with process.stop_requests() as stop:
            assert not stop.asked
            signal.raise_signal(number)
            assert stop.asked and seen == []
            signal.raise_signal(number)
            assert seen == ["before us"]
        signal.raise_signal(number)
        assert seen == ["before us"] * 2
    finally:
        signal.signal(number, before)


def test_a_stop_request_ends_work_that_has_nothing_to_save():
    with process.stop_requests() as stop:
        with pytest.raises(Preempted, match="nothing yet"), stop.at_once("nothing yet"):
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("reached")
        assert stop.asked
        with pytest.raises(Preempted, match="later"), stop.at_once("later"):
            raise AssertionError("reached: it had been asked before")


class SignalledIfDeleted:
    """JAX runs Python in the garbage collector's callbacks, which only print exceptions."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        signal.raise_signal(self.number)


def test_a_stop_request_swallowed_by_a_finalizer_still_ends_the_work(capsys):
    went_on, refused = False, pytest.raises(Preempted, match="nothing yet")
    with process.stop_requests() as stop, refused, stop.at_once("nothing yet"):
        SignalledIfDeleted(signal.SIGTERM)
        went_on = True
    assert went_on and capsys.readouterr().err == ""


class SignalledIfCompared:
    """A static argument during whose first comparison a signal comes."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __hash__(self):
        return 0

    def __eq__(self, other):
        if self.numbers:
            signal.raise_signal(self.numbers.pop())
        return self.numbers is other.numbers


def compare_static_arguments(number):
    function, numbers = jax.jit(lambda x, _: x, static_argnums=1), [number]
    for _ in range(2):
        function(1.0, SignalledIfCompared(numbers))


def test_a_stop_request_that_jaxlib_turns_into_another_error_still_ends_the_work():
    ends = pytest.raises((Preempted, ValueError))
    with process.stop_requests() as stop, ends as ended, stop.at_once("nothing yet"):
        compare_static_arguments(signal.SIGTERM)
        raise AssertionError("reached")
    assert str(ended.value) == "nothing yet" and isinstance(ended.value, Preempted)


def test_a_request_is_put_off_while_processes_take_their_devices_together(monkeypatch):
    done = []

    def take(*_):
        signal.raise_signal(signal.SIGTERM)
        done.append("taken")

    monkeypatch.setattr(recipe.distributed, "count", lambda: 2)
    monkeypatch.setattr(recipe.distributed, "barrier", done.append)
    monkeypatch.setattr(process, "use_program_cache", lambda _: None)
    monkeypatch.setattr(devices.Devices, "take", take)
    refused = pytest.raises(Preempted, match="nothing yet")
    with refused, process.stop_requests() as stop, stop.at_once("nothing yet"):
        recipe._devices(TrainOptions(), stop)
        done.append("used")
    with stop.put_off():  # outside of at_once, a request ends nothing
        done.append("later")
    assert done == ["devices", "taken", "later"]


def test_a_ctrl_c_that_jaxlib_turns_into_another_error_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_run", lambda _: compare_static_arguments(signal.SIGINT))
    code = None
    with contextlib.suppress(ValueError):
        code = cli.main([])
    assert code == 130 and capsys.readouterr().err == "jax-transformer: stopped at once\n"


def test_a_ctrl_c_that_jaxlib_turns_into_another_error_ends_a_translation():
    with pytest.raises(KeyboardInterrupt), translate.interruptible():
        compare_static_arguments(signal.SIGTERM)
    with pytest.raises(ValueError, match="no signal"), translate.interruptible():
        raise ValueError("no signal")


def test_a_second_ctrl_c_swallowed_by_a_finalizer_still_interrupts(capsys):
    went_on = False
    with pytest.raises(KeyboardInterrupt), process.stop_requests() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        SignalledIfDeleted(signal.SIGINT)
        went_on = True
        time.sleep(10)
    assert went_on and capsys.readouterr().err == ""
