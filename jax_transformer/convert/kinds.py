"""What kind of thing holds weights: known by content where it is there, by name where it is still to be written. Loads no jax."""

import enum
from pathlib import Path

from jax_transformer.convert.files import safetensors
from jax_transformer.errors import ConfigError, InputError

MANIFEST = "manifest.json"
CONFIG = "config.json"
INDEX = ".safetensors.index.json"
_PT_SUFFIXES = (".pt", ".pth", ".bin")


class Kind(enum.Enum):
    """The forms that weights are kept in."""

    SAFETENSORS = "safetensors"
    SHARDED = "sharded safetensors"
    PT = "PyTorch file"
    RUN = "run folder"
    STEP = "checkpoint"

    @property
    def is_file(self) -> bool:
        """Whether it is a file, and so under PyTorch's names; folders are under Flax's."""
        return self in (Kind.SAFETENSORS, Kind.SHARDED, Kind.PT)


def of(path: Path) -> Kind:
    """The kind of what lies at ``path``, by its content. Raises InputError where it is none that is known."""
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
    if start[:4] == b"PK\x03\x04" or start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return Kind.PT  # a zip, or the bare pickle of before PyTorch 1.6, which its reader refuses with a hint
    if safetensors.is_index(path):
        return Kind.SHARDED
    if start[8:9] == b"{":
        return Kind.SAFETENSORS
    raise InputError(f"{path}: neither a safetensors file, nor an index of them, nor a PyTorch file (a zip)")


def _of_folder(path: Path) -> Kind:
    if (path / MANIFEST).is_file():
        return Kind.STEP
    if (path / CONFIG).is_file() and (path / "checkpoints").is_dir():
        return Kind.RUN
    raise InputError(f"{path}: neither a run folder ({CONFIG} and checkpoints/) nor one checkpoint of a run ({MANIFEST})")


def wanted(path: Path) -> Kind:
    """The kind that a new file or folder of this name gets. Raises ConfigError where the name does not say."""
    if path.name.endswith(INDEX):
        raise ConfigError(f"{path}: several files are read, but one .safetensors file is written")
    if path.suffix == ".safetensors":
        return Kind.SAFETENSORS
    if path.suffix in _PT_SUFFIXES:
        return Kind.PT
    if path.suffix[1:].isalpha():
        raise ConfigError(
            f"{path}: {path.suffix} is none of .safetensors, {', '.join(_PT_SUFFIXES)}; a name without suffix becomes a folder"
        )
    return Kind.STEP if path.name.isdecimal() else Kind.RUN
