"""Damage to any file of a run is noticed by the commands that use it, and named."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jax_transformer.config import codec
from jax_transformer.errors import CheckpointError, InputError
from jax_transformer.extras.deploy.ctranslate2 import engine
from jax_transformer.storage import checkpoint, huggingface_folder, run_files, run_folder, saving
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import init_source, resume
from jax_transformer.training.options import ModelOptions, read_options

SMALL = {"config.json": "{}", "train_config.json": '{"steps": 2}', "tokenizer.json": "{}"}
SMALL |= {"data.json": '{"widths": [4]}'}
LINES = '{"step": 1}\n{"step": 2}\n'


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with two checkpoints; a third line came after the second."""
    return new_run(tmp_path / "run")


def new_run(run: Path, **others: str) -> Path:
    run.mkdir()
    for name, text in (SMALL | others).items():
        (run / name).write_text(text)
    run_files.record(run)
    for step in (1, 2):
        (run / "metrics.jsonl").write_text("".join(LINES.splitlines(keepends=True)[:step]))
        about = run_files.about(run / "checkpoints" / str(step))
        saving.save(run / "checkpoints", step, {"params": {"a": np.ones(3)}}, about=about)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3}\n')
    return run


def refusal(run: Path) -> InputError | CheckpointError:
    """The error that names everything, in one line."""
    with pytest.raises((InputError, CheckpointError)) as refused:
        run_folder.verify_all(run)
    assert "\n" not in str(refused.value)
    return refused.value


def test_an_intact_run_is_accepted_by_sha256sum_too(run):
    run_folder.verify_all(run)
    assert run_files.read_sums(run).keys() == SMALL.keys()
    if shutil.which("sha256sum"):
        command = ["sha256sum", "--check", "--strict", run_files.SHA256SUMS]
        subprocess.run(command, cwd=run, check=True)


@pytest.mark.parametrize("name", [*SMALL, run_files.SHA256SUMS])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "another run's"])
def test_damage_is_named(run, tmp_path, name, damage):
    path = run / name
    if damage == "flipped":
        path.write_bytes(path.read_bytes().replace(b"{" if name in SMALL else b"c", b"z", 1))
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "missing":
        path.unlink()
    else:
        other = new_run(tmp_path / "other", **dict.fromkeys(SMALL, "[]"))
        path.write_bytes((other / name).read_bytes())
    with pytest.raises(InputError) as refused:
        run_folder.verify(run)
    assert name in str(refused.value) and "put it back" in str(refused.value)


def test_two_files_that_were_exchanged_are_named(run):
    contents = [(run / name).read_bytes() for name in ("config.json", "data.json")]
    for name, content in zip(("data.json", "config.json"), contents, strict=True):
        (run / name).write_bytes(content)
    message = str(refusal(run))
    assert "config.json: damaged" in message and "data.json: damaged" in message


@pytest.mark.parametrize("lines", range(4))
def test_sums_that_lost_their_last_lines_are_noticed(run, lines):
    path = run / run_files.SHA256SUMS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(InputError, match=run_files.SHA256SUMS):
        run_folder.verify(run)


@pytest.mark.parametrize(
    "line",
    [
        *("", "\n", "0" * 64, "\0" * 80, f"{'0' * 64}  ../x\n", f"{'0' * 64}  /etc/hostname\n"),
        *(f"{'A' * 64}  config.json\n", f"{'0' * 64}  a/../../x\n"),
    ],
)
def test_a_damaged_line_of_the_sums_is_named(run, line):
    path = run / run_files.SHA256SUMS
    path.write_text(path.read_text()[: None if line else -1] + line)
    for verify in (run_folder.verify, run_folder.verify_all):
        with pytest.raises(InputError, match=r"SHA256SUMS: line \d is damaged") as refused:
            verify(run)
    assert len(refused.value.details) == 1, "not damage of the checkpoints"


@pytest.mark.parametrize("name", ["tokenizer.source.json", "huggingface/generation_config.json"])
def test_an_added_file_that_would_be_read_is_named(run, name):
    (run / "huggingface").mkdir()
    (run / "notes.txt").write_text("")
    (run / "huggingface/README.md").write_text("")
    run_folder.verify_all(run)
    (run / name).write_text("{}")
    assert f"{name}: is not in {run_files.SHA256SUMS}" in str(refusal(run))


def test_damage_is_named_in_the_order_of_names(run, monkeypatch):
    for name in "fbdace":
        (run / "checkpoints/1" / name).touch()
    named = checkpoint.problems(run / "checkpoints", 1)
    assert [Path(text.partition(":")[0]).name for text in named] == [*"abcdef"]
    assert "more" not in str(refusal(run)) and len(refusal(run).details) == 6
    (run / "checkpoints/1/g").touch()
    assert str(refusal(run)).endswith("and 1 more, which --json lists")
    shutil.rmtree(run / "checkpoints/1")
    problems = iter([["a file that is being replaced"], []])
    monkeypatch.setattr(run_folder, "problems", lambda _: iter(next(problems)))
    run_folder.verify_all(run)


