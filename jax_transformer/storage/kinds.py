"""Kinds of files and folders that hold weights: known by content if they exist, by name if they are
to be written.
"""

import enum
from pathlib import Path

from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.storage import hub, huggingface, index, manifest

CONFIG = "config.json"
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

    @property
    def is_file(self) -> bool:
        """True for a file, or the index of several; False for a folder."""
        return self in (Kind.SAFETENSORS, Kind.SHARDED, Kind.PT)

    @property
    def has_torch_names(self) -> bool:
        """True if the weights have PyTorch's names; those of a run have this project's."""
        return self.is_file or self is Kind.HUGGINGFACE


_FOLDERS = {"hf": Kind.HUGGINGFACE, "run": Kind.RUN}


def of(path: Path) -> Kind:
    """The kind of the file or folder at ``path``, by its content. Raises InputError if it is of no
    known kind.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir():
        return _of_folder(path)
    if not path.is_file():
        raise InputError(f"{path}: neither a file nor a folder")
    try:
        with open(path, "rb") as file:
            start = file.read(16)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if start[:4] == _ZIP or start[:2] in _PICKLES:  # a bare pickle is refused by its reader
        return Kind.PT
    if index.is_index(path):
        return Kind.SHARDED
    if start[8:9] == b"{":
        return Kind.SAFETENSORS
    raise InputError(
        f"{path}: neither a safetensors file, nor an index of them, nor a PyTorch file (a zip)"
    )


def _of_folder(path: Path) -> Kind:
    if (path / manifest.FILE).is_file():
        return Kind.STEP
    if (path / CONFIG).is_file():
        if (path / "checkpoints").is_dir():
            return Kind.RUN
        if "model_type" in (config := huggingface.configuration(path)):
            return Kind.HUGGINGFACE
        if "d_model" in config:  # of a run that has no checkpoint yet
            return Kind.RUN
    raise InputError(
        f"{path}: neither a run folder ({CONFIG} and checkpoints/), nor one checkpoint of a run "
        f"({manifest.FILE}), nor a Hugging Face folder ({CONFIG} with model_type)"
    )


def to_write(path: Path, to: str | None = None) -> Kind:
    """The kind that a new file or folder of this name gets.

    Args:
        path: its suffix determines the kind of a file; a name without suffix is a folder, a number
            a checkpoint.
        to: ``hf`` or ``run``, the kind of a folder.

    Raises:
        ConfigError: the suffix is unknown, or contradicts ``to``.
    """
    if to is not None and to not in _FOLDERS:
        known = ", ".join(_FOLDERS)
        raise ConfigError(f"--to {to} is not one of {known}{nearest(to, list(_FOLDERS))}")
    if path.name.endswith(INDEX):
        raise ConfigError(f"{path}: several files are read, but one .safetensors file is written")
    if to is not None:
        if path.suffix in (".safetensors", *_PT_SUFFIXES):
            raise ConfigError(f"--to {to}: {path} is the name of a file, and {to} is a folder")
        return _FOLDERS[to]
    if hub.is_source(str(path)):
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
