"""Checkpoints come back bit for bit, completely or not at all; every damage is named."""

import errno
import hashlib
import json
import os
import shutil
import sys
from collections import Counter, namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from orbax.checkpoint import v1 as ocp

from jax_transformer import errors
from jax_transformer.runtime import distributed
from jax_transformer.storage import atomic, checkpoint, run_folder, saving, stored_arrays, tensors
from jax_transformer.storage.tensors import TensorInfo
from parity_tests.unit import helpers, runs

FILES = "_CHECKPOINT_METADATA state/_METADATA state/manifest.ocdbt state/d/*".split()
FILES.append("state/ocdbt.process_0/d/*")


State = namedtuple("State", "step params opt_state")


def state(seed: int = 0) -> State:
    random = np.random.default_rng(seed)
    params = {
        "blocks.0.kernel": jnp.asarray(random.normal(size=(5, 3)), jnp.float32),
        "blocks.0.bias": jnp.asarray(random.normal(size=3), jnp.bfloat16),
        "scale": jnp.asarray([np.nan, np.inf, -0.0, 5e-324, 1 / 3], jnp.float64),
        "half": jnp.asarray(random.normal(size=4), jnp.float16),
    }
    counts = {
        "count": jnp.asarray(2**31 - 1, jnp.int32),
        "wide": jnp.asarray(2**40 + 1, jnp.int64),
        "flag": jnp.asarray([True, False]),
    }
    return State(jnp.asarray(7, jnp.int32), params, ({"mu": params["blocks.0.kernel"] * 2}, counts))


def like(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def bits(tree) -> list[tuple]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), runs.bits(np.asarray(leaf))) for path, leaf in leaves]


def save(folder: Path, step: int, tree=None, **about) -> Path:
    return saving.save(folder, step, state() if tree is None else tree, about=about)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint for tests that only read it."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 7, versions={"jax": jax.__version__})
    return folder


def copied(saved: Path, folder: Path) -> Path:
    """A checkpoint to damage."""
    return shutil.copytree(saved, folder, dirs_exist_ok=True) / "7"


def largest(path: Path, pattern: str) -> Path:
    return max(path.glob(pattern), key=lambda file: file.stat().st_size)


def refusal(folder: Path, target=None, **options) -> str:
    with pytest.raises(errors.CheckpointError) as caught:
        checkpoint.open(folder, 7).load(like(state()) if target is None else target, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_arrays_are_read_without_orbax(saved, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("orbax")]:
        monkeypatch.setitem(sys.modules, name, None)  # an import raises ImportError
    (step,) = checkpoint.steps(saved)
    opened = checkpoint.open(saved, step)
    arrays = opened.arrays()
    expected = dict(checkpoint._leaves(state()))
    assert arrays.keys() == expected.keys() == opened.tensors.keys()
    for name, array in arrays.items():
        assert opened.tensors[name] == TensorInfo(array.shape, str(array.dtype))
        assert array.dtype == expected[name].dtype
        assert array.tobytes() == np.asarray(expected[name]).tobytes()
    assert {"step", "params/blocks.0.kernel", "opt_state/0/mu"} < opened.tensors.keys()
    assert opened.arrays(["params"]).keys() == {n for n in expected if n.startswith("params/")}


def test_a_tree_that_orbax_did_not_write_is_refused(tmp_path):
    for content, message in (({}, "no tree of arrays"), ({"x": {"use_ocdbt": False}}, "layout")):
        for name, metadata in content.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "_METADATA").write_text(json.dumps(metadata))
        with pytest.raises(errors.CheckpointError, match=message):
            checkpoint.open_arrays(tmp_path)


def test_every_dtype_round_trips_bit_for_bit(saved):
    loaded = checkpoint.open(saved, 7).load(like(state()))
    assert bits(loaded) == bits(state())
    assert bits(loaded) != bits(state(seed=1))
    assert isinstance(loaded, State)
    assert {"bfloat16", "float16", "float32", "float64", "int32", "int64", "bool"} == {
        dtype for _, (dtype, *_) in bits(loaded)
    }


def test_relative_folders_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("runs/here"), 7)
    assert bits(checkpoint.open(Path("runs/here"), 7).load(like(state()))) == bits(state())
    actual = checkpoint.open(Path("runs/here"), 7).tensors
    assert actual == checkpoint.open(tmp_path / "runs/here", 7).tensors


