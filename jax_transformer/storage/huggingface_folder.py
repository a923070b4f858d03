"""A folder of Hugging Face transformers: config.json, weights in one file or several, tokenizer;
names and their order are those of transformers 5.23 (``utils/__init__.py``). Loads no jax.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import atomic, untrusted
from jax_transformer.storage.untrusted import shown

if TYPE_CHECKING:
    from jax_transformer.storage.tensors import LazyState, LazyTensor

CONFIG, GENERATION, CARD = "config.json", "generation_config.json", "README.md"
IN_RUN = "huggingface"
"""The folder of a run with a Hugging Face folder's files except the weights, unchanged."""
LAYOUT = "layout.json"
"""In that folder of a run: the index and headers of the files that its weights are from."""
INDEX = ".index.json"
SAFETENSORS, PT = "model.safetensors", "pytorch_model.bin"
FLAX = "flax_model.msgpack"
WEIGHTS = (SAFETENSORS, SAFETENSORS + INDEX, PT, PT + INDEX, FLAX, FLAX + INDEX)
TOKENIZER = tuple(
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
    "target_vocab.json vocab-src.json vocab-tgt.json merges.txt source.spm target.spm "
    "spiece.model sentencepiece.bpe.model spm.model tokenizer.model".split()
)
SOUND = ("preprocessor_config.json", "processor_config.json", "normalizer.json")
"""Settings of spectrograms, and of comparing transcripts."""
EXTRA_FILES = (CONFIG, GENERATION, *TOKENIZER, *SOUND, CARD, "LICENSE", "LICENSE.md", "LICENSE.txt")
_NOT_READ = ("tf_model.h5", "rust_model.ot", "model.onnx")
"""Weights of other frameworks."""
SHARD_SIZE = 5_000_000_000  # transformers' default until its version 5
_SHARD = r"model-\d{5}-of-\d{5}\.safetensors"
_LONGEST_CONFIG = 10_000_000


