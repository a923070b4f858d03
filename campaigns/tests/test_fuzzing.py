"""Fuzzing: the shipped corpus ends as promised, and the watcher reports whatever does not."""

import io
import json
import os
import resource
import sys
import time
import wave
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from campaigns.fuzzing import campaign, harness, mutators, targets
from campaigns.fuzzing.harness import Target, Watcher
from jax_transformer.architectures import preset
from jax_transformer.errors import LONGEST_MESSAGE, InputError
from jax_transformer.extras.toolkits.marian import marian_model
from jax_transformer.extras.toolkits.t5x import zarr
from jax_transformer.storage.pt import unpickler
from parity_tests.unit import helpers


@pytest.fixture(scope="module", autouse=True)
def _as_a_user():
    """Turn off the tests' type checker, which compiles code and is slow."""
    with helpers.unchecked():
        yield


def _json(**values: Any) -> bytes:
    return json.dumps(values).encode()


def _config(**changes: Any) -> bytes:
    config = preset("lesson10", source_vocab_size=11, target_vocab_size=13, d_model=8)
    values = json.loads(config.to_json())
    changes = {
        name: values[name] | value if name == "encoder" else value
        for name, value in changes.items()
    }
    return json.dumps(values | changes).encode()


def _sound(rate: int) -> bytes:
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(bytes(8))
    return content.getvalue()


_DEEP = b"[" * 3000 + b"]" * 3000
_WORDS = {"src": ["<unk>", "<blank>", "<s>", "</s>"], "tgt": ["<unk>", "<blank>", "<s>", "</s>"]}


def _golden(text: str | None = None, **changes: Any) -> bytes:
    description = {"version": 1, "seed": 1, "order": {}, "source": {}, "versions": {}, "sha256": {}}
    header = _json(__metadata__={"golden": text or json.dumps(description | changes)})
    return len(header).to_bytes(8, "little") + header


FAULTS: dict[str, tuple[str, bytes]] = {
    "a number that no float is": ("config.json", _config(dropout=10**400)),
    "a billion layers": ("config.json", _config(encoder={"layers": 10**9})),
    "a billion layers of transformers": (
        "huggingface config",
        _json(model_type="bart", d_model=8, encoder_attention_heads=2, encoder_layers=10**9),
    ),
    "an unknown key of 3,000 characters": ("config.json", _json(**{"a" * 3000: 1})),
    "a length penalty that no float is": (
        "generation_config.json",
        _json(length_penalty=10**400),
    ),
    "a small file for which 100 MB were set aside": ("generation_config.json", b"[]"),
    **{f"brackets in {name}": (name, _DEEP) for name in ("config.json", "train_config.json")},
    "brackets in a manifest": ("manifest", _DEEP),
    "brackets in a golden": ("golden", _golden(_DEEP.decode())),
    "hashes in a list": ("golden", _golden(sha256=[])),
    "a token that begins a translation and is no text": (
        "opennmt-py options",
        _json(opt={}, vocab=_WORDS | {"decoder_start_token": 5}),
    ),
    "an unknown field of 3,000 characters": ("request", _json(**{"a" * 3000: 1})),
    "a sampling rate that is a large prime": ("wav", _sound(191_999)),
    "keys that cannot be printed": ("jsonl", _json(**{"\x1b[2J\n": 1})),
    "many keys": ("jsonl", _json(**{f"key {i}": 1 for i in range(1000)})),
    "a piece that is not UTF-8": (
        "sentencepiece",
        bytes.fromhex("0a0e0a053c756effff150000000018020a090a0265721500007041"),
    ),
    "a word that the vocabulary lacks, as the unknown one": (
        "tokenizer.json",
        _json(model={"vocab": {"<pad>": 0, "<eos>": 1, "": 3}, "unk_token": "a"}),
    ),
    "half of a surrogate pair as a token": (
        "tokenizer_config.json",
        _json(added_tokens_decoder={"0": "\ud800"}),
    ),
}
"""Inputs that fuzzing has found, each with its target and the name of its fault."""


@pytest.fixture
def _type_checker(monkeypatch):
    """Allow the tests' type checker to compile a check for each function within a function."""
    monkeypatch.setattr(harness, "HARMLESS", (*harness.HARMLESS, "compile", "exec"))


