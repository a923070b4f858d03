"""The words of the code are those of JAX, Flax, PyTorch and transformers, and lines end at 100."""

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

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


@functools.cache
def trees() -> list[tuple[str, ast.AST]]:
    """The files' names from the project's root, and their syntax."""
    return [
        (path.relative_to(runs.ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in CODE
    ]


def docstrings(tree: ast.AST) -> list[ast.Constant]:
    """The strings that document a module, a class, a function, a field or a constant."""
    bodies = [getattr(node, "body", None) for node in ast.walk(tree)]
    statements = [item for body in bodies if isinstance(body, list) for item in body]
    values = [item.value for item in statements if isinstance(item, ast.Expr)]
    return [v for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]


def is_replaced(token: tokenize.TokenInfo) -> bool:
    external = token.string == "given" and token.line.strip().startswith(tuple(EXTERNAL))
    return token.string in REPLACED and not external


def test_docstrings_begin_with_what_is_returned_or_done():
    assert not [
        f"{name}:{string.lineno}: {string.value[:40]!r}"
        for name, tree in trees()
        for string in docstrings(tree)
        if re.split(r"\W", string.value.strip(), maxsplit=1)[0].lower() in QUESTIONS
    ]


def test_names_are_the_field_s():
    assert not [
        f"{path.relative_to(runs.ROOT)}:{token.start[0]}: {token.string}"
        for path in CODE
        if path != Path(__file__).resolve()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
        if token.type == tokenize.NAME and is_replaced(token)
    ]


def test_each_documented_argument_is_one_of_the_function_s():
    """The site, which is built without a warning, warns of one that is not."""
    problems = []
    for name, tree in trees():
        for node in () if name.startswith("parity_tests") else ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = (ast.get_docstring(node) or "") + "\n"
                section = re.search(r"^Args:\n((?:    .*\n|\n)*)", text, re.MULTILINE)
                rows = re.findall(r"^    (\S[^:]*):", section[1] if section else "", re.MULTILINE)
                parameters = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
                unknown = {row.lstrip("*") for row in rows} - parameters
                problems += [f"{name}:{node.lineno}: {argument}" for argument in unknown]
    assert not problems


def lines(path: Path) -> list[str]:
    """The lines that can be broken: no tables, links, single words, commands of
    tables, nor code blocks of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    several = [line for line in text.split("\n") if " " in line.strip()]
    unbroken = "|", "<!-- python "
    return [x for x in several if not x.lstrip().startswith(unbroken) and "](http" not in x]


def test_lines_end_at_column_100():
    assert not [
        f"{path.relative_to(runs.ROOT)}: {line}"
        for path in [*CODE, *PROSE]
        for line in lines(path)
        if len(line) > 100
    ]
