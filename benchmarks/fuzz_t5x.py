"""Damage checkpoints of T5X and read them: the index, or the description of an array.

Every damaged checkpoint must be refused, or read within what its chunks can hold. See
docs/untrusted-files.md.

``python benchmarks/fuzz_t5x.py --count 300 --seed 0`` makes the same files each time. It exits with
1 if anything else happened, and keeps the file that caused it.
"""

import argparse
import json
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from flax import serialization

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import fuzz_files
from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.storage import lazy, t5x, zarr

KINDS = ("index", "zarray")
_TEXTS = ("", ".", "..", "../up", "/etc/passwd", "gzip", "zarr", "\x1b[2J", "a" * 4000, "<f8", "|O")


def original(folder: Path) -> dict[str, bytes]:
    """Write a checkpoint, and return the file of each kind."""
    draw = np.random.default_rng(0)
    arrays = {
        "encoder.layers_0.mlp.wi.kernel": draw.normal(size=(6, 5)).astype(np.float32),
        "decoder.decoder_norm.scale": draw.normal(size=7).astype(np.float64),
        "token_embedder.embedding": draw.normal(size=(3, 4)).astype(np.float16),
    }
    t5x.write(folder, lazy.in_memory(arrays), 5)
    return {
        "index": (folder / t5x.INDEX).read_bytes(),
        "zarray": _description(folder).read_bytes(),
    }


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


def judged(folder: Path) -> str:
    """The outcome for a checkpoint. Raises AssertionError, or the reader's own exception, if that
    outcome is not allowed.
    """
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    fuzz_files._seen.clear()
    fuzz_files._watching.append(True)
    tracemalloc.start()
    try:
        for array in t5x.find(folder).arrays.values():
            assert array.read().nbytes <= zarr.RATIO * size, "more numbers than files hold"
        outcome = "read"
    except (InputError, UnsafeFileError) as error:
        outcome = f"exit code {error.exit_code}"
        assert str(error).isprintable() and len(str(error)) < 1000, "not one line"
    finally:
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        fuzz_files._watching.clear()
    assert memory < fuzz_files.MEMORY, f"{memory:,} bytes for files of {size:,}"
    assert not fuzz_files._seen, f"audit events: {fuzz_files._seen}"
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="files of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the changes (%(default)s)")
    parser.add_argument(
        "--keep", type=Path, default=Path("runs/fuzz"), help="folder for findings (%(default)s)"
    )
    options = parser.parse_args(arguments)
    draw, outcomes, findings = Random(options.seed), Counter[tuple[str, str]](), set[str]()
    sys.addaudithook(fuzz_files._hook)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint_5"
        contents = original(folder)
        files = {"index": folder / t5x.INDEX, "zarray": _description(folder)}
        assert judged(folder) == "read", "a valid checkpoint is refused"
        for kind in KINDS:
            for number in range(options.count):
                content = changed(draw, kind, contents[kind], list(contents.values()))
                files[kind].write_bytes(content)
                try:
                    outcomes[kind, judged(folder)] += 1
                except Exception as error:
                    finding = f"{kind}: {type(error).__name__}: {error}"[:300]
                    if finding not in findings:
                        findings.add(finding)
                        options.keep.mkdir(parents=True, exist_ok=True)
                        (options.keep / f"{options.seed}-{number}.{kind}").write_bytes(content)
                        print(finding, file=sys.stderr, flush=True)
            files[kind].write_bytes(contents[kind])
    print("| kind | files | read | exit code 3 | exit code 4 |\n|---|---|---|---|---|")
    for kind in KINDS:
        numbers = [outcomes[kind, outcome] for outcome in ("read", "exit code 3", "exit code 4")]
        print(f"| {kind} | {sum(numbers):,} | {' | '.join(f'{number:,}' for number in numbers)} |")
    print(f"{len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
