"""What a conversion begins with: any kind of file or folder, described first and read only when asked. Nothing of it is run."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.card import Training
from jax_transformer.convert.planning import Note, without_prefix
from jax_transformer.errors import CheckpointError, ConfigError, InputError, nearest
from jax_transformer.storage import hub, kinds, safetensors
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.storage.kinds import Kind
from jax_transformer.storage.tensors import TensorInfo

_USUAL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net", "weights")


@dataclass(frozen=True)
class Source:
    """Weights that are somewhere."""

    path: Path
    kind: Kind
    title: str
    tensors: Mapping[str, TensorInfo]
    read: Callable[[], dict[str, np.ndarray]]
    """The same with their numbers; names that are tied have one array."""
    ties: tuple[tuple[str, ...], ...] = ()
    dropped: tuple[Note, ...] = ()
    """What beside weights is there, and is not carried."""
    config: TransformerConfig | None = None
    """The model, where the source says it."""
    derived: tuple[Note, ...] = ()
    """Which of ``tensors`` the source leaves out, as a Hugging Face folder does with copies and what is computed."""
    beside: Path | None = None
    """The folder with the files of a Hugging Face folder that are no weights."""
    kept: tuple[str, ...] = ()
    """The names of those that go with the weights."""
    training: Training | None = None
    """How a run's weights were trained."""


def find(
    path: str | Path, *, weights: str = "auto", key: str | None = None, strip_prefix: str = ""
) -> Source:
    """What lies at ``path``, or at ``hf:owner/name``. ``weights`` chooses in a run folder, ``key`` in a PyTorch file; ``strip_prefix`` is taken
    from every name."""
    path = hub.local(path)
    kind = kinds.of(path)
    if weights != "auto" and kind is not Kind.RUN:
        raise ConfigError(f"--weights {weights}: {path} is no run folder")
    if key is not None and kind is not Kind.PT:
        raise ConfigError(f"--key {key}: {path} is no PyTorch file")
    if kind is Kind.RUN:
        found = _run(path, weights)
    elif kind is Kind.STEP:
        found = _step(path)
    elif kind is Kind.PT:
        found = _pt(path, key)
    elif kind is Kind.HUGGINGFACE:
        found = _huggingface(path)
    else:
        found = _safetensors(path, kind)
    return _stripped(found, strip_prefix) if strip_prefix else found


def _safetensors(path: Path, kind: Kind) -> Source:
    return Source(path, kind, str(path), safetensors.describe(path), lambda: safetensors.read(path))


def _stripped(found: Source, prefix: str) -> Source:
    if not found.kind.is_file:
        whose = "transformers" if found.kind is Kind.HUGGINGFACE else "this project"
        raise ConfigError(f"--strip-prefix {prefix}: {found.path} has the names of {whose}")
    ties = tuple(tuple(name.removeprefix(prefix) for name in names) for names in found.ties)
    return replace(
        found,
        tensors=without_prefix(found.tensors, prefix),
        read=lambda: without_prefix(found.read(), prefix),
        ties=ties,
    )


# PyTorch files


def _pt(path: Path, key: str | None) -> Source:
    from jax_transformer.storage import pt

    whole = pt.describe(path)
    where = _where(path, whole, key)
    inner, notes = _tensors(_at(whole, where), where)
    notes = [
        Note(name, "beside the weights: not carried") for name in _others(whole, where)
    ] + notes
    regions: dict[Any, list[str]] = {}
    for name, leaf in inner.items():
        if leaf.nbytes:
            regions.setdefault(leaf, []).append(name)
    ties = tuple(tuple(names) for names in regions.values() if len(names) > 1)
    tensors = {name: TensorInfo(tuple(leaf.shape), str(leaf.dtype)) for name, leaf in inner.items()}
    title = f"{path} ({'.'.join(where)})" if where else str(path)
    return Source(
        path,
        Kind.PT,
        title,
        tensors,
        lambda: _tensors(_at(pt.read(path), where), where)[0],
        ties,
        tuple(notes),
    )


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and any(map(_is_tensor, value.values()))
        and not any(isinstance(part, dict) for part in value.values())
    )


def _where(path: Path, whole: Any, key: str | None) -> tuple[str, ...]:
    """The keys that lead to the state_dict."""
    if key is not None:
        where = tuple(key.split("."))
        if not _is_state(_at(whole, where, path)):
            raise InputError(f"{path}: {key} is no state_dict, from names to tensors")
        return where
    if not isinstance(whole, dict):
        raise InputError(f"{path}: holds a {type(whole).__name__}, not a state_dict")
    candidates = [name for name, value in whole.items() if _is_state(value)]
    usual = [name for name in candidates if name in _USUAL_KEYS]
    if len(usual) == 1 or (len(candidates) == 1 and not usual):
        return ((usual or candidates)[0],)
    if candidates:
        raise InputError(
            f"{path}: holds several state_dicts: give --key with one of {', '.join(map(str, candidates))}"
        )
    if _is_state(whole):
        return ()
    raise InputError(f"{path}: holds no state_dict among {', '.join(map(str, whole)) or 'nothing'}")


