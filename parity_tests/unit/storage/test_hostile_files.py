"""Malicious files: each is refused in one line, runs nothing, and takes little memory."""

import contextlib
import json
import os
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.formats import registry
from jax_transformer.storage import pt, safetensors, untrusted, yaml_data
from jax_transformer.storage.pt import unpickler, zip_archive
from jax_transformer.storage.tensors import TensorInfo
from parity_tests.unit import helpers, hostile, hostile_containers

# Audit events of reading a file, next to opening that file
HARMLESS = (
    "mmap.__new__",  # of a file that was opened
    *("builtins.id", "os.scandir", "os.listdir", "sys._getframe", "object.__getattr__"),
    *("gc.", "cpython.", "array.", "sys.unraisablehook"),
)
ROOT = Path(__file__).parents[3]
MOST_MEMORY = 4_000_000

_watched: list[Any] = []
_seen: list[str] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Record every audit event while a file is read, except for opening that file."""
    if _watched and not event.startswith(HARMLESS):
        named = event == "open" and isinstance(arguments[0], str | Path)
        if not named or Path(arguments[0]).parent != _watched[0]:
            _seen.append(f"{event} {arguments!r}"[:200])


sys.addaudithook(_hook)


@contextlib.contextmanager
def nothing_runs(folder: Path) -> Iterator[None]:
    _seen.clear()
    _watched.append(folder)
    try:
        yield
    finally:
        _watched.clear()
        assert _seen == []


def refused(read: Callable[[Path], Any], path: Path) -> Exception | None:
    """Return the error that ``read`` raises: one of ours, one printable line, in little memory."""
    size = path.stat().st_size
    tracemalloc.start()
    try:
        with nothing_runs(path.parent):
            read(path)
        return None
    except (InputError, UnsafeFileError) as error:
        memory = tracemalloc.get_traced_memory()[1]
        message = str(error)
        assert error.exit_code in (3, 4)
        assert message.startswith(str(path.parent)), message
        assert message.isprintable(), message
        assert len(message) < 500 + len(str(path)), message
        assert (error.__cause__ is None and error.__suppress_context__) or error.__context__ is None
        assert memory < MOST_MEMORY + 100 * size, f"{memory:,} bytes"
        return error
    finally:
        tracemalloc.stop()


def check(files: Iterator[tuple[str, bytes]], path: Path, *readers: Callable[[Path], Any]) -> int:
    """Assert that every reader refuses every file, and return the number of files."""
    accepted, number = [], 0
    for what, content in files:
        path.write_bytes(content)
        for read in readers:
            try:
                if refused(read, path) is None:
                    accepted.append(f"{what} by {read.__module__}.{read.__name__}")
            except Exception as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        number += 1
    assert accepted == []
    return number


@pytest.fixture(scope="module", autouse=True)
def _as_a_user():
    """Turn off the tests' type checker, which compiles code and is slow."""
    with helpers.unchecked():
        yield


@pytest.fixture
def path(tmp_path) -> Path:
    """Return a file name after the first-time work of harmless files, for example imports."""
    path = tmp_path / "file"
    path.write_bytes(hostile.file(hostile.tensor()))
    assert pt.read(path).tolist() == pt.ties(path) + [0.0] * 4
    files = [hostile.file(b"\xff"), hostile.file(b"cos\nsystem\n")]
    readers = [pt.read, registry.of, pt.is_legacy, safetensors.is_index]
    readers += [safetensors.is_safetensors, safetensors.read, safetensors.describe]
    for content in (b"\x80", b"PK\x03\x04", *files, hostile.zipped([("a/data.pkl", b"")])):
        path.write_bytes(content)
        for read in readers:
            with contextlib.suppress(InputError, UnsafeFileError):
                read(path)
    return path


def test_gadgets_are_refused_by_name_and_do_not_run(path):
    sentinel = path.parent / "sentinel"
    assert check(hostile.gadgets(str(sentinel)), path, pt.describe) > 200
    assert not sentinel.exists()
    path.write_bytes(hostile.file(hostile.call(hostile.name("os", "system"), hostile.text("true"))))
    with pytest.raises(UnsafeFileError, match=r"it asks for 'os\.system'"):
        pt.read(path)


def test_the_audit_hook_detects_what_a_pickle_runs(path):
    """Control: the same pickle, run by Python's own reader, is detected."""
    import pickle
    import zipfile

    sentinel = path.parent / "sentinel"
    call = hostile.call(hostile.name("os", "mkdir"), hostile.text(str(sentinel)))
    path.write_bytes(hostile.file(call))
    with zipfile.ZipFile(path) as archive:
        content = archive.read("a/data.pkl")
    with pytest.raises(AssertionError, match=r"pickle\.find_class"), nothing_runs(path.parent):
        pickle.loads(content)
    with pytest.raises(AssertionError, match=r"os\.mkdir"), nothing_runs(path.parent):
        os.mkdir(sentinel.with_name("other"))
        raise InputError("a refusal hides nothing")
    assert sentinel.exists()


def test_the_memory_limit_detects_a_bomb(path):
    """Control: a reader that believes a header."""
    path.write_bytes(b"")

    def believing(_: Path) -> None:
        content = bytearray(2 * MOST_MEMORY)
        raise InputError(f"{path}: {len(content)}")

    with pytest.raises(AssertionError, match="bytes"):
        refused(believing, path)


@pytest.mark.parametrize("what", hostile.MACHINE)
def test_opcodes_that_weights_do_not_need_are_refused(what: str, path):
    assert check(iter([(what, hostile.file(hostile.MACHINE[what]))]), path, pt.describe) == 1


