"""Files that commands write: regular files are replaced, everything else is written directly."""

import ctypes
import errno
import io
import os
import stat
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import ConfigError
from jax_transformer.storage import atomic, pt, safetensors
from jax_transformer.storage.pt import writer
from parity_tests.unit import helpers

STATE = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3)}


@pytest.fixture
def null(tmp_path) -> Path:
    """A device like /dev/null, which a fault of ours may replace."""
    path = tmp_path / "null"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        path.write_text("")
    except OSError:
        if os.geteuid() == 0:
            pytest.skip("no device can be made here, and root could replace the real one")
        return Path(os.devnull)
    return path


class Reader(threading.Thread):
    """Read a new FIFO to its end."""

    def __init__(self, path: Path):
        super().__init__(daemon=True)
        os.mkfifo(path)
        self.path, self.content = path, b""
        self.start()

    def run(self) -> None:
        self.content = self.path.read_bytes()

    def result(self) -> bytes:
        self.join(10)
        return self.content


def as_it_grows(path: Path | str, text: str) -> None:
    with atomic.growing_file(Path(path)) as file:
        file.write(text)


WRITERS = pytest.mark.parametrize("write", [atomic.write_text, as_it_grows])


@WRITERS
def test_the_reader_of_a_fifo_gets_the_content(tmp_path, write):
    reader = Reader(tmp_path / "fifo")
    write(tmp_path / "fifo", "über\n")
    assert reader.result() == "über\n".encode()
    assert stat.S_ISFIFO(os.stat(tmp_path / "fifo").st_mode)
    assert os.listdir(tmp_path) == ["fifo"]


def test_a_device_is_not_replaced(null):
    atomic.write_text(null, "nothing")
    with atomic.file(null) as temporary:
        temporary.write_text("nothing")
    assert stat.S_ISCHR(os.stat(null).st_mode)


def test_a_full_device_is_named():
    with pytest.raises(OSError, match=r"No space left.*/dev/full"):
        atomic.write_text("/dev/full", "text")


def test_a_write_that_finds_no_room_names_the_file(tmp_path):
    path = tmp_path / "file"
    with helpers.largest_file(4096), pytest.raises(OSError, match="file") as error:
        atomic.write_text(path, "x" * 5000)
    assert error.value.filename == str(path) and not os.listdir(tmp_path)


def test_a_file_of_a_folder_that_finds_no_room_names_the_folder(tmp_path):
    path, refused = tmp_path / "folder", pytest.raises(OSError, match="folder")
    with helpers.largest_file(4096), refused as error, atomic.folder(path) as temporary:
        temporary.mkdir()
        (temporary / "file").write_bytes(bytes(5000))
    assert error.value.filename == str(path) and not os.listdir(tmp_path)


@pytest.mark.parametrize("size", [5000, 2 * io.DEFAULT_BUFFER_SIZE])
def test_a_growing_file_ends_where_it_was_flushed_if_it_finds_no_room(tmp_path, size):
    path, refused = tmp_path / "file", pytest.raises(OSError, match="file")
    with helpers.largest_file(4096), refused as error, atomic.growing_file(path) as file:
        for count in (3000, size):
            file.write("x" * count)
            file.flush()
    assert error.value.filename == str(path)
    assert (tmp_path / "file.partial").read_text() == "x" * 3000


def test_an_empty_partial_file_is_used_unless_another_process_writes_to_it(tmp_path):
    """A killed process leaves one, if nothing was flushed."""
    path, partial = tmp_path / "file", tmp_path / "file.partial"
    partial.touch()
    as_it_grows(path, "text")
    assert path.read_text() == "text" and not partial.exists()
    refused = pytest.raises(ConfigError, match=f"{partial} exists")
    with atomic.growing_file(path) as file:
        file.write("first")
        with refused:
            as_it_grows(path, "second")
    assert path.read_text() == "first"
    partial.write_text("x")
    with refused:
        as_it_grows(path, "text")
    assert partial.read_text() == "x"


def test_only_files_of_a_process_are_removed_as_unfinished(tmp_path):
    for name in (".a.12", ".a.b", "a.12", ".12"):
        (tmp_path / name).touch()
    (tmp_path / ".folder.12").mkdir()
    atomic.remove_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".12", ".a.b", ".folder.12", "a.12"]


def test_an_output_in_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    refused = [tmp_path]  # root may write everywhere
    access = lambda path, mode: (Path(path) not in refused) or mode != os.W_OK  # noqa: E731
    monkeypatch.setattr(os, "access", access)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "link").symlink_to("../file")
    for path in ("file", "sub/link"):
        with pytest.raises(ConfigError, match=f"{path}: permission denied in folder {tmp_path}"):
            atomic.check_output(tmp_path / path)
    refused.clear()
    atomic.check_output(tmp_path / "file")
    (tmp_path / "link").symlink_to("gone/file")
    for path, missing in (("link", "gone"), ("none/file", "none")):
        with pytest.raises(ConfigError, match=f"{path}: folder {tmp_path / missing} does not"):
            atomic.check_output(tmp_path / path)


