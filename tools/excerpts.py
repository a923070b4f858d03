"""Excerpts of the code: those of docs/the-core.md, and definitions as they run.

    python tools/excerpts.py            # prints the page
    python tools/excerpts.py --write    # writes it

A line ``<!-- FILE NAME -->`` stands before a block of code: NAME is a function, a class or a method
of FILE, and the block becomes its source without decorators and docstrings.
"""

import argparse
import ast
import copy
import functools
import re
import subprocess
import sys
import textwrap
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/the-core.md"
BLOCK = re.compile(r"^<!-- (\S+) (\S+) -->\n```py\n.*?^```$", re.DOTALL | re.MULTILINE)
COLUMNS = 68
"""Width of a definition as it runs: two can stand next to each other."""


def source(file: str, name: str) -> str:
    """Return the source of a definition, such as ``Transformer.encode``, without decorators and
    docstrings."""
    text = (ROOT / file).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = next(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name == part
        )
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    left_out: set[int] = set()
    for part in ast.walk(node):
        match getattr(part, "body", None):
            case [ast.Expr(ast.Constant(str())) as docstring, *_]:
                left_out.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
                if not text.splitlines()[docstring.end_lineno or 0].strip():
                    left_out.add((docstring.end_lineno or 0) + 1)
    lines = enumerate(text.splitlines()[: node.end_lineno], 1)
    return textwrap.dedent("\n".join(x for i, x in lines if i >= node.lineno and i not in left_out))


@functools.cache
def definition(file: str, name: str) -> Any:
    """Return the syntax tree of a definition, such as ``Transformer.encode``, or None."""
    node: Any = _tree(file)
    for part in name.split("."):
        node = next((n for n in node.body if getattr(n, "name", None) == part), None)
        if node is None:
            return None
    return node


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def running(file: str, name: str, lines: Collection[tuple[str, int]]) -> str:
    """Return a definition with the statements that run, if these lines of files do.

    It is laid out anew, without comments, docstrings, decorators and assertions.
    """
    node = copy.deepcopy(definition(file, name))
    ran = {line for path, line in lines if path == str(ROOT / file)}
    node.decorator_list = []
    node.body = _running(node.body, ran & {*range(node.lineno, node.end_lineno + 1)})
    return _formatted(ast.unparse(node))


@functools.cache
def _formatted(text: str) -> str:
    ruff = [sys.executable, *f"-m ruff format --isolated --line-length {COLUMNS} -".split()]
    done = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _running(statements: list[Any], ran: set[int]) -> list[Any]:
    """Return the statements without docstrings, and without those that do not run."""
    result = []
    for node in statements:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if (
            is_text
            or isinstance(node, ast.Assert)
            or (ran and not ran & {*range(node.lineno, node.end_lineno + 1)})
        ):
            continue
        for field in {"body", "orelse"} & vars(node).keys():
            setattr(node, field, _running(getattr(node, field), ran))
        node = _Chosen(ran).visit(node)
        result += [node] if getattr(node, "body", True) else node.orelse
    return result


@dataclass
class _Chosen(ast.NodeTransformer):
    """Replace a conditional expression by its only side that runs, if lines of its own show it."""

    ran: set[int]

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        sides = [{*range(n.lineno, (n.end_lineno or 0) + 1)} for n in (node.body, node.orelse)]
        chosen = [bool(lines & self.ran) for lines in sides]
        if len(sides[0] & sides[1]) or all(chosen) or not any(chosen):
            return node
        return node.body if chosen[0] else node.orelse


def page() -> str:
    """Return the page with the code as it is now."""
    return BLOCK.sub(
        lambda match: f"<!-- {match[1]} {match[2]} -->\n```py\n{source(match[1], match[2])}\n```",
        PAGE.read_text(encoding="utf-8"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page")
    text = page()
    if parser.parse_args().write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
