"""``convert`` onto existing files and folders: --force, and the state after a refusal or a kill."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from jax_transformer.convert import conversion
from jax_transformer.convert.models import ModelDescription
from jax_transformer.errors import DifferentError
from jax_transformer.storage import atomic, checkpoint, pt
from parity_tests.unit import runs
from parity_tests.unit.conversions import convert

MANIFEST = "checkpoints/0/manifest.json"


def test_force_replaces_only_the_same_kind(console, weights, config_file, tmp_path):
    file, folder = tmp_path / "file.pt", tmp_path / "folder"
    file.write_text("old")
    console.refused(3, [file, "--force"], "convert", weights, file)
    assert console.say("convert", weights, file, "--force")[0] == 0 and list(pt.read(file))
    to_folder = ["convert", weights, folder, "--config", config_file, "--no-check"]
    assert console.say(*to_folder)[0] == 0
    console.refused(3, [folder, "--force"], *to_folder)
    before = (folder / "checkpoints/0/manifest.json").read_bytes()
    (folder / "ctranslate2").mkdir()  # what an engine has made of the weights
    assert console.say(*to_folder, "--force", "--dtype", "float16")[0] == 0
    assert (folder / "checkpoints/0/manifest.json").read_bytes() != before
    (folder / "metrics.jsonl").write_text("")
    console.refused(3, ["metrics.jsonl"], *to_folder, "--force")
    console.refused(3, [file], "convert", weights, file / "x.pt")
    (tmp_path / "12.pt").mkdir()  # it is empty
    other = ["12.pt: is a folder, and --force replaces only a", "file"]
    console.refused(3, other, "convert", weights, tmp_path / "12.pt", "--force")
    (tmp_path / "12.pt").rmdir()
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "mine").write_text("")
    command = ["convert", weights, tmp_path / "12", "--config", config_file, "--force"]
    console.refused(3, ["12", "not a checkpoint"], *command)
    command[2] = tmp_path / "none" / "12"
    console.refused(3, [f"{tmp_path / 'none'}: no such folder"], *command)
    to_link = [*to_folder[:2], tmp_path / "link", *to_folder[3:], "--force"]
    for target in (folder, tmp_path / "missing"):
        os.symlink(target, tmp_path / "link")
        console.refused(3, ["is a link, which no folder replaces"], *to_link)
        (tmp_path / "link").unlink()
    os.symlink(file, tmp_path / "same.pt")
    for same in (file, tmp_path / "same.pt", tmp_path / "12/../file.pt"):
        console.refused(2, [f"{same}: is the source as well"], "convert", file, same, "--force")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["12", "file.pt", "folder", "same.pt"]


KILLED = """
import os, signal, sys
from jax_transformer import cli
if "--config" in sys.argv:  # a folder is written
    from orbax.checkpoint import v1
    from jax_transformer import transformer

def counted(event, arguments):
    global calls
    flags = os.O_WRONLY | os.O_RDWR
    written = event == "open" and isinstance(arguments[0], str) and bool(arguments[2] & flags)
    exchanging = event == "ctypes.dlsym" and arguments[1] == "renameat2"
    if exchanging or ((written or event in WATCHED) and FOLDER in str(arguments[0])):
        calls += 1
        if exchanging:
            print("exchange", calls, file=told, flush=True)
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

WATCHED, FOLDER, calls = ("os.rename", "os.mkdir", "os.remove", "os.rmdir"), sys.argv[1], 0
told = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:  # a kill at a call, each in a copy of this process
    number, child = int(line), os.fork()
    if not child:
        sys.addaudithook(counted)
        code = cli.main(sys.argv[2:])
        print("calls", calls, file=told, flush=True)
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("code", code, file=told, flush=True)
"""


class Forks:
    """Run ``convert`` repeatedly in forks that are killed at a chosen call."""

    def __init__(self, *command: str | Path):
        arguments = map(str, (Path(command[2]).parent, *command))
        self.process = runs.start(program=("-W", "ignore:os.fork", "-c", KILLED, *arguments))

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *_) -> None:
        self.process.communicate(timeout=100)

    def kill_at(self, number: int) -> dict[str, int]:
        """Return the exit ``code``, the ``exchange``'s number and the number of ``calls``."""
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        report = {}
        while "code" not in report:
            word, value = self.process.stdout.readline().split()
            report[word] = int(value)
        return report