def test_prune_removes_only_the_other_steps(tmp_path):
    for step in (5, 10, 20, 100):
        save(tmp_path, step, state(seed=step))
    saving.prune(tmp_path, [20, 100, 300])
    assert checkpoint.steps(tmp_path) == [20, 100]
    assert sorted(os.listdir(tmp_path)) == ["100", "20"]
    assert bits(checkpoint.open(tmp_path, 20).load(like(state()))) == bits(state(seed=20))


def test_a_step_saved_again_is_replaced(tmp_path):
    save(tmp_path, 7)
    save(tmp_path, 7, state(seed=1))
    assert bits(checkpoint.open(tmp_path, 7).load(like(state()))) == bits(state(seed=1))
    assert os.listdir(tmp_path) == ["7"]


def test_a_partial_save_is_no_checkpoint_and_is_removed(tmp_path):
    for leftover in (".writing-3", ".writing-9.orbax-checkpoint-tmp"):
        (tmp_path / leftover / "state").mkdir(parents=True)
        (tmp_path / leftover / "state" / "part").write_bytes(b"half")
    assert checkpoint.steps(tmp_path) == []
    save(tmp_path, 9)
    assert os.listdir(tmp_path) == ["9"]


def test_an_interrupted_replacement_restores_the_old_checkpoint(tmp_path):
    """The save was killed between its two renames, after moving the old checkpoint away."""
    save(tmp_path, 7)
    os.rename(tmp_path / "7", tmp_path / ".writing-7.replaced")
    saving.remove_unfinished(tmp_path)
    assert os.listdir(tmp_path) == ["7"]
    assert bits(checkpoint.open(tmp_path, 7).load(like(state()))) == bits(state())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), errors.InputError("damaged")])
def test_what_a_thread_writes_after_a_failure_is_removed(error, tmp_path, monkeypatch):
    def sleep(_: float) -> None:
        late = tmp_path / ".writing-3.orbax-checkpoint-tmp" / "state" / "d"
        late.mkdir(parents=True)
        (late / "0").touch()

    monkeypatch.setattr(saving, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(errors.Refusal), saving.new(tmp_path, 3, about={}):
        raise error
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("where", ["sha256", "sync", "orbax"])
def test_a_full_disk_leaves_only_the_earlier_checkpoint(tmp_path, monkeypatch, where):
    save(tmp_path, 7)

    def full(*_):  # as Orbax's storage raises it: no OSError, several lines
        raise ValueError("\nRESOURCE_EXHAUSTED: No space left on device [OS error 28]\nSource: ...")

    with (
        monkeypatch.context() as patch,
        pytest.raises(errors.CheckpointError, match="No space left") as caught,
    ):
        if where == "orbax":
            patch.setattr(ocp, "save", full)
        else:
            module = {"sha256": checkpoint, "sync": atomic}[where]
            patch.setattr(module, where, helpers.failing(errno.ENOSPC))
        save(tmp_path, 8)
    assert str(tmp_path / "8") in str(caught.value) and "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["7"]
    assert bits(checkpoint.open(tmp_path, 7).load(like(state()))) == bits(state())


FAILING = """
import asyncio, os, pathlib, sys
import numpy as np
import tensorstore
from jax_transformer.runtime import process
from jax_transformer.storage import checkpoint, saving

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).endswith("_METADATA") and "w" in str(arguments[1]):
        raise OSError(28, "No space left on device", str(arguments[0]))

sys.addaudithook(refuse)
try:
    with process.on_signals(lambda: None, raising=KeyboardInterrupt):
        saving.save(pathlib.Path(sys.argv[1]), 1, {"a": np.ones(3)}, about={})
except checkpoint.CheckpointError as error:
    print(error, flush=True)

# A write that ends when Orbax has closed its event loop, which TensorStore then calls
promise, future = tensorstore.Promise.new()

async def wait():
    await future

loop = asyncio.new_event_loop()
write = loop.create_task(wait())
loop.run_until_complete(asyncio.sleep(0))
loop.close()
promise.set_result(None)
os._exit(0)  # threads of Orbax's wait for ever
"""


def test_an_orbax_failure_is_one_error(tmp_path):
    """Orbax also logs it, with a traceback, and its threads fail again after the run has ended."""
    done = runs.python("-c", FAILING, tmp_path)
    assert "No space left on device" in done.stdout and done.stdout.count("\n") == 1
    assert done.stderr == ""
    assert os.listdir(tmp_path) == []


def damage(folder: Path, step: int) -> Path:
    path = largest(folder / str(step), "state/d/*")
    helpers.flip_a_bit(path)
    return path


def test_the_newest_intact_checkpoint_is_found_and_newer_damage_is_named(tmp_path):
    assert run_folder.newest_intact(tmp_path) == (None, [])
    for step in (5, 9, 10):
        save(tmp_path, step)
    newest, errors_found = run_folder.newest_intact(tmp_path)
    assert newest.step == 10 and errors_found == []
    spoiled = [damage(tmp_path, 10), damage(tmp_path, 9)]
    newest, errors_found = run_folder.newest_intact(tmp_path)
    assert newest.step == 5
    for path, error in zip(spoiled, errors_found, strict=True):
        assert str(path) in str(error)
    damage(tmp_path, 5)
    message = r"10/.*damaged.*; nor is any of the 2 before it intact"
    with pytest.raises(errors.CheckpointError, match=message):
        run_folder.newest_intact(tmp_path)


def test_the_newest_intact_checkpoint_is_verified_once(tmp_path, monkeypatch):
    save(tmp_path, 10)
    hashed = counted(monkeypatch)
    newest, _ = run_folder.newest_intact(tmp_path)
    newest.load(like(state()))
    assert set(hashed.values()) == {1}


def test_a_quarantined_checkpoint_is_skipped_and_not_deleted(tmp_path):
    for _ in range(3):
        save(tmp_path, 7)
        aside = run_folder.quarantine(tmp_path, 7)
        assert checkpoint.steps(tmp_path) == [] and (aside / "manifest.json").exists()
    assert sorted(os.listdir(tmp_path)) == ["damaged-7", "damaged-7.2", "damaged-7.3"]


def test_a_renamed_checkpoint_is_refused(tmp_path):
    save(tmp_path, 7)
    os.rename(tmp_path / "7", tmp_path / "8")
    with pytest.raises(errors.CheckpointError, match="is of step 7, not 8"):
        checkpoint.open(tmp_path, 8)


def test_a_changed_byte_of_the_manifest_is_detected(saved, tmp_path):
    copied(saved, tmp_path / "copy")
    path = tmp_path / "copy" / "7" / "manifest.json"
    content = path.read_bytes()
    for where in range(0, len(content), 7):
        path.write_bytes(content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :])
        with pytest.raises(errors.CheckpointError, match=r"manifest\.json"):
            checkpoint.open(tmp_path / "copy", 7)
    path.write_bytes(content)
    checkpoint.open(tmp_path / "copy", 7)


