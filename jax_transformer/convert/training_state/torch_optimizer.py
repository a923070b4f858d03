"""Optimizer state between ``torch.optim`` (AdamW, Adam, SGD with momentum) and arrays by Flax name.
NumPy only. A moment has the shape of its parameter, so the weight table converts moments too.
Everything without an exact equal is refused by name, with the reason.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_transformer.errors import InputError, nearest
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Rule, Shape, Table

Arrays = dict[str, np.ndarray]

ADAMW, ADAM, SGD = "adamw", "adam", "sgd"
# Settings without effect on the numbers: the group's parameters, and the kernel of the step
_NEUTRAL = frozenset("params param_names foreach fused capturable differentiable".split())
_OPTIONS = {
    ADAM: frozenset(
        "lr initial_lr betas eps weight_decay amsgrad maximize decoupled_weight_decay".split()
    ),
    SGD: frozenset("lr initial_lr momentum dampening weight_decay nesterov maximize".split()),
}
# A setting that only one optimizer of torch.optim has, and that optimizer's name, for messages
_FOREIGN = dict(momentum_decay="NAdam", etas="Rprop", rho="Adadelta", lr_decay="Adagrad")
_FOREIGN |= dict(centered="RMSprop", lambd="ASGD", beta2_decay="Adafactor", max_iter="LBFGS")
_FOREIGN |= dict(ns_coefficients="Muon")


@dataclass(frozen=True)
class Moments:
    """The state of an optimizer for the trained arrays, by their Flax names."""

    kind: str
    """``adamw`` (decoupled weight decay), ``adam`` (weight decay in the gradient) or ``sgd``."""
    counts: dict[str, int]
    """Number of updates of each array, for Adam's bias correction; empty for SGD."""
    first: Arrays
    """Adam's running means of gradients, or SGD's momentum; empty before the first update."""
    second: Arrays
    """Adam's running means of squared gradients; empty before the first update, and for SGD."""
    hyperparameters: dict[str, Any]
    """``lr`` of the next update; ``initial_lr``, the schedule's base, if there is one; and
    ``betas`` and ``eps``, or ``momentum`` and ``nesterov``."""
    weight_decay: dict[str, float]
    """Weight decay of each array, frozen ones included; groups differ only in it."""


def from_torch(
    state: Mapping[str, Any],
    table: Table,
    shapes: Mapping[str, Shape],
    parameter_names: Sequence[str],
    *,
    kind: str | None = None,
) -> Moments:
    """Return the moments in the ``state_dict()`` of a torch.optim optimizer, its tensors as arrays.

    Args:
        state: ``{"state": {number: ...}, "param_groups": [...]}``.
        table: the weight table of the model.
        shapes: the shapes of the trained arrays by Flax name; other arrays of the table are frozen
            and may have no state.
        parameter_names: PyTorch's names in the optimizer's order, group after group, as
            ``[name for name, _ in module.named_parameters()]``.
        kind: "adam" or "adamw", for files of versions of torch that do not say which.

    Raises:
        InputError: one line with everything that has no exact equal: amsgrad, maximize, groups that
            differ in more than their weight decay, another optimizer; missing, surplus or
            mis-shaped states; parameters that do not fit the table.
    """
    groups, states = _parts(state)
    kind = _kind(groups, kind)
    _refuse("the optimizer's state cannot be converted exactly", list(_problems(groups)))
    numbers = [number for group in groups for number in group["params"]]
    names = _canonical(table, parameter_names)
    problems = list(_check_names(groups, numbers, parameter_names, names, table, shapes))
    problems += [
        f"a state of parameter {number}, of which there is none"
        for number in states
        if number not in set(numbers)
    ]
    _refuse("the optimizer's state does not fit the model", problems)
    by_name = {name: states.get(number, {}) for name, number in zip(names, numbers, strict=True)}
    trained = rules.restrict(table, shapes)
    counts, first, second = _read_states(kind, by_name, trained, shapes, names)
    decays = [float(plain(group["weight_decay"])) for group in groups for _ in group["params"]]
    parts = {rule.torch: rule.flax for rule in rules.without_aliases(table)}
    decay = {part: value for name, value in zip(names, decays, strict=True) for part in parts[name]}
    own = {"lr", "initial_lr", *(("momentum", "nesterov") if kind == SGD else ("betas", "eps"))}
    settings = {name: plain(value) for name, value in groups[0].items() if name in own}
    return Moments(kind, counts, first, second, settings, decay)


