"""Comparison of two finished runs: files, figures, and every array of their checkpoints."""

import hashlib
import json
import threading
from pathlib import Path
from typing import Any


def arrays(folder: Path, step: int) -> dict[str, str]:
    """A digest of every array of a checkpoint with its dtype and shape, by path."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    path = (folder / str(step)).absolute()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
        ocp.metadata(path).metadata,
    )
    contents = {}
    for name, leaf in jax.tree_util.tree_leaves_with_path(ocp.load(path, shapes)):
        array = np.asarray(leaf)
        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        contents[jax.tree_util.keystr(name, simple=True, separator="/")] = (
            f"{array.dtype} {array.shape} {digest}"
        )
    return contents


def state_digest(state: Any) -> str:
    """A digest of every array of a training state, one on the host at a time."""
    import jax
    import numpy as np

    hashed = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        array = np.asarray(leaf)
        hashed.update(f"{path} {array.dtype} {array.shape}\0".encode() + array.tobytes())
    return hashed.hexdigest()


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without speed."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) | {"tokens_per_second": 0} for line in lines]


def run_contents(run: Path) -> dict[str, Any]:
    """Everything that is compared of a finished run, as a flat dict.

    File names, small files, metrics without speed, checkpoints and their manifests.
    """
    from jax_transformer.storage import checkpoint

    contents: dict[str, Any] = {f"file {path.relative_to(run)}": True for path in run.iterdir()}
    for name in ("config.json", "train_config.json", "data.json", "tokenizer.json"):
        contents[name] = (run / name).read_text() if (run / name).exists() else None
    for number, line in enumerate(metrics(run), 1):
        contents[f"metrics.jsonl line {number}"] = line
    for folder in (run / "checkpoints", run / "averaged"):
        contents |= {f"file {path.relative_to(run)}": True for path in folder.iterdir()}
        for step in checkpoint.steps(folder):
            name = f"{folder.name}/{step}"
            manifest = checkpoint.read_manifest(folder, step)
            contents |= {
                f"{name} manifest {key}": value
                for key, value in manifest.items()
                if key not in ("sha256", "metrics")  # of files with times and speeds
            }
            contents |= {f"{name} {key}": value for key, value in arrays(folder, step).items()}
    return contents


_one_at_a_time = threading.Lock()


def differences(run: Path, reference: dict[str, Any]) -> list[str]:
    """Differences from the uninterrupted run, by name."""
    with _one_at_a_time:  # one JAX for all threads
        try:
            contents = run_contents(run)
        except Exception as error:  # whatever cannot be read is a difference
            return [f"cannot be compared: {type(error).__name__}: {error}"]
    wrong = []
    for name, expected in reference.items():
        if name not in contents:
            wrong.append(f"{name}: missing")
        elif contents[name] != expected:
            wrong.append(f"{name}: {str(contents[name])[:80]} instead of {str(expected)[:80]}")
    return wrong + [f"{name}: too many" for name in contents if name not in reference]
