"""Write weights to any kind of file or folder, one tensor at a time.

What was written is read back and compared bit for bit before the file or folder gets its name.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.extras.toolkits.t5x import t5x_checkpoint, t5x_names
from jax_transformer.extras.toolkits.t5x.t5x_names import Layout
from jax_transformer.formats.kinds import CONFIG, CONVERTED, DEPLOYED, Kind
from jax_transformer.storage import (
    atomic,
    checkpoint,
    checkpoint_stream,
    checksums,
    read_back,
    run_files,
    safetensors,
)
from jax_transformer.storage import huggingface_folder as folders
from jax_transformer.storage.lazy import LazyState, LazyTensor
from jax_transformer.storage.read_back import Digests
from jax_transformer.weights import stacked

_RUN_FILES = (CONFIG, "checkpoints", folders.IN_RUN, *run_files.SIDE_FILES, checksums.NAME)
_TOKENIZER_FILES = (
    *run_files.SIDE_FILES,
    *folders.TOKENIZER,
)
_CTRANSLATE2_FILES = (
    "model.bin",
    CONFIG,
    *(f"{side}_vocabulary.json" for side in ("shared", "source", "target")),
    *_TOKENIZER_FILES,
)
_STABLEHLO_FILES = (
    "programs.json",
    "weights.safetensors",
    "run.py",
    *(f"{program}.stablehlo" for program in ("encode", "decode_step", "greedy", "beam")),
    *_TOKENIZER_FILES,
)


def check_free(target: Path, kind: Kind, *, force: bool) -> None:
    """Raise InputError unless ``target`` may be written.

    A device or a FIFO may always be. With ``force`` it may replace a file or folder of its own
    kind. The parent of a run or of a Hugging Face folder, e.g. ``runs``, may be missing: it is
    created when the folder is written.
    """
    if kind.is_file:
        if atomic.is_stream(target):
            return
        target = Path(os.path.realpath(target))  # a link is followed
    parent = target.absolute().parent
    creates_parent = (
        kind in (Kind.RUN, Kind.HUGGINGFACE, Kind.T5X, *DEPLOYED)
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
    if target.is_file() != kind.is_file:
        existing = "a file" if target.is_file() else "a folder"
        raise InputError(f"{target}: is {existing}, and --force replaces only a {kind.value}")
    if target.is_dir():
        _check_replaceable(target, kind)


def _check_replaceable(target: Path, kind: Kind) -> None:
    """Raise InputError unless ``target`` has only files that a conversion writes.

    A run that was trained is never replaced, because its training state would be lost.
    """
    names = sorted(path.name for path in target.iterdir() if path.name != CONVERTED)
    others = {
        Kind.RUN: [name for name in names if name not in _RUN_FILES],
        Kind.HUGGINGFACE: [name for name in names if not folders.is_written(name)],
        Kind.CTRANSLATE2: [name for name in names if name not in _CTRANSLATE2_FILES],
        Kind.STABLEHLO: [name for name in names if name not in _STABLEHLO_FILES],
        Kind.STEP: [],
        Kind.T5X: [name for name in names if not t5x_checkpoint.is_written(name)],
    }[kind]
    if others:
        raise InputError(
            f"{target}: holds more than weights ({', '.join(others)}), "
            f"and --force does not replace that"
        )
    if kind is Kind.STEP and names and checkpoint.MANIFEST not in names:
        raise InputError(f"{target}: is no checkpoint, and --force does not replace it")


@dataclass(frozen=True)
class ExtraFiles:
    """Files that go into a folder with the weights."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents by name; a run has those of a Hugging Face folder, with its config.json, in a
    subfolder.
    """
    shard_size: int = folders.SHARD_SIZE
    """Maximum size of one file of weights in a Hugging Face folder, in bytes."""


def write(
    target: Path,
    kind: Kind,
    state: LazyState,
    config: TransformerConfig | None,
    frozen: Collection[str],
    check: Callable[[LazyState], Any],
    extra_files: ExtraFiles | None = None,
    layout: Layout | None = None,
) -> str:
    """Write ``state``, read it back and compare; ``target`` is replaced only after that.

    One tensor is in memory at a time, or for a checkpoint a few small ones. Returns the SHA-256 of
    the file, or that of a folder's weights.

    Args:
        target: the file or folder.
        kind: its kind; runs and checkpoints, those of T5X too, are given Flax's names, the others
            PyTorch's.
        state: the tensors by name.
        config: written into a run.
        frozen: names of the arrays that are never trained.
        check: called with the tensors that were written, none of them read; it may refuse them by
            an exception.
        extra_files: files that go into a folder with the weights.
        layout: how a checkpoint of T5X stores them.
    """
    extra = extra_files or ExtraFiles()
    if kind.is_file:
        with atomic.file(target) as temporary:
            if kind is Kind.SAFETENSORS:
                sha256 = safetensors.save(temporary, state, target=target)
                check(safetensors.scan(temporary))
            else:
                from jax_transformer.storage import pt
                from jax_transformer.storage.pt import writer

                sha256 = writer.save(temporary, dict(state), target=target)
                check(pt.scan(temporary))
            return sha256
    with atomic.folder(target) as temporary, read_back.digests() as digests:
        hashed = {name: digests.watched(name, tensor) for name, tensor in state.items()}
        if kind is Kind.HUGGINGFACE:
            folders.write(temporary, hashed, extra.files, shard_size=extra.shard_size)
            check(folders.scan(folders.find(temporary)))
            _compare_files(target, temporary, extra.files)
        elif layout is not None:
            table = t5x_names.table(layout)
            t5x_checkpoint.write(temporary, stacked.to_stored(table, hashed), _step(target))
            arrays = stacked.to_flax(table, t5x_checkpoint.find(temporary).weights)
            _compare(target, digests.result(), arrays)
            check(arrays)
            folders.write_files(temporary, extra.files)
            _compare_files(target, temporary, extra.files)
        else:
            _write_checkpoint(temporary, kind, target, hashed, config, frozen, digests, check)
            if kind is Kind.RUN and extra.files:
                folder = temporary / (folders.IN_RUN if CONFIG in extra.files else "")
                folders.write_files(folder, extra.files)
                _compare_files(target, folder, extra.files)
            if kind is Kind.RUN:
                run_files.record(temporary)
        return _content_sha256(state, digests.result())


def _step(target: Path) -> int:
    """The step of a checkpoint of T5X, by its folder's name (``checkpoint_1000``); otherwise 0."""
    number = target.name.removeprefix("checkpoint_")
    return int(number) if number.isdecimal() and int(number) < 2**31 else 0


