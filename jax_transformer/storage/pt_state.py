"""The state_dict in a PyTorch file: at the top, or under a key such as ``model`` in a training
checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import InputError, nearest
from jax_transformer.storage import pt
from jax_transformer.storage.tensors import Note, TensorInfo

_USUAL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net", "weights")


@dataclass(frozen=True)
class StateFile:
    """A state_dict without its arrays."""

    path: Path
    keys: tuple[str, ...]
    """The keys that lead to it."""
    tensors: Mapping[str, TensorInfo]
    ties: tuple[tuple[str, ...], ...]
    """Groups of names of one tensor."""
    others: tuple[Note, ...]
    """The other content of the file, which is not converted."""

    def read(self) -> dict[str, np.ndarray]:
        """Read the tensors; names that are tied have one array."""
        return _tensors(_at(pt.read(self.path), self.keys))


def open(path: Path, key: str | None = None) -> StateFile:
    """Open the state_dict at ``key``, or the only one. Raises InputError if the file has none or
    several.
    """
    content = pt.describe(path)
    keys = _keys(path, content, key)
    state = _at(content, keys)
    views = _tensors(state)
    notes = [Note(name, "next to the weights: not converted") for name in _siblings(content, keys)]
    notes += [
        Note(".".join([*keys, str(name)]), "no tensor") for name in state if name not in views
    ]
    names: dict[Any, list[str]] = {}
    for name, view in views.items():
        if view.nbytes:
            names.setdefault(view, []).append(name)
    ties = tuple(tuple(group) for group in names.values() if len(group) > 1)
    infos = {name: TensorInfo(tuple(view.shape), str(view.dtype)) for name, view in views.items()}
    return StateFile(path, keys, infos, ties, tuple(notes))


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and any(map(_is_tensor, value.values()))
        and not any(isinstance(part, dict) for part in value.values())
    )


def _keys(path: Path, content: Any, key: str | None) -> tuple[str, ...]:
    if key is not None:
        keys = tuple(key.split("."))
        if not _is_state(_at(content, keys, path)):
            raise InputError(f"{path}: {key} is no state_dict, from names to tensors")
        return keys
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}, not a state_dict")
    states = [name for name, value in content.items() if _is_state(value)]
    usual = [name for name in states if name in _USUAL_KEYS]
    if len(usual) == 1 or (len(states) == 1 and not usual):
        return ((usual or states)[0],)
    if states:
        raise InputError(
            f"{path}: holds several state_dicts: give --key with one of "
            f"{', '.join(map(str, states))}"
        )
    if _is_state(content):
        return ()
    raise InputError(
        f"{path}: holds no state_dict among {', '.join(map(str, content)) or 'nothing'}"
    )


def _at(content: Any, keys: tuple[str, ...], path: Path | None = None) -> Any:
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            known = [str(name) for name in content] if isinstance(content, dict) else []
            raise InputError(
                f"{path}: has no {key!r}{nearest(key, known)}; "
                f"there are: {', '.join(known) or 'no keys'}"
            )
        content = content[key]
    return content


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in state.items() if isinstance(name, str) and _is_tensor(value)
    }


def _siblings(content: Any, keys: tuple[str, ...]) -> list[str]:
    return [
        ".".join([*keys[:depth], str(name)])
        for depth, key in enumerate(keys)
        for name in _at(content, keys[:depth])
        if name != key
    ]
