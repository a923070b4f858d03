"""Damage valid files at random and read them.

Every damaged file must be refused, or read within its own size. See docs/untrusted-files.md.

``python benchmarks/fuzz_files.py --seconds 60`` exits with 1 if anything else happened, and
keeps the file that caused it.
"""

import argparse
import contextlib
import json
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import fuzzing
from jax_transformer.errors import UnsafeFileError
from jax_transformer.storage import pt, pt_writer, safetensors, tensors, zipped
from parity_tests.unit import hostile, hostile_containers

INTERESTING = (
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
OPCODES = (
    b"(NK\x88\x89JM\x8a\x8bGX\x8c\x8dUTCB\x8e\x96}])t\x85\x86\x87aesuhjqr\x94c\x93RbQ.\x95\x81\x92"
    b"io012P\x82\x8f\x90\x91\x97IVSgpdl\x80"
)

Draw = random.Random


def seeds(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Valid files of every kind: ours, PyTorch's if it is installed, and hand-made ones."""
    random_arrays = np.random.default_rng(0)
    weight = random_arrays.normal(size=(3, 4)).astype(np.float32)
    arrays = {str(dtype): np.zeros(3, dtype) for dtype in tensors.DTYPES.values()}
    state = {
        "model": {"a.weight": weight, "tied": weight, **arrays},
        "epoch": 3,
        "betas": (0.9, 0.999),
        "name": "é",
        "raw": b"\xff",
        "none": [None, True],
    }
    pt_writer.write(folder / "ours.pt", state)
    yield "pt", (folder / "ours.pt").read_bytes()
    yield (
        "pt",
        hostile.file(
            b"]("
            + hostile.tensor()
            + hostile.tensor(shape=hostile.numbers(2, 2), stride=hostile.numbers(1, 2))
            + b"e"
        ),
    )
    yield "pt", hostile.file(b"]\x94(" + hostile.short("a") + b"\x94h\x01N\x86e", 4)
    with contextlib.suppress(ImportError):
        import torch

        module = torch.nn.Linear(2, 3)
        for protocol in (2, 4):
            torch.save(
                {
                    "model": module.state_dict(),
                    "p": module.weight,
                    "n": [1, 2.5, torch.float32],
                    "opt": argparse.Namespace(heads=3, dropout=[0.1], data={"a": None}),
                },
                folder / "torch.pt",
                pickle_protocol=protocol,
            )
            yield "pt", (folder / "torch.pt").read_bytes()
    safetensors.write(
        folder / "good.safetensors",
        {"a": weight, "b": np.arange(5, dtype=np.int8), "c": np.array(1.0), "d": np.ones(2, bool)},
    )
    yield "safetensors", (folder / "good.safetensors").read_bytes()
    yield "safetensors", hostile_containers.good_safetensors()
    yield (
        "index",
        json.dumps(
            {"metadata": {"total_size": 9}, "weight_map": dict.fromkeys("abcd", "good.safetensors")}
        ).encode(),
    )


def mutated(draw: Draw, content: bytes, others: list[bytes]) -> bytes:
    """``content`` with a few random changes."""
    result = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at, length = draw.randrange(len(result) + 1), draw.choice((1, 1, 2, 4, 8, 16, 64))
        match draw.randrange(8):
            case 0 if at < len(result):
                result[at] ^= 1 << draw.randrange(8)
            case 1:
                result[at : at + length] = draw.randbytes(length)
            case 2:
                del result[at : at + length]
            case 3:
                result[at:at] = draw.randbytes(length)
            case 4:
                result[at:at] = result[at : at + length] * draw.choice((1, 2, 100))
            case 5:
                width = draw.choice((1, 2, 4, 8))
                result[at : at + width] = struct.pack("<Q", draw.choice(INTERESTING))[:width]
            case 6:
                other = draw.choice(others)
                begin = draw.randrange(len(other))
                result[at : at + length] = other[begin : begin + draw.choice((length, 200))]
            case 7:
                result[at : at + 1] = bytes([draw.choice(OPCODES)])
    return bytes(result[: draw.randrange(len(result) + 1)] if draw.random() < 0.03 else result)


def deep_pt(draw: Draw, content: bytes, others: list[bytes]) -> bytes:
    """A zip file with correct checksums and a changed member or a random pickle."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        with zipped.Archive(file.name) as archive:
            members = [(name, archive.read(name).tobytes()) for name in archive.members]
    number = draw.choice((0, 0, 0, 0, draw.randrange(len(members))))
    name, inner = members[number]
    if draw.random() < 0.15 and name.endswith("data.pkl"):
        inner = (
            b"\x80\x02"
            + b"".join(
                bytes([draw.choice(OPCODES)]) + draw.choice((b"", b"\0", hostile.text("a")))
                for _ in range(40)
            )
            + b"."
        )
    members[number] = (name, mutated(draw, inner, others))
    return hostile.zipped(members)


def deep_safetensors(draw: Draw, content: bytes, others: list[bytes]) -> bytes:
    """A file with a changed header of the correct length."""
    length = int.from_bytes(content[:8], "little")
    return hostile_containers.safetensors(
        mutated(draw, content[8 : 8 + length], others), content[8 + length :]
    )


def changed(draw: Draw, kind: str, content: bytes, others: list[bytes]) -> bytes:
    deep: dict[str, Callable[[Draw, bytes, list[bytes]], bytes]] = {
        "pt": deep_pt,
        "safetensors": deep_safetensors,
    }
    if kind in deep and draw.random() < 0.7:
        return deep[kind](draw, content, others)
    return mutated(draw, content, others)


def judged(path: Path, kind: str) -> fuzzing.Watched:
    """Describe and read a file, and compare the two."""
    size = path.stat().st_size
    if kind == "index":
        size += path.with_name("good.safetensors").stat().st_size
    read, describe = (
        (pt.read, pt.describe) if kind == "pt" else (safetensors.read, safetensors.describe)
    )
    with fuzzing.watched(size) as result:
        described = describe(path)
        try:
            arrays = [leaf for _, leaf in pt.leaves(read(path)) if isinstance(leaf, np.ndarray)]
        except UnsafeFileError as error:
            raise AssertionError(f"described, and then refused: {error}") from error
        expected = (
            [
                leaf.shape if isinstance(leaf, pt.TensorView) else leaf
                for _, leaf in pt.leaves(described)
            ]
            if kind == "pt"
            else None
        )
        assert expected is None or [array.shape for array in arrays] == [
            shape for shape in expected if type(shape) is tuple
        ]
        assert sum({id(array): array.nbytes for array in arrays}.values()) <= size, (
            "more numbers than the file has"
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="duration (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random changes (%(default)s)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("runs/fuzz"),
        help="folder for the files that are findings (%(default)s)",
    )
    options = parser.parse_args()
    draw, outcomes, findings = Draw(options.seed), Counter[tuple[str, str]](), Counter[str]()
    slowest, most = 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        folder, end = Path(name), time.monotonic() + options.seconds
        originals = list(seeds(folder))
        for kind, content in originals:
            (folder / "good").write_bytes(content)
            assert judged(folder / "good", kind).outcome == "read", (
                f"a valid {kind} file is refused"
            )
        while time.monotonic() < end:
            kind, content = draw.choice(originals)
            path = folder / "fuzzed"
            path.write_bytes(changed(draw, kind, content, [each for _, each in originals]))
            try:
                result = judged(path, kind)
                outcomes[kind, result.outcome] += 1
                slowest, most = max(slowest, result.seconds), max(most, result.memory)
            except Exception as error:
                finding = f"{kind}: {type(error).__name__}: {error}"[:300]
                if not findings[finding]:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    (options.keep / f"{options.seed}-{len(findings)}.{kind}").write_bytes(
                        path.read_bytes()
                    )
                    print(finding, file=sys.stderr, flush=True)
                findings[finding] += 1
    print(fuzzing.table(outcomes, ("pt", "safetensors", "index")))
    print(
        f"{len(findings)} findings; the slowest took {slowest:.2f} s, the largest"
        f" {most / 1e6:.1f} MB (both with memory traced)"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