@pytest.mark.usefixtures("_type_checker")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_fuzzing_has_found_stay_mended(fault, tmp_path):
    target, content = FAULTS[fault]
    verdict = Watcher(targets.TARGETS[target], tmp_path).traced(content)
    assert (verdict.wrong, verdict.outcome in ("", "read")) == ("", False)


@pytest.mark.usefixtures("_type_checker")
def test_every_input_of_the_corpus_ends_as_promised(tmp_path):
    corpus, wrong = campaign.corpus(), []
    for number, (name, inputs) in enumerate(corpus.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        if inputs:
            watcher = Watcher(targets.TARGETS[name], folder)
            verdicts = map(watcher.judge, inputs)
            wrong += [f"{name}: {verdict.wrong}" for verdict in verdicts if verdict.wrong]
    assert wrong == []
    assert sum(map(len, corpus.values())) > 500


# The watcher


def _watched(read: Any, folder: Path, **changes: Any) -> str:
    target = Target(lambda _: read, lambda: (), **changes)
    return Watcher(target, folder).traced(b"input").wrong


def _refuse(message: str) -> None:
    raise InputError(message)


class _Unprintable(InputError):
    """An error whose text is as it was given."""

    __str__ = Exception.__str__


def _refuse_badly(message: str) -> None:
    raise _Unprintable(message)


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        (lambda content: _refuse("one line"), ""),
        (lambda content: content.index(b"x"), "ValueError"),
        (lambda content: 1 // 0, "ZeroDivisionError"),
        (lambda content: _refuse_badly("two\nlines"), "message not printable"),
        (lambda content: _refuse_badly("a" * (LONGEST_MESSAGE + 1)), "message too long"),
        (lambda content: bytes(5_000_000), "memory"),
        (lambda content: compile("1", "a", "eval"), "event: compile"),
        (lambda content: os.listdir("/") and open("/etc/hosts").close(), "event: open"),
        (lambda content: content == b"input" and __import__("zipapp"), "event: import"),
    ],
)
def test_the_watcher_reports_what_a_reader_may_not_do(read, wrong, tmp_path):
    reported = _watched(read, tmp_path)
    assert reported.startswith(wrong) and bool(reported) == bool(wrong)


def test_a_folder_whose_name_begins_alike_is_not_the_reader_s(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "ab").touch()
    assert _watched(lambda content: (tmp_path / "ab").open().close(), tmp_path / "a")


def test_the_watcher_reports_a_slow_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "SECONDS", 0.01)

    def slow(content: bytes) -> None:
        until = time.process_time() + 0.02
        while time.process_time() < until:
            pass

    assert _watched(slow, tmp_path).startswith("time: ")


def test_memory_is_traced_when_the_process_grows(tmp_path, monkeypatch):
    arrays = []
    read = lambda content: arrays.append(bytearray(len(content) * 10**6))  # noqa: E731
    target = Target(lambda _: read, lambda: ())
    watcher = Watcher(target, tmp_path)
    most = [10**9]
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=most[0]))
    assert watcher.judge(b"").wrong == ""
    most[0] += 10**6
    assert watcher.judge(b"a" * 30).wrong.startswith("memory: 30,0")


def _as_utf8(machine: Any, raw: bytes) -> str:
    return raw.decode("utf-8")


@pytest.mark.parametrize(
    ("target", "module", "name", "careless", "wrong"),
    [
        ("pickle", unpickler.Unpickler, "_text", _as_utf8, "UnicodeDecodeError"),
        ("zarr", zarr, "_lengths", lambda path, data, name: tuple(data[name]), "Error"),
        (
            "marian vocabulary",
            marian_model,
            "_id",
            lambda path, token, value: int(value),
            "ValueError",
        ),
    ],
)
def test_a_careless_reader_is_reported(
    target, module, name, careless, wrong, tmp_path, monkeypatch
):
    """Control: changed seeds are enough, without a look at coverage."""
    chosen = targets.TARGETS[target]

    watcher, seeds = Watcher(chosen, tmp_path), tuple(chosen.seeds())

    def findings() -> set[str]:
        draw = Random(1)
        flat = lambda content: mutators.blind(draw, content, seeds)  # noqa: E731
        inputs = [chosen.mutate(draw, draw.choice(seeds), flat) for _ in range(300)]
        return {watcher.untraced(content).wrong for content in inputs} - {""}

    assert findings() == set()
    monkeypatch.setattr(module, name, careless)
    assert any(wrong in finding.partition(":")[0] for finding in findings())


