"""Arrays of a checkpoint that Orbax wrote, read by TensorStore, which Orbax itself reads them with.

Importing Orbax takes longer than reading a small model, and restoring a tree needs JAX: a command
that only reads weights waits for neither.
"""

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import CheckpointError

_METADATA = "_METADATA"


def groups(path: Path) -> set[str]:
    """Return the names at the top of the tree at ``path``, also of groups without arrays.

    Raises as :func:`open_arrays`.
    """
    _, content = _metadata(path)
    return {leaf["key_metadata"][0]["key"] for leaf in content["tree_metadata"].values()}


def open_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays (tensorstore.TensorStore) of the checkpoint at ``path``, which are not read
    yet, by their path in the tree, for example ``params/encoder.norm.scale``.

    Raises CheckpointError for a layout that Orbax 0.12 does not write.
    """
    import tensorstore

    folder, content = _metadata(path)
    driver = "zarr3" if content.get("use_zarr3") else "zarr"
    opened: dict[str, Any] = {}
    for leaf in content["tree_metadata"].values():
        keys = [str(part["key"]) for part in leaf["key_metadata"]]
        if leaf["value_metadata"]["skip_deserialize"]:  # None, or an empty part of the tree
            continue
        kvstore = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{folder}/"},
            "path": f"{'.'.join(keys)}/",
        }
        opened["/".join(keys)] = tensorstore.open({"driver": driver, "kvstore": kvstore}, read=True)
    return {name: opened[name].result() for name in sorted(opened)}


def read_arrays(stored: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the opened arrays, bit for bit."""
    reading = {name: array.read() for name, array in stored.items()}
    return {name: np.asarray(future.result()) for name, future in reading.items()}


def _metadata(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a checkpoint's tree, and Orbax's description of it."""
    folders = [file.parent for file in path.glob(f"*/{_METADATA}")]
    if len(folders) != 1:
        raise CheckpointError(f"{path}: holds no tree of arrays that Orbax has written")
    content = json.loads((folders[0] / _METADATA).read_bytes())
    if not content.get("use_ocdbt"):
        raise CheckpointError(f"{path}: its arrays are in a layout that is not supported")
    return folders[0], content


@contextmanager
def failures_reported_once() -> Iterator[None]:
    """Silence Orbax, which logs a failure with its traceback, raises it, and fails again in its
    threads: the caller reports it.

    After a failure the logs stay silent, and so do exceptions in Orbax's own threads and
    coroutines, which come much later.
    """
    logs = [logging.getLogger(name) for name in ("absl", "asyncio", "concurrent.futures")]
    disabled, hooks = [log.disabled for log in logs], (threading.excepthook, sys.unraisablehook)
    for log in logs:
        log.disabled = True
    threading.excepthook, sys.unraisablehook = (_without_orbax(hook) for hook in hooks)
    yield
    for log, before in zip(logs, disabled, strict=True):
        log.disabled = before
    threading.excepthook, sys.unraisablehook = hooks


def _without_orbax(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the hook for all exceptions but those that passed through Orbax, or through the event
    loops that it runs.
    """

    def filtered(unhandled: Any) -> None:
        files = [frame.filename for frame in traceback.extract_tb(unhandled.exc_traceback)]
        packages = [f"{os.sep}{package}{os.sep}" for package in ("orbax", "asyncio")]
        if not any(package in file for file in files for package in packages):
            hook(unhandled)

    return filtered
