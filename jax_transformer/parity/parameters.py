"""Getters of parameter gradients, by module: from the weight table, or by Flax's usual names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_transformer.parity.functions import ModelFunction
from jax_transformer.parity.pairs import Pair
from jax_transformer.weights import rules

Getter = Callable[[Any], np.ndarray | None]
"""Takes a recording and returns one of its gradients, in PyTorch's layout; None if it has none."""
GradientGetters = dict[str, dict[str, tuple[Sequence[Getter], Getter]]]
"""By Flax module and by parameter, the getters for the Flax recording, one for each layout that the
parameter may have, and the getter for the PyTorch recording."""
_LEAVES = {"kernel": "weight", "bias": "bias", "scale": "weight", "embedding": "weight"}
"""Flax leaf to PyTorch leaf."""


def gradient_getters(
    table: rules.Table | None, function: ModelFunction, pairs: Sequence[Pair]
) -> GradientGetters:
    """The getters for the parameters that each paired module owns itself.

    ``table`` is the weight table; without one, parameters are found by their usual names.
    """
    if table is not None:
        return _from_table(table, function, pairs)
    getters: GradientGetters = {}
    for pair in pairs:
        name, layer = _stored(function.parameters, pair.ours)
        for leaf, torch_leaf in _LEAVES.items():
            if f"{name}.{leaf}" in function.parameters:
                layouts = _kernel_layouts if leaf == "kernel" else _one_layout
                getters.setdefault(pair.ours, {})[leaf] = (
                    _flax_getters(f"{name}.{leaf}", layer, layouts),
                    _torch_getter(f"{pair.theirs}.{torch_leaf}"),
                )
    return getters


def sizes(parameters: Mapping[str, Any], module: str) -> tuple[int, ...]:
    """The sizes of a module's parameters and those of its parts, in ascending order."""
    name, layer = _stored(parameters, module)
    arrays = [array for path, array in parameters.items() if path.startswith(f"{name}.")]
    return tuple(sorted(np.size(array if layer is None else array[0]) for array in arrays))


def _stored(parameters: Mapping[str, Any], module: str) -> tuple[str, int | None]:
    """The path of a module's parameters, and its layer if they hold all layers of a scan."""
    if any(path.startswith(f"{module}.") for path in parameters):
        return module, None
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            stacked = ".".join(parts[:i] + parts[i + 1 :])
            if any(path.startswith(f"{stacked}.") for path in parameters):
                return stacked, int(part)
    return module, None


def _from_table(
    table: rules.Table, function: ModelFunction, pairs: Sequence[Pair]
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
                [_rule_getter(rule)],
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


def _flax_getters(
    name: str, layer: int | None, layouts: Callable[[np.ndarray], list[np.ndarray]]
) -> list[Getter]:
    def gradients(recording: Any) -> list[np.ndarray]:
        array = recording.parameters.get(name)
        if array is None:
            return []
        return layouts(array if layer is None else array[layer])

    def getter(i: int) -> Getter:
        return lambda recording: dict(enumerate(gradients(recording))).get(i)

    return [getter(i) for i in range(4)]


def _one_layout(array: np.ndarray) -> list[np.ndarray]:
    return [array]


def _kernel_layouts(kernel: np.ndarray) -> list[np.ndarray]:
    """A kernel's gradient as PyTorch may have it: of a linear layer, also with several axes of
    inputs or outputs (heads); of a convolution; of a transposed convolution, whose window PyTorch
    turns round."""
    if kernel.ndim < 2:
        return [kernel]
    if kernel.ndim == 2:
        return [kernel.T]
    *window, inputs, outputs = range(kernel.ndim)
    layouts = [
        kernel.transpose(outputs, inputs, *window),
        np.flip(kernel, tuple(window)).transpose(inputs, outputs, *window),
    ]
    if kernel.ndim == 3:
        layouts += [kernel.reshape(-1, kernel.shape[-1]).T, kernel.reshape(len(kernel), -1).T]
    return layouts