def test_a_temporary_file_of_an_earlier_process_of_the_same_number_is_replaced(tmp_path):
    (tmp_path / f".file.{os.getpid()}").write_text("half")
    atomic.write_text(tmp_path / "file", "text")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EWOULDBLOCK])
def test_without_locks_only_a_new_file_grows(tmp_path, monkeypatch, number, exists):
    """No locks on this file system, or a lock that another process has got meanwhile."""
    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", helpers.failing(number))
    if exists:
        (tmp_path / "file").touch()
    file = atomic._new_or_empty(tmp_path / "file")
    assert (file is not None) == (number == errno.ENOLCK and not exists)
    if file is not None:
        file.close()


def test_every_name_of_an_open_file_is_known(tmp_path):
    (tmp_path / "a").symlink_to("/dev/stdout")
    (tmp_path / "b").symlink_to("a")
    thread = f"/proc/self/task/{os.getpid()}/fd/1"
    for path, number in (("a", 1), ("b", 1), (thread, 1), ("/dev/fd/x", None), ("c", None)):
        assert atomic._descriptor(tmp_path / path) == number


def test_a_link_is_removed_and_not_its_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    for _ in range(2):
        atomic.remove(tmp_path / "link")
    assert os.listdir(tmp_path) == ["folder"]


def test_a_folder_replaces_no_file(tmp_path):
    (tmp_path / "path").write_text("text")
    with pytest.raises(OSError), atomic.folder(tmp_path / "path") as temporary:
        temporary.mkdir()
    assert (tmp_path / "path").read_text() == "text" and os.listdir(tmp_path) == ["path"]


def test_a_new_parent_stays_after_an_error_if_something_else_is_in_it(tmp_path):
    with pytest.raises(ValueError, match="mine"), atomic.folder(tmp_path / "new" / "folder"):
        (tmp_path / "new" / "other").touch()
        raise ValueError("mine")
    assert os.listdir(tmp_path / "new") == ["other"]


def test_the_error_of_a_full_disk_names_the_file_unless_it_names_one(tmp_path):
    for own in ("own", None):
        with pytest.raises(OSError, match="full") as error, atomic.naming(tmp_path):
            raise OSError(errno.ENOSPC, "full", own)
        assert error.value.filename == (own or str(tmp_path))


