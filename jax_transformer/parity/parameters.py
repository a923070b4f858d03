"""Getters of parameter gradients, by module: from the weight table, or by Flax's usual names."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_transformer.parity.pairs import Pair
from jax_transformer.parity.recording import FlaxFunction
from jax_transformer.weights import rules

Getter = Callable[[Any], np.ndarray | None]
"""Takes a recording and returns one of its gradients, in PyTorch's layout; None if it has none."""
GradientGetters = dict[str, dict[str, tuple[Getter, Getter]]]
"""By Flax module and by parameter, the getter for the Flax and for the PyTorch recording."""
_LEAVES = {
    "kernel": ("weight", True),
    "bias": ("bias", False),
    "scale": ("weight", False),
    "embedding": ("weight", False),
}
"""Flax leaf to PyTorch leaf, and True if it is transposed."""


def gradient_getters(
    table: rules.Table | None, function: FlaxFunction, pairs: Sequence[Pair]
) -> GradientGetters:
    """The getters for the parameters that each paired module owns itself.

    ``table`` is the weight table; without one, parameters are found by their usual names.
    """
    if table is not None:
        return _from_table(table, function, pairs)
    getters: GradientGetters = {}
    for pair in pairs:
        for name, value in function.parameters.items():
            owner, _, leaf = name.rpartition(".")
            if owner == pair.ours and leaf in _LEAVES and np.ndim(value) <= 2:
                torch_leaf, transposed = _LEAVES[leaf]
                getters.setdefault(owner, {})[leaf] = (
                    _flax_getter(name, transposed),
                    _torch_getter(f"{pair.theirs}.{torch_leaf}"),
                )
    return getters


def _from_table(
    table: rules.Table, function: FlaxFunction, pairs: Sequence[Pair]
) -> GradientGetters:
    getters: GradientGetters = {}
    for rule in rules.restrict(table, function.parameters):
        assert isinstance(rule, rules.Rule)
        owners = [
            pair.ours
            for pair in pairs
            if all(name.startswith(f"{pair.ours}.") for name in rule.flax)
        ]
        if owners:
            innermost = max(owners, key=len)
            getters.setdefault(innermost, {})[rule.torch] = (
                _rule_getter(rule),
                _torch_getter(rule.torch),
            )
    return getters


def _rule_getter(rule: rules.Rule) -> Getter:
    def get(recording: Any) -> np.ndarray | None:
        gradients = recording.parameters
        if not all(name in gradients for name in rule.flax):
            return None
        return rule.to_torch([gradients[name] for name in rule.flax])

    return get


def _torch_getter(name: str) -> Getter:
    return lambda recording: recording.parameters.get(name)


def _flax_getter(name: str, transposed: bool) -> Getter:
    def get(recording: Any) -> np.ndarray | None:
        array = recording.parameters.get(name)
        return array.T if array is not None and transposed else array

    return get
