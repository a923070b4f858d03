"""What the site needs besides Markdown; mkdocs.yml names this file as its hook.

Pages are written to be read on GitHub too, where a link may lead to any file of the repository;
docstrings have Sphinx's roles. A line that is a link to a file of data becomes its tables, and the
blocks ``flow`` and ``map`` become pictures.
"""

import csv
import html
import itertools
import posixpath
import re
from pathlib import Path

from mkdocs.plugins import get_plugin_logger

log = get_plugin_logger(__name__)
ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!\w+:|#)[^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<!</span>)<code>[^<\n]+</code>")
OPTION = re.compile(r"(?<=[ >])--[\w.-]+")
PREFORMATTED = re.compile(r"<pre.*?</pre>", re.DOTALL)
LOST_ITEM = re.compile(r"\n[-*] ")
ROLE = re.compile(r":(?:meth|func|class|attr|data|mod):(?=<code>)")
TABLE = re.compile(r"^\[[^\]]+\]\((data/[\w-]+\.tsv)\)$", re.MULTILINE)
PICTURE = re.compile(r"^```(flow|map)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r" \d$")
"""Distinguishes nodes with the same text."""
NODE = re.compile(r"(.+?)(?: · (\S+))?(?: (\([^()]*\)))?")
ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 6 6" refX="2" refY="3" markerWidth="6" markerHeight="6"'
    ' orient="auto"><path d="M0 0L6 3L0 6z"/></marker></defs>'
)
DIAGRAM = '<pre class="mermaid">'


def tables(path):
    """Yield the lines of a file of data, a table under a heading for each section of its rows."""
    with open(path, encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file, "excel-tab")
    for section, group in itertools.groupby(rows, key=lambda row: row[0]):
        yield from (f"### {section}", "")
        for row in (header, ["", *["---"] * len(header[1:])], *group):
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row[1:]) + " |"
        yield ""


def flow(text):
    """Draw chains of nodes ``TORCH · FLAX (SHAPE)``; a node stands below all that lead to it."""
    chains = [line.split(" -> ") for line in text.splitlines()]
    edges = dict.fromkeys(pair for chain in chains for pair in itertools.pairwise(chain))
    rank = dict.fromkeys(itertools.chain(*chains), 0)
    for _ in rank:
        for a, b in edges:
            rank[b] = max(rank[b], rank[a] + 1)
    rows = [[n for n in rank if rank[n] == r] for r in range(max(rank.values()) + 1)]
    texts = {n: [part for part in NODE.fullmatch(n).groups() if part] for n in rank}
    widths = {n: max(24, *(7 * len(part) + 16 for part in texts[n])) for n in rank}
    widest = max(sum(widths[n] + 16 for n in row) for row in rows)
    spans, shapes, y = {}, [], 4
    for row in rows:
        x = (widest - sum(widths[n] + 16 for n in row)) / 2 + 8
        height = max(14 * len(texts[n]) + 10 for n in row)
        for n in row:
            top = y + (height - 14 * len(texts[n]) - 10) / 2
            spans[n] = x, top, x + widths[n], top + 14 * len(texts[n]) + 10
            kind = "module" if len(texts[n]) > 1 else "step"
            shapes.append(
                f'<rect class="{kind}" x="{x}" y="{top}" width="{widths[n]}" rx="6"'
                f' height="{14 * len(texts[n]) + 10}"/>'
            )
            for i, part in enumerate(texts[n]):
                at = f'x="{x + widths[n] / 2}" y="{top + 16 + 14 * i}"'
                shapes.append(f"<text {at}>{html.escape(NUMBER.sub('', part))}</text>")
            x += widths[n] + 16
        y += height + 20
    side = widest
    for a, b in edges:
        left, top, right, bottom = spans[a]
        to_left, to_top, to_right, to_bottom = spans[b]
        if rank[b] == rank[a] + 1:
            path = f"M{(left + right) / 2} {bottom}L{(to_left + to_right) / 2} {to_top - 5}"
        else:  # round whatever lies between
            side += 14
            start = f"M{right} {(top + bottom) / 2}"
            if a != rows[rank[a]][-1]:
                start = f"M{(left + right) / 2} {bottom}v5"
            path = f"{start}H{side}V{(to_top + to_bottom) / 2}H{to_right + 5}"
        shapes.append(f'<path d="{path}"/>')
    size = f'viewBox="0 0 {side + 6} {y - 12}" style="max-width: {side + 6}px"'
    return f'<svg class="flow" role="img" {size}>{ARROW}{"".join(shapes)}</svg>'


def heat_maps(text):
    """Draw two matrices, given next to each other, with one scale; colours tell signs."""
    titles, *lines = [line.split(" | ") for line in text.splitlines()]
    both = [[[float(x) for x in row.split()] for row in rows] for rows in zip(*lines, strict=True)]
    most = max(abs(x) for rows in both for row in rows for x in row) or 1
    drawn = ""
    for title, rows in zip(titles, both, strict=True):
        cells = "".join(
            f'<rect x="{20 * j}" y="{20 * i}" class="{"minus" if x < 0 else "plus"}"'
            f' fill-opacity="{abs(x) / most:.2f}"><title>{x}</title></rect>'
            for i, row in enumerate(rows)
            for j, x in enumerate(row)
        )
        size = f'viewBox="-1 -1 {20 * len(rows[0]) + 2} {20 * len(rows) + 2}"'
        drawn += f"<figure><svg {size}>{cells}</svg><figcaption>{title}</figcaption></figure>"
    return f'<div class="maps">{drawn}</div>'


def on_page_markdown(markdown, page, config, files):
    """Write the tables of data, and links that leave the documentation as text with the file's
    name."""
    markdown = TABLE.sub(lambda match: "\n".join(tables(ROOT / "docs" / match[1])), markdown)
    drawn = {"flow": flow, "map": heat_maps}
    markdown = PICTURE.sub(lambda match: drawn[match[1]](match[2]), markdown)
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match):
        text, target, _ = match.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        is_page = path.startswith("docs/") and files.get_file_from_path(path.removeprefix("docs/"))
        if is_page:
            return match[0]
        if not (ROOT / path).exists():
            log.warning(f"{page.file.src_uri} links to {path}, which does not exist")
        return (
            f"`{path}`"
            if text.strip("`") in (path, posixpath.basename(path))
            else (f"{text} (`{path}`)")
        )

    parts = FENCE.split(markdown)
    return "".join(p if FENCE.match(p) else LINK.sub(replaced, p) for p in parts)


def on_page_content(content, page, config, files):
    """Drop the roles of docstrings, whose names are shown as code; options break at no hyphen."""
    content = ROLE.sub("", content)
    if page.file.src_uri.endswith(".md") and LOST_ITEM.search(PREFORMATTED.sub("", content)):
        log.warning(f"{page.file.src_uri}: an item of a list needs an empty line before it")
    unbroken = r'<span class="option">\g<0></span>'
    return CODE.sub(lambda code: OPTION.sub(unbroken, code[0]), content)


def on_post_page(output, page, config):
    """Load Mermaid on pages with a diagram, from the site itself."""
    if DIAGRAM not in output:
        return output
    script = posixpath.relpath("assets/mermaid.tiny.js", posixpath.dirname(page.file.dest_uri))
    output = re.sub(
        f"({DIAGRAM}.*?</pre>)", r'<div class="diagram">\1</div>', output, flags=re.DOTALL
    )
    return output.replace("</head>", f'<script src="{script}"></script></head>', 1)
