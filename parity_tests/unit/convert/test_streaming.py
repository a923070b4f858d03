"""A conversion holds one tensor at a time, whatever the size of the file."""

import contextlib
import errno
import io
import itertools
import json
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorstore
import tqdm

from jax_transformer import cli
from jax_transformer.architectures import huggingface_config, huggingface_state
from jax_transformer.architectures.registry import model_weights
from jax_transformer.convert import conversion, models
from jax_transformer.errors import InputError
from jax_transformer.formats import registry
from jax_transformer.formats.base import Destination
from jax_transformer.storage import (
    checkpoint,
    huggingface_folder,
    pt,
    read_back,
    safetensors,
    saving,
    stored_arrays,
    tensors,
)
from jax_transformer.storage.pt import writer
from jax_transformer.storage.tensors import LazyTensor, TensorInfo
from parity_tests.unit import helpers, runs
from parity_tests.unit.formats.test_huggingface import T5

COUNT, LENGTH = 6, 1000


class Counted:
    """Tensors that count how many of their arrays are in memory."""

    def __init__(self) -> None:
        self.alive = self.most = self.reads = 0

    def state(self) -> dict[str, LazyTensor]:
        info = TensorInfo((LENGTH, 10), "float32")
        return {f"t{i}": LazyTensor(info, lambda i=i: self._read(i)) for i in range(COUNT)}

    def _read(self, number: int) -> np.ndarray:
        array = np.full((LENGTH, 10), number, np.float32)
        self.alive, self.reads = self.alive + 1, self.reads + 1
        self.most = max(self.most, self.alive)
        weakref.finalize(array, self._gone)
        return array

    def _gone(self) -> None:
        self.alive -= 1


class Held:
    """A write that holds its array until somebody waits for it.

    TensorStore lets go of it at some time near the end of the write.
    """

    def __init__(self, store: tensorstore.TensorStore, array: np.ndarray):
        self.array, self.written = array, store.write(array.copy())

    def result(self) -> None:
        del self.array
        self.written.result()


def holding(opening: Callable[..., Any], *spec: Any, **options: Any) -> Any:
    """``tensorstore.open``, with writes that are :class:`Held` for the arrays of a checkpoint."""
    opened = opening(*spec, **options)
    if options.keys() != {"create", "context"}:
        return opened
    real = opened.result()
    store = SimpleNamespace(write=lambda array, **_: Held(real, array))
    return SimpleNamespace(result=lambda: store)


@pytest.mark.parametrize(
    ("format", "name", "most"),
    [
        *(("safetensors", "a.safetensors", 1), ("pt", "a.pt", 1), ("hf", "hf", 1)),
        *(("run", "run", 2), ("step", "7", 2)),
    ],
)
def test_no_more_than_one_tensor_is_in_memory(format, name, most, tmp_path, monkeypatch):
    """A checkpoint has two batches, here of one array; here no small array may wait."""
    monkeypatch.setattr(tensors, "_MOST_AHEAD", 0)
    monkeypatch.setattr(saving, "_BATCH", LENGTH * 40)
    monkeypatch.setattr(checkpoint, "_READ", 2 * LENGTH * 40)
    for module in (read_back, stored_arrays):
        monkeypatch.setattr(module, "_MOST_WAITING", 0)
    monkeypatch.setattr(tensorstore, "open", partial(holding, tensorstore.open))
    counted, again = Counted(), {}
    to = Destination(registry.get(format), tmp_path / name)
    if format == "hf":
        files = {"config.json": json.dumps(T5).encode()}
        to = replace(to, files=files, options={"shard_size": "100KB"})
    to.format.write(to, counted.state(), lambda state: again.update(tensors.arrays(state)))
    assert counted.most == most and counted.reads == COUNT
    assert [float(again[f"t{i}"][0, 0]) for i in range(COUNT)] == list(range(COUNT))


def test_tensors_are_read_ahead_of_their_turn_but_few_bytes_of_them(monkeypatch):
    """Those that follow are read while one is held, each once and in their order."""
    monkeypatch.setattr(tensors, "_MOST_AHEAD", 2 * LENGTH * 40)
    counted = Counted()
    with contextlib.closing(tensors.read_ahead(counted.state().values())) as arrays:
        array = next(arrays)
        while counted.reads < 3:
            time.sleep(0.001)
        time.sleep(0.02)
        assert (counted.reads, counted.alive, array[0, 0]) == (3, 3, 0)
        del array
        assert [array[0, 0] for array in arrays] == list(range(1, COUNT))
    assert counted.reads == COUNT and counted.most <= 4