def to_torch(
    moments: Moments, table: Table, shapes: Mapping[str, Shape], parameter_names: Sequence[str]
) -> dict[str, Any]:
    """Return the ``state_dict()`` of the torch.optim optimizer: plain containers with arrays.

    The inverse of :func:`from_torch`, with its arguments and errors. Neighbours in
    ``parameter_names`` with the same weight decay make one group.
    """
    names = _canonical(table, parameter_names)
    problems = list(_check_names([], range(len(names)), parameter_names, names, table, shapes))
    parts = {rule.torch: rule.flax for rule in rules.without_aliases(table)}
    for name in names:
        for label, values in (("weight decays", moments.weight_decay), ("counts", moments.counts)):
            distinct = {values[part] for part in parts.get(name, ()) if part in values}
            if len(distinct) > 1:
                numbers = ", ".join(map(str, sorted(distinct)))
                problems.append(f"{name} would have {len(distinct)} {label}: {numbers}")
    _refuse("the optimizer's state does not fit the model", problems)
    trained = rules.restrict(table, shapes)
    states = _write_states(moments, trained)
    state = {number: states[name] for number, name in enumerate(names) if name in states}
    groups, begin = [], 0
    for decay, members in itertools.groupby(
        names, key=lambda name: moments.weight_decay[parts[name][0]]
    ):
        end = begin + len(list(members))
        settings = _settings(moments.kind, moments.hyperparameters, decay)
        groups.append({**settings, "params": list(range(begin, end))})
        begin = end
    return {"state": state, "param_groups": groups}


def parameter_names(state: Iterable[str], table: Table, buffers: Iterable[str] = ()) -> list[str]:
    """List a module's parameters in its ``state_dict()``'s order: tied ones once, no buffers."""
    left_out, seen, parameters = set(buffers), set(), []
    names = list(state)
    for name, canonical in zip(names, _canonical(table, names), strict=True):
        if canonical not in seen and name not in left_out:
            parameters.append(name)
        seen.add(canonical)
    return parameters


optimizer_from_torch, optimizer_to_torch = from_torch, to_torch  # as ``convert`` names them

# Groups of parameters


def _parts(state: Any) -> tuple[list[Mapping[str, Any]], Mapping[Any, Mapping[str, Any]]]:
    """Return a ``state_dict()``'s groups and states. Raises InputError if it is not one."""
    is_mapping = isinstance(state, Mapping)
    groups, states = (state.get("param_groups"), state.get("state")) if is_mapping else (None, None)
    if not isinstance(groups, list | tuple) or not groups or not isinstance(states, Mapping):
        raise InputError(
            "no optimizer's state_dict: it needs 'param_groups', a list, and 'state', a dict"
        )
    for i, group in enumerate(groups):
        numbers = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(numbers, list | tuple) or {*map(type, numbers)} - {int}:
            raise InputError(
                f"param_groups[{i}] of the optimizer is not a dict with a list of numbers 'params'"
            )
    for number, entries in states.items():
        if not isinstance(entries, Mapping):
            kind = type(entries).__name__
            raise InputError(f"the optimizer's state of parameter {number} is a {kind}, not a dict")
    return list(groups), states


