"""Run the programs in this folder. Needs jax, and flatbuffers, with which jax.export reads files.

    python run.py greedy < ids.txt     # a line of source ids in, a line of target ids out
    python run.py beam < ids.txt

In Python: ``model = Model("folder"); model.greedy(source)`` with ids (b, s), padded.
"""

import hashlib
import json
import sys
from pathlib import Path

import jax
import jax.export
import ml_dtypes  # comes with jax
import numpy as np


class Model:
    """The programs of a folder, compiled when they are first called with arrays of a new shape."""

    def __init__(self, folder):
        folder = Path(folder)
        self.manifest = json.loads((folder / "programs.json").read_text())
        self.weights = self._weights(self._verified(folder, self.manifest["weights"]))
        self._programs = {
            name: jax.jit(jax.export.deserialize(self._verified(folder, program)).call)
            for name, program in self.manifest["programs"].items()
        }

    def encode(self, source):
        """Return the decoder's cache for these sources (b, s), a list of arrays."""
        return self._programs["encode"](self.weights, np.asarray(source, np.int32))

    def decode_step(self, tokens, cache):
        """Return the logits (b, 1, v) of what follows the tokens (b, 1), and the next cache."""
        return self._programs["decode_step"](self.weights, np.asarray(tokens, np.int32), cache)

    def greedy(self, source):
        """Return ids (b, n), with the end token, and padding after it."""
        return self._programs["greedy"](self.weights, np.asarray(source, np.int32))

    def beam(self, source):
        """Return the best ids (b, n) of a beam search, and their scores (b)."""
        return self._programs["beam"](self.weights, np.asarray(source, np.int32))

    @staticmethod
    def _verified(folder, entry):
        content = (folder / entry["file"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise SystemExit(f"{folder / entry['file']}: is damaged: its SHA-256 is another")
        return bytearray(content)

    @staticmethod
    def _weights(content):
        """Return the arrays of a .safetensors file: a header in JSON, then their bytes."""
        size = int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8 : 8 + size]), memoryview(content)[8 + size :]
        kinds = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
        header.pop("__metadata__", None)
        arrays = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            array = np.frombuffer(data[start:end], kinds[entry["dtype"]])
            arrays[name] = jax.device_put(array.reshape(entry["shape"]))
        return arrays


def main(program):
    model = Model(Path(__file__).parent)
    ids = model.manifest["special_ids"]
    rows = [[int(word) for word in line.split()] for line in sys.stdin]
    source = np.full((len(rows), max(map(len, rows))), ids["source_pad"], np.int32)
    for row, numbers in zip(source, rows, strict=True):
        row[: len(numbers)] = numbers
    result = getattr(model, program)(source)
    for row in np.asarray(result[0] if program == "beam" else result).tolist():
        end = row.index(ids["end"]) + 1 if ids["end"] in row else len(row)
        print(*row[:end])


if __name__ == "__main__":
    main(*sys.argv[1:])