def test_an_error_while_reading_ahead_is_that_of_its_tensor(tmp_path, monkeypatch):
    def fail() -> np.ndarray:
        raise InputError("t2 is damaged")

    state = Counted().state()
    state["t2"] = LazyTensor(state["t2"].info, fail)
    with contextlib.closing(tensors.read_ahead(state.values())) as arrays:
        assert [next(arrays)[0, 0] for _ in range(2)] == [0, 1]
        with pytest.raises(InputError, match="t2 is damaged"):
            next(arrays)
    with pytest.raises(InputError, match="t2 is damaged"):
        safetensors.save(tmp_path / "a", state, target="a")


def test_what_is_not_read_yet_stays_unread_at_an_early_end(monkeypatch):
    reads, waits, shutdown = [], threading.Event(), ThreadPoolExecutor.shutdown

    def tensor(i: int) -> LazyTensor:
        def read() -> np.ndarray:
            reads.append(i)
            assert i != 1 or waits.wait(60)
            return np.zeros(2)

        return LazyTensor(TensorInfo((2,), "float64"), read)

    def noted(pool: ThreadPoolExecutor, wait: bool = True, **options: Any) -> None:
        shutdown(pool, wait=False, **options)
        waits.set()
        shutdown(pool, wait=wait)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", noted)
    with contextlib.closing(tensors.read_ahead(map(tensor, range(3)))) as arrays:
        next(arrays)
    assert 2 not in reads


def test_tied_tensors_are_read_once_for_a_file(tmp_path):
    counted = Counted()
    state = counted.state()
    state |= {"a": state["t3"], "z": state["t3"]}
    safetensors.save(tmp_path / "a.safetensors", state, target="a")
    safetensors.save(tmp_path / "b.safetensors", Counted().state(), target="b")
    assert counted.reads == COUNT
    read, untied = (safetensors.read(tmp_path / f"{name}.safetensors") for name in "ab")
    assert set(read) == {"a", "z", *untied}
    assert all(np.array_equal(read[name], untied[name]) for name in untied)
    assert all(np.array_equal(read[name], untied["t3"]) for name in "az")


def test_few_bytes_wait_to_be_hashed(tmp_path, monkeypatch):
    """The hash of each array waits here until another is asked for that may not be read yet."""
    monkeypatch.setattr(read_back, "_MOST_WAITING", 2 * LENGTH * 40)
    counted, released = Counted(), threading.Event()
    thread = threading.Timer(0.2, released.set)
    monkeypatch.setattr(read_back, "sha256", lambda array: str(released.wait()))
    thread.start()
    with read_back.Hashes() as hashes:
        for tensor in hashes.watched(counted.state()).values():
            tensor.read()
    assert counted.most == 3 and hashes.result() == dict.fromkeys(counted.state(), "True")


def test_the_hash_of_a_folder_depends_on_each_name_dtype_shape_and_number(tmp_path):
    zeros, hashes = np.zeros((2, 3), np.float32), set()
    other = ({"b": zeros}, {"a": zeros.reshape(3, 2)}, {"a": zeros.view(np.int32)})
    states = ({"a": zeros}, *other, {"a": zeros + 1}, {"a": zeros, "b": zeros})
    for state in states:
        with read_back.Hashes() as thread:
            watched = thread.watched({name: LazyTensor.of(array) for name, array in state.items()})
            assert all(tensor.read() is state[name] for name, tensor in watched.items())
            hashes.add(read_back.NewFolder(tmp_path, tmp_path, watched, thread).sha256())
            watched = dict(reversed(watched.items()))  # their order does not count
            hashes.add(read_back.NewFolder(tmp_path, tmp_path, watched, thread).sha256())
    assert len(hashes) == len(states)


@pytest.mark.parametrize("unsynced", [1, 50_000, 200_000])
def test_an_error_of_the_disk_is_reported(unsynced, tmp_path, monkeypatch):
    """Also if it comes while the rest is written or at the end, and the last sync succeeds."""
    monkeypatch.setattr(read_back, "_UNSYNCED", unsynced)
    results = itertools.chain([helpers.failing(errno.EIO)], itertools.repeat(lambda _: None))
    monkeypatch.setattr(os, "fsync", lambda descriptor: next(results)(descriptor))
    with pytest.raises(OSError, match="Input/output error"):
        safetensors.save(tmp_path / "a", Counted().state(), target="a")


def test_a_control_that_keeps_every_tensor_is_counted():
    counted = Counted()
    arrays = [tensor.read() for tensor in counted.state().values()]
    assert counted.most == len(arrays) == COUNT


