"""A fault as a value: a replacement in a file, the tests that reach it, and the faulty module."""

import ast
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FORWARD = "parity_tests/test_forward.py::test_level"
GRADIENTS = "parity_tests/test_gradients.py"
FAMILIES = "parity_tests/test_huggingface_forward.py::test_every_hidden_state_attention_and_logit"
USUAL = "lesson10"


@dataclass(frozen=True)
class Mutant:
    """One fault, seeded by itself."""

    name: str
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
    met: str = ""
    """The known fault that this one is, or resembles."""
    backward: bool = False
    """True if the outputs agree and the gradients must name the module."""


def level(name: str, case: str = "lesson10") -> tuple[str, ...]:
    """The test of one level, in float64."""
    return (f"{FORWARD}[{case}-float64-{name}]",)


def family(name: str) -> tuple[str, ...]:
    """The test of all hidden states of a family of Hugging Face's, in float64."""
    return (f"{FAMILIES}[{name}-float64]",)


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


def missing_tests(nodes: tuple[str, ...], root: Path = ROOT) -> list[str]:
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