def test_the_manifest_has_the_step_the_metadata_and_every_file(saved):
    content = checkpoint.read_manifest(saved, 7)
    assert content["step"] == 7
    assert content["versions"] == {"jax": jax.__version__}
    files = [path for path in (saved / "7").rglob("*") if path.is_file()]
    assert content["sha256"] == {
        str(path.relative_to(saved / "7")): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != "manifest.json"
    }
    assert len(files) > 4


@pytest.mark.parametrize("pattern", FILES)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_is_named(saved, tmp_path, pattern, damage):
    path = largest(copied(saved, tmp_path), pattern)
    if damage == "flipped":
        helpers.flip_a_bit(path)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    message = refusal(tmp_path)
    assert str(path) in message
    assert "missing" in message if damage == "missing" else "SHA-256" in message


def test_an_added_file_is_named(saved, tmp_path):
    path = copied(saved, tmp_path) / "state" / "d" / "more"
    path.write_bytes(b"more")
    assert str(path) in refusal(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"", b'{"step": 7, "sha', b"\xff\xfe", b"[]", b"7"),
        *(b'{"step": 7, "sha256": []}', b'{"step": 7}'),
    ],
)
def test_a_manifest_that_is_missing_or_damaged_is_named(saved, tmp_path, content):
    path = copied(saved, tmp_path) / "manifest.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert str(path) in refusal(tmp_path)


@pytest.mark.parametrize(("shape", "dtype"), [((5, 4), "float32"), ((5, 3), "float64")])
def test_another_shape_or_dtype_is_refused_by_name(saved, shape, dtype):
    target = like(state())
    target.params["blocks.0.kernel"] = jax.ShapeDtypeStruct(shape, dtype)
    message = refusal(saved, target)
    for word in ("params/blocks.0.kernel", "(5, 3)", shape, dtype):
        assert str(word) in message


