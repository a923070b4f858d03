"""The registry of file formats: this folder's, those of installed packages, and added ones.

A format is imported when a path or a name asks for it, those of this folder before others. An
installed package adds one by an entry point of the group ``jax_transformer.formats``, whose name is
the format's; :func:`register` adds one for this process.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path

from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.formats import hub
from jax_transformer.formats.base import Format
from jax_transformer.runtime import entry_points
from jax_transformer.storage import atomic

ENTRY_POINTS = "jax_transformer.formats"
# In the order in which folders are asked
_OURS = {
    "run": "run_folders",
    "step": "checkpoints",
    "hf": "huggingface_folders",
    "safetensors": "safetensors_files",
    "pt": "pt_files",
}
_BY_SUFFIX = {
    ".safetensors": "safetensors",
    ".json": "safetensors",
    ".pt": "pt",
    ".pth": "pt",
    ".bin": "pt",
}
_added: dict[str, Format] = {}


def register(format: Format) -> Format:
    """Add a format for this process, and return it. Raises ConfigError if another has its name."""
    if format.name in _OURS or _added.get(format.name, format) is not format:
        raise ConfigError(f"another format is registered as {format.name!r}: choose another name")
    _added[format.name] = format
    return format


def get(name: str) -> Format:
    """Return the format of that name. Raises ConfigError if there is none."""
    if name in _OURS:
        module = importlib.import_module(f"{__package__}.{_OURS[name]}")
        format: Format = module.FORMAT
        return format
    if name not in _added:
        points = entry_points.of(ENTRY_POINTS)
        if name not in points:
            known = [*_OURS, *_added, *points]
            raise ConfigError(
                f"unknown format {name!r}{nearest(name, known)}; known: {', '.join(known)}"
            )
        loaded = entry_points.load(points[name], Format)
        if loaded.name != name:
            raise ConfigError(
                f"entry point {name} = {points[name].value}: is the format {loaded.name}"
            )
        _added[name] = loaded
    return _added[name]


def others() -> Iterator[Format]:
    """Yield the formats of other packages and the added ones; those that do not load are left
    out.
    """
    for name in dict.fromkeys([*_added, *entry_points.of(ENTRY_POINTS)]):
        try:
            yield get(name)
        except ConfigError:
            continue


def of(path: Path) -> Format:
    """Return the format of the file or folder at ``path``, by its content. Raises InputError if it
    has no known format.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder{hub.hint(path)}")
    if not path.is_dir() and not path.is_file():
        raise InputError(f"{path}: neither a file nor a folder")
    is_file, suggested = path.is_file(), _BY_SUFFIX.get(path.suffix)
    try:
        for name in dict.fromkeys([suggested or "run", *_OURS]):
            if (name in ("safetensors", "pt")) is is_file and get(name).recognises(path):
                return get(name)
        for format in others():
            if format.recognises(path):
                return format
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    known = [*map(get, _OURS), *others()]
    fitting = [
        f"a {format.title} ({format.mark})"
        for format in known
        if format.mark and bool(format.suffixes) is path.is_file()
    ]
    hints = "".join(format.hint(path) for format in known)
    raise InputError(f"{path}: neither {', nor '.join(fitting)}{hints}")


def of_suffix(path: Path, suffix: str) -> Format:
    """Return the format of files with this suffix, for the file ``path``. Raises InputError if no
    installed format reads them.
    """
    if suffix in _BY_SUFFIX:
        return get(_BY_SUFFIX[suffix])
    for format in others():
        if suffix in format.suffixes:
            return format
    raise InputError(f"{path}: no installed format reads {suffix} files")


def to_write(path: Path, to: str | None = None) -> Format:
    """Return the format that a new file or folder of this name gets.

    Args:
        path: its suffix determines the format of a file; a name without suffix is a folder, a
            number a checkpoint.
        to: the name of a folder's format, such as ``hf`` or ``run``.

    Raises:
        ConfigError: the suffix is unknown, or contradicts ``to``.
    """
    if str(path) == atomic.STDOUT:
        raise ConfigError("-: weights are written to a file or folder, not to standard output")
    if path.name.endswith(".safetensors.index.json"):
        raise ConfigError(f"{path}: several files are read, but one .safetensors file is written")
    if to is not None:
        return _folder(path, to)
    if hub.is_hub_name(str(path)):
        raise ConfigError(
            f"{path}: is a place to read from; nothing is uploaded: "
            f"convert to a folder with --to hf"
        )
    if not path.suffix[1:].isalpha():
        return get("step" if path.name.isdecimal() else "run")
    if path.suffix in _BY_SUFFIX and path.suffix != ".json":
        return get(_BY_SUFFIX[path.suffix])
    written = [format for format in others() if format.write_options is not None]
    for format in written:
        if path.suffix in format.suffixes:
            return format
    known = [suffix for suffix in _BY_SUFFIX if suffix != ".json"]
    known += [suffix for format in written for suffix in format.suffixes]
    raise ConfigError(
        f"{path}: {path.suffix} is none of {', '.join(known)}; a name without suffix becomes a "
        "folder"
    )


def _folder(path: Path, to: str) -> Format:
    """Return the format that ``--to`` names."""
    points = entry_points.of(ENTRY_POINTS)
    format = get(to) if to in _added or to in points or to in ("hf", "run") else None
    if format is None or format.is_file or format.write_options is None:
        known = ["hf", "run"]
        known += [f.name for f in others() if not f.is_file and f.write_options is not None]
        raise ConfigError(f"--to {to} is not one of {', '.join(known)}{nearest(to, known)}")
    if path.suffix in _BY_SUFFIX and path.suffix != ".json":
        raise ConfigError(f"--to {to}: {path} is the name of a file, and {to} is a folder")
    return format