@WRITERS
@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "-"])
def test_standard_output_goes_on_after_what_was_printed(path, capfd, tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    # As in a process whose output is no terminal: what was printed waits in a buffer
    with open(os.dup(1), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        print("before")
        write(path, "text\n")
        print("after", flush=True)
    monkeypatch.undo()
    assert capfd.readouterr().out == "before\ntext\nafter\n"  # pytest redirects both to a file
    assert not os.listdir(tmp_path)


@WRITERS
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed(tmp_path, exists, write):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "file", tmp_path / "link"
    if exists:
        target.write_text("old")
    link.symlink_to("folder/file")
    write(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert os.listdir(tmp_path / "folder") == ["file"]


def test_a_conversion_writes_into_a_fifo_and_through_a_link(console, tmp_path):
    source, fifo = tmp_path / "source.safetensors", tmp_path / "fifo.safetensors"
    safetensors.write(source, STATE)
    reader = Reader(fifo)
    assert console.say("convert", source, fifo)[0] == 0
    assert reader.result() == source.read_bytes()
    for suffix in ("safetensors", "pt"):
        target, link = tmp_path / f"target.{suffix}", tmp_path / f"link.{suffix}"
        target.write_text("old")
        link.symlink_to(target)
        console.refused(3, [f"{target.name}: exists already"], "convert", source, link)
        assert console.say("convert", source, link, "--force")[0] == 0
        assert link.is_symlink() and not target.is_symlink()
    assert (tmp_path / "target.safetensors").read_bytes() == source.read_bytes()
    assert pt.read(tmp_path / "target.pt")["weight"].tobytes() == STATE["weight"].tobytes()
    console.refused(2, ["-: weights are written to a file or folder"], "convert", source, "-")


@pytest.mark.parametrize(
    "command",
    [
        "translate --run none --output",
        "translate --run none --attention",
        "evaluate --run none --source none --target none --hypotheses",
        "parity none none --html",
        "parity none none --junit",
        "golden make",
    ],
)
def test_a_folder_is_refused_before_anything_is_read(console, tmp_path, command):
    rest = ["none"] if command == "golden make" else []
    words = [f"cannot write {tmp_path}: it is a folder"]
    console.refused(2, words, *command.split(), tmp_path, *rest)
    words = [f"cannot write {tmp_path}/none/out: folder {tmp_path}/none does not exist"]
    console.refused(2, words, *command.split(), tmp_path / "none" / "out", *rest)


def test_a_folder_is_not_synced_on_windows(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda *call: (opened.append(call), real(*call))[1])
    monkeypatch.setattr(atomic, "WINDOWS", True)
    atomic.sync(tmp_path)
    atomic.sync(tmp_path / "file")
    assert opened == [(tmp_path / "file", os.O_RDWR)]


def test_what_is_complete_is_no_failure_if_nothing_can_be_removed(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/1").write_text("old")

    unlink = helpers.failing(errno.EIO)
    with monkeypatch.context() as patch, atomic.file(tmp_path / "file") as temporary:
        temporary.write_text("new")
        patch.setattr(os, "unlink", unlink)
    assert (tmp_path / "file").read_text() == "new"
    for name in ("old", "new"):
        with monkeypatch.context() as patch, atomic.folder(tmp_path / name) as temporary:
            temporary.mkdir()
            (temporary / "2").write_text("new")
            patch.setattr(os, "unlink", unlink)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["2"]


def _failing_sync(monkeypatch, folder: Path) -> None:
    sync, fail = atomic.sync, helpers.failing(errno.EIO)
    monkeypatch.setattr(atomic, "sync", lambda path: (fail if path == folder else sync)(path))


@pytest.mark.parametrize("old", [False, True])
def test_an_error_of_the_last_sync_of_a_file_changes_nothing(tmp_path, monkeypatch, old):
    target = tmp_path / "target"
    if old:
        target.write_text("old")
    _failing_sync(monkeypatch, tmp_path)
    with pytest.raises(OSError, match="Input/output"):
        atomic.write_text(target, "new")
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == ({"target": "old"} if old else {})


@pytest.mark.parametrize(
    "write",
    [
        lambda path, text: writer.write(path, {"text": text}),
        lambda path, text: safetensors.write(path, {text: np.ones(2)}),
        lambda path, text: Tokenizer.train([text], 300, pad_id=0, bos_id=1, eos_id=2).save(path),
    ],
    ids=["pt", "safetensors", "tokenizer"],
)
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, write):
    path = tmp_path / "file"
    write(path, "old")
    before = path.read_bytes()

    for full in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        monkeypatch.setattr(os, "fsync", helpers.failing(full))
        with pytest.raises(OSError, match=rf"Errno {full}\].*/file'$"):
            write(path, "new")
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def _failing_exchange(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Let the system call that exchanges two names fail."""

    def fails(*_: object) -> int:
        ctypes.set_errno(error)
        return -1

    library = SimpleNamespace(renameat2=fails)
    monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *_, **__: library)


@pytest.mark.parametrize("write", [atomic.write_text, lambda path, _: _write_folder(path)])
def test_an_exchange_that_fails_changes_nothing(tmp_path, monkeypatch, write):
    target = tmp_path / "target"
    write(target, "old")
    inode = target.stat().st_ino
    _failing_exchange(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error") as raised:
        write(target, "new")
    assert raised.value.filename == str(target)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert target.stat().st_ino == inode


def _write_folder(path: Path) -> None:
    with atomic.folder(path) as temporary:
        temporary.mkdir()


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP])
def test_a_system_that_cannot_exchange_names_replaces_a_file(tmp_path, monkeypatch, error):
    target = tmp_path / "target"
    target.write_text("old")
    _failing_exchange(monkeypatch, error)
    atomic.write_text(target, "new")
    _failing_sync(monkeypatch, tmp_path)
    with pytest.raises(OSError, match="Input/output"):
        atomic.write_text(target, "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert target.read_text() == "newer"


@pytest.mark.parametrize("parent, old", [(".", False), (".", True), ("new", False)])
def test_an_error_of_the_last_sync_of_a_folder_changes_nothing(tmp_path, monkeypatch, parent, old):
    """Also if it is the sync of the folder that a new parent is in."""
    target = tmp_path / parent / "target"
    if old:
        (target / "old").mkdir(parents=True)
    _failing_sync(monkeypatch, tmp_path)
    with pytest.raises(OSError, match="Input/output"), atomic.folder(target) as temporary:
        (temporary / "new").mkdir(parents=True)
    assert [path.name for path in tmp_path.iterdir()] == (["target"] if old else [])
    assert not old or [path.name for path in target.iterdir()] == ["old"]