def test_an_extra_or_missing_array_is_refused_by_name(saved):
    target = like(state())
    target.params["shift"] = target.params.pop("scale")
    array = "float64 (5,)"
    assert f"params/scale: the checkpoint has {array}, the model nothing" in refusal(saved, target)
    target.params["scale"] = target.params["shift"]
    assert f"params/shift: the checkpoint has nothing, the model {array}" in refusal(saved, target)


def test_a_group_of_arrays_can_be_loaded(saved, tmp_path):
    """From a checkpoint that is checked as a whole."""
    scale = like(state()).params["scale"]
    target = {"params": {"scale": scale}}
    loaded = checkpoint.open(saved, 7).load(target, partial=True)
    assert bits(loaded) == bits({"params": {"scale": state().params["scale"]}})
    refusal(saved, target)
    assert "params/scales" in refusal(saved, {"params": {"scales": scale}}, partial=True)
    path = largest(copied(saved, tmp_path), "state/ocdbt.process_0/d/*")
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in refusal(tmp_path, target, partial=True)


def counted(monkeypatch) -> Counter[str]:
    """Count the hashes of each file of a checkpoint, by path."""
    hashed, sha256 = Counter[str](), checkpoint.sha256
    monkeypatch.setattr(
        checkpoint, "sha256", lambda path: hashed.update([str(path)]) or sha256(path)
    )
    return hashed


def test_an_opened_checkpoint_hashes_each_file_once(saved, monkeypatch):
    hashed = counted(monkeypatch)
    opened = checkpoint.open(saved, 7)
    assert opened.tensors and opened.arrays()
    assert bits(opened.load(like(state()))) == bits(state())
    files = [path for path in (saved / "7").rglob("*") if path.is_file()]
    assert hashed == {str(path): 1 for path in files if path.name != "manifest.json"}


@pytest.mark.parametrize("change", ["content", "replaced", "missing"])
def test_a_file_that_changed_after_it_was_verified_is_refused(saved, tmp_path, change):
    path = largest(copied(saved, tmp_path), "state/ocdbt.process_0/d/*")
    opened = checkpoint.open(tmp_path, 7)
    content = path.read_bytes()
    if change == "replaced":
        path.unlink()
    if change != "missing":
        path.write_bytes(content)
    else:
        (path.parent / "more").write_bytes(b"")
    for read in (opened.arrays, lambda: opened.load(like(state()))):
        with pytest.raises(errors.CheckpointError, match="was changed by another process"):
            read()


FormerState = namedtuple("FormerState", "step params carried moments")
TrainState = namedtuple("TrainState", "step params frozen opt_state")


def test_names_of_version_0_1_are_read_as_today_s(tmp_path):
    table, kernel = jnp.arange(6, dtype=jnp.float32).reshape(2, 3), jnp.ones(2, jnp.float32)
    carried = {"positions.table": table, "decoder.idle.kernel": kernel}
    frozen = {"positions.table": table, "decoder.unused.kernel": kernel}
    step, params, opt_state = state()
    save(tmp_path, 7, FormerState(step, params, carried, opt_state))
    expected = TrainState(step, params, frozen, opt_state)
    opened = checkpoint.open(tmp_path, 7)
    for names in (opened.tensors.keys(), opened.arrays().keys()):
        assert {name.partition("/")[0] for name in names} == set(TrainState._fields)
        assert {f"frozen/{name}" for name in frozen} <= names
    assert bits(opened.load(like(expected))) == bits(expected)
    part = {"frozen": frozen}
    assert bits(opened.load(like(part), partial=True)) == bits(part)


@pytest.mark.parametrize("most", [3, 4, 8, 40])
def test_large_arrays_are_written_alone_and_the_others_in_batches(most, monkeypatch):
    monkeypatch.setattr(saving, "_BATCH", most)
    monkeypatch.setattr(saving, "_ALONE", 4)
    state = tensors.in_memory({str(n): np.zeros(n, np.int8) for n in (1, 2, 9, 3, 0, 4)})
    batches = [*saving._batches({"params": state, "frozen": state})]
    paths = [path for batch in batches for path in batch]
    assert sorted(paths) == sorted(f"{group}/{n}" for group in ("params", "frozen") for n in state)
    assert [[*batch] for batch in batches[:4]] == [
        [f"{group}/{n}"] for group in ("params", "frozen") for n in (9, 4)
    ]
    sizes = [sum(tensor.nbytes for tensor in batch.values()) for batch in batches[4:]]
    assert max(sizes) <= most
    for size, batch in zip(sizes, batches[5:], strict=False):
        assert size + next(iter(batch.values())).nbytes > most


