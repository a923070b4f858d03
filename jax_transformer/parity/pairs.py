"""Pairs of Flax and PyTorch modules: derived from a weight table, or given by patterns."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jax_transformer.errors import ConfigError, nearest
from jax_transformer.weights.rules import Rule, Table


class Pair(NamedTuple):
    """Two modules that should be equal, by their dotted names."""

    ours: str
    theirs: str


def from_table(table: Table, ours: Collection[str], theirs: Collection[str]) -> list[Pair]:
    """The pairs that a weight table implies among the modules that were called.

    Two modules are a pair if they hold exactly the same weights, so blocks, attentions, norms and
    linear layers are paired whatever their names are. Of several modules around the same weights
    the innermost is taken. Modules without weights, and those whose weights the other side packs
    into a larger tensor, are not paired.
    """
    # Tables of relative positions are left out: T5 keeps that of the stack in its first block
    rules = [rule for rule in table if isinstance(rule, Rule)]
    numbered = [
        (i, rule)
        for i, rule in enumerate(rules)
        if not any(".relative." in name for name in rule.flax)
    ]
    our_weights = _weights_of_modules(
        [(name, (i, name)) for i, rule in numbered for name in rule.flax], ours
    )
    their_weights = _weights_of_modules([(rule.torch, (i, "")) for i, rule in numbered], theirs)
    by_rules = {
        frozenset(i for i, _ in weights): module for module, weights in their_weights.items()
    }
    pairs = {}
    for module, weights in our_weights.items():
        key = frozenset(i for i, _ in weights)
        # A module that holds a part of a packed tensor has no counterpart
        if key in by_rules and len(weights) == sum(len(rules[i].flax) for i in key):
            pairs[key] = Pair(module, by_rules[key])
    return list(pairs.values())


def _weights_of_modules(
    weights: Sequence[tuple[str, tuple[int, str]]], modules: Collection[str]
) -> dict[str, set[tuple[int, str]]]:
    """The weights of each module that has some; outer modules come before inner ones."""
    owned: dict[str, set[tuple[int, str]]] = {
        name: set() for name in sorted(modules, key=lambda name: name.count("."))
    }
    for name, weight in weights:
        parts = name.split(".")
        for end in range(1, len(parts)):
            if (module := ".".join(parts[:end])) in owned:
                owned[module].add(weight)
    return {name: members for name, members in owned.items() if members}


def from_patterns(
    patterns: Mapping[str, str] | Sequence[tuple[str, str]],
    ours: Collection[str],
    theirs: Collection[str],
) -> list[Pair]:
    """The pairs that patterns such as ``{"their.layers.{i}": "our.blocks.{i}"}`` name.

    Each ``{word}`` stands for one part of a dotted name, the same on both sides. Raises one
    ConfigError that lists every pattern that matches no module, with the nearest name.
    """
    pairs: list[Pair] = []
    problems: list[str] = []
    for torch_pattern, flax_pattern in (
        patterns.items() if isinstance(patterns, Mapping) else patterns
    ):
        placeholders = re.findall(r"\{(\w+)\}", torch_pattern)
        if sorted(placeholders) != sorted(re.findall(r"\{(\w+)\}", flax_pattern)):
            problems.append(
                f"the rule {torch_pattern!r}: {flax_pattern!r} has different placeholders on its"
                " two sides"
            )
            continue
        regex = re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^.]+)", re.escape(torch_pattern)))
        matches = [match for match in map(regex.fullmatch, theirs) if match]
        if not matches:
            problems.append(
                f"the PyTorch model has no module {torch_pattern!r}"
                f"{nearest(torch_pattern, sorted(theirs))}"
            )
        for match in matches:
            name = flax_pattern.format(**match.groupdict())
            if name not in ours:
                problems.append(
                    f"the Flax model has no module {name!r}{nearest(name, sorted(ours))}"
                )
            pairs.append(Pair(name, match.string))
    if problems:
        raise ConfigError("; ".join(problems))
    return pairs
