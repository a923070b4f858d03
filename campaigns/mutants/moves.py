"""The files of a revision and of the working tree, and which became which."""

import ast
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection
from functools import cache
from pathlib import Path, PurePath

TESTS = ("parity_tests", "campaigns")


class Tree:
    """The working tree next to the revision ``base``."""

    def __init__(self, root: Path, base: str, packages: Collection[str]):
        self.root, self.base = root, base
        self.code = self._python(packages)
        self.tests = {file for file in self._python(TESTS) if PurePath(file).name[:5] == "test_"}
        self.renamed = self._renamed()
        """The present path of files that the revision has elsewhere, as far as git sees it."""
        self.text = cache(lambda file: (root / file).read_text(encoding="utf-8"))
        self.before = cache(self._before)
        self.functions = cache(lambda file: frozenset(_named(self.text(file))))

    def _python(self, folders: Collection[str]) -> set[str]:
        paths = (path for folder in folders for path in (self.root / folder).rglob("*.py"))
        return {path.relative_to(self.root).as_posix() for path in paths}

    def naming(self) -> list[Path]:
        """The pages and the code that may name tests; a changelog keeps its names."""
        patterns = ("*.md", "*.py", ":!CHANGELOG.md")
        listed = self._git("ls-files", "-z", "-co", "--exclude-standard", "--", *patterns)
        paths = (self.root / name for name in sorted(set(listed.stdout.split("\0")) - {""}))
        return [path for path in paths if path.is_file()]

    def _git(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "-C", str(self.root), *arguments],
            capture_output=True,
            encoding="utf-8",
            env=os.environ | environment,
        )

    def _renamed(self) -> dict[str, str]:
        """By a temporary index, so that files that are not added yet count."""
        with tempfile.TemporaryDirectory() as folder:
            index = {"GIT_INDEX_FILE": f"{folder}/index"}
            self._git("add", "--all", **index).check_returncode()
            diff = self._git(
                *("diff", "--cached", "--name-status", "-z", "-M30%", "-l0", "--diff-filter=R"),
                self.base,
                **index,
            )
        diff.check_returncode()
        cells = diff.stdout.split("\0")[:-1]
        return dict(zip(cells[1::3], cells[2::3], strict=True))

    def renamed_modules(self) -> dict[str, str]:
        """The new names of modules that were renamed, unless a name has become several."""
        pairs = {
            (PurePath(old).stem, PurePath(new).stem)
            for old, new in self.renamed.items()
            if old.endswith(".py") and new.endswith(".py") and "__init__" not in old + new
        }
        pairs = {(old, new) for old, new in pairs if old != new and not old.startswith("test_")}
        times = Counter(old for old, _ in pairs)
        return {old: new for old, new in sorted(pairs) if times[old] == 1}

    def _before(self, file: str) -> str:
        """The text of a file in the revision; empty if it had none."""
        return self._git("show", f"{self.base}:{file}").stdout

    def scope(self, file: str, start: int) -> str:
        """The function or class around a character of a file, with those around it."""
        text = self.text(file)
        return around(scopes(text), text.count("\n", 0, start) + 1)

    def scope_of(self, file: str, old: str) -> str:
        """The function or class of a text; empty if the file does not have it once."""
        return _scope_of(self.text(file), old)

    def scope_before(self, file: str, old: str) -> str:
        """The same in the revision."""
        return _scope_of(self.before(file), old)

    def source(self, text: str, function: str) -> str:
        """The source of a function in a text; empty if there is none."""
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        return next((ast.unparse(node) for node in nodes if node.name == function), "")


@cache
def scopes(text: str) -> list[tuple[int, int, str]]:
    """The first and last line of each function and class, and its name with those around it."""
    spans = []

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{child.name}".lstrip(".")
                spans.append((child.lineno, child.end_lineno or child.lineno, name))
            visit(child, name)

    visit(ast.parse(text), "")
    return spans


def _scope_of(text: str, old: str) -> str:
    if text.count(old) != 1:
        return ""
    return around(scopes(text), text.count("\n", 0, text.index(old)) + 1)


def around(spans: list[tuple[int, int, str]], line: int) -> str:
    """The innermost scope of a line; empty outside of all."""
    names = [(first, name) for first, last, name in spans if first <= line <= last]
    return max(names)[1] if names else ""


def _named(text: str) -> list[str]:
    return re.findall(r"^\s*(?:async )?def (\w+)", text, re.MULTILINE)