def test_damage_of_averaged_weights_is_named(run):
    about = run_files.about(run / "averaged" / "2")
    saving.save(run / "averaged", 2, {"params": {"a": np.ones(3)}}, about=about)
    run_folder.verify_all(run)
    (run / "averaged/2/manifest.json").write_text("{}")
    error = refusal(run)
    assert isinstance(error, CheckpointError) and "averaged/2/manifest.json: not a" in str(error)


def test_a_run_without_sums_whose_checkpoints_record_nothing_is_not_checked(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    saving.save(run / "checkpoints", 1, {"a": np.ones(1)}, about={})
    (run / "config.json").write_text("{}")
    run_folder.verify_all(run)
    run_files.record(run)  # at its next start
    (run / "config.json").write_text("{ }")
    assert "config.json" in str(refusal(run))


@pytest.mark.parametrize("killed_at", range(1, 5))
def test_replacing_a_file_may_be_killed_at_any_moment(run, monkeypatch, killed_at):
    calls = []

    def dying(path: Path, content: bytes) -> None:
        calls.append(path)
        if len(calls) == killed_at:
            raise KeyboardInterrupt
        Path(path).write_bytes(content)

    monkeypatch.setattr("jax_transformer.storage.atomic.write_bytes", dying)
    with pytest.raises(KeyboardInterrupt) if killed_at <= 3 else contextlib.nullcontext():
        run_files.replace(run, "train_config.json", '{"steps": 4}')
    run_folder.verify(run)
    monkeypatch.undo()
    run_files.replace(run, "train_config.json", '{"steps": 4}')
    run_files.record(run)
    run_folder.verify_all(run)
    assert len(run_files.read_sums(run)["train_config.json"]) == 1


def test_files_next_to_the_weights_are_on_the_disk_when_they_are_listed(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", recorded)
    folder = tmp_path / "huggingface"
    huggingface_folder.write_files(folder, {"config.json": b"{}", "spiece.model": b"0"})
    written = [tmp_path, folder, folder / "config.json", folder / "spiece.model"]
    assert {path.stat().st_ino for path in written} <= synced
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "spiece.model"]


@pytest.mark.parametrize("name", ["none", "folder"])
def test_a_file_next_to_the_weights_that_cannot_be_read_is_named(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=f"{name}: cannot be read: (No such|Is a dir)"):
        huggingface_folder.contents({"config.json": tmp_path / name})


def test_recording_again_does_not_accept_damage(run):
    (run / "config.json").write_text("{ }")
    run_files.record(run)
    assert "config.json: damaged" in str(refusal(run))


@pytest.mark.parametrize("change", ["first", "second", "cut", "missing"])
def test_damaged_metrics_are_named(run, change):
    path = run / "metrics.jsonl"
    run_folder.verify_metrics(run)
    text = path.read_text()
    if change == "missing":
        path.unlink()
    else:
        changed = {"first": text.replace("1", "7"), "second": text.replace("2", "7")}
        path.write_text(changed.get(change, LINES[:-1]))
    for verify in (run_folder.verify_metrics, run_folder.verify_all):
        with pytest.raises(InputError, match=r"metrics\.jsonl: (damaged|missing).*--init"):
            verify(run)


def test_metrics_after_the_last_checkpoint_are_not_covered_and_dropped(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "valid_loss": 0}\nnot JSON')
    run_folder.verify_all(run)
    RunFolder(run).keep_metrics(2, validated=True, averaged=False)
    assert (run / "metrics.jsonl").read_text() == LINES


def test_a_checkpoint_of_another_run_is_refused(run, tmp_path):
    other = new_run(tmp_path / "other", **{"data.json": "[]"})
    shutil.rmtree(run / "checkpoints/2")
    shutil.copytree(other / "checkpoints/2", run / "checkpoints/2")
    with pytest.raises(CheckpointError, match=r"checkpoints/2/manifest\.json: is of another run"):
        checkpoint.open(run / "checkpoints", 2)
    opened, damaged = run_folder.newest_intact(run / "checkpoints")
    assert opened.step == 1 and len(damaged) == 1
    shutil.copytree(run / "checkpoints/2", tmp_path / "elsewhere/2")
    assert checkpoint.open(tmp_path / "elsewhere", 2).step == 2


def test_a_checkpoint_in_the_place_of_an_average_is_refused(run):
    shutil.copytree(run / "checkpoints/2", run / "averaged/2")
    with pytest.raises(CheckpointError, match=r"averaged/2/manifest\.json: is of another run"):
        checkpoint.open(run / "averaged", 2)


def test_everything_that_is_damaged_is_named_at_once(run):
    (run / "config.json").write_text("{ }")
    (run / "data.json").unlink()
    (run / "metrics.jsonl").write_text("")
    (run / "checkpoints/1/manifest.json").unlink()
    error = refusal(run)
    assert isinstance(error, CheckpointError)
    names = ("data.json", "config.json", "metrics.jsonl", "checkpoints/1/manifest.json")
    for name, detail in zip(names, error.details, strict=True):
        assert str(run / name) in detail and detail in str(error)


def test_many_damaged_files_are_all_in_the_details(run):
    arrays = [path for path in (run / "checkpoints/2").rglob("*") if path.is_file()]
    arrays = [path for path in arrays if path.name != "manifest.json"]
    for path in arrays:
        path.write_bytes(path.read_bytes() + b"0")
    error = refusal(run)
    assert isinstance(error, CheckpointError) and len(arrays) > 6
    assert len(error.details) == len(arrays)
    assert str(error).endswith(f"and {len(arrays) - 6} more, which --json lists")


def test_a_checkpoint_that_is_removed_meanwhile_is_not_damaged(run, monkeypatch):
    read_manifest = checkpoint.read_manifest

    def removing(folder, step):
        if step == 1:
            shutil.rmtree(folder / "1", ignore_errors=True)
        return read_manifest(folder, step)

    monkeypatch.setattr(checkpoint, "read_manifest", removing)
    run_folder.verify_all(run)


def test_a_checkpoint_may_be_saved_by_a_relative_path(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    about = run_files.about_run(Path("7"))
    saving.save(Path(), 7, {"a": np.ones(1)}, about=about)
    assert checkpoint.read_manifest(Path(), 7)["folder"] == "checkpoints"


def test_the_tokenizer_of_a_converted_run_may_be_added_to_its_huggingface_folder(tmp_path):
    (tmp_path / "huggingface").mkdir()
    for name in ("config.json", "huggingface/config.json"):
        (tmp_path / name).write_text("{}")
    run_files.record(tmp_path)
    about = {"run": None, "folder": "checkpoints"}
    assert run_files.about_run(tmp_path / "checkpoints" / "3") == about
    assert run_files.about_run(tmp_path / "others" / "3") == {}
    (tmp_path / "huggingface/tokenizer.json").write_text("{}")
    run_folder.verify(tmp_path)
    path = tmp_path / run_files.SHA256SUMS
    content = path.read_text()
    path.write_text(content.splitlines(keepends=True)[0])
    with pytest.raises(InputError, match=rf"{tmp_path}/config\.json: is not in SHA256SUMS"):
        run_folder.verify(tmp_path)
    path.write_text(content)
    (tmp_path / "huggingface/generation_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"generation_config\.json: is not in SHA256SUMS"):
        run_folder.verify(tmp_path)


def test_a_damaged_model_of_ctranslate2_is_noticed(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"12345")
    run_files.write_sums(tmp_path, {"model.bin": [run_files.sha256(tmp_path / "model.bin")]})
    assert list(engine._damage(tmp_path)) == []
    (tmp_path / "model.bin").write_bytes(b"12346")
    assert "model.bin: damaged" in next(engine._damage(tmp_path))
    (tmp_path / run_files.SHA256SUMS).unlink()
    assert "does not list model.bin" in next(engine._damage(tmp_path))


def times(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


def test_commands_refuse_a_run_with_a_damaged_file(trained, console, tmp_path):
    run = shutil.copytree(trained.path, tmp_path / "run")
    commands = {
        "train": ["train", "--run", run, *trained.arguments],
        "translate": ["translate", "--run", run],
        "inspect": ["inspect", run],
        "convert": ["convert", run, tmp_path / "out.safetensors"],
        "config": ["train", "--run", tmp_path / "new", "--config", run / "train_config.json"],
    }
    for name in "config.json train_config.json data.json tokenizer.json metrics.jsonl".split():
        content = (run / name).read_bytes()
        (run / name).write_bytes(content.replace(b"1", b"2", 1))
        before = times(run)
        readers = ("train", "inspect") if name == "metrics.jsonl" else commands
        for command in readers:
            console.refused(3, [run / name, "damaged"], *commands[command])
        if name != "metrics.jsonl":
            with pytest.raises(InputError, match=f"{name}: damaged"):  # what `estimate` reads
                init_source.read_config(str(run), ModelOptions())
        (run / name).write_bytes(content)
        changed = {path.name for path, _ in before.items() ^ times(run).items()}
        assert changed <= {".lock", name}
    assert console.say("inspect", run)[0] == 0 and not (tmp_path / "new").exists()


def test_an_edit_that_sums_list_is_accepted(trained, console, tmp_path):
    run = shutil.copytree(trained.path, tmp_path / "run")
    (run / "config.json").write_text((run / "config.json").read_text() + " ")
    console.refused(3, ["sha256sum"], "inspect", run)
    sums = run_files.read_sums(run) | {"config.json": [run_files.sha256(run / "config.json")]}
    run_files.write_sums(run, sums)
    assert console.say("inspect", run)[0] == 0


def test_a_damaged_run_is_not_continued_by_number(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = Path("runs/text-001")
    shutil.copytree(trained.path, run)
    options = dataclasses.replace(read_options(RunFolder(run)), run=None, steps=300)
    run_files.replace(run, "train_config.json", codec.to_json(options))
    with resume.open_run(options) as folder:
        assert folder.path == run
    (run / "tokenizer.json").write_text("{}")
    with resume.open_run(options) as folder:
        assert folder.path == Path("runs/text-002")
    err = capsys.readouterr().err
    assert err.startswith("warning: runs/text-001/tokenizer.json: damaged")
    assert "this run is not continued" in err
