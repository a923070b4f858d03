"""What the site needs besides Markdown; mkdocs.yml names this file as its hook.

Pages are written to be read on GitHub too, where a link may lead to any file of the repository;
docstrings have Sphinx's roles. A line that is a link to a file of data becomes its tables, and the
blocks ``flow`` and ``map`` become pictures. So does a comment ``dots``, with numbers of tables.
"""

import csv
import html
import itertools
import math
import posixpath
import re
import textwrap
from pathlib import Path

from mkdocs.plugins import get_plugin_logger

log = get_plugin_logger(__name__)
ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!\w+:|#)[^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<!</span>)<code>[^<]+</code>")
OPTION = re.compile(r"(?<=[\s>])--[\w.-]+")
PREFORMATTED = re.compile(r"<pre.*?</pre>", re.DOTALL)
LOST_BLOCK = re.compile(r"\n[-*] |\|---")
ROLE = re.compile(r":(?:meth|func|class|attr|data|mod):(<code>)\.?")
TABLE = re.compile(r"^\[[^\]]+\]\((data/[\w-]+\.tsv)\)$", re.MULTILINE)
PICTURE = re.compile(r"^```(flow|map)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
DOTS = re.compile(r"^<!-- dots\n(.*?)\n-->$", re.DOTALL | re.MULTILINE)
ROWS = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
VALUE = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
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


def dots(text, markdown):
    """Draw columns of tables, a row for each first cell.

    A line is ``SERIES: TABLE COLUMN``: the number of a table on the page, or a file of data, and of
    its column. The axis is logarithmic if the values need that.
    """
    series = {}
    for line in text.splitlines():
        name, table, column = re.fullmatch(r"(.+): (\S+) (\d+)", line).groups()
        if table.isdigit():
            lines = ROWS.findall(markdown)[int(table) - 1].splitlines()[2:]
            rows = [[re.sub(r"[*`]", "", x).strip() for x in r.split("|")[1:-1]] for r in lines]
        else:
            with open(ROOT / "docs" / table, encoding="utf-8", newline="") as file:
                _, *rows = csv.reader(file, "excel-tab")
        cells = [(row[0], VALUE.search(row[int(column) - 1])) for row in rows]
        points = [(label, x[0].replace(",", "")) for label, x in cells if x and label != "all"]
        series[name] = [(label, float(x)) for label, x in points]
    values = [value for points in series.values() for _, value in points]
    is_log = max(values) > 100 * min(values) > 0
    scaled = math.log10 if is_log else float
    low = math.floor(math.log10(min(values))) if is_log else 0
    most = scaled(max(values))
    steps = (n * 10**k for k in itertools.count() for n in (1, 2, 5))
    step = next(step for step in steps if (most - low) / step <= 6)
    high = low + step * math.ceil((most - low) / step)
    labels = list(dict.fromkeys(label for points in series.values() for label, _ in points))
    common = len(posixpath.commonprefix(labels))
    short = [textwrap.shorten(label[common:], 40, placeholder=" …") for label in labels]
    left = 5 * max(map(len, short)) + 20
    shapes, top, bottom = [], 14 * len(series) + 8, 14 * len(series) + 15 * len(labels) + 12
    for tick in range(low, high + 1, step):
        x = left + (385 - left) * (tick - low) / (high - low)
        number = f"1e{tick}" if is_log and tick < -2 else f"{10.0**tick if is_log else tick:g}"
        shapes.append(f'<path d="M{x} {top}V{bottom}"/>')
        shapes.append(f'<text x="{x}" y="{bottom + 12}">{number}</text>')
    for i, label in enumerate(short):
        at = f'class="label" x="{left - 10}" y="{top + 15 * i + 14}"'
        shapes.append(f"<text {at}>{html.escape(label)}</text>")
    for i, (name, points) in enumerate(series.items()):
        shapes.append(f'<circle class="series{i}" cx="8" cy="{14 * i + 8}" r="4"/>')
        shapes.append(f'<text class="name" x="18" y="{14 * i + 12}">{html.escape(name)}</text>')
        for label, value in points:
            x = left + (385 - left) * (scaled(value) - low) / (high - low)
            y = top + 15 * labels.index(label) + 10
            title = f"<title>{html.escape(label)}: {value:g}</title>"
            shapes.append(f'<circle class="series{i}" cx="{x:.1f}" cy="{y}" r="4">{title}</circle>')
    size = f'viewBox="0 0 400 {bottom + 18}"'
    return f'<svg class="dots" role="img" {size}>{"".join(shapes)}</svg>'


def on_page_markdown(markdown, page, config, files):
    """Write the tables of data, and links that leave the documentation as text with the file's
    name."""
    markdown = TABLE.sub(lambda match: "\n".join(tables(ROOT / "docs" / match[1])), markdown)
    drawn = {"flow": flow, "map": heat_maps}
    markdown = DOTS.sub(lambda match: dots(match[1], match.string), markdown)
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
    content = ROLE.sub(r"\1", content)
    if page.file.src_uri.endswith(".md") and LOST_BLOCK.search(PREFORMATTED.sub("", content)):
        log.warning(f"{page.file.src_uri}: a list or a table needs an empty line before it")
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
