"""Find the format of files and folders, and open them: the formats of this folder, those of
installed packages, and added ones.

A format is imported when a path or a name asks for it, those of this folder before others. An
installed package adds one by an entry point of the group ``jax_transformer.formats``, whose name is
the format's; :func:`register` adds one for this process.

``hf:owner/name`` and ``hf:owner/name@revision`` are downloaded through ``huggingface_hub`` into its
own cache. Configuration, weights in one format, and tokenizer files are requested by name; programs
never are. No code in a file is run. Importing this module loads no jax, and neither does opening a
file.
"""

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.formats.base import Format, Pretrained
from jax_transformer.formats.contents import Contents
from jax_transformer.runtime import process
from jax_transformer.storage import atomic, huggingface_folder
from jax_transformer.storage.huggingface_folder import CONFIG, EXTRA_FILES, WEIGHTS

if TYPE_CHECKING:
    from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
    from jax_transformer.transformer import Transformer

ENTRY_POINTS = "jax_transformer.formats"
HUB = "hf:"
"""The beginning of the name of a model on the hub."""
# In the order in which folders are asked
_OURS = {
    "run": ("runs", "RUN"),
    "step": ("runs", "CHECKPOINT"),
    "hf": ("huggingface_folders", "FORMAT"),
    "safetensors": ("safetensors_files", "FORMAT"),
    "pt": ("pt_files", "FORMAT"),
}
_BY_SUFFIX = {".safetensors": "safetensors", ".json": "safetensors"}
_BY_SUFFIX |= dict.fromkeys((".pt", ".pth", ".bin"), "pt")
_WRITTEN = [suffix for suffix in _BY_SUFFIX if suffix != ".json"]
# A letter, digit, underscore, dot or dash; the hub's own rule for names
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", re.ASCII)
_OPTIONS = {
    "weights": ("auto", "--weights {}: {} is not a run folder, and has one set of weights"),
    "key": (None, "--key {}: {} is not a PyTorch file"),
    "scan_axis": (None, "--param-scan-axis {}: {} is not a checkpoint of T5X"),
}
_added: dict[str, Format] = {}


# Opening


def open(
    path: str | Path,
    weights: str = "auto",
    *,
    key: str | None = None,
    strip_prefix: str = "",
    scan_axis: int | None = None,
) -> Pretrained:
    """Open the weights at ``path``: a run folder, one checkpoint, a Hugging Face folder,
    ``hf:owner/name``, a .safetensors file or the index of several, a PyTorch file, or a file or
    folder of another format in the registry, such as a checkpoint of T5X. The content decides.

    A checkpoint is verified against its manifest here, once; everything else is read on demand.

    Args:
        path: a file, a folder or ``hf:owner/name``.
        weights: ``auto``, ``averaged``, ``best``, ``last`` or the number of a step, in a run. If a
            checkpoint is damaged, ``auto`` names it on stderr and takes the next.
        key: the key of the state_dict in a PyTorch file, such as ``model``; not needed if there is
            only one.
        strip_prefix: removed from the beginning of every name of a file, such as ``module.``.
        scan_axis: T5X's ``param_scan_axis``, if the shapes of a checkpoint fit several.

    Raises:
        InputError: the file is missing, damaged, or of no known format.
        CheckpointError: a run has no intact checkpoint, or not the one that ``weights`` selects.
        ConfigError: an argument does not apply to this format.
        UnsafeFileError: the file would run code, or needs more memory than it has bytes.
    """
    path = download(str(path)) if str(path).startswith(HUB) else Path(path)
    format = of(path)
    options: dict[str, Any] = {"weights": weights, "key": key, "scan_axis": scan_axis}
    for name, (default, refusal) in _OPTIONS.items():
        if name not in format.open_options:
            if options[name] != default:
                raise ConfigError(refusal.format(options[name], path))
            del options[name]
    opened = format.open(path, **options)
    return opened.with_names(NameChanges(strip_prefix)) if strip_prefix else opened


