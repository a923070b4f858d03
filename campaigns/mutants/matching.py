"""Occurrences of a fault's text in code, also with other line breaks and indentation."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKEN = re.compile(r"\w+|[^\w\s]")
CLOSING, SPACE = ")]}", r"\s*"


@dataclass(frozen=True)
class Place:
    """An occurrence of a fault's text."""

    file: str
    start: int
    old: str
    new: str


def exact(file: str, text: str, old: str, new: str) -> Iterator[Place]:
    """Yield the occurrences of a text."""
    start = text.find(old)
    while start >= 0:
        yield Place(file, start, old, new)
        start = text.find(old, start + 1)


def loose(file: str, text: str, old: str, new: str) -> Iterator[Place]:
    """Yield the occurrences of a text with other spaces, line breaks and last commas."""
    tokens = list(TOKEN.finditer(old))
    pattern = ""
    for i, token in enumerate(tokens):
        last = i + 1 < len(tokens) and tokens[i + 1][0] in CLOSING
        pattern += "(,?)" if last and token[0] == "," else f"({re.escape(token[0])})"
        pattern += r"\s*,?\s*" if last and token[0] != "," else r"\s*"
    first = r"(?<!\w)" if re.match(r"\w", tokens[0][0]) else ""
    end = r"(?!\w)" if re.match(r"\w", tokens[-1][0]) else ""
    for match in re.finditer(first + pattern.removesuffix(SPACE) + end, text):
        spans = [match.span(i + 1) for i in range(len(tokens))]
        yield Place(file, match.start(), match[0], _merged(text, spans, old, new))


def _merged(text: str, spans: Sequence[tuple[int, int]], old: str, new: str) -> str:
    """The new text, with the line breaks of the code at hand where it equals the old one."""
    before, after = list(TOKEN.finditer(old)), list(TOKEN.finditer(new))
    blocks = difflib.SequenceMatcher(
        None, [token[0] for token in before], [token[0] for token in after], autojunk=False
    ).get_matching_blocks()
    equal = {block.b + k: block.a + k for block in blocks for k in range(block.size)}
    indented = 0
    for i in range(1, len(before)):
        was, now = old[before[i - 1].end() : before[i].start()], text[spans[i - 1][1] : spans[i][0]]
        if "\n" in was and "\n" in now:
            indented = len(now.rpartition("\n")[2]) - len(was.rpartition("\n")[2])
            break
    parts: list[str] = []
    for j, token in enumerate(after):
        i = equal.get(j)
        if j and i is not None and equal.get(j - 1) == i - 1:
            parts.append(text[spans[i - 1][1] : spans[i][0]])
        elif j:
            space = new[after[j - 1].end() : token.start()]
            shift = " " * indented if indented > 0 else ""
            parts.append(space[:indented] if "\n" in space and indented < 0 else space)
            parts.append(shift if "\n" in space else "")
        parts.append(token[0])
    return "".join(parts)
