"""Point the faults at the code and tests that have moved since a revision.

``python -m campaigns.mutants.reanchor --base main [--word OLD=NEW ...] [--dry-run]``

A fault whose text still occurs exactly once in its file stays as it is. Otherwise its text is
looked for in the file that git says its own has become, then in the whole package; if that fails,
with the words of renamed modules (and of ``--word``) replaced, then with other line breaks and
indentation. If it occurs several times, the occurrence in the function or class of the same name
is meant. Tests are found by the names of their functions, also those that pages and code name;
their parameters are not looked at (``pytest`` does that, in campaigns/tests/test_mutants.py). The
code must still parse with the fault in it. What could not be placed is listed and stays as it was;
the exit code is then 1. Changes of text, not only of place, are printed, to be read.
"""

import argparse
import ast
import difflib
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from campaigns.mutants import faults
from campaigns.mutants.faults import Mutant
from campaigns.mutants.matching import Place, exact, loose
from campaigns.mutants.moves import Tree

NODE = re.compile(r"(?<![\w/])((?:parity_tests|campaigns)/[\w/]+\.py)(?:::(test_\w+))?")


# Code


def placed(mutant: Mutant, tree: Tree, words: dict[str, str]) -> Mutant | str:
    """The fault at its place in the tree; the reason if there is not exactly one."""
    scope = tree.scope_before(mutant.file, mutant.old)
    files = [mutant.file, tree.renamed.get(mutant.file, ""), *sorted(tree.code)]
    files = [file for file in dict.fromkeys(files) if file in tree.code]
    own, rest = files[:1] if mutant.file in tree.code else [], files
    matches: list[Place] = []
    for old, new in _variants(mutant, words):
        for within in (own, [f for f in rest if f == tree.renamed.get(mutant.file)], rest):
            matches = [place for file in within for place in exact(file, tree.text(file), old, new)]
            if place := _meant(matches, scope, tree):
                return _checked(mutant, place, tree)
            if matches:
                return f"its text occurs {len(matches)} times: " + _where(matches, tree)
    for old, new in _variants(mutant, words):
        matches = [place for file in rest for place in loose(file, tree.text(file), old, new)]
        if place := _meant(matches, scope, tree):
            return _checked(mutant, place, tree)
    if matches:
        return f"its text occurs {len(matches)} times: " + _where(matches, tree)
    return "its text is gone" + _nearest(mutant, scope, tree)