def load(
    path: str | Path,
    weights: str = "auto",
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> "tuple[Transformer, Tokenizer | TokenizerPair | None]":
    """Load the model and the tokenizer of a run folder, a Hugging Face folder or ``hf:owner/name``;
    the tokenizer is None if there is none.

    The model knows none of the folder's settings of generation: the functions of
    :mod:`jax_transformer.generate` decode as their arguments say, and only
    :class:`jax_transformer.Translator` translates as the folder says. Arrays keep the dtypes of the
    files. The languages are for a multilingual tokenizer.
    ``weights`` and errors are those of :func:`open`.
    """
    opened = open(path, weights)
    if not opened.has_tokenizer and source_lang is None and target_lang is None:
        return opened.model(), None
    return opened.model(), opened.tokenizer(source_lang, target_lang)


def inspect(path: str | Path) -> Contents:
    """Describe the file or folder at ``path``; no weights are loaded. Raises InputError for an
    unknown format or a wrong checksum, CheckpointError for a damaged checkpoint, UnsafeFileError
    for a file that tries to run code or declares more data than it has.
    """
    path = download(str(path)) if str(path).startswith(HUB) else Path(path)
    return of(path).inspect(path)


def download(path: str) -> Path:
    """Return the folder of ``hf:owner/name@revision``. Raises ConfigError or InputError."""
    name = path.removeprefix(HUB)
    if not _HUB_NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{path}: give a model of the hub as hf:owner/name or hf:owner/name@revision"
        )
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        raise ConfigError(
            f"{path}: models of the hub need huggingface_hub: pip install 'jax-seq2seq[hub]'"
        ) from None
    repository, _, stated = name.partition("@")
    revision = stated or None
    try:
        names = _to_download(path, HfApi().list_repo_files(repository, revision=revision))
        return Path(snapshot_download(repository, revision=revision, allow_patterns=names))
    except (ConfigError, InputError):
        raise
    except Exception as error:  # of the library, of the network, and of its storage
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{path}: cannot be downloaded: {reason}") from error


def _to_download(path: str, listed: list[str]) -> list[str]:
    """Return the files to download, of those that the repository has."""
    weights = next((name for name in WEIGHTS if name in listed), None)
    if weights is None or CONFIG not in listed:
        missing = CONFIG if CONFIG not in listed else f"any of {', '.join(WEIGHTS)}"
        raise InputError(f"{path}: is not a model that can be read: it lacks {missing}")
    shards = []
    if weights.endswith(huggingface_folder.INDEX):  # model-00001-of-00002.safetensors
        stem, _, suffix = weights.removesuffix(huggingface_folder.INDEX).rpartition(".")
        shard = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{suffix}")
        shards = [name for name in listed if shard.fullmatch(name)]
    return [weights, *shards, *(name for name in EXTRA_FILES if name in listed)]


# Formats


def register(format: Format) -> Format:
    """Add a format for this process, and return it. Raises ConfigError if another has its name."""
    if format.name in _OURS or _added.get(format.name, format) is not format:
        raise ConfigError(f"another format is registered as {format.name!r}: choose another name")
    _added[format.name] = format
    return format


def get(name: str) -> Format:
    """Return the format of that name. Raises ConfigError if there is none."""
    if name in _OURS:
        file, value = _OURS[name]
        format: Format = getattr(importlib.import_module(f"{__package__}.{file}"), value)
        return format
    if name not in _added:
        points = process.entry_points(ENTRY_POINTS)
        if name not in points:
            known = [*_OURS, *_added, *points]
            raise ConfigError(
                f"unknown format {name!r}{nearest(name, known)}; known: {', '.join(known)}"
            )
        loaded = process.load_entry_point(points[name], Format)
        if loaded.name != name:
            raise ConfigError(
                f"entry point {name} = {points[name].value}: is the format {loaded.name}"
            )
        _added[name] = loaded
    return _added[name]


