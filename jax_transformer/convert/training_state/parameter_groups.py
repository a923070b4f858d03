"""The settings of a torch.optim optimizer: its kind, and reasons not to convert its state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_transformer.errors import InputError

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
_FOREIGN = {
    "momentum_decay": "NAdam",
    "etas": "Rprop",
    "rho": "Adadelta",
    "lr_decay": "Adagrad",
    "centered": "RMSprop",
    "lambd": "ASGD",
    "beta2_decay": "Adafactor",
    "ns_coefficients": "Muon",
    "max_iter": "LBFGS",
}


def parts(state: Any) -> tuple[list[Mapping[str, Any]], Mapping[Any, Mapping[str, Any]]]:
    """Return the groups and the states of an optimizer's ``state_dict()``.

    Raises InputError if it is not one.
    """
    groups, states = (
        state.get(name) if isinstance(state, Mapping) else None
        for name in ("param_groups", "state")
    )
    if not isinstance(groups, list | tuple) or not groups or not isinstance(states, Mapping):
        raise InputError(
            "no optimizer's state_dict: it needs 'param_groups', a list, and 'state', a dict"
        )
    for i, group in enumerate(groups):
        numbers = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(numbers, list | tuple) or not all(
            type(number) is int for number in numbers
        ):
            raise InputError(
                f"param_groups[{i}] of the optimizer is not a dict with a list of numbers 'params'"
            )
    for number, entries in states.items():
        if not isinstance(entries, Mapping):
            raise InputError(
                f"the optimizer's state of parameter {number} is a {type(entries).__name__},"
                " not a dict"
            )
    return list(groups), states


def kind(groups: Sequence[Mapping[str, Any]], stated: str | None) -> str:
    """Return the optimizer that has these groups: adamw, adam or sgd.

    ``stated`` decides between Adam and AdamW if the groups do not. Raises InputError for an
    optimizer that Optax does not compute equally.
    """
    group = groups[0]
    family = (
        ADAM
        if {"betas", "amsgrad"} <= group.keys()
        else SGD
        if {"momentum", "dampening"} <= group.keys()
        else None
    )
    foreign = sorted(group.keys() - _NEUTRAL - (_OPTIONS[family] if family else set()))
    name = next((_FOREIGN[key] for key in foreign if key in _FOREIGN), None)
    if name is None and family is None and "betas" in group:
        name = "RAdam" if "decoupled_weight_decay" in group else "Adamax"
    if family is None or name is not None:
        raise InputError(
            f"the optimizer is {name or 'of an unknown kind'}: only the state of AdamW, Adam and"
            " SGD with momentum can be converted"
        )
    missing = sorted(
        {"lr", "weight_decay", *(("eps",) if family is ADAM else ("nesterov",))} - group.keys()
    )
    if foreign or missing:
        settings_text = ", ".join(
            [
                *(f"unknown setting {key!r}" for key in foreign),
                *(f"no setting {key!r}" for key in missing),
            ]
        )
        raise InputError(f"the optimizer's state cannot be converted exactly: {settings_text}")
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


def problems(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
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


def hyperparameters(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that ``Moments.hyperparameters`` has."""
    own = ("betas", "eps") if kind != SGD else ("momentum", "nesterov")
    return {name: plain(group[name]) for name in ("lr", "initial_lr", *own) if name in group}


def settings(kind: str, values: Mapping[str, Any], weight_decay: float) -> dict[str, Any]:
    """Return a group's settings, the inverse of :func:`hyperparameters`.

    Those that change no number have torch's defaults.
    """
    same = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
    base = {"initial_lr": values["initial_lr"]} if "initial_lr" in values else {}
    if kind == SGD:
        own = {
            "momentum": values["momentum"],
            "dampening": 0.0,
            "weight_decay": weight_decay,
            "nesterov": values["nesterov"],
        }
        return {"lr": values["lr"], **own, **same, **base}
    own = {
        "betas": tuple(values["betas"]),
        "eps": values["eps"],
        "weight_decay": weight_decay,
        "amsgrad": False,
    }
    return {
        "lr": values["lr"],
        **own,
        **same,
        "capturable": False,
        "decoupled_weight_decay": kind == ADAMW,
        **base,
    }


def plain(value: Any) -> Any:
    """Return a setting as Python's number or tuple: a capturable optimizer's rate is a tensor."""
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        return value.item()
    return tuple(plain(item) for item in value) if isinstance(value, list | tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(plain(value), int | float)