@dataclass(frozen=True)
class Folder:
    """The files of a folder; no weights are read."""

    path: Path
    data: Mapping[str, Any]
    """config.json."""
    weights: Path
    """The file of weights, or the index of several."""
    files: tuple[Path, ...]
    """The index, if there is one, and the files that hold the weights."""
    extra_names: tuple[str, ...]
    """Names of the files that are copied with the weights, unchanged."""
    others: tuple[tuple[str, str], ...]
    """The other files and folders, and why each is left out of a conversion."""

    @property
    def shards(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        return self.files[1:] or self.files


def configuration(path: Path) -> Mapping[str, Any]:
    """Return a folder's config.json. Raises InputError, or UnsafeFileError if it is too large."""
    data = untrusted.read_json(path / CONFIG, longest=_LONGEST_CONFIG)
    if not isinstance(data, dict):
        raise InputError(f"{path / CONFIG}: is not a JSON object")
    return data


def find(path: str | Path) -> Folder:
    """Find a folder's files. Raises InputError naming weight files if it has none of them."""
    path = Path(path)
    data = configuration(path)
    weights = next(filter(Path.is_file, map(path.joinpath, WEIGHTS)), None)
    if weights is None:
        others = [name for name in _NOT_READ if (path / name).is_file()]
        hint = f"; {', '.join(others)} cannot be read: get the PyTorch weights of this model"
        reason = f"there is none of {', '.join(WEIGHTS)}{hint if others else ''}"
        raise InputError(f"{path}: holds no weights: {reason}")
    shards = untrusted.shards(weights) if weights.name.endswith(INDEX) else []
    files = (weights, *shards)
    extra_names = tuple(name for name in EXTRA_FILES if (path / name).is_file())
    left_out = tuple(
        (entry.name, _why(entry, weights.name))
        for entry in sorted(path.iterdir())
        if entry not in files and entry.name not in extra_names
    )
    return Folder(path, data, weights, files, extra_names, left_out)


def _why(path: Path, chosen: str) -> str:
    if path.is_dir():
        return "a folder"
    weights = (".safetensors", ".bin", ".msgpack", ".h5", ".ot", ".onnx")
    if path.suffix in weights or path.name.endswith(INDEX):
        return f"weights again, next to {chosen}, which is read"
    if path.suffix in (".py", ".sh"):
        return "a program; programs are neither run nor copied"
    return "neither weights, configuration nor tokenizer"


# Writing


def write(
    path: Path,
    state: "LazyState",
    extra_files: Mapping[str, bytes],
    *,
    shard_size: int = SHARD_SIZE,
    parameters: int | None = None,
    layout: Mapping[str, str] | None = None,
) -> None:
    """Write a new folder: ``state`` unchanged, in one file or in several of at most ``shard_size``
    bytes, and the other files by their names. Each tensor is read back and compared.

    The index counts ``parameters``, by default all numbers. If ``layout``, of another folder, has
    the same tensors, there are its files with their headers, and its index.

    Nothing is synced or renamed: see :func:`jax_transformer.storage.atomic.folder`.
    """
    from jax_transformer.storage import safetensors

    path.mkdir()
    layout = layout or {}
    parts = _as_before(layout, state)
    if not parts:
        layout, several = {}, split(state, shard_size)
        for number, group in enumerate(several, 1):
            parts[f"model-{number:05d}-of-{len(several):05d}.safetensors"] = group
        if len(several) == 1:
            parts = {SAFETENSORS: several[0]}
    files: dict[str, str] = {}
    for name, part in parts.items():
        begin = layout.get(name)
        safetensors.save(path / name, part, target=path / name, hashed=False, begin=begin)
        files |= dict.fromkeys(part, name)
    if SAFETENSORS not in parts:
        total = {
            "total_parameters": parameters or sum(tensor.info.size for tensor in state.values()),
            "total_size": sum(tensor.nbytes for tensor in state.values()),
        }
        index = to_json({"metadata": total, "weight_map": dict(sorted(files.items()))})
        index = layout.get(SAFETENSORS + INDEX, "").encode() or index
        (path / (SAFETENSORS + INDEX)).write_bytes(index)
    write_files(path, extra_files)


def layout(files: Iterable[Path]) -> dict[str, str]:
    """Return the text of an index and the header of each .safetensors file, by name; empty if files
    have other names than transformers', or if :func:`write` writes the same anyway.
    """
    from jax_transformer.storage import safetensors

    texts: dict[str, str] = {}
    for file in files:
        if file.name == SAFETENSORS + INDEX:
            texts[file.name] = untrusted.read_bytes(file, untrusted.LONGEST_JSON).decode()
        elif not _is_weights(file.name):
            return {}
        else:
            texts[file.name] = safetensors.stored_header(file)
    if list(texts) == [SAFETENSORS]:
        usual = safetensors.in_order(safetensors.describe(file))
        if texts[SAFETENSORS] == safetensors.header_text(usual):
            return {}
    return texts


def read_layout(path: Path) -> dict[str, str]:
    """Return what a run has recorded of :func:`layout`. Raises InputError if it is damaged."""
    data = untrusted.read_json(path) if path.is_file() else {}
    if not isinstance(data, dict) or not all(isinstance(text, str) for text in data.values()):
        raise InputError(f"{path}: is not an object of texts")
    return data


def _as_before(layout: Mapping[str, str], state: "LazyState") -> dict[str, dict[str, "LazyTensor"]]:
    """Return the tensors of each file of a layout; empty if it has other ones than ``state``."""
    from jax_transformer.storage import safetensors

    parts: dict[str, dict[str, LazyTensor]] = {}
    left = dict(state)
    for name in filter(_is_weights, layout):
        part = parts[name] = {}
        for tensor, extent in safetensors.extents(Path(LAYOUT), layout[name]).items():
            there = extent.shape, safetensors.DTYPES[extent.dtype].name
            if tensor not in left or (left[tensor].shape, left[tensor].dtype) != there:
                return {}
            part[tensor] = left.pop(tensor)
    return {} if left else parts


def write_files(path: Path, files: Mapping[str, bytes]) -> None:
    """Write files by name into a folder, created if needed; on the disk when this returns."""
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        atomic.write_bytes(path / name, content)
    atomic.sync(path.parent)


def is_written(name: str) -> bool:
    """Return True for names of files that an export may write."""
    return name in (SAFETENSORS + INDEX, *EXTRA_FILES) or _is_weights(name)


def _is_weights(name: str) -> bool:
    return name == SAFETENSORS or re.fullmatch(_SHARD, name) is not None


def split(state: "LazyState", most: int) -> list[dict[str, "LazyTensor"]]:
    """Split tensors, in order, into groups of at most ``most`` bytes; a larger one is alone, before
    the group that is being filled, as in huggingface_hub's ``split_torch_state_dict_into_shards``.
    """
    parts: list[dict[str, LazyTensor]] = []
    part: dict[str, LazyTensor] = {}
    filled = 0
    for name, tensor in state.items():
        if tensor.nbytes > most:
            parts.append({name: tensor})
            continue
        if filled + tensor.nbytes > most:
            parts.append(part)
            part, filled = {}, 0
        part[name] = tensor
        filled += tensor.nbytes
    return [*parts, part] if part else parts


def size(text: str) -> int:
    """Parse a size in bytes: ``5GB``, ``200MB`` or a number. Raises ConfigError for other text."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    unit = units.get(text[-2:].upper(), 1)
    number = text if unit == 1 else text[:-2]
    if not (number.isascii() and number.isdecimal()) or int(number) < 1:
        raise ConfigError(
            f"--shard-size {shown(text)}: give a whole number of bytes, KB, MB, GB or TB, for "
            "example 5GB"
        )
    return int(number) * unit


def to_json(data: Mapping[str, Any]) -> bytes:
    """JSON in transformers' format."""
    return (json.dumps(data, indent=2, sort_keys=False, ensure_ascii=False) + "\n").encode()


def with_dtype(data: Mapping[str, Any], dtypes: set[str]) -> dict[str, Any]:
    """Return config.json with its weights' dtype: ``dtype``, ``torch_dtype`` before version 5."""
    if len(dtypes) != 1:
        return dict(data)
    name = "torch_dtype" if "torch_dtype" in data else "dtype"
    return {**data, name: next(iter(dtypes))}


def contents(files: Mapping[str, Path]) -> dict[str, bytes]:
    """Return the content of files by their names. Raises InputError for one that cannot be read."""
    try:
        return {name: path.read_bytes() for name, path in files.items()}
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror or error}") from None