def others() -> Iterator[Format]:
    """Yield the formats of other packages and the added ones, without those that do not load."""
    for name in dict.fromkeys([*_added, *process.entry_points(ENTRY_POINTS)]):
        try:
            yield get(name)
        except ConfigError:
            continue


def of(path: Path) -> Format:
    """Return the format at ``path``, by its content. Raises InputError if none is known."""
    if not path.exists():
        hint = ""
        if "/" in str(path) and _HUB_NAME.fullmatch(str(path)) and not path.parent.exists():
            hint = "" if path.suffix in _BY_SUFFIX else f" (did you mean {HUB}{path}?)"
        raise InputError(f"{path}: no such file or folder{hint}")
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
    """Return the format of ``path`` by its suffix. Raises InputError if no format reads it."""
    if suffix in _BY_SUFFIX:
        return get(_BY_SUFFIX[suffix])
    for format in others():
        if suffix in format.suffixes:
            return format
    raise InputError(f"{path}: no installed format reads {suffix} files")


# Writing


def to_write(path: Path, to: str | None = None) -> Format:
    """Return the format to write: a file's by its suffix, a folder's, whose name has none, by
    ``to``; a number is a checkpoint. Raises ConfigError if the suffix is unknown, or contradicts
    ``to``.
    """
    if str(path) == atomic.STDOUT:
        raise ConfigError("-: weights are written to a file or folder, not to standard output")
    if path.name.endswith(".safetensors.index.json"):
        raise ConfigError(f"{path}: several files are read, but one .safetensors file is written")
    if to is not None:
        may_be = to in ("hf", "run", *_added, *process.entry_points(ENTRY_POINTS))
        format = get(to) if may_be else None
        if format is None or format.is_file or format.write_options is None:
            known = ["hf", "run"]
            known += [f.name for f in others() if not f.is_file and f.write_options is not None]
            raise ConfigError(f"--to {to} is not one of {', '.join(known)}{nearest(to, known)}")
        if path.suffix in _WRITTEN:
            raise ConfigError(f"--to {to}: {path} is the name of a file, and {to} is a folder")
        return format
    if str(path).startswith(HUB):
        hint = "convert to a folder with --to hf"
        raise ConfigError(f"{path}: is a place to read from; nothing is uploaded: {hint}")
    if not path.suffix[1:].isalpha():
        return get("step" if path.name.isdecimal() else "run")
    if path.suffix in _WRITTEN:
        return get(_BY_SUFFIX[path.suffix])
    known = list(_WRITTEN)
    for format in others():
        if format.write_options is not None:
            if path.suffix in format.suffixes:
                return format
            known += format.suffixes
    hint = "a name without suffix becomes a folder"
    raise ConfigError(f"{path}: {path.suffix} is none of {', '.join(known)}; {hint}")


def check_free(format: Format, target: Path, *, force: bool) -> None:
    """Raise InputError unless a file or folder of this format may be written to ``target``: a
    device or FIFO always, a file or folder of its own format with ``force``. The parent of a folder
    may be missing: it is created when the folder is written.
    """
    if format.is_file:
        if atomic.is_stream(target):
            return
        target = Path(os.path.realpath(target))  # a link is followed
    parent = target.absolute().parent
    creates_parent = (
        not format.is_file
        and format.makes_parent
        and not os.path.lexists(parent)
        and parent.parent.is_dir()
    )
    if not parent.is_dir() and not creates_parent:
        raise InputError(f"{target.parent}: no such folder")
    if target.is_symlink():
        raise InputError(f"{target}: is a link, which no folder replaces")
    if not target.exists():
        return
    if not force:
        raise InputError(f"{target}: exists already, and is not overwritten without --force")
    if target.is_file() != format.is_file:
        existing = "a file" if target.is_file() else "a folder"
        raise InputError(f"{target}: is {existing}, and --force replaces only a {format.title}")
    if target.is_dir():
        format.check_replaceable(target)
