"""Check that stored tensors fit a model: one error names everything that does not."""

from collections.abc import Mapping, Sequence

import numpy as np

from jax_transformer.errors import InputError, nearest
from jax_transformer.storage.tensors import TensorInfo, is_float, same
from jax_transformer.storage.untrusted import plain

Shape = tuple[int, ...]


def problems(
    tensors: Mapping[str, TensorInfo], expected: Mapping[str, Shape], *, floating: bool = True
) -> list[str]:
    """List every tensor that is missing, unexpected or of another shape.

    With ``floating``, also those whose numbers are no floating-point numbers.
    """
    free = sorted(expected.keys() - tensors.keys())
    wrong = [f"missing {name} {expected[name]}" for name in free]
    for name in sorted(tensors.keys() - expected.keys()):
        hint = nearest(name, free or sorted(expected))
        wrong.append(f"unexpected {plain(name)} {tensors[name].shape}{hint}")
    for name in sorted(expected.keys() & tensors.keys()):
        if tensors[name].shape != expected[name]:
            wrong.append(
                f"mis-shaped {name}: the checkpoint has {tensors[name].shape}, "
                f"the model {expected[name]}"
            )
        if floating and not is_float(tensors[name].dtype):
            wrong.append(f"{name} is {tensors[name].dtype}, and weights are floating-point numbers")
    return wrong


def differing_ties(ties: Mapping[str, str], state: Mapping[str, np.ndarray]) -> list[str]:
    """List the tensors that differ from those that the model ties them with, by ``ties``."""
    return [
        f"{name} differs from {other}, but the model ties them"
        for name, other in ties.items()
        if name in state and other in state and not same(state[name], state[other])
    ]


def refuse(problems: Sequence[str]) -> None:
    """Raise one InputError with all problems, if there are any."""
    if problems:
        raise InputError(
            f"the weights do not fit the model ({len(problems)} problems): {'; '.join(problems)}"
        )