# The parts


def test_a_finding_is_reduced_to_the_bytes_that_show_it():
    small = harness.reduced(b"aaaaxbbbbbbbbycc", lambda part: b"x" in part and b"y" in part)
    assert small == b"xy"


def test_findings_of_one_place_are_one():
    wrong = [
        "KeyError: pt.py:7 read: 'a'",
        "KeyError: pt.py:7 read: 'b'",
        "KeyError: pt.py:8 a: 'b'",
    ]
    assert len({harness.kind_of(each) for each in wrong}) == 2
    assert harness.kind_of("memory: 5 bytes for an input of 1") == "memory"


@pytest.mark.parametrize("name", ["pt", "safetensors", "sentencepiece", "manifest", "golden"])
def test_changed_inputs_pass_the_checks_of_lengths_and_checksums(name, tmp_path):
    """Half of them are read, or refused for something that comes after those checks."""
    target = targets.TARGETS[name]
    draw, watcher, messages = Random(2), Watcher(target, tmp_path), []
    seeds = tuple(target.seeds())
    for _ in range(60):
        content = target.mutate(draw, draw.choice(seeds), lambda part: part[:-1] + b"?")
        try:
            watcher.read(content)
            messages.append("read")
        except target.refusals as error:
            messages.append(str(error))
    stopped = ("CRC-32", "its header declares", "not a SentencePiece model", "its SHA-256 is not")
    assert sum(not any(each in message for each in stopped) for message in messages) > 30


def test_a_process_that_dies_is_a_finding_with_its_last_input(tmp_path):
    (tmp_path / "current").write_bytes((3).to_bytes(8, "little") + b"abcd")
    (tmp_path / "log").write_text("INFO: begins\nSegmentation fault\n")
    case = campaign._died("pt", tmp_path, -11)
    assert case.wrong and "exit code -11" in case.what and "Segmentation fault" in case.what
    assert case.facts == {"input": b"abc".hex()}


def test_a_block_is_counted_by_its_outcomes(tmp_path, monkeypatch):
    """A block without Atheris: its process writes the results that the real one would."""
    result = {
        **{"inputs": 30, "seconds": 2.0, "checksum": 1, "slowest": 0.1, "largest": 5},
        "outcomes": {"read": 20, "exit code 3": 10},
        "findings": [{"wrong": "KeyError: pt.py:7 read: 'a'", "input": "00"}],
    }

    def run(command: list[str], **_: Any) -> Any:
        scratch = Path(command[command.index("--scratch") + 1])
        (scratch / "result.json").write_text(json.dumps(result))
        (scratch / "log").write_text("#1 NEW cov: 3 ft: 4\n#9 NEW cov: 7 ft: 9\n")
        return type("Process", (), {"returncode": 0})

    monkeypatch.setattr(campaign.subprocess, "run", run)
    first, second, finding = campaign.cases(tmp_path, tmp_path, 1, 0)
    assert (first.group, first.outcome, first.count, second.count) == ("pickle", "read", 20, 10)
    assert first.facts["coverage"] == 7 and second.facts == {}
    assert finding.wrong == ("KeyError: pt.py:7 read: 'a'",) and finding.facts["input"] == "00"


def test_blocks_grow_from_round_to_round():
    sizes = [campaign.block(turn * len(campaign.rounds())) for turn in range(7)]
    first = targets.TARGETS["pickle"].inputs
    assert sizes == [("pickle", first * times) for times in (1, 2, 4, 8, 16, 16, 16)]


def test_every_target_has_its_blocks_in_a_round():
    assert set(campaign.rounds()) == set(targets.TARGETS) and len(targets.TARGETS) > 30
    assert "atheris" not in sys.modules  # only a block needs it
