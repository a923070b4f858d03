"""Checkpoints are written whole or not at all: at once, while training goes on, or a few arrays at
a time, so that they may be larger than the memory.
"""

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import CheckpointError, InputError, Refusal
from jax_transformer.runtime import distributed
from jax_transformer.storage import atomic, checkpoint, tensors
from jax_transformer.storage.stored_arrays import StoredArrays
from jax_transformer.storage.tensors import LazyState, LazyTensor

_WRITING = ".writing-"
_NODE = 16 << 10
"""Bytes of a node of the database that names the arrays' parts."""
_LATE = 0.2
"""Seconds after which no thread writes any more if another one has failed."""
_BATCH, _ALONE = 32 << 20, 1 << 20
"""Bytes of arrays that are being written at once, and of an array that is written alone."""


def save(folder: Path, step: int, tree: Any, *, about: dict[str, Any]) -> Path:
    """Write ``folder/step``: ``tree``, and ``about`` in its manifest. An earlier checkpoint stays
    until it is complete on the disk. Raises CheckpointError if the disk is full.
    """
    from orbax.checkpoint import v1 as ocp

    with new(folder, step, about=about) as temporary:
        ocp.save(temporary, tree)
    return folder.resolve() / str(step)


def begin(
    folder: Path, step: int, tree: Any, *, about: dict[str, Any], then: Callable[[], None]
) -> Callable[[], None]:
    """Copy ``tree``, whose memory can be reused then, to the host, and begin to :func:`save` it.
    The returned function, for any thread, completes the checkpoint and calls ``then``.
    """
    import jax
    from orbax.checkpoint import v1 as ocp

    with contextlib.ExitStack() as entered:
        temporary = entered.enter_context(new(folder, step, about=about))
        leaves, structure = jax.tree.flatten(tree)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, jax.Array):  # divided as on the devices; Orbax copies others
                leaves[i] = jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))
        copied = jax.block_until_ready(jax.tree.unflatten(structure, leaves))
        # In the caller's thread: with several processes Orbax begins with a collective operation,
        # and all processes have to start those in one order
        response = ocp.save_async(temporary, copied)
        writing = entered.pop_all()

    def complete() -> None:
        with writing:
            response.result()
        then()

    return complete


@contextmanager
def new(folder: Path, step: int, *, about: dict[str, Any]) -> Iterator[Path]:
    """Yield the name of a folder that Orbax creates and fills. At the end it gets its manifest and
    becomes ``folder/step``, as for :func:`save`; after an error it is removed.

    All processes of a distributed run call this and then Orbax, which writes their shards; the
    first one does the rest, and the others wait for it.
    """
    folder = folder.resolve()
    path, temporary = folder / str(step), folder / f"{_WRITING}{step}"
    aside = temporary.with_name(f"{temporary.name}.replaced")
    if not distributed.first():
        distributed.barrier("save begins")
        with _failures_reported_once():
            yield temporary
        distributed.barrier("save ends")
        return
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    try:
        with atomic.folder(path, temporary=temporary, aside=aside):
            distributed.barrier("save begins")
            with _failures_reported_once():
                yield temporary
            if not (temporary / checkpoint.MANIFEST).exists():
                checkpoint.write_manifest(temporary, step, about)
        for parent in (folder.parent, folder.parent.parent):
            atomic.sync(parent)
        distributed.barrier("save ends")
    except Refusal:  # of what is being written
        _remove_failed(folder)
        raise
    except Exception as error:  # a full disk reaches us from Orbax in many forms
        _remove_failed(folder)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = (lines or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path}: could not be written ({reason[:300]}); earlier checkpoints are untouched"
        ) from error


@contextmanager
def _failures_reported_once() -> Iterator[None]:
    """Silence Orbax, which logs a failure, raises it, and fails again in its threads and
    coroutines, much later: the caller reports it.
    """
    before = {}
    for name in ("absl", "asyncio", "concurrent.futures"):
        log = logging.getLogger(name)
        before[log], log.disabled = log.disabled, True
    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = (
        partial(_report_unless_of_orbax, hooks[0]),
        partial(_report_unless_of_orbax, hooks[1]),
    )
    yield
    for log, disabled in before.items():
        log.disabled = disabled
    threading.excepthook, sys.unraisablehook = hooks


def _report_unless_of_orbax(hook: Callable[[Any], Any], unhandled: Any) -> None:
    """Call the hook except for exceptions that passed through Orbax or the event loops it runs."""
    files = [frame.filename for frame in traceback.extract_tb(unhandled.exc_traceback)]
    packages = [f"{os.sep}{package}{os.sep}" for package in ("orbax", "asyncio")]
    if not any(package in file for file in files for package in packages):
        hook(unhandled)


def remove_unfinished(folder: Path) -> None:
    """Remove an interrupted or failed save's files; a checkpoint being replaced is renamed back."""
    for stale in sorted(folder.glob(f"{_WRITING}*"), reverse=True):
        name = stale.name.removeprefix(_WRITING).removesuffix(".replaced")
        if stale.suffix == ".replaced" and not (folder / name).exists():
            os.rename(stale, folder / name)
        else:
            shutil.rmtree(stale)


