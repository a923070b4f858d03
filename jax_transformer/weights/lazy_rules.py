"""Weight tables applied to tensors that are read one at a time. NumPy only."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from jax_transformer.storage.lazy import LazyState, LazyTensor
from jax_transformer.storage.tensors import Shape, TensorInfo
from jax_transformer.weights.rules import Alias, Rule, Table


def to_flax(
    table: Table, state: LazyState, flax_shapes: Mapping[str, Shape]
) -> dict[str, LazyTensor]:
    """Return the Flax arrays by path, none of them read.

    The tensors fit the table: see :func:`.tensors.problems` and :func:`.lazy.differing_ties`.
    """
    arrays = {}
    for rule in table:
        if isinstance(rule, Rule):
            shapes = [flax_shapes[name] for name in rule.flax]
            for number, (name, shape) in enumerate(zip(rule.flax, shapes, strict=True)):
                info = TensorInfo(shape, state[rule.torch].dtype)
                arrays[name] = LazyTensor(
                    info, partial(_part, rule, number, state[rule.torch], shapes)
                )
    return arrays


def to_torch(table: Table, arrays: LazyState) -> dict[str, LazyTensor]:
    """Return the PyTorch tensors by name, none of them read, in the table's order.

    Tensors that the model ties are one LazyTensor.
    """
    state: dict[str, LazyTensor] = {}
    for rule in table:
        if isinstance(rule, Rule):
            parts = [arrays[name] for name in rule.flax]
            shape = rule.torch_shape([part.shape for part in parts])
            state[rule.torch] = LazyTensor(
                TensorInfo(shape, parts[0].dtype), partial(_joined, rule, parts)
            )
    names = {rule.torch: rule.of if isinstance(rule, Alias) else rule.torch for rule in table}
    return {name: state[of] for name, of in names.items()}


def _part(rule: Rule, number: int, tensor: LazyTensor, shapes: list[Shape]) -> np.ndarray:
    return rule.part(number, tensor.read(), shapes)


def _joined(rule: Rule, parts: list[LazyTensor]) -> np.ndarray:
    return rule.joined([part.read() for part in parts])
