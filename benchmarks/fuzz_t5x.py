"""Damage checkpoints of T5X and read them: the index, or the description of an array.

Every damaged checkpoint must be refused, or read within what its chunks can hold. See
docs/untrusted-files.md.

``python benchmarks/fuzz_t5x.py --count 300 --seed 0`` makes the same files each time. It exits with
1 if anything else happened, and keeps the file that caused it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from flax import serialization

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import fuzz_files, fuzzing
from jax_transformer.storage import lazy, t5x, zarr

_TEXTS = ("", ".", "..", "../up", "/etc/passwd", "gzip", "zarr", "\x1b[2J", "a" * 4000, "<f8", "|O")


def original(parent: Path) -> dict[str, Path]:
    """Write a checkpoint, and return the file of each kind."""
    draw = np.random.default_rng(0)
    arrays = {
        "encoder.layers_0.mlp.wi.kernel": draw.normal(size=(6, 5)).astype(np.float32),
        "decoder.decoder_norm.scale": draw.normal(size=7).astype(np.float64),
        "token_embedder.embedding": draw.normal(size=(3, 4)).astype(np.float16),
    }
    folder = parent / "checkpoint_5"
    t5x.write(folder, lazy.in_memory(arrays), 5)
    return {"index": folder / t5x.INDEX, "zarray": _description(folder)}


def _description(folder: Path) -> Path:
    return folder / "target.encoder.layers_0.mlp.wi.kernel" / zarr.METADATA


def changed(draw: Random, kind: str, content: bytes, others: list[bytes]) -> bytes:
    """Damaged bytes, or a file of the same form with other values."""
    if draw.random() < 0.4:
        return fuzz_files.mutated(draw, content, others)
    if kind == "index":
        tree = serialization.msgpack_restore(content)
        return serialization.msgpack_serialize(_other_value(draw, tree))
    return json.dumps(_other_value(draw, json.loads(content))).encode()


def _other_value(draw: Random, tree: Any) -> Any:
    """The tree with one value, anywhere in it, that is another one."""
    if isinstance(tree, dict | list) and tree and draw.random() < 0.85:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key = draw.choice(keys)
        tree[key] = _other_value(draw, tree[key])
        return tree
    numbers = [number for number in fuzz_files.INTERESTING if number < 2**63]
    return draw.choice(
        [
            draw.choice(numbers),
            -draw.choice(numbers),
            draw.choice(_TEXTS),
            [draw.choice(numbers), draw.choice((1, 5, 6, 7))],
            None,
            {},
            [],
            True,
            1.5,
        ]
    )


def judged(kind: str, path: Path) -> fuzzing.Watched:
    """Read the checkpoint that a file is of."""
    folder = path.parent if kind == "index" else path.parent.parent
    size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    with fuzzing.watched(size) as result:
        for array in t5x.find(folder).arrays.values():
            assert array.read().nbytes <= zarr.RATIO * size, "more numbers than files hold"
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = fuzzing.options(__doc__, arguments)
    return fuzzing.count(options, original, changed, judged)


if __name__ == "__main__":
    raise SystemExit(main())
