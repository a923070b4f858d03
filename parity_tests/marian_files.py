"""Models of Marian, written as it writes them, and what it computes with them, in NumPy.

Written from marian-dev 1.12 (``src/3rd_party/cnpy/cnpy.h``, ``src/common/io.cpp``,
``src/models/transformer.h``); shares no code with the reader.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity_tests import published

Arrays = dict[str, np.ndarray]
DEFAULTS = published.read("marian")
PRE_NORM = {
    "transformer-preprocess": "n",
    "transformer-postprocess": "da",
    "transformer-postprocess-top": "n",
}


def options(**changes: Any) -> dict[str, Any]:
    """Marian's options of a small model; underscores stand for dashes."""
    return DEFAULTS | {name.replace("_", "-"): value for name, value in changes.items()}


def weights(chosen: Mapping[str, Any], seed: int = 0) -> Arrays:
    """Random arrays of every name that a model with these options has."""
    d, ffn = chosen["dim-emb"], chosen["transformer-dim-ffn"]
    source, target = chosen["dim-vocabs"]
    flags = {name for name, value in chosen.items() if value == "true"}
    shapes: dict[str, tuple[int, ...]] = {}
    if flags & {"tied-embeddings-all", "tied-embeddings-src"}:
        shapes["Wemb"] = (source, d)
    else:
        shapes |= {"encoder_Wemb": (source, d), "decoder_Wemb": (target, d)}
    if not flags & {"tied-embeddings-all", "tied-embeddings"}:
        shapes["decoder_ff_logit_out_Wt"] = (target, d)
    if "output-omit-bias" not in flags:
        shapes["decoder_ff_logit_out_b"] = (1, target)
    pre = "_pre" if "n" in chosen["transformer-preprocess"] else ""

    def norm(prefix: str, suffix: str = pre) -> None:
        for part in ("scale", "bias"):
            shapes[f"{prefix}_ln_{part}{suffix}"] = (1, d)

    for stack, attentions in (("encoder", ["self"]), ("decoder", ["self", "context"])):
        width = chosen.get("transformer-decoder-dim-ffn", 0) if stack == "decoder" else 0
        width = width or ffn
        for layer in range(1, chosen[f"{stack[:3]}-depth"] + 1):
            prefix = f"{stack}_l{layer}"
            for attention in attentions:
                for part in "qkvo":
                    shapes[f"{prefix}_{attention}_W{part}"] = (d, d)
                    shapes[f"{prefix}_{attention}_b{part}"] = (1, d)
                norm(f"{prefix}_{attention}_Wo")
            shapes |= {f"{prefix}_ffn_W1": (d, width), f"{prefix}_ffn_b1": (1, width)}
            shapes |= {f"{prefix}_ffn_W2": (width, d), f"{prefix}_ffn_b2": (1, d)}
            norm(f"{prefix}_ffn_ffn")
        if "n" in chosen["transformer-postprocess-emb"]:
            norm(f"{stack}_emb", "_pre")
        if "n" in chosen["transformer-postprocess-top"]:
            norm(f"{stack}_top", "")
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape) * 0.7 for name, shape in shapes.items()}


# Files


def yaml(values: Mapping[str, Any]) -> str:
    """YAML of text, numbers and lists, in JSON's quotes where they are needed."""

    def of(value: Any) -> str:
        plain = isinstance(value, int) or (value and str(value)[0].isalpha() and ":" not in value)
        return str(value) if plain else json.dumps(value, ensure_ascii=False)

    return "".join(f"{of(name)}: {of(value)}\n" for name, value in values.items())


def npy(array: np.ndarray) -> bytes:
    """An array as cnpy writes it: types begin with <, those of bytes too."""
    shape = "".join(f"{size}, " for size in array.shape[:-1]) + f"{array.shape[-1]}"
    shape += "," if array.ndim == 1 else ""
    text = f"{{'descr': '<{array.dtype.str[1:]}', 'fortran_order': False, 'shape': ({shape}), }}"
    text += " " * (16 - (10 + len(text)) % 16 - 1) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + array.tobytes()


def npz(members: Mapping[str, bytes]) -> bytes:
    """A zip file as cnpy writes it: no compression, no dates, no extra fields."""
    content, directory = b"", b""
    for name, member in members.items():
        raw = name.encode()
        fields = struct.pack(
            "<5H3L2H", 20, 0, 0, 0, 0, zlib.crc32(member), len(member), len(member), len(raw), 0
        )
        directory += b"PK\x01\x02\x14\0" + fields + struct.pack("<3HLL", 0, 0, 0, 0, len(content))
        directory += raw
        content += b"PK\x03\x04" + fields + raw + member
    count, size = len(members), len(directory)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, size, len(content), 0)
    return content + directory + end


def model(arrays: Arrays, chosen: Mapping[str, Any], dtype: str = "<f4") -> bytes:
    """The file of a model: its arrays, and its options as bytes padded with NUL."""
    text = yaml(chosen).encode() + b"\0"
    text += b"\0" * (-len(text) % 256)
    members = {f"{name}.npy": npy(array.astype(dtype)) for name, array in arrays.items()}
    return npz(members | {"special:model.yml.npy": npy(np.frombuffer(text, np.int8))})