@pytest.mark.parametrize("alone, together", [(LENGTH * 40, 3), (LENGTH * 40 - 1, 1)])
def test_small_arrays_of_a_checkpoint_are_read_together(alone, together, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_READ", 3 * LENGTH * 40)
    monkeypatch.setattr(checkpoint, "_ALONE", alone)
    opened_with: list[list[str]] = []
    selected = checkpoint.Checkpoint.selected

    def recorded(opened, names, **options):
        opened_with.append(list(names))
        return selected(opened, names, **options)

    def check(state):
        read.update({name: tensor.read() for name, tensor in state.items()})

    monkeypatch.setattr(checkpoint.Checkpoint, "selected", recorded)
    read, to = {}, Destination(registry.get("run"), tmp_path / "run")
    to.format.write(to, Counted().state(), check)
    names = [f"params/t{i}" for i in range(COUNT)]
    once = [names[i : i + together] for i in range(0, COUNT, together)]
    assert opened_with == once  # to check
    assert all(array[0, 0] == int(name[1:]) for name, array in read.items())


@pytest.mark.parametrize("seed", range(3))
def test_arrays_are_read_in_any_order_and_few_bytes_of_them_wait(seed, monkeypatch):
    monkeypatch.setattr(checkpoint, "_READ", 100)
    monkeypatch.setattr(checkpoint, "_ALONE", 30)
    draw, alive = random.Random(seed), []
    groups = ("frozen", "params", "opt_state")
    names = [f"{group}/{i}" for group in groups for i in range(20)]
    infos = {name: TensorInfo((draw.randint(1, 40),), "int8") for name in names}

    def selected(chosen: list[str], check: bool) -> dict[str, np.ndarray]:
        assert len({name.partition("/")[0] for name in chosen}) == 1
        assert len(chosen) == 1 or sum(infos[name].nbytes for name in chosen) <= 100
        read = {name: np.full(infos[name].shape, names.index(name), np.int8) for name in chosen}
        for array in read.values():
            alive.append(array.nbytes)
            weakref.finalize(array, alive.remove, array.nbytes)
        return read

    opened = helpers.stand_in(checkpoint.Checkpoint, tensors=infos, selected=selected)
    state = checkpoint.scan(opened, groups[:2])
    assert [*state] == names[:40]
    for name in draw.choices(names[:40], k=200):
        array = state[name].read()
        assert array.shape == infos[name].shape and set(array) == {names.index(name)}
        assert sum(alive) <= 2 * 100 + array.nbytes


@pytest.mark.parametrize("share", [1, 3, 16])
def test_that_no_file_changed_is_checked_for_each_share_of_the_bytes_and_at_the_end(
    share, monkeypatch
):
    """In each of two passes, the second in another order."""
    monkeypatch.setattr(checkpoint, "_CHECKS", share)
    monkeypatch.setattr(checkpoint, "_ALONE", 0)
    infos = {f"params/{i}": TensorInfo((draw,), "int8") for i, draw in enumerate([3, 9, 1, 5] * 12)}
    total, unchecked = sum(info.nbytes for info in infos.values()), 0

    def selected(chosen: list[str], check: bool) -> dict[str, np.ndarray]:
        nonlocal unchecked
        unchecked = 0 if check else unchecked + sum(infos[name].nbytes for name in chosen)
        return {name: np.zeros(infos[name].shape, np.int8) for name in chosen}

    opened = helpers.stand_in(checkpoint.Checkpoint, tensors=infos, selected=selected)
    state = checkpoint.scan(opened, ["params"])
    for names in ([*state], [*state][::-1]):
        left = total
        for name in names:
            state[name].read()
            left -= infos[name].nbytes
            assert unchecked < total // share and (not unchecked or left > total // share), name


def test_the_bytes_are_those_of_the_safetensors_library(tmp_path):
    import safetensors.numpy as library

    random_bits = np.random.default_rng(0)
    state = {
        f"{name}.{number}é": random_bits.integers(0, 2, (3, number % 3)).astype(dtype)
        for number, dtype in enumerate(safetensors.DTYPES.values())
        for name in "ba"
    }
    for metadata in ({}, {"format": "é"}):  # the library writes several in any order
        library.save_file(state, tmp_path / "theirs", metadata={"format": "pt"} | metadata)
        safetensors.write(tmp_path / "ours", state, metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    for names in ("ab", "ba"):
        safetensors.write(tmp_path / names, state, dict.fromkeys(names, "text"))
    assert (tmp_path / "ab").read_bytes() == (tmp_path / "ba").read_bytes()


@pytest.mark.parametrize("scan", [safetensors.scan, pt.scan])
def test_a_file_that_becomes_shorter_is_one_line(scan, tmp_path):
    path = tmp_path / "file"
    state = {"a": np.ones(10_000, np.float32)}
    (writer if scan is pt.scan else safetensors).write(path, state)
    tensor = scan(path)["a"]
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(InputError, match=r"became shorter|ends in the middle"):
        tensor.read()


def test_without_memory_for_two_models_the_tensors_are_checked(monkeypatch):
    pytest.importorskip("torch")
    config = huggingface_config.from_config(T5)
    model = model_weights(config)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in model.shapes["flax"].items()}
    flax = tensors.in_memory(zeros)
    state = models.renamed(flax, model, from_torch=False, to_torch=True)
    monkeypatch.setattr(conversion, "_available_memory", lambda: 1000)
    checked = conversion.check(config, model.table, state, flax)
    assert not checked.errors and "there and back bit for bit" in checked.method
    assert "0.0 GiB of memory are free" in checked.method


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_terminal_shows_the_bytes_that_were_converted(stderr, tmp_path, monkeypatch):
    source = tmp_path / "a.safetensors"
    safetensors.write(source, {"a": np.ones(50_000), "b": np.zeros(50_000)})
    counted: list[int] = []
    monkeypatch.setattr(tqdm.tqdm, "update", lambda self, n: counted.append(n))
    monkeypatch.setattr(sys, "stderr", stderr)
    assert cli.main(["convert", str(source), str(tmp_path / "b.pt")]) == 0
    shown = stderr.getvalue()
    assert sum(counted) == 800_000 * stderr.isatty()
    assert ("b.pt" in shown and "0.00/800k" in shown) == stderr.isatty()
    assert bool(shown) == stderr.isatty()


SIZES = {"d_model": 1024, "d_kv": 64, "num_heads": 16, "d_ff": 2048, "vocab_size": 20_000}
LARGEST = 20_000 * 1024 * 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_peak_memory_is_bounded_by_the_largest_tensor(tmp_path):
    """Above that of a tiny conversion: the largest tensor, twice if transposed, and 256 MiB."""
    tiny, large = tmp_path / "tiny", tmp_path / "large"
    _random_folder(tiny, T5)
    total = _random_folder(large, {**T5, **SIZES, "num_layers": 9, "tie_word_embeddings": False})
    assert total > 400_000_000
    for source, target, transposed in (
        ("", "run", True),
        ("-run", "copy", False),
        ("-copy", "hf", True),
        ("-hf", "a.pt", False),
        ("-a.pt", "a.safetensors", False),
    ):
        peaks = [_peak(Path(f"{each}{source}"), Path(f"{each}-{target}")) for each in (tiny, large)]
        most = LARGEST * (1 + transposed) + (256 << 20)
        assert peaks[1] - peaks[0] < most, (source, target, peaks)
    shards = sorted(path.name for path in large.glob("*.safetensors"))
    assert len(shards) > 3
    for name in shards:
        assert (large / name).read_bytes() == (tmp_path / "large-hf" / name).read_bytes()


def _random_folder(path: Path, data: dict) -> int:
    """Write a Hugging Face folder of random numbers; return the bytes of its tensors."""
    config, draw = huggingface_config.from_config(data), np.random.default_rng(0)
    state = {
        name: LazyTensor(
            TensorInfo(shape, "float32"),
            lambda shape=shape: draw.standard_normal(shape, dtype=np.float32),
        )
        for name, shape in model_weights(config).shapes["torch"].items()
    }
    state = huggingface_state.saved(state, config)
    files = {"config.json": json.dumps(data).encode()}
    huggingface_folder.write(path, state, files, shard_size=100_000_000)
    return sum(tensor.nbytes for tensor in state.values())


def _peak(source: Path, target: Path) -> int:
    """Peak resident memory of a conversion in a process of its own, in bytes."""
    code = (
        "import sys\n"
        "from jax_transformer import cli\n"
        "code = cli.main(sys.argv[1:])\n"
        "status = open('/proc/self/status').read()\n"  # ru_maxrss counts the parent's memory, too
        "print(code, int(status.partition('VmHWM:')[2].split()[0]) * 1024)"
    )
    to = ["--to", "hf", "--shard-size", "100MB"] if target.name.endswith("-hf") else []
    done = runs.python("-c", code, "convert", source, target, "--no-check", *to)
    exit_code, peak = done.stdout.split()[-2:]
    assert exit_code == "0", done.stdout + done.stderr
    return int(peak)
