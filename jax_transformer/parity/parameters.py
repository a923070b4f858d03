"""Of each paired module's own parameters, how to get the gradients of either side: by the weight table, or as Flax names them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_transformer import convert
from jax_transformer.parity.pairs import Pair
from jax_transformer.parity.recording import Subject
from jax_transformer.transformer import Encoder, Transformer
from jax_transformer.weights import rules as tables

Parameters = dict[
    str, dict[str, tuple[Callable[[Any], np.ndarray | None], Callable[[Any], np.ndarray | None]]]
]
_LEAVES = {
    "kernel": ("weight", True),
    "bias": ("bias", False),
    "scale": ("weight", False),
    "embedding": ("weight", False),
}


def of_pairs(model: Any, subject: Subject, found: Sequence[Pair]) -> Parameters:
    """Of each paired module's own parameters, how to get the gradients of either side: by the weight table, or as Flax names them."""
    made: Parameters = {}
    if isinstance(model, Transformer | Encoder):
        table = convert.weight_table(
            model.config, "encoder" if isinstance(model, Encoder) else "model"
        )
        for rule in tables.restrict(table, subject.parameters):
            assert isinstance(rule, tables.Rule)
            owner = min(
                (
                    pair.ours
                    for pair in found
                    if all(n.startswith(f"{pair.ours}.") for n in rule.flax)
                ),
                key=lambda n: -len(n),
                default=None,
            )
            if owner is not None:
                made.setdefault(owner, {})[rule.torch] = (_ruled(rule), _named(rule.torch))
        return made
    for pair in found:
        for name in subject.parameters:
            owner, _, leaf = name.rpartition(".")
            if owner == pair.ours and leaf in _LEAVES and np.ndim(subject.parameters[name]) <= 2:
                their_leaf, transposed = _LEAVES[leaf]
                made.setdefault(owner, {})[leaf] = (
                    _leaf(name, transposed),
                    _named(f"{pair.theirs}.{their_leaf}"),
                )
    return made


def _ruled(rule: tables.Rule) -> Callable[[Any], np.ndarray | None]:
    def get(run: Any) -> np.ndarray | None:
        return (
            rule.to_torch([run.parameters[name] for name in rule.flax])
            if all(name in run.parameters for name in rule.flax)
            else None
        )

    return get


def _named(name: str) -> Callable[[Any], np.ndarray | None]:
    return lambda run: run.parameters.get(name)


def _leaf(name: str, transposed: bool) -> Callable[[Any], np.ndarray | None]:
    def get(run: Any) -> np.ndarray | None:
        array = run.parameters.get(name)
        return array.T if array is not None and transposed else array

    return get
