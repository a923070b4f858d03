"""The state of an optimizer between ``torch.optim`` and arrays by Flax name: AdamW, Adam, and SGD with momentum. NumPy only.

A moment has the shape of its parameter, so the table that carries the weights carries the moments, transposed and packed as they are. What cannot
be carried exactly is refused by name, with the reason.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_transformer.convert import optimizer_groups
from jax_transformer.convert.optimizer_groups import SGD
from jax_transformer.errors import InputError, nearest
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Alias, Rule, Shape, Table

Arrays = dict[str, np.ndarray]

# What torch keeps for each parameter, by the kind of optimizer: the count, then the moments
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
_SGD_STATE = ("momentum_buffer",)


@dataclass(frozen=True)
class Moments:
    """What an optimizer remembers of the trained arrays, by their Flax names."""

    kind: str
    """``adamw`` (decoupled weight decay), ``adam`` (weight decay within the gradient) or ``sgd``."""
    counts: dict[str, int]
    """The updates that each array has had, which Adam's bias correction divides by; none are kept for SGD."""
    first: Arrays
    """Adam's running means of gradients, or SGD's momentum; nothing before the first update, and where SGD has no momentum."""
    second: Arrays
    """Adam's running means of squared gradients; nothing before the first update, and for SGD."""
    hyperparameters: dict[str, Any]
    """``lr`` (of the next update), ``initial_lr`` (the schedule's base, where it is told), and ``betas``, ``eps``, or ``momentum``, ``nesterov``."""
    weight_decay: dict[str, float]
    """Of each array, those that are carried and never trained among them: groups of parameters differ in it and in nothing else."""


def from_torch(
    state: Mapping[str, Any],
    table: Table,
    shapes: Mapping[str, Shape],
    parameter_names: Sequence[str],
    *,
    kind: str | None = None,
) -> Moments:
    """The moments in the ``state_dict()`` of a torch.optim optimizer, its tensors given as arrays.

    Args:
        state: ``{"state": {number: ...}, "param_groups": [...]}``.
        table: the weight table of the model.
        shapes: the shapes of the trained arrays by Flax name; what the table names beside them is carried along and may have no state.
        parameter_names: PyTorch's names in the optimizer's order, ``[name for name, _ in module.named_parameters()]``; group after group.
        kind: "adam" or "adamw", for what versions of torch wrote that do not say which.

    Raises:
        InputError: one line with everything that cannot be carried exactly: amsgrad, maximize, groups that differ in more than their weight decay,
            another optimizer; states that are missing, too many or mis-shaped; parameters that do not fit the table.
    """
    groups, states = optimizer_groups.parts(state)
    found = optimizer_groups.kind(groups, kind)
    _refuse("the optimizer's state cannot be carried", list(optimizer_groups.problems(groups)))
    numbers = [number for group in groups for number in group["params"]]
    names = _canonical(table, parameter_names)
    problems = list(_check_names(groups, numbers, parameter_names, names, table, shapes))
    problems += [
        f"a state of parameter {number}, of which there is none"
        for number in states
        if number not in set(numbers)
    ]
    _refuse("the optimizer's state does not fit the model", problems)
    by_name = {
        name: states[number]
        for name, number in zip(names, numbers, strict=True)
        if number in states
    }
    trained = rules.restrict(table, shapes)
    counts, first, second = _read_states(found, by_name, trained, shapes, names)
    decays = [
        float(optimizer_groups.plain(group["weight_decay"]))
        for group in groups
        for _ in group["params"]
    ]
    parts = {rule.torch: rule.flax for rule in table if isinstance(rule, Rule)}
    decay = {part: value for name, value in zip(names, decays, strict=True) for part in parts[name]}
    return Moments(
        found, counts, first, second, optimizer_groups.hyperparameters(found, groups[0]), decay
    )


def to_torch(
    moments: Moments, table: Table, shapes: Mapping[str, Shape], parameter_names: Sequence[str]
) -> dict[str, Any]:
    """The ``state_dict()`` that the torch.optim optimizer would have: plain containers with arrays, the inverse of :func:`from_torch`.

    Neighbours in ``parameter_names`` with the same weight decay make one group. Arguments and errors as there.
    """
    names = _canonical(table, parameter_names)
    problems = list(_check_names([], range(len(names)), parameter_names, names, table, shapes))
    parts = {rule.torch: rule.flax for rule in table if isinstance(rule, Rule)}
    for name in names:
        for what, values in (("weight decays", moments.weight_decay), ("counts", moments.counts)):
            several = {values[part] for part in parts.get(name, ()) if part in values}
            if len(several) > 1:
                problems.append(
                    f"{name} would have {len(several)} {what}: {', '.join(map(str, sorted(several)))}"
                )
    _refuse("the optimizer's state does not fit the model", problems)
    trained = rules.restrict(table, shapes)
    states = _write_states(moments, trained)
    state = {number: states[name] for number, name in enumerate(names) if name in states}
    groups, begin = [], 0
    for decay, members in itertools.groupby(
        names, key=lambda name: moments.weight_decay[parts[name][0]]
    ):
        end = begin + len(list(members))
        groups.append(
            {
                **optimizer_groups.settings(moments.kind, moments.hyperparameters, decay),
                "params": list(range(begin, end)),
            }
        )
        begin = end
    return {"state": state, "param_groups": groups}


