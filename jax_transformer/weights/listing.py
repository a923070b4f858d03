"""Weight tables as Python code."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax_transformer.weights.rules import Alias, Rule

_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


def code(table: Iterable[Any], notes: Mapping[str, str] | None = None) -> str:
    """Return a table as Python code; what differs in a layer's number only is one ``repeat``.

    ``notes`` are comments on tensors, by name.
    """
    entries, text, done = list(table), "table = [\n", set[int]()
    groups = _groups(entries)
    for i, entry in enumerate(entries):
        if i in done:
            continue
        if i not in groups:
            text += _lines(entry, [entry], notes or {}, 4)
            continue
        count, members = groups[i]
        text += f"    *repeat(\n        {count},\n        [\n"
        for repeated, numbers in members:
            text += _lines(repeated, [entries[n] for n in numbers], notes or {}, 12)
            done |= {*numbers}
        text += "        ],\n    ),\n"
    return f"{text}]\n"


def _lines(entry: Any, every: Sequence[Any], notes: Mapping[str, str], indent: int) -> str:
    """Return an entry's line, and the first comment on one that it stands for."""
    comments = [notes[e.torch] for e in every if getattr(e, "torch", None) in notes]
    comment = [f"# {comments[0]}"] if comments else []
    return "".join(f"{' ' * indent}{line}\n" for line in [*comment, f"{_written(entry)},"])


def _written(entry: Any) -> str:
    values: list[Any] = [entry.flax if hasattr(entry, "flax") else entry.torch]
    if isinstance(entry, Rule):
        flax = entry.flax[0] if len(entry.flax) == 1 else entry.flax
        values = [entry.torch, flax, entry.axes, dict(entry.sizes)]
        while not values[-1]:
            values.pop()
    elif isinstance(entry, Alias):
        values = [entry.torch, entry.of]
    written = [json.dumps(value, ensure_ascii=False) for value in values]
    written += [f"{key}={n}" for key in ("axis", "parts") if (n := getattr(entry, key, 0))]
    return f"{type(entry).__name__}({', '.join(written)})"


def _groups(entries: Sequence[Any]) -> dict[int, tuple[int, list[tuple[Any, list[int]]]]]:
    """Return, by the number of its first entry, each group of entries that stand for layers 0, 1
    and so on: the number of layers, and the entries with ``{i}`` with the numbers of what they are.
    """
    seen: dict[str, dict[int, int]] = defaultdict(dict)
    repeated: dict[str, Any] = {}
    for number, entry in enumerate(entries):
        for layer, changed in _with_placeholder(entry):
            seen[repr(changed)][layer] = number
            repeated[repr(changed)] = changed
    groups: dict[tuple[int, str], list[tuple[Any, list[int]]]] = {}
    taken: set[int] = set()
    for key, layers in sorted(
        seen.items(), key=lambda each: (-len(each[1]), min(each[1].values()))
    ):
        numbers = [layers[layer] for layer in sorted(layers)]
        complete = len(layers) > 1 and sorted(layers) == list(range(len(layers)))
        if complete and not taken.intersection(numbers):
            taken |= {*numbers}
            around = repeated[key].torch.partition("{i}")[0]
            groups.setdefault((len(layers), around), []).append((repeated[key], numbers))
    ordered = [(count, sorted(g, key=lambda each: each[1][0])) for (count, _), g in groups.items()]
    return {group[0][1][0]: (count, group) for count, group in ordered}


def _with_placeholder(entry: Any) -> Iterator[tuple[int, Any]]:
    """Return a number in the names of a rule or an alias, and the entry with ``{i}`` for it."""
    if not isinstance(entry, Rule | Alias):
        return
    for place, match in enumerate(_NUMBER.finditer(entry.torch)):

        def changed(name: str, number: str = match[0], place: int = place) -> str:
            same = [each for each in _NUMBER.finditer(name) if each[0] == number]
            if not same:
                return name
            start, end = same[min(place, len(same) - 1)].span()
            return f"{name[:start]}{{i}}{name[end:]}"

        torch = f"{entry.torch[: match.start()]}{{i}}{entry.torch[match.end() :]}"
        others = [entry.of] if isinstance(entry, Alias) else entry.flax
        names = [changed(name) for name in others]
        if all("{i}" in name for name in names):
            more = {"of": names[0]} if isinstance(entry, Alias) else {"flax": tuple(names)}
            yield int(match[0]), replace(entry, torch=torch, **more)
