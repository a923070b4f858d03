"""The words of the code are those of JAX, Flax, PyTorch and transformers, and lines end at 100."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from parity_tests.unit import runs

PACKAGES = ("jax_transformer", "torch_reference", "benchmarks", "campaigns", "parity_tests")
CODE = [
    runs.ROOT / "train.py",
    *sorted(path for folder in PACKAGES for path in (runs.ROOT / folder).rglob("*.py")),
]
PROSE = sorted(path for path in runs.ROOT.rglob("*.md") if ".git" not in path.parts)
QUESTIONS = "what whether how where of as who which when".split()
"""First words of a docstring that begins a sentence without saying what is returned or done."""
REPLACED = """
    claim Initial carried_state Journal boards places Said told said given Frame Given Around Beside
    Asked Words dialects idle set_aside Decoding lineage ancestors found wanted kept held made how
    whole
""".split()
"""Names of a language of our own, which the field's replaced."""
EXTERNAL = {"from hypothesis import ", "@given(", "@hypothesis.given("}
"""Beginnings of the lines that may use a library's ``given``."""


def named(paths: list[Path]) -> list:
    """The paths as parameters of a test, by their names from the project's root."""
    return [pytest.param(path, id=path.relative_to(runs.ROOT).as_posix()) for path in paths]


def docstrings(tree: ast.AST) -> list[ast.Constant]:
    """The strings that document a module, a class, a function, a field or a constant."""
    bodies = [getattr(node, "body", None) for node in ast.walk(tree)]
    statements = [item for body in bodies if isinstance(body, list) for item in body]
    values = [item.value for item in statements if isinstance(item, ast.Expr)]
    return [v for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]


def is_replaced(token: tokenize.TokenInfo) -> bool:
    external = token.string == "given" and token.line.strip().startswith(tuple(EXTERNAL))
    return token.string in REPLACED and not external


@pytest.mark.parametrize("path", named(CODE))
def test_names_and_docstrings_are_the_field_s(path: Path):
    text = path.read_text(encoding="utf-8")
    problems = [
        f"line {string.lineno}: {string.value[:40]!r}"
        for string in docstrings(ast.parse(text))
        if re.split(r"\W", string.value.strip(), maxsplit=1)[0].lower() in QUESTIONS
    ]
    if path != Path(__file__).resolve():
        problems += [
            f"line {token.start[0]}: {token.string}"
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.NAME and is_replaced(token)
        ]
    assert not problems, problems


@pytest.mark.parametrize("path", named([p for p in CODE if "parity_tests" not in p.parts]))
def test_each_documented_argument_is_one_of_the_function_s(path: Path):
    """The site, which is built without a warning, warns of one that is not."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            section = re.search(
                r"^Args:\n((?:    .*\n|\n)*)", (ast.get_docstring(node) or "") + "\n", re.MULTILINE
            )
            documented = re.findall(r"^    (\S[^:]*):", section[1] if section else "", re.MULTILINE)
            parameters = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            assert {name.lstrip("*") for name in documented} <= parameters, node.name


def lines(path: Path) -> list[str]:
    """The lines that can be broken: no tables, links, single words, nor code blocks of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    several = [line for line in text.split("\n") if " " in line.strip()]
    return [x for x in several if not x.lstrip().startswith("|") and "](http" not in x]


@pytest.mark.parametrize("path", named([*CODE, *PROSE]))
def test_lines_end_at_column_100(path: Path):
    assert not [line for line in lines(path) if len(line) > 100]