def _variants(mutant: Mutant, words: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the old and new text as they are, with all words replaced, and with each of them."""
    seen = set()
    for chosen in ({}, words, *({word: words[word]} for word in words)):
        pair = _reworded(mutant.old, chosen), _reworded(mutant.new, chosen)
        if pair not in seen:
            seen.add(pair)
            yield pair


def _reworded(text: str, words: dict[str, str]) -> str:
    for word, other in words.items():
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", lambda _, other=other: other, text)
    return text


def _meant(matches: Sequence[Place], scope: str, tree: Tree) -> Place | None:
    """The only occurrence, or the only one in a function or class of this name, grown until its
    text is unique in its file."""
    if len(matches) > 1 and scope:
        matches = [each for each in matches if tree.scope(each.file, each.start) == scope]
    if len(matches) != 1:
        return None
    [place] = matches
    text = tree.text(place.file)
    while text.count(place.old) != 1:
        line = text.rfind("\n", 0, max(0, place.start - 1)) + 1
        if line >= place.start:
            return None
        added = text[line : place.start]
        place = Place(place.file, line, added + place.old, added + place.new)
    return place


def _checked(mutant: Mutant, place: Place, tree: Tree) -> Mutant | str:
    """The fault at a place; the reason if it is none there."""
    mutant = replace(mutant, file=place.file, old=place.old, new=place.new)
    text = tree.text(mutant.file)
    try:
        faulty = ast.dump(ast.parse(text.replace(mutant.old, mutant.new)))
    except SyntaxError as error:
        return f"{mutant.file} does not parse with it: {error}"
    return f"it no longer changes {mutant.file}" if faulty == ast.dump(ast.parse(text)) else mutant


def _where(matches: Sequence[Place], tree: Tree) -> str:
    lines = (
        f"{each.file}:{tree.text(each.file).count(chr(10), 0, each.start) + 1}" for each in matches
    )
    return ", ".join(lines)


def _nearest(mutant: Mutant, scope: str, tree: Tree) -> str:
    """The lines most like the longest line of the text, in files that may hold it."""
    line = max(mutant.old.splitlines(), key=len).strip()
    name = scope.rpartition(".")[2]
    likely = [
        file
        for file in tree.code
        if file in (mutant.file, tree.renamed.get(mutant.file))
        or (name and re.search(rf"(?:def|class) {name}\b", tree.text(file)))
    ]
    lines = {
        text.strip(): f"{file}:{number}: {text.strip()}"
        for file in likely or sorted(tree.code)
        for number, text in enumerate(tree.text(file).splitlines(), 1)
    }
    close = difflib.get_close_matches(line, lines, 2, 0.5)
    return "".join(
        [f"\n    was ({scope or 'module'}): {line}", *(f"\n    {lines[text]}" for text in close)]
    )


# Tests


def test_place(path: str, function: str, tree: Tree) -> str | None:
    """The file of a test function that was in ``path``; None if there is not exactly one."""
    if path in tree.tests and (not function or function in tree.functions(path)):
        return path
    target = tree.renamed.get(path)
    if target in tree.tests and (not function or function in tree.functions(target)):
        return target
    if not function:
        return None
    having = [file for file in sorted(tree.tests) if function in tree.functions(file)]
    base = tree.before(path)
    for alike in (
        lambda file: True,
        lambda file: Path(file).name in (Path(path).name, Path(target or path).name),
        lambda file: tree.source(tree.text(file), function) == tree.source(base, function),
    ):
        chosen = [file for file in having if alike(file)]
        if len(chosen) == 1:
            return chosen[0]
    return None


def moved_tests(mutant: Mutant, tree: Tree) -> tuple[Mutant, list[str]]:
    """The fault with the present places of its tests, and what could not be placed."""
    nodes, lost = [], []
    for node in mutant.tests:
        path, _, rest = node.partition("::")
        function = rest.partition("[")[0]
        place = test_place(path, function, tree)
        nodes.append(f"{place or path}::{rest}")
        if place is None:
            known = {name: file for file in tree.tests for name in tree.functions(file)}
            close = difflib.get_close_matches(function, known, 1, 0.6)
            lost.append(f"no test {node}" + "".join(f"\n    {known[n]}::{n}" for n in close))
    return replace(mutant, tests=tuple(nodes)), lost


def moved_names(text: str, tree: Tree) -> str:
    """A text with the present places of the tests that it names."""

    def moved(match: re.Match[str]) -> str:
        path, function = match[1], match[2] or ""
        if not tree.before(path):  # a name that means no test
            return match[0]
        place = test_place(path, function, tree) or tree.renamed.get(path, path)
        return f"{place}::{function}" if function else place

    return NODE.sub(moved, text)


# The command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base", default="HEAD", help="revision that the faults match (%(default)s)"
    )
    parser.add_argument("--word", action="append", default=[], metavar="OLD=NEW", help="a renaming")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--root", type=Path, default=faults.ROOT, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def followed(
    mutant: Mutant, tree: Tree, words: dict[str, str]
) -> tuple[Mutant, list[str], list[str]]:
    """The fault in the tree, what to read again, and what could not be placed."""
    place = placed(mutant, tree, words)
    if isinstance(place, str):
        now, lost = moved_tests(mutant, tree)
        return now, [], [place, *lost]
    now, lost = moved_tests(place, tree)
    notes = []
    if (now.old, now.new) != (mutant.old, mutant.new):
        changed = [f"  - {line}" for line in now.old.splitlines()]
        changed += [f"  + {line}" for line in now.new.splitlines()]
        notes.append("\n".join([f"new text in {now.file}", *changed]))
    before, after = tree.scope_before(mutant.file, mutant.old), tree.scope_of(now.file, now.old)
    if before and before.rpartition(".")[2] != after.rpartition(".")[2]:
        notes.append(f"was in {before}, is in {after or 'no function'} of {now.file}")
    return now, notes, lost


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    root: Path = options.root
    data = root / faults.DATA.relative_to(faults.ROOT)
    areas = [faults.read(path) for path in sorted(data.glob("*.toml"))]
    packages = {mutant.file.partition("/")[0] for area in areas for mutant in area.mutants}
    tree = Tree(root, options.base, packages)
    words = tree.renamed_modules() | dict(word.split("=", 1) for word in options.word)
    counts: Counter[str] = Counter()
    texts = {}
    for area in areas:
        mutants = []
        for mutant in area.mutants:
            now, notes, lost = followed(mutant, tree, words)
            mutants.append(now)
            counts["as they were" if now == mutant else "changed"] += 1
            counts["not placed"] += bool(lost)
            for line in [*notes, *(f"NOT PLACED: {reason}" for reason in lost)]:
                print(f"{area.name}: {mutant.name}: {line}")
        texts[data / f"{area.name}.toml"] = faults.written(replace(area, mutants=tuple(mutants)))
    for path in tree.naming():
        texts[path] = moved_names(path.read_text(encoding="utf-8"), tree)
    for path, text in texts.items():
        if text != path.read_text(encoding="utf-8"):
            print(f"{path.relative_to(root)}: {'to be ' * options.dry_run}rewritten")
            if not options.dry_run:
                path.write_text(text, encoding="utf-8")
    print("faults: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if counts["not placed"] else 0


if __name__ == "__main__":
    sys.exit(main())
