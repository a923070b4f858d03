"""Write weights to any kind of file or folder, read them back, and compare them bit for bit before they get their name."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.storage import atomic, safetensors
from jax_transformer.storage import huggingface as folders
from jax_transformer.storage.kinds import CONFIG, Kind

State = Mapping[str, np.ndarray]


def check_free(target: Path, kind: Kind, *, force: bool) -> None:
    """Raises InputError unless something may be written there; with ``force`` it may replace what is of the same kind.

    The folder above a run or a Hugging Face folder need not be there yet, as ``runs``.
    """
    above = target.absolute().parent
    makes = (
        kind in (Kind.RUN, Kind.HUGGINGFACE)
        and not os.path.lexists(above)
        and above.parent.is_dir()
    )
    if not above.is_dir() and not makes:
        raise InputError(f"{target.parent}: no such folder")
    if target.is_symlink():
        raise InputError(f"{target}: is a link, and is not written through")
    if not target.exists():
        return
    if not force:
        raise InputError(f"{target}: exists already, and is not overwritten without --force")
    if target.is_file() != kind.is_file:
        raise InputError(
            f"{target}: is {'a file' if target.is_file() else 'a folder'}, and --force replaces only the like of a {kind.value}"
        )
    if target.is_dir():
        _check_replaceable(target, kind)


def _check_replaceable(target: Path, kind: Kind) -> None:
    """--force replaces what a conversion has made, and no run that was trained: that has more to lose than weights."""
    there = sorted(path.name for path in target.iterdir())
    more = {
        Kind.RUN: [name for name in there if name not in (CONFIG, "checkpoints", folders.IN_RUN)],
        Kind.HUGGINGFACE: [name for name in there if not folders.is_written(name)],
        Kind.STEP: [],
    }[kind]
    if more:
        raise InputError(
            f"{target}: holds more than weights ({', '.join(more)}), and --force does not replace that"
        )
    if kind is Kind.STEP and not (target / "manifest.json").is_file() and any(target.iterdir()):
        raise InputError(f"{target}: is no checkpoint, and --force does not replace it")


@dataclass(frozen=True)
class ExtraFiles:
    """What goes into a folder with the weights."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """By their names in a Hugging Face folder; a run keeps them in one of its own."""
    shard_size: int = folders.SHARD_SIZE
    """The most bytes of weights in one file of a Hugging Face folder."""


def write(
    target: Path,
    kind: Kind,
    state: State,
    config: TransformerConfig | None,
    frozen: Collection[str],
    check: Callable[[State], Any],
    beside: ExtraFiles | None = None,
) -> None:
    """Write ``state``, under PyTorch's names or, to a run, under Flax's, compare it, and let ``check`` refuse what was read back."""
    beside = beside or ExtraFiles()
    with (atomic.file if kind.is_file else atomic.folder)(target) as temporary:
        if kind is Kind.SAFETENSORS:
            safetensors.write(temporary, state)
            again = safetensors.read(temporary)
        elif kind is Kind.PT:
            from jax_transformer.storage import pt

            pt.write(temporary, dict(state))
            again = pt.read(temporary)
        elif kind is Kind.HUGGINGFACE:
            folders.write(temporary, state, beside.files, shard_size=beside.shard_size)
            again = folders.read(folders.find(temporary))
            _compare_files(target, temporary, beside.files)
        else:
            again = _write_checkpoint(temporary, kind, target, state, config, frozen)
            if kind is Kind.RUN and beside.files:
                folders.write_files(temporary / folders.IN_RUN, beside.files)
                _compare_files(target, temporary / folders.IN_RUN, beside.files)
        _compare(target, state, again)
        check(again)


def _write_checkpoint(
    temporary: Path,
    kind: Kind,
    target: Path,
    state: State,
    config: TransformerConfig | None,
    frozen: Collection[str],
) -> dict[str, np.ndarray]:
    from jax_transformer.storage import checkpoint

    groups: dict[str, dict[str, np.ndarray]] = {"params": {}, "frozen": {}}
    for name, array in state.items():
        groups["frozen" if name in frozen else "params"][name] = np.ascontiguousarray(array)
    step = int(target.name) if kind is Kind.STEP else 0
    holder = temporary if kind is Kind.RUN else temporary.with_name(f"{temporary.name}.holder")
    try:
        root = holder / "checkpoints"
        root.mkdir(parents=True)
        checkpoint.save(root, step, groups, about={})
        again = {
            name.partition("/")[2]: array
            for name, array in checkpoint.open(root, step).arrays().items()
        }
        if kind is Kind.STEP:
            os.rename(root / str(step), temporary)
        elif config is not None:
            atomic.write_text(holder / CONFIG, config.to_json())
        return again
    finally:
        if kind is Kind.STEP:
            atomic.remove(holder)


def _compare(target: Path, written: State, again: State) -> None:
    """Raises InputError naming the first tensor that is not on the disk as it was given."""
    if written.keys() != again.keys():
        raise InputError(
            f"{target}: {', '.join(sorted(written.keys() ^ again.keys()))} was not written as it is; nothing was changed"
        )
    for name, array in written.items():
        other = again[name]
        if (array.dtype, array.shape) != (
            other.dtype,
            other.shape,
        ) or array.tobytes() != other.tobytes():
            raise InputError(f"{target}: {name} was not written as it is; nothing was changed")


def _compare_files(target: Path, folder: Path, files: Mapping[str, bytes]) -> None:
    """Raises InputError naming the first file that is not on the disk as it was given."""
    for name, content in files.items():
        if (folder / name).read_bytes() != content:
            raise InputError(f"{target}: {name} was not written as it is; nothing was changed")
