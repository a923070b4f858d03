"""A fault as a value: a replacement in a file, the tests that reach it, and the faulty module.

The faults are data, a file of TOML for each area; ``read`` and ``written`` are inverses.
"""

import ast
import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = Path(__file__).resolve().parent / "data"
USUAL = "lesson10"


@dataclass(frozen=True)
class Mutant:
    """One fault, seeded by itself."""

    name: str
    met: str
    """The known fault that this one is, or resembles."""
    file: str
    """Path from the project's root."""
    old: str
    """The text to replace, which occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Node ids of tests that reach the fault; the first failure kills it."""
    module: str | None = None
    """The module that ``jax_transformer.parity.compare`` must name first; None if the fault is in
    no module, or in none that is paired."""
    case: str = USUAL
    """The compared configuration, by its name in parity_tests.cases or parity_tests.huggingface."""
    backward: bool = False
    """True if the outputs agree and the gradients must name the module."""


@dataclass(frozen=True)
class Area:
    """The faults of a file of data: a table of docs/mutants.md."""

    name: str
    about: str
    mutants: tuple[Mutant, ...]


# The data


def read(path: Path) -> Area:
    """The area of a file. Raises TypeError for an unknown or missing field."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    mutants = (Mutant(**fault | {"tests": tuple(fault["tests"])}) for fault in content["fault"])
    return Area(path.stem, content["about"], tuple(mutants))


@cache
def areas() -> tuple[Area, ...]:
    """All areas, by name."""
    return tuple(read(path) for path in sorted(DATA.glob("*.toml")))


def listed() -> list[Mutant]:
    """All faults."""
    return [mutant for area in areas() for mutant in area.mutants]


@cache
def area_of(name: str) -> Area:
    """The area of the fault with this name."""
    [area] = [area for area in areas() if name in {mutant.name for mutant in area.mutants}]
    return area


def written(area: Area) -> str:
    """The text of an area's file."""
    return f"about = {_quoted(area.about)}\n" + "".join(
        "\n[[fault]]\n" + "".join(f"{line}\n" for line in _lines(mutant)) for mutant in area.mutants
    )


def _lines(mutant: Mutant) -> Iterator[str]:
    for each in fields(mutant):
        value = getattr(mutant, each.name)
        if value == each.default:
            continue
        if each.name == "tests":
            nodes = [_quoted(node) for node in value]
            inner = nodes[0] if len(nodes) == 1 else "".join(f"\n    {node}," for node in nodes)
            yield f"tests = [{inner}{'' if len(nodes) == 1 else chr(10)}]"
        elif each.name in ("old", "new"):
            yield f"{each.name} = {_literal(value)}"
        else:
            yield f"{each.name} = {'true' if value is True else _quoted(value)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str:
    """Code without escapes: in one line, or from the line below on."""
    if "\n" not in text and "'" not in text:
        return f"'{text}'"
    if "'''" in text:
        raise ValueError(f"{text!r}: three quotes cannot stand in the data")
    return f"'''\n{text}'''"


# What keeps it valid


def applied(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the file with the fault in it.

    Raises ValueError unless the old text occurs exactly once and the new text differs.
    """
    text = (root / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.old) != 1 or mutant.old == mutant.new:
        raise ValueError(
            f"{mutant.name}: its old text occurs {text.count(mutant.old)} times in {mutant.file}:"
            " adapt it to the code"
        )
    return text.replace(mutant.old, mutant.new)


def missing_tests(nodes: Sequence[str], root: Path = ROOT) -> list[str]:
    """The node ids without a file or function of that name; parameters are not looked at."""
    missing = []
    for node in nodes:
        path, _, rest = node.partition("::")
        names = _functions(root / path) if (root / path).is_file() else set()
        if rest.partition("[")[0] not in names:
            missing.append(node)
    return missing


def names(node: str, collected: str) -> bool:
    """True if a node id means a collected test: itself, or a parametrisation of it."""
    return collected == node or collected.startswith(f"{node}[")


def not_among(nodes: Iterable[str], collected: Collection[str]) -> list[str]:
    """The node ids that match no collected test: missing function, missing parameters or
    deselected."""
    return [node for node in nodes if not any(names(node, test) for test in collected)]


def uncollected(nodes: Iterable[str], session: Any) -> list[str] | None:
    """The node ids that mean no test of the default suite, among those that a session collected.

    Only files that the session has collected count; None if it has collected none of theirs, or if
    it has selected tests.
    """
    options, collected = session.config.option, {item.nodeid for item in session.items}
    files = {node.partition("::")[0] for node in collected}
    known = [node for node in nodes if node.partition("::")[0] in files]
    if (
        not known
        or options.keyword
        or options.markexpr not in ("", "not slow")
        or any("::" in name for name in session.config.args)
    ):
        return None
    return not_among(known, collected)


@lru_cache
def _functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
