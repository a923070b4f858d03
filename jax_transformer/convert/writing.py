"""Write weights to any kind of file or folder.

They are read back and compared bit for bit before the file or folder gets its name.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.storage import atomic, checkpoint, safetensors
from jax_transformer.storage import huggingface as folders
from jax_transformer.storage.kinds import CONFIG, Kind
from jax_transformer.storage.tensors import same

State = Mapping[str, np.ndarray]


def check_free(target: Path, kind: Kind, *, force: bool) -> None:
    """Raise InputError unless ``target`` may be written.

    With ``force`` it may replace a file or folder of its own kind. The parent of a run or of a
    Hugging Face folder, e.g. ``runs``, may be missing: it is created when the folder is written.
    """
    parent = target.absolute().parent
    creates_parent = (
        kind in (Kind.RUN, Kind.HUGGINGFACE)
        and not os.path.lexists(parent)
        and parent.parent.is_dir()
    )
    if not parent.is_dir() and not creates_parent:
        raise InputError(f"{target.parent}: no such folder")
    if target.is_symlink():
        raise InputError(f"{target}: is a link, and is not written through")
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
    names = sorted(path.name for path in target.iterdir())
    others = {
        Kind.RUN: [name for name in names if name not in (CONFIG, "checkpoints", folders.IN_RUN)],
        Kind.HUGGINGFACE: [name for name in names if not folders.is_written(name)],
        Kind.STEP: [],
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
    """Contents by name in a Hugging Face folder; a run has these files in a subfolder."""
    shard_size: int = folders.SHARD_SIZE
    """Maximum size of one file of weights in a Hugging Face folder, in bytes."""


def write(
    target: Path,
    kind: Kind,
    state: State,
    config: TransformerConfig | None,
    frozen: Collection[str],
    check: Callable[[State], Any],
    extra_files: ExtraFiles | None = None,
) -> None:
    """Write ``state``, read it back and compare; ``target`` is replaced only after that.

    Args:
        target: the file or folder.
        kind: its kind; runs and checkpoints have Flax's names, the others PyTorch's.
        state: the arrays by name.
        config: written into a run.
        frozen: names of the arrays that are never trained.
        check: called with the arrays that were read back; it may refuse them by an exception.
        extra_files: files that go into a folder with the weights.
    """
    extra = extra_files or ExtraFiles()
    with (atomic.file if kind.is_file else atomic.folder)(target) as temporary:
        if kind is Kind.SAFETENSORS:
            safetensors.write(temporary, state)
            read_back = safetensors.read(temporary)
        elif kind is Kind.PT:
            from jax_transformer.storage import pt, pt_writer

            pt_writer.write(temporary, dict(state))
            read_back = pt.read(temporary)
        elif kind is Kind.HUGGINGFACE:
            folders.write(temporary, state, extra.files, shard_size=extra.shard_size)
            read_back = folders.read(folders.find(temporary))
            _compare_files(target, temporary, extra.files)
        else:
            read_back = _write_checkpoint(temporary, kind, target, state, config, frozen)
            if kind is Kind.RUN and extra.files:
                folders.write_files(temporary / folders.IN_RUN, extra.files)
                _compare_files(target, temporary / folders.IN_RUN, extra.files)
        _compare(target, state, read_back)
        check(read_back)


def _write_checkpoint(
    temporary: Path,
    kind: Kind,
    target: Path,
    state: State,
    config: TransformerConfig | None,
    frozen: Collection[str],
) -> dict[str, np.ndarray]:
    groups: dict[str, dict[str, np.ndarray]] = {"params": {}, "frozen": {}}
    for name, array in state.items():
        groups["frozen" if name in frozen else "params"][name] = np.ascontiguousarray(array)
    step = int(target.name) if kind is Kind.STEP else 0
    run = temporary if kind is Kind.RUN else temporary.with_name(f"{temporary.name}.run")
    try:
        root = run / "checkpoints"
        root.mkdir(parents=True)
        checkpoint.save(root, step, groups, about={})
        arrays = checkpoint.open(root, step).arrays()
        if kind is Kind.STEP:
            os.rename(root / str(step), temporary)
        elif config is not None:
            atomic.write_text(run / CONFIG, config.to_json())
        return {name.partition("/")[2]: array for name, array in arrays.items()}
    finally:
        if kind is Kind.STEP:
            atomic.remove(run)


def _compare(target: Path, written: State, read_back: State) -> None:
    """Raise InputError naming every tensor that differs between disk and memory."""
    differing = sorted(written.keys() ^ read_back.keys()) or [
        name for name, array in written.items() if not same(array, read_back[name])
    ]
    if differing:
        raise InputError(
            f"{target}: {', '.join(differing)} reads back different; nothing was changed"
        )


def _compare_files(target: Path, folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        if (folder / name).read_bytes() != content:
            raise InputError(f"{target}: {name} reads back different; nothing was changed")