def _at(whole: Any, where: tuple[str, ...], path: Path | None = None) -> Any:
    for word in where:
        if not isinstance(whole, dict) or word not in whole:
            known = [str(name) for name in whole] if isinstance(whole, dict) else []
            raise InputError(
                f"{path}: has no {word!r}{nearest(word, known)}; there are: {', '.join(known) or 'no keys'}"
            )
        whole = whole[word]
    return whole


def _tensors(state: Mapping[str, Any], where: tuple[str, ...]) -> tuple[dict[str, Any], list[Note]]:
    """The tensors of a state_dict, and what else is in it."""
    tensors = {
        name: value for name, value in state.items() if isinstance(name, str) and _is_tensor(value)
    }
    others = [".".join([*where, str(name)]) for name in state if name not in tensors]
    return tensors, [Note(name, "no tensor") for name in others]


def _others(whole: Any, where: tuple[str, ...]) -> list[str]:
    found = []
    for depth, word in enumerate(where):
        found += [
            ".".join([*where[:depth], str(name)])
            for name in _at(whole, where[:depth])
            if name != word
        ]
    return found


# Folders


def _huggingface(path: Path) -> Source:
    from jax_transformer.convert import huggingface

    found = huggingface.find(path)
    others = tuple(Note(name, reason) for name, reason in found.folder.others)
    title = f"{path} ({found.folder.weights.name})"
    return Source(
        path,
        Kind.HUGGINGFACE,
        title,
        found.tensors,
        found.read,
        dropped=found.dropped + others,
        config=found.config,
        derived=found.derived,
        beside=path,
        kept=found.folder.kept,
    )


def _run(path: Path, weights: str) -> Source:
    from jax_transformer import pretrained
    from jax_transformer.convert import huggingface
    from jax_transformer.storage import checkpoint
    from jax_transformer.storage.run_folder import RunFolder, parsed

    folder = RunFolder(path)
    config = parsed(folder.config, TransformerConfig.from_json)
    damage: CheckpointError | None = None
    for candidate in pretrained.candidates(folder, weights):
        if damage is not None:
            print(f"warning: {damage}; the checkpoint before it is used", file=sys.stderr)
        try:
            opened = checkpoint.open(candidate.root, candidate.step)
            title = f"{path} ({candidate.name}, step {candidate.step})"
            made = _checkpoint(path, Kind.RUN, title, opened, config)
            return huggingface.with_files(made, folder, candidate.step)
        except CheckpointError as error:
            damage = error
    wanted = "" if weights == "auto" else f" for --weights {weights}"
    raise damage or CheckpointError(f"{folder.checkpoints}: holds no checkpoint{wanted}")


def _step(path: Path) -> Source:
    from jax_transformer.storage import checkpoint

    path = path.absolute()
    if not path.name.isdecimal():
        raise InputError(f"{path}: a single checkpoint has its step as its name")
    root, step = path.parent, int(path.name)
    opened = checkpoint.open(root, step)
    return _checkpoint(path, Kind.STEP, str(path), opened, config_around(path))


def config_around(path: Path) -> TransformerConfig | None:
    """The configuration of the run folder that a checkpoint lies in or shall lie in; None where it lies in none."""
    from jax_transformer.storage.run_folder import RunFolder, parsed

    folder = RunFolder(path.absolute().parent.parent)
    return parsed(folder.config, TransformerConfig.from_json) if folder.config.is_file() else None


def _checkpoint(
    path: Path,
    kind: Kind,
    title: str,
    opened: Checkpoint,
    config: TransformerConfig | None,
) -> Source:
    """The weights of a checkpoint that a user would translate with: the moving average where one is kept, and what is carried along."""
    groups: dict[str, list[str]] = {}
    for name in opened.tensors:
        groups.setdefault(name.partition("/")[0], []).append(name)
    trained = "ema" if "ema" in groups else "params"
    if trained not in groups:
        raise CheckpointError(f"{path}: holds no weights among {', '.join(groups) or 'nothing'}")
    names = {
        name.partition("/")[2]: name
        for group in (trained, "frozen")
        for name in groups.pop(group, [])
    }
    why = {
        "params": "the moving average of the weights is taken instead",
        "opt_state": "the optimizer's state",
        "step": "the place in training",
    }
    dropped = tuple(
        Note(
            f"{group}/ ({len(members)} arrays)" if members != [group] else group,
            why.get(group, "no weights"),
        )
        for group, members in groups.items()
    )

    def read() -> dict[str, np.ndarray]:
        arrays = opened.arrays()
        return {name: arrays[full] for name, full in names.items()}

    tensors = {name: opened.tensors[full] for name, full in names.items()}
    return Source(path, kind, title, tensors, read, dropped=dropped, config=config)