def test_a_damaged_checkpoint_is_named_with_the_one_tried_instead(tmp_path, capsys):
    shutil.copytree(runs.ROOT / "parity_tests/v0_1/run", tmp_path / "run")
    file = next((tmp_path / "run/checkpoints/200/state/d").iterdir())
    file.write_bytes(file.read_bytes()[:10])
    candidate, _ = run_folder.open_weights(run_folder.RunFolder(tmp_path / "run"))
    assert (candidate.step, candidate.name) == (203, "last")
    error = capsys.readouterr().err
    assert error.startswith(f"warning: {file}: damaged")
    assert error.endswith("; step 203 (last) is tried instead\n")
    last = next((tmp_path / "run/checkpoints/203/state/d").iterdir())
    last.write_bytes(b"")
    with pytest.raises(errors.CheckpointError, match=f"{last}: damaged"):
        run_folder.open_weights(run_folder.RunFolder(tmp_path / "run"))


@pytest.mark.parametrize("reason", ["Gloo all-reduce failed", "RESOURCE_EXHAUSTED: no memory"])
def test_an_error_of_a_save_may_be_the_death_of_another_process(tmp_path, monkeypatch, reason):
    """JAX then ends this process, whose exit code is that of a lost process, within twice the
    heartbeat. If it does not, the error is one line.
    """
    waited = []
    monkeypatch.setattr(distributed, "count", lambda: 2)
    monkeypatch.setattr(distributed, "barrier", lambda name: None)
    monkeypatch.setattr(distributed, "_report", lambda error: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: None)
    monkeypatch.setattr(jax.config, "update", lambda *option: None)
    monkeypatch.setattr(distributed, "time", SimpleNamespace(sleep=waited.append))
    options = distributed.DistributedOptions("nowhere:1", 2, 0, heartbeat_timeout=7)
    with (
        pytest.raises(errors.CheckpointError, match=rf"3: could not be written \({reason}"),
        distributed.joined(options),
        saving.new(tmp_path, 3, about={}) as folder,
    ):
        folder.mkdir()
        raise jax.errors.JaxRuntimeError(reason)
    assert waited == ([14] if "Gloo" in reason else [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("batch", [1, 1 << 20])
def test_an_error_of_the_last_write_is_reported(batch, tmp_path, monkeypatch):
    def failing() -> None:
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    class Store:
        """A store whose writes of the number 2 fail late."""

        def __init__(self, real: tensorstore.TensorStore):
            self.real = real

        def write(self, numbers: np.ndarray, **options: bool) -> Any:
            fails = numbers[0] == 2
            return SimpleNamespace(result=failing) if fails else self.real.write(numbers)

    def opened(*spec: Any, **options: Any) -> Any:
        store = real(*spec, **options)
        ours = options.keys() == {"create", "context"}
        return SimpleNamespace(result=lambda: Store(store.result())) if ours else store

    real = tensorstore.open
    monkeypatch.setattr(saving, "_BATCH", batch)
    monkeypatch.setattr(tensorstore, "open", opened)
    state = tensors.in_memory({"a": np.ones(3), "b": np.full(3, 2.0)})
    with pytest.raises(errors.CheckpointError, match=r"3: could not be written .*No space left"):
        saving.write(tmp_path, 3, {"params": state}, about={})
    assert not list(tmp_path.iterdir())


def test_steps_are_folders_that_have_a_number_as_name(tmp_path):
    for name in ("10", "9", "x", "-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "7").touch()
    assert checkpoint.steps(tmp_path) == [9, 10]


@pytest.mark.parametrize("at", [0, 12_000, 23_999])
@pytest.mark.parametrize("changed", ["a", "b", "c", "bd"])
@pytest.mark.parametrize("alone", [1, 20_000, 1 << 20])
def test_a_bit_that_flips_on_the_disk_leaves_no_checkpoint(
    alone, changed, at, tmp_path, monkeypatch
):
    """The array was written alone, or with others into one file."""
    monkeypatch.setattr(saving, "_ALONE", alone)
    monkeypatch.setattr(stored_arrays, "_PART", 10_000)
    add = stored_arrays.StoredArrays.add

    def flipped(stored: Any, written: dict[str, np.ndarray]) -> None:
        for name, array in written.items():
            for file in (tmp_path / ".writing-3/state/d").iterdir():
                content = file.read_bytes()
                begin = content.find(array.tobytes())
                if begin >= 0 and name[-1] in changed:
                    with file.open("r+b") as opened:  # others may be reading it
                        opened.seek(begin + at)
                        opened.write(bytes([content[begin + at] ^ 16]))
        add(stored, written)

    monkeypatch.setattr(stored_arrays.StoredArrays, "add", flipped)
    draw = np.random.default_rng(0)
    groups = {"params": tensors.in_memory({name: draw.normal(size=3000) for name in "abcd"})}
    names = ", ".join(changed)
    with pytest.raises(errors.InputError, match=f"/7: {names} reads back different"):
        saving.write(tmp_path, 3, groups, about={}, target=tmp_path / "7")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("alone", [1, 1 << 20])
def test_an_array_that_was_written_alone_is_hashed_once(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_ALONE", alone)
    hashed, digest = [], hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, name: hashed.append(file.name) or digest(file, name)
    )
    arrays = {name: np.random.default_rng(0).normal(size=20_000) for name in "ab"}
    about = saving.write(tmp_path, 3, {"params": tensors.in_memory(arrays)}, about={})
    assert about == {name: hashlib.sha256(array).hexdigest() for name, array in arrays.items()}
    large = [name for name in hashed if "/d/" in name and "3/" in name]
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "3/state/d").iterdir()}
    assert (max(sizes[Path(name).name] for name in large) > 100_000) is (alone > 1)
    assert checkpoint.problems(tmp_path, 3) == []


@pytest.mark.parametrize(
    "module, name", [(checkpoint, "sha256"), (atomic, "sync_folder"), (atomic, "sync")]
)
def test_an_error_of_hashing_or_of_the_disk_is_reported(module, name, tmp_path, monkeypatch):
    """Linux reports an error of the disk only once."""
    real = getattr(module, name)
    errors_of_the_disk = iter([OSError(errno.EIO, "Input/output error")])

    def failing(path: Path) -> Any:
        for error in errors_of_the_disk:
            raise error
        return real(path)

    monkeypatch.setattr(stored_arrays, "_UNSYNCED", 1)
    monkeypatch.setattr(module, name, failing)
    groups = {"params": tensors.in_memory({"a": np.ones(3)})}
    with pytest.raises(errors.CheckpointError, match=r"could not be written .*Input/output error"):
        saving.write(tmp_path, 3, groups, about={})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("alone", [1, 40])
@pytest.mark.parametrize("batch", [1, 40, 1 << 20])
def test_arrays_that_are_written_one_by_one_are_orbax_s_own(alone, batch, tmp_path, monkeypatch):
    """Every dtype and rank, in any number of parts: Orbax restores them, as JAX's arrays too."""
    monkeypatch.setattr(saving, "_BATCH", batch)
    monkeypatch.setattr(saving, "_ALONE", alone)
    monkeypatch.setattr(stored_arrays, "_PART", alone)
    draw = np.random.default_rng(0)
    shapes = {"scalar": (), "vector": (7,), "square.w": (4, 4), "wide.w": (1, 9), "cube": (2, 3, 5)}
    groups: dict[str, dict[str, np.ndarray]] = {"params": {}, "frozen": {}, "empty": {}}
    for dtype in ("float32", "bfloat16", "float16", "int8", "bool"):
        for name, shape in shapes.items():
            group = "frozen" if name == "cube" else "params"
            groups[group][f"{name}.{dtype}"] = np.asarray(draw.normal(size=shape) * 9).astype(
                tensors.DTYPES[dtype]
            )
    lazy = {group: tensors.in_memory(arrays) for group, arrays in groups.items()}
    hashes = saving.write(tmp_path, 3, lazy, about={})
    opened = checkpoint.open(tmp_path, 3)
    arrays, restored = opened.arrays(), opened.load(groups)
    assert restored.keys() == groups.keys() and not restored["empty"]
    for group, expected in groups.items():
        assert restored[group].keys() == expected.keys()
        for name, array in expected.items():
            path = f"{group}/{name}"
            for again in (arrays[path], np.asarray(restored[group][name])):
                assert tensors.same(again, array), name
            assert hashes.pop(name) == hashlib.sha256(array.tobytes()).hexdigest()
    assert not hashes
    assert checkpoint.problems(tmp_path, 3) == []