def opus(folder: Path, content: bytes, vocabulary: Mapping[str, int], **files: bytes) -> Path:
    """A folder as OPUS-MT publishes it; ``source`` and ``target`` are SentencePiece models."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "opus.spm32k-spm32k"
    (folder / f"{name}.transformer.model1.npz.best-perplexity.npz").write_bytes(content)
    words = (f"{json.dumps(word, ensure_ascii=False)}: {i}\n" for word, i in vocabulary.items())
    (folder / f"{name}.vocab.yml").write_text("".join(words))
    vocabs = f"  - {name}.vocab.yml\n" * 2
    (folder / "decoder.yml").write_text(
        f"models:\n  - {name}.transformer.model1.npz.best-perplexity.npz\nvocabs:\n{vocabs}"
        "beam-size: 6\nnormalize: 1\nword-penalty: 0\nmini-batch: 1\nrelative-paths: true\n"
    )
    for side, spm in files.items():
        (folder / f"{side}.spm").write_bytes(spm)
    return folder


# Arithmetic


class Reference:
    """Marian's arithmetic, or that of transformers' ``marian`` with the same weights."""

    def __init__(self, arrays: Arrays, chosen: Mapping[str, Any], *, transformers: bool = False):
        self.arrays, self.options = arrays, chosen
        self.epsilon = 1e-5 if transformers else 1e-6
        self.waves = chosen["dim-emb"] / 2 - (0 if transformers else 1)

    def norm(self, x: np.ndarray, prefix: str, suffix: str = "") -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.epsilon)
        scale, bias = (self.arrays[f"{prefix}_ln_{part}{suffix}"] for part in ("scale", "bias"))
        return x * scale + bias

    def around(self, x: np.ndarray, prefix: str, branch: Any) -> np.ndarray:
        if "n" in self.options["transformer-preprocess"]:
            return x + branch(self.norm(x, prefix, "_pre"))
        return self.norm(x + branch(x), prefix)

    def affine(self, x: np.ndarray, prefix: str, part: str) -> np.ndarray:
        return x @ self.arrays[f"{prefix}_W{part}"] + self.arrays[f"{prefix}_b{part}"]

    def attend(
        self, x: np.ndarray, memory: np.ndarray, visible: np.ndarray, prefix: str
    ) -> np.ndarray:
        heads = self.options["transformer-heads"]

        def split(y: np.ndarray, part: str) -> np.ndarray:
            y = self.affine(y, prefix, part)
            return y.reshape(*y.shape[:2], heads, -1).transpose(0, 2, 1, 3)

        query, key, value = split(x, "q"), split(memory, "k"), split(memory, "v")
        scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(query.shape[-1])
        scores = np.where(visible[:, None], scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = scores / scores.sum(-1, keepdims=True) @ value
        return self.affine(mixed.transpose(0, 2, 1, 3).reshape(x.shape), prefix, "o")

    def feed_forward(self, x: np.ndarray, prefix: str) -> np.ndarray:
        x = self.affine(x, prefix, "1")
        swish = self.options["transformer-ffn-activation"] == "swish"
        return self.affine(x / (1 + np.exp(-x)) if swish else np.maximum(x, 0), prefix, "2")

    def embedded(self, x: np.ndarray, stack: str) -> np.ndarray:
        d = x.shape[-1]
        rates = np.exp(-np.log(10000) * np.arange(d // 2) / self.waves)
        angles = np.arange(x.shape[1])[:, None] * rates
        table = np.concatenate([np.sin(angles), np.cos(angles)], -1).astype(np.float32)
        x = x * np.sqrt(d) + table
        named = "n" in self.options["transformer-postprocess-emb"]
        return self.norm(x, f"{stack}_emb", "_pre") if named else x

    def stack(
        self,
        stack: str,
        x: np.ndarray,
        visible: np.ndarray,
        memory: np.ndarray | None = None,
        visible_memory: np.ndarray | None = None,
    ) -> np.ndarray:
        x = self.embedded(x, stack)
        for layer in range(1, self.options[f"{stack[:3]}-depth"] + 1):
            own, cross, ffn = (f"{stack}_l{layer}_{part}" for part in ("self", "context", "ffn"))
            x = self.around(x, f"{own}_Wo", lambda y, p=own: self.attend(y, y, visible, p))
            if memory is not None:
                attend = lambda y, p=cross: self.attend(y, memory, visible_memory, p)  # noqa: E731
                x = self.around(x, f"{cross}_Wo", attend)
            x = self.around(x, f"{ffn}_ffn", lambda y, p=ffn: self.feed_forward(y, p))
        top = "n" in self.options["transformer-postprocess-top"]
        return self.norm(x, f"{stack}_top") if top else x

    def logits(self, source: np.ndarray, lengths: list[int], target: np.ndarray) -> np.ndarray:
        """Scores of the words (b, t, v) that follow zeros and each prefix of ``target``."""
        read = self.arrays.get("Wemb", self.arrays.get("encoder_Wemb"))
        write = self.arrays.get("Wemb", self.arrays.get("decoder_Wemb"))
        assert read is not None and write is not None
        seen = np.arange(source.shape[1]) < np.array(lengths)[:, None]
        x = read[np.where(seen, source, 0)]
        memory = self.stack("encoder", x, seen[:, None])
        words = write[target]
        begin = np.zeros((len(words), 1, words.shape[-1]))
        causal = np.tri(target.shape[1] + 1, dtype=bool)[None]
        y = np.concatenate([begin, words], 1)
        y = self.stack("decoder", y, causal, memory, seen[:, None])
        tied = "true" in (self.options["tied-embeddings-all"], self.options["tied-embeddings"])
        output = write if tied else self.arrays["decoder_ff_logit_out_Wt"]
        return y @ output.T + self.arrays.get("decoder_ff_logit_out_b", 0)

    def greedy(self, source: np.ndarray, lengths: list[int], steps: int) -> np.ndarray:
        """The most probable words, one after another."""
        target = np.zeros((len(source), 0), np.int64)
        for _ in range(steps):
            best = self.logits(source, lengths, target)[:, -1].argmax(-1)
            target = np.concatenate([target, best[:, None]], 1)
        return target