def _kind(groups: Sequence[Mapping[str, Any]], stated: str | None) -> str:
    """Return the optimizer that has these groups: adamw, adam or sgd; ``stated`` decides between
    the first two if they do not. Raises InputError if Optax has no equal.
    """
    group = groups[0]
    family = None
    if {"betas", "amsgrad"} <= group.keys():
        family = ADAM
    elif {"momentum", "dampening"} <= group.keys():
        family = SGD
    foreign = sorted(group.keys() - _NEUTRAL - (_OPTIONS[family] if family else set()))
    name = next((_FOREIGN[key] for key in foreign if key in _FOREIGN), None)
    if name is None and family is None and "betas" in group:
        name = "RAdam" if "decoupled_weight_decay" in group else "Adamax"
    if family is None or name is not None:
        raise InputError(
            f"the optimizer is {name or 'of an unknown kind'}: only the state of AdamW, Adam and"
            " SGD with momentum can be converted"
        )
    needed = {"lr", "weight_decay", "eps" if family is ADAM else "nesterov"}
    wrong = [f"unknown setting {key!r}" for key in foreign]
    wrong += [f"no setting {key!r}" for key in sorted(needed - group.keys())]
    if wrong:
        raise InputError(f"the optimizer's state cannot be converted exactly: {', '.join(wrong)}")
    if family is SGD:
        return SGD
    decoupled = group.get("decoupled_weight_decay")
    if decoupled is not None:
        return ADAMW if decoupled else ADAM
    if stated is None and any(group.get("weight_decay") for group in groups):
        raise InputError(
            "the optimizer is Adam or AdamW, which differ in weight decay, and this older file does"
            " not say which"
        )
    return stated or ADAMW


