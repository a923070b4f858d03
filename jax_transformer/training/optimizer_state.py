"""Moments and the state of an Optax chain over ``{Flax name: array}``, both ways and exactly."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_transformer.convert.optimizer import Moments
from jax_transformer.convert.optimizer_groups import ADAM, ADAMW, SGD
from jax_transformer.errors import ConfigError, InputError

_KINDS: dict[str, type] = {
    ADAMW: optax.ScaleByAdamState,
    ADAM: optax.ScaleByAdamState,
    SGD: optax.TraceState,
}


def from_optax(
    state: optax.OptState,
    kind: str,
    hyperparameters: Mapping[str, Any],
    weight_decay: Mapping[str, float],
) -> Moments:
    """The moments in an Optax state over ``{Flax name: array}``; what the state does not hold is given. Raises ConfigError where it holds what
    no optimizer of that ``kind`` in torch.optim does."""
    ours = _only(state, _KINDS[kind])
    others = [
        leaf
        for leaf in _nodes(state)
        if leaf is not ours and not isinstance(leaf, optax.ScaleByScheduleState)
    ]
    if ours is None or others:
        raise ConfigError(
            f"this Optax state is not that of {kind}: {', '.join(type(leaf).__name__ for leaf in others) or 'no moments'}"
        )
    given = dict(hyperparameters)
    if isinstance(ours, optax.TraceState):
        return Moments(kind, {}, _host(ours.trace), {}, given, dict(weight_decay))
    count = int(ours.count)
    first, second = (_host(ours.mu), _host(ours.nu)) if count else ({}, {})
    return Moments(kind, dict.fromkeys(ours.mu, count), first, second, given, dict(weight_decay))


def into_optax(state: optax.OptState, moments: Moments, position: int) -> optax.OptState:
    """``state``, as ``init`` made it, with these moments, and with its schedule at ``position``.

    Raises InputError where the moments are of other arrays or counts, ConfigError where the state is not that of such an optimizer.
    """
    kind = _KINDS[moments.kind]
    fresh = _only(state, kind)
    if fresh is None:
        raise ConfigError(
            f"this Optax state is not that of {moments.kind}: it holds {', '.join(type(n).__name__ for n in _nodes(state))}"
        )
    made = (
        _adam(fresh, moments)
        if isinstance(fresh, optax.ScaleByAdamState)
        else fresh._replace(trace=_like(fresh.trace, moments.first))
    )

    def replace(node: Any) -> Any:
        if isinstance(node, optax.ScaleByScheduleState):
            return node._replace(count=jnp.asarray(position, node.count.dtype))
        return made if isinstance(node, kind) else node

    return jax.tree.map(replace, state, is_leaf=_is_node)


def position(state: optax.OptState) -> int:
    """The place in its one schedule. Raises ConfigError where it has none or several."""
    found = [
        int(node.count) for node in _nodes(state) if isinstance(node, optax.ScaleByScheduleState)
    ]
    if len(found) != 1:
        raise ConfigError(f"this Optax state has {len(found)} schedules")
    return found[0]


def _adam(fresh: optax.ScaleByAdamState, moments: Moments) -> optax.ScaleByAdamState:
    counts = set(moments.counts.values())
    if len(counts) > 1:
        by_count = {
            count: next(name for name, each in moments.counts.items() if each == count)
            for count in sorted(counts)
        }
        several = ", ".join(f"{name} {count}" for count, name in by_count.items())
        raise InputError(
            f"the arrays had different numbers of updates ({several}), and Optax counts for all at once"
        )
    count = jnp.asarray(counts.pop() if counts else 0, fresh.count.dtype)
    return optax.ScaleByAdamState(
        count, _like(fresh.mu, moments.first), _like(fresh.nu, moments.second)
    )


def _is_node(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState | optax.TraceState | optax.ScaleByScheduleState)


def _nodes(state: optax.OptState) -> list[Any]:
    """The states of transformations that this file knows, and whatever other array there is."""
    return jax.tree.leaves(state, is_leaf=_is_node)


def _only(state: optax.OptState, kind: type) -> Any:
    found = [node for node in _nodes(state) if isinstance(node, kind)]
    return found[0] if len(found) == 1 else None


def _host(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in arrays.items()}


def _like(fresh: Mapping[str, jax.Array], arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Copies of ``arrays``, as of now zeros where there are none; their own dtypes must be those of ``fresh``."""
    if not arrays:
        return {name: jnp.zeros_like(array) for name, array in fresh.items()}
    if fresh.keys() != arrays.keys():
        raise InputError(
            f"moments of other arrays than the model trains: {', '.join(sorted(fresh.keys() ^ arrays.keys()))}"
        )
    for name, array in arrays.items():
        if (array.shape, str(array.dtype)) != (fresh[name].shape, str(fresh[name].dtype)):
            ours = f"{fresh[name].dtype} {fresh[name].shape}"
            raise InputError(
                f"the moments of {name} are {array.dtype} {array.shape}, and the parameter is {ours}"
            )
    return {name: jnp.array(arrays[name], copy=True) for name in fresh}
