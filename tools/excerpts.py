"""The excerpts of the code in docs/the-core.md.

    python tools/excerpts.py            # prints the page
    python tools/excerpts.py --write    # writes it

A line ``<!-- FILE NAME -->`` stands before a block of code: NAME is a function, a class or a method
of FILE, and the block becomes its source without decorators and docstrings.
"""

import argparse
import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/the-core.md"
BLOCK = re.compile(r"^<!-- (\S+) (\S+) -->\n```py\n.*?^```$", re.DOTALL | re.MULTILINE)


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