def _remove_failed(folder: Path) -> None:
    """Remove a failed save's files, also those that threads of TensorStore write a little later:
    nothing tells when they have ended."""
    with contextlib.suppress(OSError):
        remove_unfinished(folder)
    time.sleep(_LATE)
    remove_unfinished(folder)


def prune(folder: Path, keep: Container[int]) -> None:
    """Remove checkpoints of steps not in ``keep``, renamed first: none is there incomplete."""
    for step in checkpoint.steps(folder):
        if step not in keep:
            nameless = folder / f"{_WRITING}{step}"
            os.rename(folder / str(step), nameless)
            shutil.rmtree(nameless)


class BackgroundSaver(ThreadPoolExecutor):
    """Saves checkpoints in a thread, whose error the next call raises. As a context manager it
    waits for the last one at the end, unless the user interrupts.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self, folder: Path, step: int, tree: Any, *, about: dict[str, Any], then: Callable[[], None]
    ) -> None:
        """Save as :func:`save`, and call ``then``; return after ``tree`` was copied."""
        self.wait()
        self._pending = self.submit(begin(folder, step, tree, about=about, then=then))

    def check(self) -> None:
        """Raise the error of the last save, if it has failed by now."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, Exception):
            try:  # the checkpoint of an earlier step is as good as without this error
                self.wait()
            except Exception as second:
                error.add_note(str(second))
        self.shutdown(wait=False)


def write(
    folder: Path,
    step: int,
    groups: Mapping[str, LazyState],
    *,
    about: dict[str, Any],
    target: Path | None = None,
) -> dict[str, str]:
    """Write ``folder/step`` as :func:`save` does, a few arrays by name of ``groups`` at a time.
    They are not compressed: zstd saves a tenth of such numbers, in three times the time.

    Returns the SHA-256 of each array by its name. Raises InputError, with the name ``target`` that
    the checkpoint will get, if arrays read back different.
    """
    import tensorstore
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False
    tree: dict[str, dict[str, np.ndarray]] = {}
    for group, state in groups.items():
        tree[group] = {}
        for name, tensor in state.items():
            tree[group][name] = np.zeros((1,) * len(tensor.shape), tensor.info.numpy_dtype())
    with context, new(folder, step, about=about) as temporary:
        # Orbax describes the tree. It could write arrays in parts, too, but in a time that grows
        # with the square of their number; so they get their shapes and numbers here.
        ocp.save(temporary, tree)
        described = checkpoint.open_arrays(temporary)
        for entry in checkpoint.database(temporary):
            atomic.remove(entry)
        targets = {}
        files = tensorstore.Context({"file_io_sync": False})  # the folder is synced at the end
        for path, array in described.items():
            spec = array.spec().to_json()
            del spec["transform"], spec["kvstore"]["config"]["uuid"]
            # Every write encodes its node anew, which had all arrays in it
            spec["kvstore"]["config"]["max_decoded_node_bytes"] = _NODE
            group, _, name = path.partition("/")
            spec["metadata"]["shape"] = shape = list(groups[group][name].shape)
            for part in (spec["metadata"]["chunk_grid"], *spec["metadata"]["codecs"]):
                part["configuration"]["chunk_shape"] = shape
            targets[path] = tensorstore.open(spec, create=True, context=files)
        opened = {path: target.result() for path, target in targets.items()}
        with StoredArrays(temporary) as stored:
            writing: list[Any] = []
            written: dict[str, np.ndarray] = {}
            for batch in _batches(groups):
                stored.wait(sum(tensor.nbytes for tensor in batch.values()))
                arrays = {path: tensors.contiguous(tensor.read()) for path, tensor in batch.items()}
                for future in writing:
                    future.result()
                stored.add(written)
                written = arrays
                writing = [
                    opened[path].write(numbers, can_reference_source_data_indefinitely=True)
                    for path, numbers in arrays.items()  # which nothing changes meanwhile
                ]
                del arrays
            for future in writing:
                future.result()
            stored.add(written)
            stored.finish()
        if stored.differing:
            names = ", ".join(path.partition("/")[2] for path in sorted(stored.differing))
            raise InputError(
                f"{target or folder / str(step)}: {names} reads back different; nothing was changed"
            )
        checkpoint.write_manifest(temporary, step, about, stored.files)
    return {path.partition("/")[2]: digest for path, digest in stored.sha256.items()}


def _batches(groups: Mapping[str, LazyState]) -> Iterator[dict[str, LazyTensor]]:
    """Yield large arrays alone, and then the others in batches, by their paths in the tree."""
    arrays = {
        f"{group}/{name}": tensor
        for group, state in groups.items()
        for name, tensor in state.items()
    }
    batch: dict[str, LazyTensor] = {}
    for path, tensor in arrays.items():
        if tensor.nbytes >= _ALONE:
            yield {path: tensor}
    for path, tensor in arrays.items():
        if tensor.nbytes < _ALONE:
            if batch and sum(each.nbytes for each in (tensor, *batch.values())) > _BATCH:
                yield batch
                batch = {}
            batch[path] = tensor
    yield batch
