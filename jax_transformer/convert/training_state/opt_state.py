"""The state of an optimizer between torch.optim (as ``Moments``) and an Optax chain over
``{Flax name: array}``, both ways and exactly."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_transformer.convert.training_state.torch_optimizer import ADAM, ADAMW, SGD, Moments
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.training.optimizer import OptimizerName, OptimizerOptions

_KINDS = {ADAMW: optax.ScaleByAdamState, ADAM: optax.ScaleByAdamState, SGD: optax.TraceState}


def torch_kind(options: OptimizerOptions) -> str:
    """Return torch.optim's optimizer of the same arithmetic. Raises ConfigError without one."""
    kinds = {OptimizerName.ADAMW: ADAMW, OptimizerName.ADAM: ADAM, OptimizerName.SGD: SGD}
    if options.name in kinds:
        return kinds[options.name]
    reason = {
        OptimizerName.ADAFACTOR: "torch.optim.Adafactor factors other arrays, with another epsilon",
        OptimizerName.LION: "torch.optim has no Lion",
    }[options.name]
    raise ConfigError(
        f"optimizer.name={options.name.value}: its state cannot be converted, as {reason}"
    )


def hyperparameters(options: OptimizerOptions) -> dict[str, Any]:
    """Return torch.optim's settings besides learning rate and weight decay."""
    if torch_kind(options) == SGD:
        return {"momentum": options.momentum, "nesterov": options.nesterov}
    return {"betas": (options.beta1, options.beta2), "eps": options.epsilon}


def from_optax(
    state: optax.OptState,
    kind: str,
    hyperparameters: Mapping[str, Any],
    weight_decay: Mapping[str, float],
) -> Moments:
    """Return the moments in an Optax state over ``{Flax name: array}``, with settings that it
    lacks. Raises ConfigError if it holds anything that torch.optim's optimizer of that ``kind``
    does not.
    """
    ours = _only(state, _KINDS[kind])
    rest = [node for node in _nodes(state) if node is not ours]
    schedules = [node for node in rest if isinstance(node, optax.ScaleByScheduleState)]
    others = [node for node in rest if not isinstance(node, optax.ScaleByScheduleState)]
    without_momentum = kind == SGD and not hyperparameters.get("momentum")
    if others or (ours is None and not without_momentum):
        raise ConfigError(
            f"this Optax state is not {kind}'s: "
            f"{', '.join(type(leaf).__name__ for leaf in others) or 'no moments'}"
        )
    settings, decay = dict(hyperparameters), dict(weight_decay)
    if kind == SGD:
        # Before its first step torch.optim.SGD has no momentum yet
        begun = ours is not None and all(int(node.count) for node in schedules)
        return Moments(kind, {}, _host(ours.trace) if begun else {}, {}, settings, decay)
    count = int(ours.count)
    first, second = (_host(ours.mu), _host(ours.nu)) if count else ({}, {})
    return Moments(kind, dict.fromkeys(ours.mu, count), first, second, settings, decay)


def into_optax(state: optax.OptState, moments: Moments, position: int) -> optax.OptState:
    """Return ``state``, as ``init`` made it, with these moments, its schedule at ``position``.
    Raises InputError for moments of other arrays or counts, ConfigError for another optimizer's
    state.
    """
    kind = _KINDS[moments.kind]
    fresh = _only(state, kind)
    if fresh is None and (moments.kind != SGD or moments.first):
        nodes = ", ".join(type(node).__name__ for node in _nodes(state))
        raise ConfigError(f"this Optax state is not {moments.kind}'s: it holds {nodes}")
    filled = (
        _adam(fresh, moments)
        if isinstance(fresh, optax.ScaleByAdamState)
        else fresh and fresh._replace(trace=_like(fresh.trace, moments.first))
    )

    def replace(node: Any) -> Any:
        if isinstance(node, optax.ScaleByScheduleState):
            return node._replace(count=jnp.asarray(position, node.count.dtype))
        return filled if isinstance(node, kind) else node

    return jax.tree.map(replace, state, is_leaf=_is_node)


def position(state: optax.OptState) -> int:
    """Return the position in its one schedule. Raises ConfigError if it has none or several."""
    kind = optax.ScaleByScheduleState
    counts = [int(node.count) for node in _nodes(state) if isinstance(node, kind)]
    if len(counts) != 1:
        raise ConfigError(f"this Optax state has {len(counts)} schedules")
    return counts[0]


def _adam(fresh: optax.ScaleByAdamState, moments: Moments) -> optax.ScaleByAdamState:
    by_count: dict[int, str] = {}
    for name, count in moments.counts.items():
        by_count.setdefault(count, name)
    if len(by_count) > 1:
        several = ", ".join(f"{by_count[count]} {count}" for count in sorted(by_count))
        raise InputError(
            f"the arrays had different numbers of updates ({several}), "
            "and Optax has one count for all"
        )
    updates = jnp.asarray(next(iter(by_count), 0), fresh.count.dtype)
    first, second = _like(fresh.mu, moments.first), _like(fresh.nu, moments.second)
    return optax.ScaleByAdamState(updates, first, second)


def _is_node(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState | optax.TraceState | optax.ScaleByScheduleState)


def _nodes(state: optax.OptState) -> list[Any]:
    """Return the states of transformations that this file knows, and any other array."""
    return jax.tree.leaves(state, is_leaf=_is_node)


def _only(state: optax.OptState, kind: type) -> Any:
    nodes = [node for node in _nodes(state) if isinstance(node, kind)]
    return nodes[0] if len(nodes) == 1 else None


def _host(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in arrays.items()}


def _like(fresh: Mapping[str, jax.Array], arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Return copies of ``arrays``, of the shapes and dtypes of ``fresh``; zeros if empty."""
    if not arrays:
        return {name: jnp.zeros_like(array) for name, array in fresh.items()}
    if fresh.keys() != arrays.keys():
        raise InputError(
            "moments of other arrays than the model trains: "
            f"{', '.join(sorted(fresh.keys() ^ arrays.keys()))}"
        )
    for name, array in arrays.items():
        theirs, ours = (f"{each.dtype} {each.shape}" for each in (array, fresh[name]))
        if theirs != ours:
            raise InputError(f"the moments of {name} are {theirs}, and the parameter is {ours}")
    return {name: jnp.array(arrays[name], copy=True) for name in fresh}