def _problems(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield every setting that has no equal in Optax."""
    reasons = {
        "amsgrad": "Optax's Adam keeps no maximum of second moments",
        "maximize": "here a loss is made smaller",
        "dampening": "Optax's momentum has none",
    }
    for i, group in enumerate(groups):
        for name, reason in reasons.items():
            if group.get(name):
                yield f"param_groups[{i}] has {name}={plain(group[name])}: {reason}"
        for name in ("lr", "initial_lr", "weight_decay", "eps", "momentum"):
            if name in group and not _is_number(group[name]):
                yield f"param_groups[{i}] has {name}={group[name]!r}, not a number"
        if "betas" in group and not (
            isinstance(group["betas"], list | tuple)
            and [_is_number(beta) for beta in group["betas"]] == [True, True]
        ):
            yield f"param_groups[{i}] has betas={group['betas']!r}, not two numbers"
    for i, group in enumerate(groups[1:], 1):
        for name in sorted((group.keys() | groups[0].keys()) - _NEUTRAL - {"weight_decay"}):
            ours, theirs = (plain(each.get(name)) for each in (group, groups[0]))
            if ours != theirs:
                yield (
                    f"param_groups[{i}] has {name}={ours} and param_groups[0] {theirs}: groups may"
                    " differ only in weight decay"
                )


def _settings(kind: str, values: Mapping[str, Any], weight_decay: float) -> dict[str, Any]:
    """Return a group's settings; those that change no number have torch's defaults."""
    settings = {"lr": values["lr"], "weight_decay": weight_decay}
    settings |= {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
    if kind == SGD:
        settings |= {"momentum": values["momentum"], "nesterov": values["nesterov"]}
        settings["dampening"] = 0.0
    else:
        settings |= {"betas": values["betas"], "eps": values["eps"], "amsgrad": False}
        settings |= {"capturable": False, "decoupled_weight_decay": kind == ADAMW}
    if "initial_lr" in values:
        settings["initial_lr"] = values["initial_lr"]
    return settings


def plain(value: Any) -> Any:
    """Return a setting as Python's number or tuple: a capturable optimizer's rate is a tensor."""
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        return value.item()
    return tuple(plain(item) for item in value) if isinstance(value, list | tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(plain(value), int | float)


# Parameters and their states


def _canonical(table: Table, names: Sequence[str]) -> list[str]:
    """Replace the names of tied tensors by the one that has a rule."""
    aliases = rules.aliases(table)
    return [aliases.get(name, name) for name in names]


def _check_names(
    groups: Sequence[Mapping[str, Any]],
    numbers: Sequence[Any],
    parameter_names: Sequence[str],
    names: Sequence[str],
    table: Table,
    shapes: Mapping[str, Shape],
) -> Iterator[str]:
    """Yield every problem of the list of parameters."""
    if len(numbers) != len(names) or len(set(numbers)) != len(numbers):
        yield (
            f"the optimizer has {len(numbers)} parameters, {len(set(numbers))} of them different,"
            f" and the model {len(names)}"
        )
        return
    known = [rule.torch for rule in rules.without_aliases(table)]
    for stated, name in zip(parameter_names, names, strict=True):
        if name not in known:
            yield f"unknown parameter {stated}{nearest(name, known)}"
    for name in sorted(set(names)):
        if names.count(name) > 1:
            yield f"{name} is there more than once"
    for rule in rules.restrict(table, shapes):
        if rule.torch not in set(names):
            yield f"{rule.torch} is trained here and is not a parameter of the optimizer"
    recorded = [name for group in groups for name in group.get("param_names", ())]
    for ours, theirs in zip(parameter_names, recorded, strict=False):
        if ours != theirs:
            yield f"the optimizer's own names have another order: {theirs} where {ours} is expected"
            return


def _read_states(
    kind: str,
    states: Mapping[str, Mapping[str, Any]],
    trained: Sequence[Rule],
    shapes: Mapping[str, Shape],
    names: Sequence[str],
) -> tuple[dict[str, int], Arrays, Arrays]:
    """Return counts, first and second moments by Flax name."""
    # The state that torch has for each parameter: the count, then moments
    keys = ("momentum_buffer",) if kind == SGD else ("step", "exp_avg", "exp_avg_sq")
    expected = rules.torch_shapes(trained, shapes)
    own = {  # without entries of None, which SGD without momentum writes
        name: {key: value for key, value in states.get(name, {}).items() if value is not None}
        for name in [*expected, *names]
    }
    frozen = [name for name in names if name not in expected and own[name]]
    problems = [f"{name} has a state, but is not trained here" for name in frozen]
    stepped = [name for name in expected if own[name]]
    if kind != SGD and stepped:
        problems += [
            f"{name} has no state: it had no gradient yet, and Optax counts for all at once"
            for name in expected
            if not own[name]
        ]
    for name in stepped:
        problems += _check_state(name, own[name], keys, expected[name])
    _refuse("the optimizer's state cannot be converted exactly", problems)
    if not stepped:
        return {part: 0 for part in shapes if kind != SGD}, {}, {}
    dtype = own[stepped[0]][keys[-1]].dtype

    def moments(key: str) -> Arrays:
        stored = {
            name: own[name].get(key, np.zeros(shape, dtype)) for name, shape in expected.items()
        }
        return rules.to_flax(trained, stored, shapes)

    if kind == SGD:
        return {}, moments("momentum_buffer"), {}
    counts = {name: _count(own[rule.torch]["step"]) for rule in trained for name in rule.flax}
    return counts, moments("exp_avg"), moments("exp_avg_sq")


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
    """Return the count, which torch stores as a float tensor or an int; -1 if it is neither."""
    value = plain(value)
    return int(value) if isinstance(value, int | float) and value == value // 1 else -1


def _write_states(moments: Moments, trained: Sequence[Rule]) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter by PyTorch's name."""
    parts = moments.first, moments.second
    first, second = (rules.to_torch(trained, part) if part else {} for part in parts)
    if moments.kind == SGD:
        return {name: {"momentum_buffer": array} for name, array in first.items()}
    # torch stores the count in float32, whatever the dtype of its parameters
    return {
        rule.torch: {
            "step": np.array(moments.counts[rule.flax[0]], np.float32),
            "exp_avg": first[rule.torch],
            "exp_avg_sq": second[rule.torch],
        }
        for rule in trained
        if first
    }


def _refuse(summary: str, problems: Sequence[str]) -> None:
    if problems:
        raise InputError(f"{summary} ({len(problems)} problems): {'; '.join(problems)}")