def test_killed_at_any_call_it_leaves_the_old_file_or_the_new_one(weights, tmp_path):
    target = tmp_path / "model.pt"
    command = ["convert", weights, target, "--force"]
    assert runs.main(*command) == 0
    new, old = target.read_bytes(), b"old"
    seen = set()
    with Forks(*command) as forks:
        for number in range(1, 20):
            target.write_bytes(old)
            done = forks.kill_at(number)
            if done["code"] == 0:
                break
            assert done["code"] == -signal.SIGKILL
            seen.add(target.read_bytes())
            assert seen <= {old, new}
            for path in tmp_path.glob(".*"):
                path.unlink()
    assert done["code"] == 0 and done["calls"] == number - 1 >= 3 and seen == {old, new}
    assert target.read_bytes() == new


def test_killed_at_any_call_it_leaves_the_old_folder_or_the_new_one(weights, config_file, tmp_path):
    """While writing, around the exchange of names, and while removing the old one."""
    target, copy = tmp_path / "here" / "folder", tmp_path / "kept"
    target.parent.mkdir()
    convert(weights, target, description=ModelDescription(str(config_file)))
    shutil.copytree(target, copy)
    old = (copy / MANIFEST).read_bytes()
    command = ["convert", weights, target, "--config", config_file]
    with Forks(*command, *"--dtype float16 --no-check --force".split()) as forks:
        complete = forks.kill_at(0)
        written = checkpoint.open(target / "checkpoints", 0).tensors["params/output.kernel"]
        assert complete["code"] == 0 and written.dtype == "float16"
        at = complete["exchange"]
        assert 5 < at < complete["calls"]
        for number in (at, at + 1, complete["calls"]):
            shutil.rmtree(target)
            shutil.copytree(copy, target)
            assert forks.kill_at(number)["code"] == -signal.SIGKILL
            checkpoint.open(target / "checkpoints", 0)
            assert (target / "config.json").read_bytes() == (copy / "config.json").read_bytes()
            assert ((target / MANIFEST).read_bytes() == old) == (number <= at), number
            assert list(target.parent.glob("[!.]*")) == [target]


@pytest.mark.parametrize("kind", ["run", "12"])
def test_files_of_a_killed_process_of_the_same_number_do_not_stop_it(
    weights, config_file, tmp_path, kind
):
    for left in (f".{kind}.{os.getpid()}", f".{kind}.{os.getpid()}.run"):
        (tmp_path / left / "checkpoints").mkdir(parents=True)
    convert(weights, tmp_path / kind, description=ModelDescription(str(config_file)))
    assert (tmp_path / kind).is_dir() and not (tmp_path / f".{kind}.{os.getpid()}").exists()


def test_a_folder_is_replaced_in_one_call(weights, config_file, tmp_path, monkeypatch):
    """Before and after the call the folder of that name is complete."""
    folder, seen, exchange_names = tmp_path / "folder", [], atomic._exchange
    description = ModelDescription(str(config_file))
    convert(weights, folder, description=description)

    def look(path: Path) -> None:
        seen.append({str(array.dtype) for array in runs.arrays(path, 0).values()})

    def watched(one: Path, other: Path) -> bool:
        look(other)
        exchanged = exchange_names(one, other)
        look(other)
        return exchanged

    monkeypatch.setattr(atomic, "_exchange", watched)
    convert(weights, folder, description=description, dtype="float16", force=True)
    assert seen == [{"float32"}, {"float16"}]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("kind", ["file.pt", "file.safetensors", "folder", "12"])
def test_a_late_refusal_leaves_the_old_files(weights, config_file, tmp_path, monkeypatch, kind):
    target, description = tmp_path / kind, ModelDescription(str(config_file))
    outcome = convert(weights, target, description=description)

    def different(*_):
        raise DifferentError("different")

    monkeypatch.setattr(conversion, "check", different)
    with pytest.raises(DifferentError):
        convert(weights, target, description=description, dtype="float16", force=True, check=True)
    assert [path.name for path in tmp_path.iterdir()] == [kind]
    monkeypatch.undo()
    described = description if kind == "12" else ModelDescription()
    again = convert(target, tmp_path / "again.safetensors", description=described)
    assert "float32" in again.summary
    assert (tmp_path / "again.safetensors").read_bytes() == weights.read_bytes()
    assert outcome.sha256