def parameter_names(state: Iterable[str], table: Table, carried: Iterable[str] = ()) -> list[str]:
    """PyTorch's parameters in the order of a module, told from the order of its ``state_dict()``.

    A tied parameter is left out where it comes again, as ``named_parameters`` does, and so are the tensors named in ``carried``: its buffers.
    """
    left_out, seen, found = set(carried), set(), []
    names = list(state)
    for name, canonical in zip(names, _canonical(table, names), strict=True):
        if canonical not in seen and name not in left_out:
            found.append(name)
        seen.add(canonical)
    return found


# Of the parameters and their states


def _canonical(table: Table, names: Sequence[str]) -> list[str]:
    """The names with a tied tensor's replaced by that of the tensor that the table has a rule for."""
    tied = {alias.torch: alias.of for alias in table if isinstance(alias, Alias)}
    return [tied.get(name, name) for name in names]


def _check_names(
    groups: Sequence[Mapping[str, Any]],
    numbers: Sequence[Any],
    parameter_names: Sequence[str],
    names: Sequence[str],
    table: Table,
    shapes: Mapping[str, Shape],
) -> Iterator[str]:
    """What is wrong with the list of parameters."""
    if len(numbers) != len(names) or len(set(numbers)) != len(numbers):
        yield f"the optimizer has {len(numbers)} parameters, {len(set(numbers))} of them different, and the model {len(names)}"
        return
    known = [rule.torch for rule in table if isinstance(rule, Rule)]
    for given, name in zip(parameter_names, names, strict=True):
        if name not in known:
            yield f"unknown parameter {given}{nearest(name, known)}"
    yield from (
        f"{name} is there more than once" for name in sorted(set(names)) if names.count(name) > 1
    )
    absent = [
        rule.torch
        for rule in rules.restrict(table, shapes)
        if isinstance(rule, Rule) and rule.torch not in set(names)
    ]
    yield from (f"{name} is trained here and is no parameter of the optimizer" for name in absent)
    said = [name for group in groups for name in group.get("param_names", ())]
    for ours, theirs in zip(parameter_names, said, strict=False):
        if ours != theirs:
            yield f"the optimizer's own names have another order: {theirs} where {ours} is expected"
            return


def _read_states(
    kind: str,
    states: Mapping[str, Mapping[str, Any]],
    trained: Table,
    shapes: Mapping[str, Shape],
    names: Sequence[str],
) -> tuple[dict[str, int], Arrays, Arrays]:
    """Counts, first and second moments by Flax name."""
    keys, expected = _SGD_STATE if kind == SGD else _ADAM_STATE, rules.torch_shapes(trained, shapes)
    problems = [
        f"{name} has a state, but is not trained here"
        for name in names
        if name not in expected and _kept(states.get(name))
    ]
    held = {name: _kept(states.get(name)) for name in expected}
    stepped = [name for name in expected if held[name]]
    if kind != SGD and stepped:
        problems += [
            f"{name} has no state: it had no gradient yet, and Optax counts for all at once"
            for name in expected
            if not held[name]
        ]
    for name in stepped:
        problems += _check_state(name, held[name], keys, expected[name])
    _refuse("the optimizer's state cannot be carried", problems)
    if not stepped:
        return {part: 0 for part in shapes if kind != SGD}, {}, {}
    dtype = held[stepped[0]][keys[-1]].dtype
    moments = [
        rules.to_flax(
            trained,
            {name: held[name].get(key, np.zeros(expected[name], dtype)) for name in expected},
            shapes,
        )
        for key in keys
        if key != "step"
    ]
    if kind == SGD:
        return {}, moments[0], {}
    counts = {
        part: _count(held[rule.torch]["step"])
        for rule in trained
        if isinstance(rule, Rule)
        for part in rule.flax
    }
    return counts, moments[0], moments[1]


def _kept(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """A parameter's state without what holds nothing: SGD without momentum writes None."""
    return {key: value for key, value in (state or {}).items() if value is not None}


def _check_state(
    name: str, state: Mapping[str, Any], keys: Sequence[str], shape: Shape
) -> Iterator[str]:
    if state.keys() != set(keys):
        yield f"{name} has the state {', '.join(map(str, state))}, expected {', '.join(keys)}"
        return
    for key in keys:
        value = state[key]
        if key == "step":
            if _count(value) < 1:
                yield f"{name}: step is {value}, not a count of updates"
        elif not isinstance(value, np.ndarray):
            yield f"{name}: {key} is a {type(value).__name__}, not an array"
        elif value.shape != shape:
            yield f"{name}: {key} has the shape {value.shape}, expected {shape}"


def _count(value: Any) -> int:
    """The whole number that torch keeps as a float tensor, or kept as an int; -1 for anything else."""
    value = optimizer_groups.plain(value)
    return int(value) if isinstance(value, int | float) and value == value // 1 else -1


def _write_states(moments: Moments, trained: Table) -> dict[str, dict[str, Any]]:
    """Each parameter's state by PyTorch's name."""
    if not moments.first:
        return {}
    first = rules.to_torch(trained, moments.first)
    if moments.kind == SGD:
        return {name: {"momentum_buffer": array} for name, array in first.items()}
    second = rules.to_torch(trained, moments.second)
    counts = {
        rule.torch: moments.counts[rule.flax[0]] for rule in trained if isinstance(rule, Rule)
    }
    # torch keeps the count in float32, whatever its parameters are in
    return {
        name: {
            "step": np.array(counts[name], np.float32),
            "exp_avg": first[name],
            "exp_avg_sq": second[name],
        }
        for name in first
    }


def _refuse(what: str, problems: Sequence[str]) -> None:
    if problems:
        raise InputError(f"{what} ({len(problems)} problems): {'; '.join(problems)}")
