"""Stored weights of each kind of file or folder, found by its path.

Loads no jax.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jax_transformer.architectures import huggingface_config, huggingface_state
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import CheckpointError, ConfigError, InputError
from jax_transformer.extras.toolkits import toolkit_weights
from jax_transformer.extras.toolkits.marian import marian_model as marian_files
from jax_transformer.formats import kinds
from jax_transformer.formats.kinds import Kind
from jax_transformer.formats.stored_weights import StoredWeights
from jax_transformer.storage import (
    checkpoint,
    checkpoint_stream,
    integrity,
    pt,
    safetensors,
)
from jax_transformer.storage import huggingface_folder as folders
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.storage.lazy import LazyState, LazyTensor
from jax_transformer.storage.run_folder import RunFolder, open_weights, parsed
from jax_transformer.storage.tensors import Note
from jax_transformer.storage.tensors import same as same_bits
from jax_transformer.weights import lora

_WHY_NOT = {
    "params": "the moving average of the weights is taken instead",
    "opt_state": "the optimizer's state",
    "step": "the place in training",
}


def find(
    path: str | Path,
    weights: str = "auto",
    key: str | None = None,
    scan_axis: int | None = None,
) -> StoredWeights:
    """Find the weights at ``path``.

    Arguments and errors are those of :func:`jax_transformer.formats.pretrained.open`.
    """
    path = kinds.local(path)
    kind = kinds.of(path)
    if weights != "auto" and kind is not Kind.RUN:
        raise ConfigError(
            f"--weights {weights}: {path} is no run folder, and has one set of weights"
        )
    if key is not None and kind is not Kind.PT:
        raise ConfigError(f"--key {key}: {path} is no PyTorch file")
    if scan_axis is not None and kind is not Kind.T5X:
        raise ConfigError(f"--param-scan-axis {scan_axis}: {path} is no checkpoint of T5X")
    if kind is Kind.T5X:
        return toolkit_weights.of_t5x(path, scan_axis)
    if kind is Kind.MARIAN:
        return toolkit_weights.of_marian(marian_files.find(path))
    if kind is Kind.RUN:
        return _run(path, weights)
    if kind is Kind.STEP:
        return _step(path)
    if kind is Kind.HUGGINGFACE:
        return _huggingface(path)
    if kind is Kind.PT:
        return _pt(path, key)
    scan = partial(safetensors.scan, path)
    files = tuple(dict.fromkeys([path, *safetensors.files(path)]))
    return StoredWeights(kind, path, str(path), safetensors.describe(path), scan, files=files)


def _run(path: Path, weights: str) -> StoredWeights:
    folder = RunFolder(path)
    integrity.verify(path)
    config = parsed(folder.config, TransformerConfig.from_json)
    candidate, opened = open_weights(folder, weights)
    title = f"{path} ({candidate.name}, step {candidate.step})"
    stored = _checkpoint(Kind.RUN, path, title, opened, folder, config)
    return replace(stored, weights=candidate.name)


def _step(path: Path) -> StoredWeights:
    path = path.absolute()
    if not path.name.isdecimal():
        raise InputError(f"{path}: a single checkpoint has its step as its name")
    config, folder = config_around(path), RunFolder(path.parent.parent)
    opened = checkpoint.open(path.parent, int(path.name))
    stored = _checkpoint(Kind.STEP, path, str(path), opened, folder if config else None, config)
    return replace(stored, weights=path.name)


def config_around(path: Path) -> TransformerConfig | None:
    """The configuration of the run folder of a checkpoint, which need not exist yet; None if it is
    in no run folder.
    """
    folder = RunFolder(path.absolute().parent.parent)
    if not folder.config.is_file():
        return None
    integrity.verify(folder.path)
    return parsed(folder.config, TransformerConfig.from_json)


def _checkpoint(
    kind: Kind,
    path: Path,
    title: str,
    opened: Checkpoint,
    run: RunFolder | None,
    config: TransformerConfig | None,
) -> StoredWeights:
    """The weights for inference: the moving average if there is one, and the frozen arrays."""
    groups: dict[str, list[str]] = {}
    for name in opened.tensors:
        groups.setdefault(name.partition("/")[0], []).append(name)
    trained = "ema" if "ema" in groups else "params"
    if trained not in groups:
        raise CheckpointError(f"{path}: holds no weights among {', '.join(groups) or 'nothing'}")
    used = [group for group in (trained, "frozen") if group in groups]
    stored = {name.partition("/")[2]: name for group in used for name in groups.pop(group)}
    derived = tuple(Note(name, "with its low-rank adapter added") for name in lora.adapted(stored))
    dropped = tuple(
        Note(
            group if names == [group] else f"{group}/ ({len(names)} arrays)",
            _WHY_NOT.get(group, "no weights"),
        )
        for group, names in groups.items()
    )

    def scan() -> dict[str, LazyTensor]:
        arrays = checkpoint_stream.scan(opened, used)
        return _without_adapters({name: arrays[full] for name, full in stored.items()})

    tensors = {
        name: opened.tensors[full] for name, full in stored.items() if lora.is_parameter(name)
    }
    extra = run.path / folders.IN_RUN if run else None
    extra_files = {
        name: extra / name for name in folders.EXTRA_FILES if extra and (extra / name).is_file()
    }
    return StoredWeights(
        kind,
        path,
        title,
        tensors,
        scan,
        config,
        step=opened.step,
        run=run,
        files=(opened.path / checkpoint.MANIFEST,),
        extra_files=extra_files,
        dropped=dropped,
        derived=derived,
    )


def _without_adapters(arrays: LazyState) -> dict[str, LazyTensor]:
    """The arrays of the model itself, with each low-rank adapter added to its kernel when it is
    read.
    """

    def merged(name: str) -> np.ndarray:
        names = [name, *(name + part for part in (lora.A, lora.B, lora.SCALE))]
        return lora.merge({each: arrays[each].read() for each in names})[name]

    adapted = {
        name: LazyTensor(arrays[name].info, partial(merged, name)) for name in lora.adapted(arrays)
    }
    return {name: arrays[name] for name in arrays if lora.is_parameter(name)} | adapted


def _huggingface(path: Path) -> StoredWeights:
    """A folder's tensors under all names of the module's ``state_dict()``, including those that are
    not in its file.
    """
    folder = folders.find(path)
    scanned = folders.scan(folder)
    stored = {name: tensor.info for name, tensor in scanned.items()}

    def same(one: str, other: str) -> bool:
        one_tensor, other_tensor = scanned[one], scanned[other]
        return one_tensor is other_tensor or same_bits(one_tensor.read(), other_tensor.read())

    try:
        config = huggingface_config.from_config(folder.data, names=stored, same=same)
    except InputError as error:
        raise InputError(f"{path}/{error}") from None
    tensors = huggingface_state.complete(stored, config)
    dropped = [
        Note(name, huggingface_state.why_dropped(name, config))
        for name in stored
        if name not in tensors
    ]
    derived = tuple(
        Note(name, huggingface_state.why_completed(name, config))
        for name in tensors
        if name not in stored
    )
    return StoredWeights(
        Kind.HUGGINGFACE,
        path,
        f"{path} ({folder.weights.name})",
        tensors,
        lambda: huggingface_state.complete(scanned, config),
        config,
        weights=folder.weights.name,
        files=tuple(folder.files),
        extra_files={name: path / name for name in folder.extra_names},
        dropped=(*dropped, *(Note(name, reason) for name, reason in folder.others)),
        derived=derived,
    )


def _pt(path: Path, key: str | None) -> StoredWeights:
    content = pt.describe(path)
    toolkit = None if key is not None else toolkit_weights.toolkit_of(content)
    if toolkit is not None:
        return toolkit_weights.of_toolkit(path, toolkit, content)
    state = pt.open_state(path, key)
    title = f"{path} ({'.'.join(state.keys)})" if state.keys else str(path)
    return StoredWeights(
        Kind.PT,
        path,
        title,
        state.tensors,
        state.scan,
        files=(path,),
        ties=state.ties,
        dropped=state.others,
    )
