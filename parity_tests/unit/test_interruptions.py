"""The interruption campaign: damage is detected, chains are reproducible, a small one passes."""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import (
    interruptions,
    interruptions_chains,
    interruptions_damage,
    interruptions_verdict,
)
from benchmarks.interruptions_chains import Chain
from benchmarks.interruptions_runs import ProcessResult, Sandbox
from benchmarks.interruptions_verdict import Outcome
from jax_transformer.storage import checkpoint
from parity_tests.unit.runs import ROOT

RESUMES = "the same command continues from there"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Three small checkpoints."""
    folder = tmp_path_factory.mktemp("place") / "run" / "checkpoints"
    for step in (1, 2, 3):
        checkpoint.save(folder, step, {"a": np.arange(40.0) + step}, about={})
    return folder


@pytest.mark.parametrize(
    "kind", [kind.__name__ for kind in interruptions_damage.Damage(random.Random(0)).kinds()]
)
def test_every_kind_of_damage_is_detected(checkpoints, tmp_path, kind):
    damage = getattr(interruptions_damage.Damage(random.Random(kind)), kind)
    for number in range(3):
        copy = tmp_path / str(number)
        shutil.copytree(checkpoints, copy)
        assert interruptions_damage.refused(damage, copy, step=3 - number).wrong == []


def test_accepted_damage_is_reported(checkpoints, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoints, copy)
    monkeypatch.setattr(checkpoint, "sha256", lambda path: "0")
    wrong = interruptions_damage.refused(
        lambda folder, step: ({step}, "nothing at all"), copy, 3
    ).wrong
    assert any(line.startswith("1 is intact and was refused") for line in wrong)
    monkeypatch.setattr(checkpoint, "verify", lambda folder, step: ({}, {}))
    wrong = interruptions_damage.refused(
        lambda folder, step: ({step}, "nothing at all"), copy, 3
    ).wrong
    assert wrong == [
        "3 is damaged and was accepted",
        "the newest intact checkpoint is 2, not 3",
    ]


def test_the_chains_of_a_seed_have_the_requested_number_of_interruptions():
    first, again, other = (interruptions_chains.lengths(200, seed, "kills") for seed in (0, 0, 1))
    assert first == again != other
    assert sum(first) == 200


def test_a_campaign_goes_on_after_the_chains_of_its_results(tmp_path, monkeypatch):
    started = []

    def outcomes(chain):
        started.append((chain.kind, chain.number))
        return [Outcome(chain.kind, chain.number, "SIGKILL", "steps")] * chain.count

    monkeypatch.setattr(Chain, "outcomes", outcomes)
    counts = {"kills": 20, "terms": 5, "failures": 5}
    options = argparse.Namespace(
        **counts, seed=0, processes=1, jobs=1, only=None, results=tmp_path / "results"
    )
    first = interruptions.interrupt(options, [None], tmp_path, tmp_path, None)
    assert len(first) == 30 and {kind for kind, _ in started[:3]} == counts.keys()
    lines = options.results.read_text().splitlines(keepends=True)
    assert len(lines) == 30
    lost = json.loads(lines[0])
    options.results.write_text("".join(line for line in lines if json.loads(line) != lost))
    started.clear()
    again = interruptions.interrupt(options, [None], tmp_path, tmp_path, None)
    assert started == [(lost["kind"], lost["chain"])] and again == first
    started.clear()
    options.processes = 2
    assert interruptions.interrupt(options, [None], tmp_path, tmp_path, None) == first
    assert len(started) > 3


def stopped(code: int, line: str, phase: str, after: str = "end") -> ProcessResult:
    """The result of a process that got SIGTERM in a phase."""
    words = [(1.0, "imports"), (2.0, "handled"), (3.0, phase), (4.5, after)]
    return ProcessResult(code, "", line, words, [(4.0, signal.SIGTERM)], ended=5.0)


@pytest.mark.parametrize(
    "result, wrong",
    [
        (
            stopped(
                75,
                f"jax-transformer: stopped at step 3, saved in run; {RESUMES}\n",
                "steps",
            ),
            None,
        ),
        (
            stopped(
                75,
                f"jax-transformer: stopped at step 4, saved in run; {RESUMES}\n",
                "steps",
            ),
            "it printed step 4",
        ),
        (
            stopped(
                75,
                "jax-transformer: stopped before the first step; the same command restarts\n",
                "data",
            ),
            None,
        ),
        (
            stopped(
                75,
                "jax-transformer: stopped before the first step; the same command restarts\n",
                "save",
            ),
            "nothing saved",
        ),
        (
            stopped(
                75,
                "Traceback (most recent call last)\njax-transformer: stopped at step 3\n",
                "steps",
            ),
            "a traceback",
        ),
        (stopped(5, "jax-transformer: run: could not be written\n", "save"), "exit code 5"),
        (stopped(-15, "", "steps"), "exit code -15"),
        (stopped(0, "run\n", "average"), None),
        (
            stopped(0, "run\n", "steps", after="save"),
            "exit code 0 after SIGTERM in phase steps: it did not stop",
        ),
    ],
)
def test_a_signal_has_the_right_verdict(checkpoints, result, wrong):
    sandbox = Sandbox(checkpoints.parent.parent, [], Path("nowhere"))
    outcome = interruptions_verdict.judge("terms", 0, sandbox, result, {})
    assert outcome is not None
    assert outcome.phase == result.words[2][1]
    assert [line[: len(wrong or "")] for line in outcome.wrong] == ([wrong] if wrong else [])


@pytest.mark.slow
def test_a_small_campaign_passes(tmp_path):
    counts = "--kills 4 --terms 3 --failures 3 --damages 20".split()
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "interruptions.py"),
        *counts,
        "--work",
        str(tmp_path / "work"),
    ]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "not equal" in process.stdout
