"""The interruption campaign: damage is detected, chains are reproducible, a small one passes."""

import importlib.util
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from campaigns.crashes import recordings
from campaigns.damages import campaign as damages
from campaigns.interruptions import (
    checkpoint_damages,
    child,
    conversion_kills,
    failures,
    processes,
    resumes,
    system_calls,
    verdicts,
)
from campaigns.interruptions.chains import Chain, Reference
from campaigns.interruptions.fork_server import ForkServer
from campaigns.interruptions.processes import ProcessResult, Sandbox
from campaigns.interruptions.reports import Pipe, Task
from jax_transformer.errors import CheckpointError, InputError
from jax_transformer.storage import checkpoint, run_folder, saving
from parity_tests.unit.runs import ROOT

RESUMES = "the same command continues from there"
STOPPED, UNSAVED = "jax-transformer: stopped", "before the first step; the same command restarts"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Three small checkpoints."""
    folder = tmp_path_factory.mktemp("place") / "run" / "checkpoints"
    for step in (1, 2, 3):
        saving.save(folder, step, {"a": np.arange(40.0) + step}, about={})
    return folder


def kinds_of_damage(seed: str) -> dict[str, Callable]:
    kinds = checkpoint_damages.CheckpointDamage(random.Random(seed)).kinds()
    return {kind.__name__: kind for kind in kinds}


@pytest.mark.parametrize("kind", kinds_of_damage(""))
def test_every_kind_of_damage_is_detected(checkpoints, tmp_path, kind):
    damage = kinds_of_damage(kind)[kind]
    for number in range(3):
        copy = tmp_path / str(number)
        shutil.copytree(checkpoints, copy)
        assert checkpoint_damages.refused(damage, copy, step=3 - number).wrong == ()


def test_accepted_damage_is_reported(checkpoints, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoints, copy)
    monkeypatch.setattr(checkpoint, "sha256", lambda path: "0")
    nothing = lambda folder, step: ({step}, "nothing at all")  # noqa: E731
    wrong = checkpoint_damages.refused(nothing, copy, 3).wrong
    assert any(line.startswith("1 is intact and was refused") for line in wrong)
    monkeypatch.setattr(checkpoint, "verify", lambda folder, step: ({}, {}))
    wrong = checkpoint_damages.refused(nothing, copy, 3).wrong
    assert wrong == ("3 is damaged and was accepted", "the newest intact checkpoint is 2, not 3")

    def elsewhere(folder: Path, step: int) -> None:
        raise CheckpointError(f"{tmp_path / 'other' / str(step)}: damaged")

    monkeypatch.setattr(checkpoint, "open", elsewhere)
    every = lambda folder, step: ({1, 2, 3}, "everything")  # noqa: E731
    wrong = checkpoint_damages.refused(every, copy, 3).wrong
    assert [line.partition(":")[0] for line in wrong] == ["the damaged checkpoint is not named"] * 3


def new_chain(kind: str, number: int, seed: int, folder: Path) -> Chain:
    durations = {phase: [1.0] for phase in processes.PHASES}
    reference = Reference("ema", [], {}, durations, {"open": 9, "fsync": 4})
    server = ForkServer.__new__(ForkServer)  # which starts nothing
    return Chain(kind, number, seed, reference, Sandbox(folder, [], folder, 1, server))


def drawn(kind: str, number: int, seed: int, folder: Path) -> list[tuple]:
    """The first signals and calls of a chain in which nothing is saved."""
    chain = new_chain(kind, number, seed, folder)
    return [(chain.count, *chain._draw(Sandbox(folder, [], folder))) for _ in range(5)]


@pytest.mark.parametrize("kind", ["kills", "terms"])
def test_a_chain_is_decided_by_its_seed_and_number(tmp_path, kind):
    first, again = (drawn(kind, 3, 0, tmp_path) for _ in range(2))
    assert first == again
    assert first != drawn(kind, 4, 0, tmp_path)
    assert first != drawn(kind, 3, 1, tmp_path)


@pytest.mark.parametrize(("codes", "starts"), [((-9, -9), 3), ((-9, 0), 3), ((0, 0), 2)])
def test_a_run_is_interrupted_until_it_has_finished_and_started_once_more(
    codes, starts, tmp_path, monkeypatch
):
    started: list[tuple[Any, ...]] = []

    def start(*interruption: Any, **task: Any) -> ProcessResult:
        started.append(interruption)
        return stopped(dict(enumerate(codes, 1)).get(len(started), 0), "", "steps")

    monkeypatch.setattr(verdicts, "judge", lambda *_: verdicts.Outcome("", "steps"))
    chain = new_chain("terms", 0, 0, tmp_path)
    chain._interrupted(SimpleNamespace(start=start, run=tmp_path, processes=1), 2, [])
    assert len(started) == starts and started[-1] == () and all(started[:-1])


def test_the_modules_whose_phases_are_reported_exist():
    for name in child.phases(Pipe(Task(1)), SimpleNamespace(wrap_exchange=None)):
        assert importlib.util.find_spec(name), name


def test_a_refusal_to_read_a_damaged_run_is_a_message():
    def refuse(path: Path) -> list[str]:
        raise InputError(f"{path}: damaged")

    assert damages.messages(refuse, "a.json") == ["a.json: damaged"]


def test_a_place_is_our_innermost_function_and_the_kind_of_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    name = "step-17-0123456789abcdef01"
    place = run_folder.parsed(path, lambda _: system_calls.site_of(sys._getframe(), name))
    assert place == "run_folder.parsed:step-N-HEX"


def test_a_conversion_that_changed_something_is_reported():
    before = {"run/config.json": "1", "a.safetensors": "2"}
    after = {"a.safetensors": "3", "out": "4", ".out.partial": "5"}
    changes = [
        "a.safetensors: changed",
        "out: left behind",
        "run/config.json: changed",
    ]
    assert list(failures.changed(before, after, cleans=True)) == changes
    assert ".out.partial: left behind" in failures.changed(before, after, cleans=False)
    assert list(failures.changed(before, before, cleans=False)) == []


def killed_conversion(folder: Path, **files: str) -> tuple[str, list[str]]:
    """The verdict on what a killed conversion of ``weights`` to ``out`` left, by their contents."""
    conversion = recordings.Conversion("", folder, "out", ())
    reference = conversion_kills.Reference(conversion, 1.0, {}, "the right weights")
    for name, contents in (("before", {"weights": "1", "out": "0"}), ("after", files)):
        (folder / name).mkdir()
        for file, content in contents.items():
            (folder / name / file).write_text(content)
    return conversion_kills.judged(reference, folder / "before", folder / "after")


@pytest.mark.parametrize(
    "files, verdict",
    [
        ({"weights": "1", "out": "0", ".out.7": "2"}, ("as before", [])),
        ({"weights": "1", "out": "the right weights"}, ("complete", [])),
        ({"weights": "1", "out": "a part"}, ("complete", ["out: other weights"])),
        ({"weights": "1"}, ("complete", ["out: other weights"])),
        ({"weights": "2", "out": "0"}, ("as before", ["weights: changed"])),
        ({"weights": "1", "out": "0", "out.7": "2"}, ("as before", ["left behind: out.7"])),
    ],
)
def test_a_killed_conversion_has_the_right_verdict(tmp_path, monkeypatch, files, verdict):
    def weights_of(folder: Path, target: str) -> str:
        return (folder / target).read_text() if (folder / target).exists() else ""

    monkeypatch.setattr(conversion_kills.recordings, "weights_of", weights_of)
    assert killed_conversion(tmp_path, **files) == verdict


def test_a_resume_is_not_stopped_at_a_validation():
    stops = [resumes.stop_after(step) for step in range(1, resumes.STEPS)]
    assert all(stop % resumes.EVAL_EVERY or stop == resumes.STEPS for stop in stops)
    assert all(stop > step for step, stop in enumerate(stops, 1))


def stopped(code: int, line: str, phase: str, after: str = "end") -> ProcessResult:
    """The result of a process that got SIGTERM in a phase."""
    words = [(1.0, "imports"), (2.0, "handled"), (3.0, phase), (4.5, after)]
    return ProcessResult(code, "", line, words, [(4.0, signal.SIGTERM)], ended=5.0)


@pytest.mark.parametrize(
    "result, wrong",
    [
        (stopped(75, f"{STOPPED} at step 3, saved in run; {RESUMES}\n", "steps"), None),
        (
            stopped(75, f"{STOPPED} at step 4, saved in run; {RESUMES}\n", "steps"),
            "it printed step 4",
        ),
        (stopped(75, f"{STOPPED} {UNSAVED}\n", "data"), None),
        (stopped(75, f"{STOPPED} {UNSAVED}\n", "save"), "nothing saved"),
        (
            stopped(75, f"Traceback (most recent call last)\n{STOPPED} at step 3\n", "steps"),
            "a traceback",
        ),
        (stopped(5, "jax-transformer: run: could not be written\n", "save"), "exit code 5"),
        (stopped(-15, "", "steps"), "exit code -15"),
        (stopped(-15, "", "end"), None),
        (stopped(0, "run\n", "average"), None),
        (
            stopped(0, "run\n", "steps", after="save"),
            "exit code 0 after SIGTERM in phase steps: it did not stop",
        ),
    ],
)
def test_a_signal_has_the_right_verdict(checkpoints, result, wrong):
    sandbox = Sandbox(checkpoints.parent.parent, [], Path("nowhere"))
    outcome = verdicts.judge("terms", sandbox, result, {})
    assert outcome is not None
    assert outcome.phase == result.words[2][1]
    assert [line[: len(wrong or "")] for line in outcome.wrong] == ([wrong] if wrong else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["signals", "kills", "conversion-kills", "controls", "checkpoint-damages", "failures"],
)
def test_a_small_campaign_passes(tmp_path, name):
    command = [sys.executable, "-m", "campaigns", name, "--count", "4"]
    command += ["--work", str(tmp_path / "work"), "--keep", str(tmp_path / "kept")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
