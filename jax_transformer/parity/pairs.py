"""Which module of a Flax model is which of a PyTorch model: read off a weight table, or said by rules with placeholders."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jax_transformer.errors import ConfigError, nearest
from jax_transformer.weights.rules import Rule, Table


class Pair(NamedTuple):
    """Two modules that should be one, by their dotted names."""

    ours: str
    theirs: str


def of_table(table: Table, ours: Collection[str], theirs: Collection[str]) -> list[Pair]:
    """The pairs that a weight table implies among the modules that were called: a module of either side is paired with that of the other which
    has exactly the same weights.

    So blocks, attentions, norms and linear layers find each other whatever they are called. Of several modules around the same weights the
    innermost is taken. What has no weights, and what one side packs into another's, is not paired.
    """
    # A table of relative positions counts for no block: T5 keeps the whole stack's in the first
    rules = [rule for rule in table if isinstance(rule, Rule)]
    numbered = [
        (i, rule)
        for i, rule in enumerate(rules)
        if not any(".relative." in name for name in rule.flax)
    ]
    own = _owners([(name, (i, name)) for i, rule in numbered for name in rule.flax], ours)
    found = {
        frozenset(rule for rule, _ in held): name
        for name, held in _owners([(r.torch, (i, "")) for i, r in numbered], theirs).items()
    }
    pairs = {}
    for name, held in own.items():
        weights = frozenset(i for i, _ in held)
        # A module that holds a part of what a rule packs has no counterpart
        if weights in found and len(held) == sum(len(rules[i].flax) for i in weights):
            pairs[weights] = Pair(name, found[weights])
    return list(pairs.values())


def _owners(
    weights: Sequence[tuple[str, tuple[int, str]]], modules: Collection[str]
) -> dict[str, set[tuple[int, str]]]:
    """What each module holds, outer modules before those within."""
    owned: dict[str, set[tuple[int, str]]] = {
        name: set() for name in sorted(modules, key=lambda name: name.count("."))
    }
    for name, weight in weights:
        words = name.split(".")
        for end in range(1, len(words)):
            if (module := ".".join(words[:end])) in owned:
                owned[module].add(weight)
    return {name: held for name, held in owned.items() if held}


def of_rules(
    rules: Mapping[str, str] | Sequence[tuple[str, str]],
    ours: Collection[str],
    theirs: Collection[str],
) -> list[Pair]:
    """The pairs that ``{"their.layers.{i}": "our.blocks.{i}"}`` names; each ``{word}`` stands for one part of a name, the same on both sides.

    Raises ConfigError for a rule that meets no module, naming the nearest.
    """
    pairs: list[Pair] = []
    for their_rule, our_rule in rules.items() if isinstance(rules, Mapping) else rules:
        words = re.findall(r"\{(\w+)\}", their_rule)
        if sorted(words) != sorted(re.findall(r"\{(\w+)\}", our_rule)):
            raise ConfigError(
                f"the rule {their_rule!r}: {our_rule!r} has different placeholders on its two sides"
            )
        pattern = re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^.]+)", re.escape(their_rule)))
        met = [match for match in map(pattern.fullmatch, theirs) if match]
        if not met:
            raise ConfigError(
                f"the PyTorch model has no module {their_rule!r}{nearest(their_rule, sorted(theirs))}"
            )
        for match in met:
            name = our_rule.format(**match.groupdict())
            if name not in ours:
                raise ConfigError(
                    f"the Flax model has no module {name!r}{nearest(name, sorted(ours))}"
                )
            pairs.append(Pair(name, match.string))
    return pairs
