"""Kinds of files and folders that hold weights: known by content if they exist, by name if they are
to be written.

``hf:owner/name`` and ``hf:owner/name@revision`` are models on the Hugging Face hub, downloaded
through ``huggingface_hub`` into its own cache. Configuration, weights in one format, and tokenizer
files are requested by name; programs never are.
"""

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.extras.toolkits.marian import marian_model, npz
from jax_transformer.extras.toolkits.t5x import t5x_checkpoint
from jax_transformer.storage import atomic, checkpoint, huggingface_folder, untrusted

HUB = "hf:"
# A letter, digit, underscore, dot or dash; the hub's own rule for names
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", re.ASCII)
CONFIG = "config.json"
CONVERTED = "ctranslate2"
"""A folder in that of a model, with what `--engine ctranslate2` has converted of it."""
INDEX = ".safetensors.index.json"
_PT_SUFFIXES = (".pt", ".pth", ".bin")
_ZIP, _PICKLES = b"PK\x03\x04", (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class Kind(enum.Enum):
    """The formats that weights are stored in."""

    SAFETENSORS = "safetensors"
    SHARDED = "sharded safetensors"
    PT = "PyTorch file"
    RUN = "run folder"
    STEP = "checkpoint"
    HUGGINGFACE = "Hugging Face folder"
    T5X = "checkpoint of T5X"
    MARIAN = "model of Marian"  # read, never written
    # Written, never read
    CTRANSLATE2 = "CTranslate2 folder"
    STABLEHLO = "StableHLO folder"

    @property
    def is_file(self) -> bool:
        """True for a file, or the index of several; False for a folder."""
        return self in (Kind.SAFETENSORS, Kind.SHARDED, Kind.PT)

    @property
    def has_torch_names(self) -> bool:
        """True if the weights have PyTorch's names; those of a run have this project's, and those
        of a checkpoint of T5X are read under them. A model of Marian is read under transformers'.
        """
        return self.is_file or self in (Kind.HUGGINGFACE, Kind.MARIAN)


DEPLOYED = (Kind.CTRANSLATE2, Kind.STABLEHLO)
"""Kinds that other programs run; nothing reads weights from them."""
_FOLDERS = {
    "hf": Kind.HUGGINGFACE,
    "run": Kind.RUN,
    "t5x": Kind.T5X,
    "ct2": Kind.CTRANSLATE2,
    "stablehlo": Kind.STABLEHLO,
}


def of(path: Path) -> Kind:
    """The kind of the file or folder at ``path``, by its content. Raises InputError if it is of no
    known kind.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder{_hub_hint(path)}")
    if path.is_dir():
        return _of_folder(path)
    if not path.is_file():
        raise InputError(f"{path}: neither a file nor a folder")
    try:
        with open(path, "rb") as file:
            start = file.read(16)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if npz.is_npz(path):
        return Kind.MARIAN
    if start[:4] == _ZIP or start[:2] in _PICKLES:  # a bare pickle is refused by its reader
        return Kind.PT
    if untrusted.is_index(path):
        return Kind.SHARDED
    if start[8:9] == b"{":
        return Kind.SAFETENSORS
    raise InputError(
        f"{path}: neither a safetensors file, nor an index of them, nor a PyTorch file (a zip), "
        "nor a model of Marian (.npz)"
    )


def _of_folder(path: Path) -> Kind:
    if (path / checkpoint.MANIFEST).is_file():
        return Kind.STEP
    if t5x_checkpoint.is_checkpoint(path):
        return Kind.T5X
    if (path / CONFIG).is_file():
        if (path / "checkpoints").is_dir():
            return Kind.RUN
        if is_huggingface(config := huggingface_folder.configuration(path)):
            return Kind.HUGGINGFACE
        if "d_model" in config:  # of a run that has no checkpoint yet
            return Kind.RUN
    if marian_model.weights(path):
        return Kind.MARIAN
    raise InputError(
        f"{path}: neither a run folder ({CONFIG} and checkpoints/), nor one checkpoint of a run "
        f"({checkpoint.MANIFEST}), nor a Hugging Face folder ({CONFIG} with model_type), nor a "
        f"checkpoint of T5X ({t5x_checkpoint.INDEX}), nor a model of Marian (*.npz)"
        f"{_checkpoint_hint(path)}"
    )


def _checkpoint_hint(path: Path) -> str:
    """A question for the newest checkpoint, if a folder has checkpoints of T5X."""
    steps = [
        int(step)
        for folder in path.glob("checkpoint_*")
        if (step := folder.name.removeprefix("checkpoint_")).isdecimal()
        and t5x_checkpoint.is_checkpoint(folder)
    ]
    return f" (did you mean {path / f'checkpoint_{max(steps)}'}?)" if steps else ""


def is_huggingface(config: Mapping[str, Any]) -> bool:
    """True if a ``config.json`` is one of transformers: it has a ``model_type``, and this project's
    has none.
    """
    return "model_type" in config


def to_write(path: Path, to: str | None = None) -> Kind:
    """The kind that a new file or folder of this name gets.

    Args:
        path: its suffix determines the kind of a file; a name without suffix is a folder, a number
            a checkpoint.
        to: ``hf``, ``run``, ``t5x``, ``ct2`` or ``stablehlo``, the kind of a folder.

    Raises:
        ConfigError: the suffix is unknown, or contradicts ``to``.
    """
    if to is not None and to not in _FOLDERS:
        known = ", ".join(_FOLDERS)
        raise ConfigError(f"--to {to} is not one of {known}{nearest(to, list(_FOLDERS))}")
    if str(path) == atomic.STDOUT:
        raise ConfigError("-: weights are written to a file or folder, not to standard output")
    if path.name.endswith(INDEX):
        raise ConfigError(f"{path}: several files are read, but one .safetensors file is written")
    if to is not None:
        if path.suffix in (".safetensors", *_PT_SUFFIXES):
            raise ConfigError(f"--to {to}: {path} is the name of a file, and {to} is a folder")
        return _FOLDERS[to]
    if is_hub_name(str(path)):
        raise ConfigError(
            f"{path}: is a place to read from; nothing is uploaded: "
            f"convert to a folder with --to hf"
        )
    if path.suffix == ".safetensors":
        return Kind.SAFETENSORS
    if path.suffix in _PT_SUFFIXES:
        return Kind.PT
    if path.suffix[1:].isalpha():
        raise ConfigError(
            f"{path}: {path.suffix} is none of .safetensors, {', '.join(_PT_SUFFIXES)}; "
            f"a name without suffix becomes a folder"
        )
    return Kind.STEP if path.name.isdecimal() else Kind.RUN


# Models on the hub


def _hub_hint(path: Path) -> str:
    """A question for the hub's model of that name, if a missing path looks like one."""
    is_file = path.suffix in (*_PT_SUFFIXES, ".safetensors", ".json")
    may_be = "/" in str(path) and _HUB_NAME.fullmatch(str(path)) and not path.parent.exists()
    return f" (did you mean {HUB}{path}?)" if may_be and not is_file else ""


def is_hub_name(path: str) -> bool:
    """True for a name on the hub, ``hf:...``."""
    return path.startswith(HUB)


def local(path: str | Path) -> Path:
    """The local folder of ``path``: itself, or the download for ``hf:owner/name``.

    Raises ConfigError if the name is invalid or ``huggingface_hub`` is not installed, InputError if
    the download fails.
    """
    if not is_hub_name(str(path)):
        return Path(path)
    name = str(path).removeprefix(HUB)
    if not _HUB_NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{path}: give a model of the hub as hf:owner/name or hf:owner/name@revision"
        )
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f"{path}: models of the hub need huggingface_hub: pip install 'jax-seq2seq[hub]'"
        ) from None
    repository, _, revision = name.partition("@")
    try:
        listed = huggingface_hub.HfApi().list_repo_files(repository, revision=revision or None)
        patterns = _to_download(str(path), listed)
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=patterns
            )
        )
    except (ConfigError, InputError):
        raise
    except Exception as error:  # of the library, of the network, and of its storage
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{path}: cannot be downloaded: {reason}") from error


def _to_download(path: str, listed: list[str]) -> list[str]:
    """The files to download, of those that the repository has."""
    form = next((name for name in huggingface_folder.WEIGHTS if name in listed), None)
    if form is None or CONFIG not in listed:
        missing = (
            CONFIG if CONFIG not in listed else f"any of {', '.join(huggingface_folder.WEIGHTS)}"
        )
        raise InputError(f"{path}: is no model that can be read: it lacks {missing}")
    shards = [
        name
        for name in listed
        if form.endswith(huggingface_folder.INDEX)
        and _is_shard(name, form.removesuffix(huggingface_folder.INDEX))
    ]
    return [form, *shards, *(name for name in huggingface_folder.EXTRA_FILES if name in listed)]


def _is_shard(name: str, file: str) -> bool:
    """True for the name of a shard of ``file``: model-00001-of-00002.safetensors."""
    stem, _, suffix = file.rpartition(".")
    return re.fullmatch(rf"{re.escape(stem)}-\d+-of-\d+\.{suffix}", name) is not None
