"""What kind of thing holds weights: known by content where it is there, by name where it is still to be written. Loads no jax."""

import enum
from pathlib import Path

from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.storage import hub, huggingface, index

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
    HUGGINGFACE = "Hugging Face folder"

    @property
    def is_file(self) -> bool:
        """Whether it is a file, or the index of several, and no folder."""
        return self in (Kind.SAFETENSORS, Kind.SHARDED, Kind.PT)

    @property
    def has_torch_names(self) -> bool:
        """Whether the weights are under PyTorch's names; a run's are under this project's."""
        return self.is_file or self is Kind.HUGGINGFACE


_WORDS = {"hf": Kind.HUGGINGFACE, "run": Kind.RUN}


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
    if start[:4] == b"PK\x03\x04" or start[:2] in (
        b"\x80\x02",
        b"\x80\x03",
        b"\x80\x04",
        b"\x80\x05",
    ):
        return (
            Kind.PT
        )  # a zip, or the bare pickle of before PyTorch 1.6, which its reader refuses with a hint
    if index.is_index(path):
        return Kind.SHARDED
    if start[8:9] == b"{":
        return Kind.SAFETENSORS
    raise InputError(
        f"{path}: neither a safetensors file, nor an index of them, nor a PyTorch file (a zip)"
    )


def _of_folder(path: Path) -> Kind:
    if (path / MANIFEST).is_file():
        return Kind.STEP
    if (path / CONFIG).is_file() and (path / "checkpoints").is_dir():
        return Kind.RUN
    if (path / CONFIG).is_file() and "model_type" in huggingface.configuration(path):
        return Kind.HUGGINGFACE
    raise InputError(
        f"{path}: neither a run folder ({CONFIG} and checkpoints/), nor one checkpoint of a run ({MANIFEST}), nor a Hugging Face folder "
        f"({CONFIG} with model_type)"
    )


def wanted(path: Path, to: str | None = None) -> Kind:
    """The kind that a new file or folder of this name gets; ``to`` says which kind of folder. Raises ConfigError where neither says it."""
    if to is not None and to not in _WORDS:
        raise ConfigError(f"--to {to} is not one of {', '.join(_WORDS)}{nearest(to, list(_WORDS))}")
    if path.name.endswith(INDEX):
        raise ConfigError(f"{path}: several files are read, but one .safetensors file is written")
    if to is not None:
        if path.suffix in (".safetensors", *_PT_SUFFIXES):
            raise ConfigError(f"--to {to}: {path} is the name of a file, and {to} is a folder")
        return _WORDS[to]
    if hub.is_source(str(path)):
        raise ConfigError(
            f"{path}: is a place to read from; nothing is uploaded: convert to a folder with --to hf"
        )
    if path.suffix == ".safetensors":
        return Kind.SAFETENSORS
    if path.suffix in _PT_SUFFIXES:
        return Kind.PT
    if path.suffix[1:].isalpha():
        raise ConfigError(
            f"{path}: {path.suffix} is none of .safetensors, {', '.join(_PT_SUFFIXES)}; a name without suffix becomes a folder"
        )
    return Kind.STEP if path.name.isdecimal() else Kind.RUN