def test_unknown_pickle_protocols_are_refused(path):
    assert check(hostile.protocols(), path, pt.describe) > 10


def test_bombs_are_refused_within_the_memory_limit(path):
    assert check(hostile.bombs(), path, pt.describe) > 25


def test_tensors_lie_within_their_storages(path):
    assert check(hostile.lies(), path, pt.read) > 50


def test_zip_files_have_one_meaning(path):
    assert check(hostile_containers.archives(), path, pt.read) > 80


def test_files_that_are_no_zip_archive_are_refused(path):
    assert check(hostile_containers.no_archives(), path, pt.read, safetensors.read) > 5


READERS = (safetensors.read, safetensors.describe, safetensors.scan, safetensors.metadata)


def test_false_headers_are_refused(path):
    assert check(hostile_containers.headers(), path, *READERS) > 60
    assert check(hostile_containers.contents(), path, safetensors.read) == 1
    entry = hostile_containers._entry(shape=[1] * 63 + [4])  # NumPy's greatest number of axes
    path.write_bytes(hostile_containers.safetensors({"a": entry}))
    assert safetensors.read(path)["a"].ndim == 64


@pytest.mark.parametrize(("count", "more"), [(5, ""), (6, " and 1 more")])
def test_five_tensors_that_shards_lack_are_named_and_the_others_counted(path, count, more):
    names = {f"a{i}": "one" for i in range(count)}
    index = path.with_name("x.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": names}))
    message = (
        f"{index}: its files are without 'a0', 'a1', 'a2', 'a3', 'a4'{more}, with unexpected 'b'"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        untrusted.check_shards(index, {index.with_name("one"): ["b"]})


def test_a_plain_file_name_is_one_on_every_system():
    for name in ("a", "..a", "model-00001-of-00002.safetensors", "é", "x" * 255):
        assert untrusted.is_file_name(name)
    for name in ("", ".", "..", "a/b", "a\\b", "C:a", "a\n", "x" * 256, "é" * 128):
        assert not untrusted.is_file_name(name)


def test_an_index_names_only_files_of_its_own_folder(path):
    good = path.with_name("good.safetensors")
    good.write_bytes(hostile_containers.good_safetensors())
    assert safetensors.describe(good) == {"a": TensorInfo((4,), "float32")}
    assert check(hostile_containers.indexes(), path.with_name("index.json"), safetensors.read) > 20


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_the_commands_refuse_in_one_line(command: str, path, console):
    """One file of each kind; both commands use the same readers."""
    sentinel, family = path.parent / "sentinel", dict(hostile_containers.archives())
    gadget = hostile.call(hostile.name("os", "mkdir"), hostile.text(str(sentinel)))
    damaged = "a damaged storage" if command == "convert" else "a damaged pickle"
    target = [path.parent / "new", "--preset", "small"] if command == "convert" else []
    for file, code, content in (
        ("gadget.pt", 4, hostile.file(gadget)),
        ("gadget.safetensors", 4, hostile.file(gadget)),
        ("bomb.pt", 4, family["a deflated gigabyte"]),
        ("damaged.pt", 3, family[damaged]),
        ("hole.safetensors", 4, dict(hostile_containers.headers())["a hole"]),
    ):
        (path.parent / file).write_bytes(content)
        console.refused(code, [path.parent / file], command, path.parent / file, *target)
    assert not sentinel.exists() and not (path.parent / "new").exists()


def test_there_are_many_hostile_files():
    files, containers = hostile, hostile_containers
    families = (files.gadgets("x"), files.protocols(), files.bombs(), files.lies())
    families += (containers.archives(), containers.no_archives(), containers.headers())
    families += (containers.indexes(), iter(hostile.MACHINE.items()))
    assert len({content for family in families for _, content in family}) > 700


def test_limits_hold_at_the_value_itself(path):
    for key in (2**64 - 1, -(2**63), 2**64, -(2**63) - 1):
        path.write_bytes(hostile.file(b"}" + hostile.number(key) + b"Ns"))
        refused = pytest.raises(UnsafeFileError, match="int as a dictionary's key")
        with contextlib.nullcontext() if -(2**63) <= key < 2**64 else refused:
            assert pt.read(path) == {key: None}
    for version in (b"1\n", b"10\n"):
        files = hostile.members(hostile.pickle(b"}"))[:-1]
        path.write_bytes(hostile.zipped([*files, ("a/version", version)]))
        assert pt.read(path) == {}
    path.write_bytes(b"abc")
    assert untrusted.read_bytes(path, 3) == b"abc"
    with pytest.raises(UnsafeFileError, match=f"{path}: refused: 3 bytes, more than 2"):
        untrusted.read_bytes(path, 2)
    assert yaml_data.parse("a", b"[" * 20 + b"]" * 20)
    with pytest.raises(UnsafeFileError, match="a: line 1: refused: more than 20 deep"):
        yaml_data.parse("a", b"[" * 21 + b"]" * 21)


@pytest.mark.parametrize(
    ("module", "limit", "most", "content", "message"),
    [
        (unpickler, "MOST_STEPS", 1000, b"(" + b"N" * 998 + b"t", "more than 1,000 instructions"),
        (zip_archive, "MOST_MEMBERS", 3, b"}", "4 members, more than 3"),
    ],
)
def test_limits_on_counts_hold(module, limit, most, content, message, path, monkeypatch):
    monkeypatch.setattr(module, limit, most)
    path.write_bytes(hostile.file(content))
    with pytest.raises(UnsafeFileError, match=message):
        pt.read(path)