def _write_checkpoint(
    temporary: Path,
    kind: Kind,
    target: Path,
    state: LazyState,
    config: TransformerConfig | None,
    frozen: Collection[str],
    digests: Digests,
    check: Callable[[LazyState], Any],
) -> None:
    groups: dict[str, dict[str, LazyTensor]] = {"params": {}, "frozen": {}}
    for name, tensor in state.items():
        groups["frozen" if name in frozen else "params"][name] = tensor
    step = int(target.name) if kind is Kind.STEP else 0
    run = temporary if kind is Kind.RUN else temporary.with_name(f"{temporary.name}.run")
    try:
        root = run / "checkpoints"
        atomic.remove(run)  # of a killed process that had the same number
        root.mkdir(parents=True)
        # A new run has no data.json, by which it would be known
        about = {"run": None} if kind is Kind.RUN else run_files.about_run(target)
        checkpoint_stream.write(root, step, groups, about=about)
        # Its manifest has just been computed from the files
        scanned = checkpoint_stream.scan(checkpoint.open(root, step, verified=True), groups)
        arrays = {name.partition("/")[2]: tensor for name, tensor in scanned.items()}
        _compare(target, digests.result(), arrays)
        check(arrays)
        if kind is Kind.STEP:
            os.rename(root / str(step), temporary)
        elif config is not None:
            atomic.write_text(run / CONFIG, config.to_json())
    finally:
        if kind is Kind.STEP:
            atomic.remove(run)


def _compare(target: Path, written: Mapping[str, str], state: LazyState) -> None:
    """Raise InputError naming every tensor that differs between disk and memory, by SHA-256."""
    differing = sorted(written.keys() ^ state.keys())
    if not differing:
        with read_back.digests() as digests:
            for name, tensor in state.items():
                digests.watched(name, tensor).read()
        again = digests.result()
        differing = [name for name in state if again[name] != written[name]]
    if differing:
        raise InputError(
            f"{target}: {', '.join(differing)} reads back different; nothing was changed"
        )


def _content_sha256(state: LazyState, digests: Mapping[str, str]) -> str:
    """Hash every tensor's name, dtype, shape and SHA-256, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0{digests[name]}\0".encode())
    return digest.hexdigest()


def _compare_files(target: Path, folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        if (folder / name).read_bytes() != content:
            raise InputError(f"{target}: {name} reads back different; nothing was changed")
